"""Under ZeRO-3 parameters are empty outside of the forward pass: no file contains an empty tensor."""

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.run import RunConfig
from fastdiff.export.run import Choice, export
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.inputs.text_runs import encode, text_run
from tests.support.runs import launch, newest, tiny


def empty_tensors(folder: Path) -> list[str]:
    """Tensors without an element, in any file below ``folder``; that there are files is checked."""
    files, found = sorted(folder.rglob("*.safetensors")), []
    assert files
    for path in files:
        with safe_open(path, framework="pt") as file:
            found += [f"{path}: {key}" for key in file.keys() if 0 in file.get_slice(key).get_shape()]  # noqa: SIM118
    return found


@pytest.mark.fault(26)
def test_no_empty_tensor_is_ever_written_under_zero3(digits: Path, tmp_path: Path) -> None:
    """Where parameters are (0,) outside of the forward pass: checkpoints, snapshots, exports, those of an adapter."""
    data = encode(tmp_path / "data", build(tmp_path / "pipeline"))
    adapter = text_run(data, tmp_path / "pipeline", tmp_path / "adapter", lora=LoraConfig(rank=2), optim__lr=0.1)
    run = tiny(digits, tmp_path / "run", steps=4, ema__power_stds=(0.05, 0.1), ema__snapshot_every=2)
    values(forked_ranks(train_both, run, adapter))
    for choice in (Choice(format="dit"), Choice(format="safetensors", ema=0.9), Choice(format="safetensors", raw=True)):
        export(tmp_path / "run", tmp_path / f"exported-{choice.format}-{choice.ema}", choice)
    export(tmp_path / "adapter", tmp_path / "exported-lora", Choice(format="lora", ema=0.5))
    assert empty_tensors(tmp_path) == []
    assert len(list((tmp_path / "run" / "ema").rglob("*.safetensors"))) == 4, "two snapshots of two ranks"
    weights = load_file(tmp_path / "exported-lora" / "pytorch_lora_weights.safetensors")
    assert len([name for name in weights if not name.endswith("alpha")]) == len(
        newest(tmp_path / "adapter").weights(0.5)
    )
    assert all(value.any() for name, value in weights.items() if ".lora_up." in name)


def train_both(world: World, first: RunConfig, second: RunConfig) -> None:
    train(first, launch(3), world)
    train(second, launch(3), world)
