"""fp16 with its loss scale, on a CPU that DeepSpeed is told can do it; 8-bit state that really is 8-bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from fastdiff import dist
from fastdiff.dist import World
from fastdiff.errors import ConfigError
from fastdiff.fragments import Flat, Fragment
from fastdiff.optim import check_is_8bit
from fastdiff.saved import Saved, committed
from fastdiff.train import train
from tests.runs import launch, losses, tiny, train_losses


@pytest.fixture(scope="module")
def world(torch_extensions: Path) -> World:
    return dist.start()


@pytest.fixture
def cpu_with_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes in fp16 on any CPU, only slowly; DeepSpeed asks for fast instructions."""
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


def test_fp16_without_fp16_arithmetic_is_refused(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    with pytest.raises(ConfigError, match="use bf16 or fp32"):
        train(tiny(digits, tmp_path / "run", performance__precision="fp16"), launch(), world)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_follows_fp32_and_resumes_with_its_loss_scale(
    world: World, digits: Path, tmp_path: Path, cpu_with_fp16: None, stage: int
) -> None:
    exact = train_losses(world, tiny(digits, tmp_path / "fp32"), launch(stage))
    whole = train_losses(world, tiny(digits, tmp_path / "whole", performance__precision="fp16"), launch(stage))
    assert whole == pytest.approx(exact, rel=0.1)
    assert whole != exact
    for steps in (3, 6):
        train(tiny(digits, tmp_path / "parts", steps=steps, performance__precision="fp16"), launch(stage), world)
    assert [x.hex() for x in losses(tmp_path / "parts")] == [x.hex() for x in whole]
    manifests = [Saved(committed(tmp_path / n / "checkpoints")[0]).manifest for n in ("whole", "parts")]
    assert manifests[0]["loss_scale"] == manifests[1]["loss_scale"]
    assert manifests[0]["loss_scale"]["cur_scale"] > 1
    assert manifests[0]["files"] == manifests[1]["files"]


def _flat(state: dict[str, torch.Tensor], size: int = 8192) -> Flat:
    key = torch.zeros(size)
    return Flat(key, {key: state}, (Fragment("weight", 0, size, 0),), owned=True)


def test_fp32_state_of_an_8bit_optimizer_stops_the_run() -> None:
    check_is_8bit([_flat({k: torch.zeros(8192, dtype=torch.uint8) for k in ("state1", "state2")})])
    check_is_8bit([_flat({k: torch.zeros(100) for k in ("state1", "state2")}, size=100)])
    with pytest.raises(ConfigError, match=r"weight.*float32.*expected uint8; use --optim.name adamw"):
        check_is_8bit([_flat({k: torch.zeros(8192) for k in ("state1", "state2")})])
    with pytest.raises(ConfigError, match="expected uint8"):
        check_is_8bit([_flat({})])


def test_8bit_state_takes_two_bytes_per_parameter(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=2, optim__name="adamw8bit-bnb"), launch(3), world)
    saved = Saved(committed(tmp_path / "run" / "checkpoints")[0])
    raw = saved.raw(0, 0)
    parameters = sum(torch.Size(shape).numel() for shape in saved.manifest["parameters"].values())
    assert raw["state1"].dtype == raw["state2"].dtype == torch.uint8
    held = sum(t.numel() * t.element_size() for key, t in raw.items() if not key.startswith("qmap"))
    assert held < 2.1 * parameters
