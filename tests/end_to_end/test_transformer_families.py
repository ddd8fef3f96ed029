"""Each family of diffusers' transformers from pictures to a pipeline that draws: ranks, a kill, resume, LoRA."""

import signal
from pathlib import Path
from typing import Any

import pytest

from fastdiff.cli.main import main
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.models.family import family_of
from fastdiff.models.load import pretrained
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.parallel.world import World
from fastdiff.sampling.run import Run
from fastdiff.sampling.solvers import _generator
from tests.support.forked import forked_ranks, values
from tests.support.inputs.encoding import captioned, encode
from tests.support.inputs.family_pipelines import TOKENS, family_pipeline, network_in
from tests.support.killed import train_killed
from tests.support.references.transformer_families import FAMILIES
from tests.support.references.unet_reference import difference
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, tiny, train_losses

STEPS = 4
CAPTIONS = ["a red cat", "two birds on a wire", "x", "the sea at night", "a dog", "snow", "an old tree", "a small boat"]
DRAWN = 3
"""Steps of a picture."""
GUIDED = {"qwen-image": {"negative_prompt": " "}}
"""Arguments without which a pipeline does not guide."""


families = pytest.mark.parametrize("kind", FAMILIES)


def config_of(pipeline: Path, data: Path, folder: Path, **changes: Any) -> RunConfig:
    network = network_in(pipeline).completed(FAMILIES[pipeline.parent.name].config)
    assert network.flow_convention is not None
    options = {
        "objective": FlowConfig(convention=network.flow_convention),
        "model": network,
        "pretrained": PretrainedConfig(path=str(pipeline), weights=True, max_tokens=TOKENS[pipeline.parent.name]),
        "samples": 4 * STEPS,
        "batch": BatchConfig(samples=4, micro=1),
        "performance__recompute": True,
        "output__checkpoint_every": 1,
        "optim__weight_decay": 0.1,
    }
    return tiny(data, folder, **options | changes)


@families
def test_from_pictures_to_a_pipeline(tmp_path: Path, world: World, kind: str) -> None:
    """Two ranks under ZeRO-3 go on equal to the bit after a kill; one rank without it up to rounding."""
    pipeline = family_pipeline(tmp_path / kind, kind)
    side = 8 * Pretrained(str(pipeline)).latent_space.factor
    pictures = captioned(tmp_path / "pictures", CAPTIONS, [(side, side)] * len(CAPTIONS))
    encode(pictures, data := tmp_path / "data", pipeline, resolution=side, max_tokens=TOKENS[kind])
    pictured = ValidationConfig(prompts=("a red cat", "snow"), every=STEPS, steps=2)

    whole = config_of(pipeline, data, tmp_path / "whole", validation=pictured)
    expected = values(forked_ranks(train_losses, whole, launch()))[0]
    assert (tmp_path / "whole" / "samples" / f"step-{STEPS:08d}.png").is_file()
    config = config_of(pipeline, data, tmp_path / "killed", validation=pictured)
    assert forked_ranks(train_killed, config)[1].code == -signal.SIGKILL
    assert intact(tmp_path / "killed")[0] < STEPS
    assert hexes(values(forked_ranks(train_losses, config, launch()))[0]) == hexes(expected)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "killed")
    alone = config_of(pipeline, data, tmp_path / "alone", batch=BatchConfig(samples=4), performance__recompute=False)
    assert train_losses(world, alone, launch(0)) == pytest.approx(expected, rel=2e-5)

    for quantize in ("none", "4bit"):
        adapted = {"lora": LoraConfig(rank=2, alpha=3.0, quantize=quantize), "output__checkpoint_every": STEPS}
        cut = config_of(pipeline, data, tmp_path / quantize / "cut", **adapted)
        adapted |= {"batch": BatchConfig(samples=4), "performance__recompute": False}
        alone = config_of(pipeline, data, tmp_path / quantize / "alone", **adapted)
        expected = train_losses(world, alone, launch(0))
        assert values(forked_ranks(train_losses, cut, launch()))[0] == pytest.approx(expected, rel=2e-5)
    draws_as_we_draw(kind, tmp_path / "alone", tmp_path / "exported")


def draws_as_we_draw(kind: str, folder: Path, out: Path) -> None:
    """The exported pipeline draws our pictures from the same noise, with its own guidance and levels."""
    from diffusers import DiffusionPipeline

    assert main(["export", str(folder), str(out), "--format", "diffusers", "--dtype", "fp32"]) == 0
    network = FAMILIES[kind].config
    assert f"has the license {family_of(network).license(network) or '?'}." in (out / "README.md").read_text()
    theirs, ours, prompts = DiffusionPipeline.from_pretrained(out), Run(folder), ("a red cat", "snow")
    pipeline = pretrained(ours.config.pretrained)
    side = 8 * pipeline.latent_space.factor
    generators = [_generator(0, number) for number in range(len(prompts))]
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(  # Z-Image writes into the list of prompts
        prompt=list(prompts), height=side, width=side, num_inference_steps=DRAWN, generator=generators,
        output_type="pt", max_sequence_length=TOKENS[kind], **GUIDED.get(kind, {}),
    ).images  # fmt: skip
    condition, null = ours.embedded(prompts, negative=None)
    found = pipeline.autoencoder().decode(ours.sample(condition, null, ours.sampler(steps=DRAWN)))
    assert found.std() > 0.1
    assert difference(found / 2 + 0.5, expected) < 1e-4
