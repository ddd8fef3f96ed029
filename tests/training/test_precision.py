"""fp16 with its loss scale, on a CPU that DeepSpeed takes for capable of it; 8-bit state that really is 8-bit."""

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.config.optimizers.registry import optimizer_family
from fastdiff.errors import ConfigError, DivergedError
from fastdiff.parallel.fragments import Flat, Fragment
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.loop import train
from fastdiff.training.optimizer.build import check_state
from fastdiff_kernels.adamw8bit import AdamW8bit
from tests.end_to_end.test_train import check_clipping
from tests.support.nights import by_day
from tests.support.runs import hexes, launch, losses, newest, records, tiny, train_losses


def test_fp16_without_fp16_arithmetic_is_refused(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    with pytest.raises(ConfigError, match="use bf16 or fp32"):
        train(tiny(digits, tmp_path / "run", performance__precision="fp16"), launch(), world)


@pytest.mark.parametrize("stage", by_day([1, 3], 2))
def test_fp16_clips_the_unscaled_gradient(
    world: World, digits: Path, tmp_path: Path, cpu_with_fp16: None, stage: int
) -> None:
    """Adam does not see the scale of a gradient, so only its first moment tells that the loss scale is taken out."""
    check_clipping(world, tiny(digits, tmp_path / "run", steps=1, performance__precision="fp16"), stage)


def test_fp16_under_zero0_is_refused(world: World, digits: Path, tmp_path: Path, cpu_with_fp16: None) -> None:
    with pytest.raises(ConfigError, match=r"use --deepspeed_config zero1,"):
        train(tiny(digits, tmp_path / "run", performance__precision="fp16"), launch(0), world)


def test_deepspeed_trains_on_the_device_of_the_run(world: World, digits: Path, tmp_path: Path) -> None:
    """It takes a GPU where there is one, also under --performance.device cpu."""
    before = get_accelerator()
    set_accelerator(CUDA_Accelerator())
    try:
        beside_a_gpu = train_losses(world, tiny(digits, tmp_path / "gpu", steps=2), launch(1))
        assert get_accelerator().device_name() == "cpu"
    finally:
        set_accelerator(before)
    assert hexes(beside_a_gpu) == hexes(train_losses(world, tiny(digits, tmp_path / "cpu", steps=2), launch(1)))


def test_bf16_on_a_gpu_without_it_is_refused_before_anything_is_built(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    config = tiny(digits, tmp_path / "run", performance__precision="bf16")
    with pytest.raises(ConfigError, match=r"^--performance.precision bf16: this GPU \(sm_75\) .*; use .* fp16$"):
        train(config, launch(), replace(world, device=torch.device("cuda", 0)))
    assert not (tmp_path / "run").exists()


def test_the_loss_scale_is_in_the_log_of_fp16_alone(
    world: World, digits: Path, tmp_path: Path, cpu_with_fp16: None
) -> None:
    train(tiny(digits, tmp_path / "fp16", performance__precision="fp16"), launch(1), world)
    found = [record["loss_scale"] for record in records(tmp_path / "fp16")]
    assert all(math.log2(scale).is_integer() for scale in found)
    assert "loss_scale" in EventAccumulator(str(tmp_path / "fp16" / "tensorboard")).Reload().Tags()["scalars"]
    train(tiny(digits, tmp_path / "fp32", steps=1), launch(1), world)
    assert "loss_scale" not in records(tmp_path / "fp32")[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_stops_at_the_smallest_loss_scale(
    world: World, digits: Path, tmp_path: Path, cpu_with_fp16: None, stage: int
) -> None:
    """Finite losses, but a gradient that overflows at any scale."""
    config = tiny(digits, tmp_path / "run", steps=60, performance__precision="fp16")

    class Overflowing(DeepSpeedEngine):
        def backward(self, loss: torch.Tensor, *, discard: bool = False) -> None:
            super().backward(loss * 1e30, discard=discard)

    with (
        mock.patch("fastdiff.training.engines.deepspeed.DeepSpeedEngine", Overflowing),
        pytest.raises(DivergedError, match="smallest loss scale"),
    ):
        train(config, launch(stage), world)
    lines = (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()
    scales = [json.loads(line)["cur_scale"] for line in lines]
    assert scales[0] > scales[-1]
    logged = [record["loss_scale"] for record in records(tmp_path / "run")]
    assert logged[0] > logged[-1], "it falls at each overflow"


@pytest.mark.parametrize("stage", by_day([3], 1, 2))
def test_fp16_follows_fp32_and_resumes_with_its_loss_scale(
    world: World, digits: Path, tmp_path: Path, cpu_with_fp16: None, stage: int
) -> None:
    exact = train_losses(world, tiny(digits, tmp_path / "fp32"), launch(stage))
    whole = train_losses(world, tiny(digits, tmp_path / "whole", performance__precision="fp16"), launch(stage))
    assert whole == pytest.approx(exact, rel=0.1)
    assert whole != exact
    for steps in (3, 6):
        train(tiny(digits, tmp_path / "parts", steps=steps, performance__precision="fp16"), launch(stage), world)
    assert hexes(losses(tmp_path / "parts")) == hexes(whole)
    manifests = [newest(tmp_path / name).manifest for name in ("whole", "parts")]
    assert manifests[0]["loss_scale"] == manifests[1]["loss_scale"]
    assert manifests[0]["loss_scale"]["cur_scale"] > 1
    assert manifests[0]["files"] == manifests[1]["files"]


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "fp16")])
def test_the_loss_scale_stays_with_fp16(
    world: World, digits: Path, tmp_path: Path, cpu_with_fp16: None, before: str, after: str
) -> None:
    train(tiny(digits, tmp_path / "run", steps=2, performance__precision=before), launch(1), world)
    changed = tiny(digits, tmp_path / "run", steps=3, performance__precision=after)
    train(changed, launch(1, allow_change=("performance.precision",)), world)
    scale = newest(tmp_path / "run").manifest["loss_scale"]
    assert scale.get("cur_scale", 0) > 1 if after == "fp16" else scale == {}


class _Unquantised(AdamW8bit):
    """Keeps one of its moments in fp32."""

    def cut(self, *args: Any, **options: Any) -> None:
        super().cut(*args, **options)
        for state in self.state.values():
            state["exp_avg_sq_codes"] = state["exp_avg_sq_codes"].float()


@pytest.mark.parametrize(
    ("stage", "name"),
    [(0, "adamw8bit"), (1, "adamw8bit-bnb"), (2, "adamw8bit"), (3, "adamw8bit"), (3, "adamw8bit-bnb")],
)
def test_a_moment_that_is_not_8bit_stops_the_run_before_it_starts(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stage: int
) -> None:
    monkeypatch.setattr("fastdiff_kernels.adamw8bit.AdamW8bit", _Unquantised)
    monkeypatch.setattr(bitsandbytes.optim, "AdamW8bit", bitsandbytes.optim.AdamW32bit)
    message = rf"--optim.name {name}: the moments of .*float32.*expected one byte.*; use --optim.name adamw"
    with pytest.raises(ConfigError, match=message):
        train(tiny(digits, tmp_path / "run", optim__name=name, performance__engine="deepspeed"), launch(stage), world)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def _flat(state: dict[str, torch.Tensor], size: int) -> Flat:
    key = torch.zeros(size)
    return Flat(key, {key: state}, (Fragment("weight", 0, size, 0),), owned=True)


def test_bitsandbytes_may_keep_small_tensors_in_fp32() -> None:
    check_state(optimizer_family("adamw8bit-bnb"), [_flat({k: torch.zeros(4095) for k in ("state1", "state2")}, 4095)])
    for name, size in (("adamw8bit-bnb", 4096), ("adamw8bit", 1)):
        with pytest.raises(ConfigError, match="expected one byte"):
            check_state(optimizer_family(name), [_flat({}, size)])


@pytest.mark.parametrize("name", ["adamw8bit", "adamw8bit-bnb"])
def test_8bit_state_takes_two_bytes_per_parameter(world: World, digits: Path, tmp_path: Path, name: str) -> None:
    config = tiny(digits, tmp_path / "run", steps=2, optim__name=name)
    with ExitStack() as stack:
        engine = build(config, launch(3), world, stack).state.engine
        parameters = sum(torch.Size(shape).numel() for shape in engine.shapes.values())
        held = sum(
            value.numel() * value.element_size()
            for flat in engine.flats
            for key, value in flat.state.items()
            if isinstance(value, torch.Tensor) and not key.startswith("qmap")
        )
        assert 2 * parameters < held < 2.1 * parameters
