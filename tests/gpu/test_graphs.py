"""Passes captured in CUDA graphs: the losses of runs without, no memory allocated anew, resumes equal to the bit."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.training.forward_backward import graph
from fastdiff.training.guard import StepGuard
from fastdiff.training.loop import train
from tests.gpu.cases import Case, Inputs, deterministic, each, launch_of
from tests.support.runs import assert_same_checkpoint, hexes, losses, newest, train_losses

CASES = [
    Case(family="dit", stage="0", precision="bf16"),
    Case(family="dit", stage="0", precision="fp32", optimizer="adamw8bit", recompute=True),
    Case(family="adm", stage="0", precision="bf16"),
    Case(family="sd15", stage="0", precision="bf16"),
    Case(family="dit", stage="0", precision="bf16", adapter="4bit"),
]
STEPS = 20


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per capture."""
    found: list[int] = []
    own = graph.CudaGraphs.__call__

    def counted(self: graph.CudaGraphs, section: graph.Section) -> graph.Section:
        found.append(1)
        return own(self, section)

    monkeypatch.setattr(graph.CudaGraphs, "__call__", counted)
    return found


def options(case: Case, *, captured: bool, accumulation: int = 2) -> dict[str, Any]:
    """Changes of a run: two micro-batches per step, in a fixed order."""
    samples = 8 if case.family == "sd15" else 16
    own = {"performance__engine": "flat", "performance__cuda_graph": captured, "timesteps": TimestepConfig()}
    return {**deterministic(), **own, "batch__micro": samples // accumulation}


@pytest.mark.parametrize(("on", "case"), each(CASES, []), indirect=["on"])
def test_the_losses_are_those_of_a_run_without_it(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path, captures: list[int]
) -> None:
    """To the bit, with the weights, moments and averages, over twenty steps."""
    for name in ("graph", "eager"):
        config = inputs.run(case, tmp_path / name, STEPS, **options(case, captured=name == "graph"))
        train(config, launch_of("0"), world)
    assert len(captures) == 2
    assert hexes(losses(tmp_path / "graph")) == hexes(losses(tmp_path / "eager"))
    assert_same_checkpoint(tmp_path / "graph", tmp_path / "eager")


@pytest.mark.parametrize(("on", "case"), each(CASES[:1], []), indirect=["on"])
def test_a_resumed_run_is_equal_to_the_bit(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path, captures: list[int]
) -> None:
    """Its new process warms up and captures again."""
    whole = train_losses(
        world, inputs.run(case, tmp_path / "whole", 12, **options(case, captured=True)), launch_of("0")
    )
    for steps in (5, 12):
        config = inputs.run(case, tmp_path / "parts", steps, **options(case, captured=True))
        train(config, replace(launch_of("0"), allow_change=("samples",)), world)
    assert len(captures) == 3 * 2
    assert hexes(losses(tmp_path / "parts")) == hexes(whole)
    assert newest(tmp_path / "parts").manifest["files"] == newest(tmp_path / "whole").manifest["files"]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(("on", "case"), each(CASES[:1], []), indirect=["on"])
def test_the_allocator_gets_no_more_memory_after_the_captures(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    captures: list[int], accumulation: int,
) -> None:  # fmt: skip
    segments: list[int] = []
    take = StepGuard.take_step

    def watched(self: StepGuard, *given: Any) -> bool:
        applied = take(self, *given)
        segments.append(torch.cuda.memory_stats(on)["segment.all.allocated"])
        return applied

    monkeypatch.setattr(StepGuard, "take_step", watched)
    config = inputs.run(case, tmp_path, STEPS, **options(case, captured=True, accumulation=accumulation))
    train(config, launch_of("0"), world)
    assert len(captures) == min(2, accumulation)
    assert len(segments) == STEPS
    assert segments[8] == segments[-1]


def capture_a_read() -> float:
    """Try to capture a read by the host; return the number that is read after the error."""
    number = torch.ones((), device="cuda")
    with pytest.raises(ConfigError, match=r"cannot be captured \(.*\); leave the flag out"):
        graph.CudaGraphs()(lambda: number * number.item())
    return number.item()


@pytest.mark.gpu
def test_a_read_by_the_host_cannot_be_captured(world: World) -> None:
    """And the process goes on after the error; one of its own, whose stream and allocator remain in the capture."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        assert process.submit(capture_a_read).result() == 1


@pytest.mark.gpu
def test_two_graphs_share_their_memory(world: World) -> None:
    """And each has its own result."""
    number = torch.ones(2**20, device=world.device)
    capture = graph.CudaGraphs()
    first, second = capture(lambda: (number + 1).sum()), capture(lambda: (number + 2).sum())
    for factor in (1, 3):
        number.fill_(factor)
        assert [float(first()), float(second())] == [(factor + n) * 2**20 for n in (1, 2)]
