"""Whole runs on a GPU: the losses of a CPU, no graph breaks, no waiting, bit-equal resumes, overflows, pictures."""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.export.run import Choice, export
from fastdiff.parallel.world import World
from fastdiff.plugins.promises import NoHostSync
from fastdiff.sampling.run import Run
from fastdiff.training.engines.base import Engine
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.engines.flat import FlatEngine
from fastdiff.training.guard import StepGuard
from fastdiff.training.loop import train
from fastdiff.training.metrics import Meters
from fastdiff.training.profiling.recording import trace_path
from tests.gpu.cases import BRIEFLY, CASES, ON_CPU, Case, Inputs, deterministic, each, launch_of
from tests.support.processes import run_ranks
from tests.support.runs import hexes, intact, launch, losses, newest, train_losses

TOLERANCE = {"fp32": 1e-3, "bf16": 0.04, "fp16": 0.02}
"""Relative, of every loss of the first steps, from those of fp32 on a CPU."""
BY_FAMILY = [CASES[0], CASES[6], CASES[12]]


def test_the_cases_cover_what_they_should() -> None:
    """Every family under every stage, every precision under every stage, and every optimizer with every precision."""
    stages = ("0", "1", "2", "3", "offload")
    met = {(case.family, case.stage) for case in CASES}
    assert met >= set(product(("dit", "adm", "sd15"), stages))
    assert {case.family for case in CASES} == {"dit", "adm", "sd15", "sdxl"}
    precisions = {(case.precision, case.stage) for case in CASES}
    assert precisions >= set(product(("fp32", "bf16", "fp16"), stages)) - {("fp16", "0")}
    assert {(case.optimizer, case.recompute) for case in CASES} >= set(product(("adamw", "adamw8bit"), (False, True)))
    assert {case.adapter for case in CASES} == {"", "none", "8bit", "4bit"}
    assert any(case.optimizer == "adamw8bit-bnb" for case in CASES)
    for name in ("family", "stage", "precision", "optimizer", "recompute", "adapter", "attention"):
        by_day = {getattr(case, name) for case in [*ON_CPU, *BRIEFLY]}
        assert by_day == {getattr(case, name) for case in CASES}, name


@pytest.mark.parametrize(("on", "case"), each([], CASES, by_day=BRIEFLY), indirect=["on"])
def test_every_case_takes_a_step_on_a_cpu(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """So that on a GPU nothing fails for its configuration or its shapes; by day what other tests do not run here."""
    (loss,) = train_losses(world, inputs.run(case, tmp_path / "run", steps=1), launch_of(case.stage))
    assert math.isfinite(loss)


@contextmanager
def graphs_by_step() -> Iterator[list[int]]:
    """Collect the number of compiled graphs after every optimizer step."""
    found: list[int] = []
    step = StepGuard.take_step

    def counted(self: StepGuard, engine: Engine) -> bool:
        applied = step(self, engine)
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return applied

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(StepGuard, "take_step", counted):
        yield found


def reference(world: World, config: RunConfig, folder: Path) -> list[float]:
    """The losses of the same run in fp32 on a CPU, with nothing that saves time or memory."""
    plain = replace(config.performance, precision="fp32", recompute=False, compile=False, attention="auto")
    there = replace(config, performance=plain, output=replace(config.output, folder=str(folder)))
    if world.device.type == "cpu":
        return train_losses(world, there, launch(1))
    found: list[float] = run_ranks(train_losses, there, launch(1), ranks=1)[0]
    return found


@pytest.fixture
def compiler(nightly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By day a CPU runs the traced graphs as they are: Inductor would take half a minute to write its C++."""
    if not (nightly or torch.cuda.is_available()):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("on", "case"), each(CASES, ON_CPU), indirect=["on"])
def test_a_run_has_the_losses_of_a_cpu_in_fp32_and_whole_graphs(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """Whatever saves time or memory; no graph breaks, and nothing is compiled after the second step."""
    config = inputs.run(case, tmp_path / "here")
    with graphs_by_step() as graphs:
        found = train_losses(world, config, launch_of(case.stage))
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(graphs) == config.steps
    assert graphs[1] == graphs[-1]
    assert (graphs[0] > 0) == (on.type == "cuda" or bool(case.compile))
    expected = reference(world, config, tmp_path / "there")
    assert found == pytest.approx(expected, rel=TOLERANCE[case.precision])


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Fail if the host waits for the device, or copies to it."""
    if device.type == "cpu":
        with NoHostSync():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _watched(own: Callable[..., Any], calls: list[str], device: torch.device) -> Callable[..., Any]:
    """Return ``own``, which notes its calls and may not wait from the second one on."""

    def call(*given: Any, **more: Any) -> Any:
        calls.append(own.__name__)
        with no_waiting(device) if calls.count(own.__name__) > 1 else nullcontext():
            return own(*given, **more)

    return call


@pytest.mark.parametrize(("on", "case"), each(BY_FAMILY, [CASES[6]]), indirect=["on"])
def test_neither_objective_nor_meters_wait_in_a_run(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """From the second call on; the first one compiles the kernels in the rehearsal before the steps."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Objective, "add_noise"), (Objective, "loss"), (Meters, "add")):
            patch.setattr(owner, name, _watched(getattr(owner, name), calls, on))
        train(inputs.run(case, tmp_path / "run"), launch_of(case.stage), world)
    assert calls == ["add_noise", "loss", *["add_noise", "loss", "add"] * 4], "the first ones rehearse"


@pytest.mark.parametrize(
    ("on", "case"),
    each([Case(family="dit", stage="0", precision="bf16", optimizer=name) for name in ("adamw", "adamw8bit")], []),
    indirect=["on"],
)
def test_the_step_of_the_flat_engine_does_not_wait(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """Gradient, norm and update; the host waits for the flags of the ranks alone, behind them."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("backward", "check_grads", "optimizer_step"):
            patch.setattr(FlatEngine, name, _watched(getattr(FlatEngine, name), calls, on))
        train(inputs.run(case, tmp_path / "run"), launch_of(case.stage), world)
    assert {"backward", "check_grads", "optimizer_step"} == set(calls)


@pytest.mark.parametrize(("on", "case"), each([*(CASES[n] for n in (0, 1, 6, 18, 20))], [CASES[1]]), indirect=["on"])
def test_a_resumed_run_equals_a_whole_one_to_the_bit(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """With kernels that add in a fixed order."""
    whole = train_losses(world, inputs.run(case, tmp_path / "whole", **deterministic()), launch_of(case.stage))
    for steps in (2, 4):
        config = inputs.run(case, tmp_path / "parts", steps, **deterministic())
        train(config, replace(launch_of(case.stage), allow_change=("samples",)), world)
    assert hexes(losses(tmp_path / "parts")) == hexes(whole)
    assert newest(tmp_path / "parts").manifest["files"] == newest(tmp_path / "whole").manifest["files"]


@pytest.mark.parametrize(("on", "case"), each([CASES[0], CASES[1]], [CASES[1]]), indirect=["on"])
def test_a_profiled_run_has_the_same_losses_and_a_trace_of_the_device(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """On a GPU the trace has the kernels, with the ranges around them, and there is a snapshot of the memory."""
    plain = train_losses(world, inputs.run(case, tmp_path / "plain", **deterministic()), launch_of(case.stage))
    config = inputs.run(case, tmp_path / "profiled", performance__profile="2:3", **deterministic())
    assert hexes(train_losses(world, config, launch_of(case.stage))) == hexes(plain)
    folder = tmp_path / "profiled" / "profile"
    with gzip.open(trace_path(folder, 0, 3), "rt") as file:
        found = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert {"user_annotation", "cpu_op"} <= found
    assert ({"kernel", "gpu_user_annotation"} <= found) == (on.type == "cuda")
    assert (folder / "memory-rank-0-from-3.pickle").exists() == (on.type == "cuda")


class Overflowing(DeepSpeedEngine):
    """Overflows in the second and third step, behind the backward pass that rehearses."""

    passes = 0

    def backward(self, loss: torch.Tensor, *, discard: bool = False) -> None:
        """Scale the loss of two passes beyond fp16."""
        self.passes += 1
        super().backward(loss * (1e30 if self.passes in (3, 4) else 1.0), discard=discard)


@pytest.mark.parametrize(
    ("on", "case"),
    each([CASES[3], CASES[5], CASES[13]], [replace(CASES[3], optimizer="adamw")]),
    indirect=["on"],
)
def test_a_run_in_fp16_skips_steps_that_overflow(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """With finite losses, halving its loss scale, and goes on."""
    config = inputs.run(case, tmp_path / "run", steps=6)
    with mock.patch("fastdiff.training.engines.deepspeed.DeepSpeedEngine", Overflowing):
        train(config, launch_of(case.stage), world)
    skipped = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert [line["step"] for line in skipped] == [2, 3]
    assert skipped[-1]["cur_scale"] < 2**8
    found = losses(tmp_path / "run")
    assert all(math.isfinite(loss) for loss in found)
    assert len(found) == 6
    assert newest(tmp_path / "run").manifest["progress"]["skipped"] == 2


@pytest.mark.parametrize(("on", "case"), each([CASES[0], CASES[6]], [CASES[0]]), indirect=["on"])
def test_a_run_is_sampled_and_exported(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path
) -> None:
    """Its pictures are those that a CPU draws, and its export is its checkpoint."""
    train(inputs.run(case, tmp_path / "run"), launch_of(case.stage), world)
    assert intact(tmp_path / "run") == [4]
    drawing = SamplerConfig(scheduler="dpmsolver++", steps=4, cfg=1.5, seed=3)
    drawn = {}
    for device in (on, torch.device("cpu")):
        run = Run(tmp_path / "run", device=device)
        assert run.device.type == device.type
        drawn[device.type] = run.draw(torch.arange(10), drawing, progress=False)
    torch.testing.assert_close(drawn[on.type], drawn["cpu"], rtol=1e-3, atol=1e-3)
    assert drawn[on.type].std() > 0.1
    export(tmp_path / "run", tmp_path / "out", Choice(format="safetensors", raw=True))
    (file,) = (tmp_path / "out").glob("*.safetensors")
    exported, saved = load_file(file), newest(tmp_path / "run").weights()
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
