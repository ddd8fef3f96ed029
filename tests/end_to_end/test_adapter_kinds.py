"""Each kind of adapter but LoRA, from its base to its files: killed and resumed, drawn, exported, trained on."""

import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastdiff.cli.main import main
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.errors import ConfigError
from fastdiff.export.adapters import WEIGHTS_FILE, changes_of
from fastdiff.export.run import Choice, export
from fastdiff.models.adapter_files.native_names import named_network
from fastdiff.models.adapter_files.published import read_adapter
from fastdiff.models.adapter_files.start import with_values_of_file
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.load import build_network
from fastdiff.models.pretrained.tiny_pipeline import UNETS, build
from fastdiff.parallel.world import World
from tests.support.forked import forked_ranks, values
from tests.support.inputs.text_runs import encode, text_run
from tests.support.killed import train_killed
from tests.support.references.unet_reference import difference
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, newest, train_losses

TARGETS = ("to_q", "conv1", "proj_in", "conv_in", "linear_1")
NAMES = named_network(UNETS["sd15"])


@dataclass(frozen=True)
class Case:
    lora: LoraConfig
    size: str
    form: str
    """A format that holds it."""
    refused: tuple[str, ...]
    why: str


CASES = {
    "DoRA": Case(
        LoraConfig(kind="dora", rank=2, alpha=3.0, targets=TARGETS),
        "rank 2", "lora-diffusers", ("lora", "lora-kohya"),
        "use --format lora-diffusers for diffusers or lora-native for ComfyUI",
    ),
    "LoKr": Case(
        LoraConfig(kind="lokr", rank=2, alpha=3.0, targets=TARGETS, factor=4),
        "rank 2, factor 4", "lora", ("lora-diffusers",),
        "diffusers reads no LoKr of a UNet of Stable Diffusion; use --format lora for other programs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", CASES)
def test_a_run_and_its_files(title: str, tmp_path: Path, world: World) -> None:
    case = CASES[title]
    lora, kind = case.lora, kind_of(case.lora)
    data = encode(tmp_path / "data", build(tmp_path / "pipeline"))

    def config_of(name: str, **changes: Any) -> RunConfig:
        options = {"lora": lora, "optim__lr": 0.05, "output__checkpoint_every": 1, "performance__recompute": True}
        return text_run(data, tmp_path / "pipeline", tmp_path / name, steps=4, **options | changes)

    # Two ranks under ZeRO-3 go on equal to the bit after a kill; one rank without it up to rounding.
    expected = values(forked_ranks(train_losses, config_of("whole"), launch()))[0]
    assert forked_ranks(train_killed, killed := config_of("killed"))[1].code == -signal.SIGKILL
    assert intact(tmp_path / "killed")[0] < 4
    assert hexes(values(forked_ranks(train_losses, killed, launch()))[0]) == hexes(expected)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "killed")
    assert train_losses(world, config_of("alone", performance__recompute=False), launch(0)) == pytest.approx(
        expected, rel=2e-5
    )
    packed = config_of("packed", lora=replace(lora, quantize="8bit"), batch=BatchConfig(samples=4, micro=2))
    assert values(forked_ranks(train_losses, packed, launch()))[0] == pytest.approx(
        train_losses(world, replace(packed, output=replace(packed.output, folder=str(tmp_path / "p"))), launch(0)),
        rel=2e-5,
    )

    # Merged, drawn and exported it is the network of the training.
    saved, config = newest(tmp_path / "whole"), config_of("whole")
    trained = saved.weights()
    tuned = build_network(config, trained)
    changes = changes_of(trained, lora)
    export(tmp_path / "whole", tmp_path / "merged", Choice(format="diffusers", raw=True, dtype="fp32"))
    merged = load_file(tmp_path / "merged" / "unet" / "diffusion_pytorch_model.safetensors")
    base = dict(load_file(tmp_path / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors"))
    plain = build_network(replace(config, lora=LoraConfig()), merged)
    given = {
        "noisy": torch.randn(2, 4, 8, 8), "time": torch.tensor([7, 800]),
        "context": torch.randn(2, 9, config.model.cross_attention_dim),
    }  # fmt: skip
    with torch.no_grad():
        assert difference(tuned(**given), plain(**given)) < 1e-5
        assert difference(tuned(**given), build_network(replace(config, lora=LoraConfig()))(**given)) > 1e-3

    export(tmp_path / "whole", tmp_path / "adapter", Choice(format=case.form, raw=True))
    found = read_adapter(tmp_path / "adapter" / WEIGHTS_FILE, NAMES, kind)
    for layer, change in changes.items():
        weight = base[f"{layer}.weight"].float()
        torch.testing.assert_close(found[layer].merged(weight), change.merged(weight), rtol=1e-5, atol=1e-6)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f"A {title} adapter of" in card
    assert f"| {title} | {case.size}, alpha 3" in card
    export(tmp_path / "whole", tmp_path / "half", Choice(format="lora-native", raw=True, dtype="bf16"))
    for name, value in load_file(tmp_path / "half" / WEIGHTS_FILE).items():
        exact = name.endswith((".dora_scale", ".alpha"))
        assert value.dtype == (torch.float32 if exact else torch.bfloat16), name
    for form in case.refused:
        with pytest.raises(ConfigError, match=case.why):
            export(tmp_path / "whole", tmp_path / form, Choice(format=form, raw=True))
    main(["sample", str(tmp_path / "whole"), "--prompt", "a hat", "--steps", "1", "--grid", str(tmp_path / "a.png")])

    # A training that starts from the file starts as this one ended, sharded or not.
    init = LoraConfig(kind=lora.kind, init=str(tmp_path / "adapter" / WEIGHTS_FILE))
    values(forked_ranks(train_losses, config_of("on", lora=init, optim__lr=1e-30), launch()))
    again = changes_of(newest(tmp_path / "on").weights(), with_values_of_file(init, config.model))
    for layer, change in changes.items():
        weight = base[f"{layer}.weight"].float()
        torch.testing.assert_close(again[layer].merged(weight), change.merged(weight), rtol=1e-5, atol=1e-6)
