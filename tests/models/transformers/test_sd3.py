"""Stable Diffusion 3: its table of positions, and what its last block does not use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.errors import ConfigError
from fastdiff.models.load import build_network, build_on_meta
from tests.support.references.transformer_families import FAMILIES, built, conditions, noisy, theirs
from tests.support.references.unet_reference import difference

CONFIG = FAMILIES["sd3"].config
TABLE = "pos_embed.pos_embed"
SIGMA = torch.tensor([450.0])


def test_the_table_of_positions_is_cropped() -> None:
    """It is cropped from its centre; pictures beyond it are refused, whatever their shape."""
    model, given = built(CONFIG), conditions(CONFIG, batch=1)
    table = model.get_buffer(TABLE)
    small = noisy(CONFIG, (4, 6), batch=1)
    before = model(small, SIGMA, **given)
    places = torch.zeros(8, 8, dtype=torch.bool)
    places[3:5, 2:5] = True
    table[0, ~places.flatten()] *= 2
    assert torch.equal(model(small, SIGMA, **given), before)
    table[0, places.flatten()] *= 2
    assert difference(model(small, SIGMA, **given), before) > 0.01
    with pytest.raises(ConfigError, match=r"latents of 8 x 18: the table of positions .* has room for 16 x 16"):
        model(noisy(CONFIG, (8, 18), batch=1), SIGMA, **given)
    with pytest.raises(ConfigError, match=r"latents of 18 x 18: .* encode smaller pictures"):
        replace(CONFIG, size=18)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"caption_projection_dim": 48}, "--model.caption_projection_dim 48: expected 32, the width of --model.num_at"),
        ({"dual_attention_layers": (-1,)}, r"--model.dual_attention_layers \(-1,\): at least 0"),
        ({"dual_attention_layers": (3,)}, r"--model.dual_attention_layers \(3,\): below 3, --model.num_layers"),
        ({"num_layers": 0}, "--model.num_layers 0: above 0"),
    ],
)
def test_it_refuses_other_shapes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def published(folder: Path) -> dict[str, torch.Tensor]:
    """Write the network of a pipeline with another table than that of the class; return its weights."""
    model = built(CONFIG, seed=2)
    weights = {**model.state_dict(), TABLE: model.get_buffer(TABLE) / 3}
    network = theirs(CONFIG, weights)
    network.save_pretrained(folder / "transformer")
    return weights


def run_of(path: Path) -> RunConfig:
    return RunConfig(
        model=CONFIG,
        objective=FlowConfig(convention="sd3"),
        pretrained=PretrainedConfig(path=str(path), weights=True),
        output=OutputConfig(sample_every=0),
    )


def test_the_table_of_a_pipeline_stays(tmp_path: Path) -> None:
    """From the beginning, in one piece or one by one, and when trained weights replace the others."""
    expected, config = published(tmp_path), run_of(tmp_path)
    trained = {name: p.detach() + 1 for name, p in build_network(config).named_parameters() if p.requires_grad}
    assert len(trained) == len(expected) - 4
    shapes = {name: tuple(value.shape) for name, value in trained.items()}
    ways = {
        "whole": build_network(config).state_dict(),
        "one by one": dict(build_on_meta(config)[1]),
        "trained": build_network(config, trained).state_dict(),
        "beside a checkpoint": dict(build_on_meta(config, shapes)[1]),
    }
    for way, found in ways.items():
        assert found.keys() == (expected.keys() - trained.keys() if way == "beside a checkpoint" else expected.keys())
        for name, value in found.items():
            assert torch.equal(value, trained[name] if way == "trained" and name in trained else expected[name]), way


def test_an_adapter_is_on_the_layers_of_the_usual_script(tmp_path: Path) -> None:
    """Not on the second attention of dual blocks; beside it, the table is that of the pipeline."""
    expected, config = published(tmp_path), replace(run_of(tmp_path), lora=LoraConfig(rank=2))
    for network in (build_network(config), build_on_meta(config)[0]):
        assert torch.equal(network.get_buffer(TABLE), expected[TABLE])
        names = {name.partition(".lora_A")[0] for name, p in network.named_parameters() if p.requires_grad}
        layers = {name.partition(".lora_B")[0] for name in names}
        picture = [f"transformer_blocks.{block}.attn.to_{layer}" for block in range(3) for layer in ("q", "k", "v")]
        text = [f"transformer_blocks.{block}.attn.add_{layer}_proj" for block in range(3) for layer in ("q", "k", "v")]
        out = [f"transformer_blocks.{block}.attn.to_out.0" for block in range(3)]
        assert layers == {*picture, *text, *out, *(f"transformer_blocks.{block}.attn.to_add_out" for block in (0, 1))}


def test_a_file_alone_is_refused(tmp_path: Path) -> None:
    """Its table is needed again with every checkpoint."""
    save_file(published(tmp_path), path := tmp_path / "sd3.safetensors")
    for build in (build_network, build_on_meta):
        with pytest.raises(ConfigError, match=r"sd3.safetensors: its table of positions, pos_embed.pos_embed, would"):
            build(run_of(path))
