"""Passes captured in CUDA graphs: the losses of runs without, no memory allocated anew, resumes equal to the bit."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from fastdiff.models import delayed_scales, fp8
from fastdiff.parallel.world import World, start_world, stop_world
from fastdiff.training.engines import flat_sum
from fastdiff.training.engines.flat import FlatEngine
from fastdiff.training.forward_backward import cuda_graphs
from fastdiff.training.forward_backward.cuda_graphs import Pool
from fastdiff.training.guard import StepGuard
from fastdiff.training.loop import train
from tests.gpu.cases import DIT, Case, Inputs, deterministic, each, launch_of
from tests.support.runs import assert_same_checkpoint, hexes, losses, newest, train_losses
from tests.support.servers.ports import reserved_port

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
    own: Callable[..., Any] = cuda_graphs.CudaGraphs.__call__

    def counted(self: cuda_graphs.CudaGraphs, section: Callable[[], Any], pool: Pool) -> Any:
        found.append(1)
        return own(self, section, pool)

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "__call__", counted)
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
    assert len(captures) == 3, "of both passes, at first and again, and of the update"
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
    assert len(captures) == 3 * 3
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
    assert len(captures) == min(2, accumulation) + 1
    assert len(segments) == STEPS
    assert segments[8] == segments[-1]


@pytest.mark.parametrize(("on", "case"), each(CASES[:1], []), indirect=["on"])
def test_graphs_in_bf16_are_dropped_with_the_first_step_in_fp8(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    captures: list[int],
) -> None:  # fmt: skip
    """Their memory returns to the device, and losses are those of a run without graphs."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 products begin with sm_89")
    monkeypatch.setattr(fp8, "LEAST", 64)
    monkeypatch.setattr(delayed_scales, "WINDOW", 4)
    reserved: list[int] = []
    free = cuda_graphs.CudaGraphs.free

    def watched(self: cuda_graphs.CudaGraphs, replays: Any) -> None:
        reserved.append(torch.cuda.memory_reserved(on))
        free(self, replays)
        reserved.append(torch.cuda.memory_reserved(on))

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "free", watched)
    own = {"model": replace(DIT, depth=3, hidden=64), "performance__fp8": True}
    for name in ("graph", "eager"):
        config = inputs.run(case, tmp_path / name, 12, **options(case, captured=name == "graph"), **own)
        train(config, launch_of("0"), world)
    assert len(captures) == 2 + 2 + 1, "of both passes in bf16 and in FP8, and of the update"
    before, after = reserved
    assert after < before
    assert hexes(losses(tmp_path / "graph")) == hexes(losses(tmp_path / "eager"))
    assert_same_checkpoint(tmp_path / "graph", tmp_path / "eager")


@pytest.mark.parametrize(("on", "case"), each(CASES[:2], []), indirect=["on"])
def test_captured_passes_go_with_sums_in_chunks(
    on: torch.device, case: Case, world: World, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's, of the one rank that a GPU can have: its stream and that of the captures wait for each other."""
    build: Callable[..., None] = FlatEngine.__init__

    def built(self: FlatEngine, *given: Any) -> None:
        build(self, *given)
        self._sum = flat_sum.FlatSum(self._gradients.buffer)

    monkeypatch.setattr(flat_sum, "_CHUNK_BYTES", 2**14)
    train(inputs.run(case, tmp_path / "eager", STEPS, **options(case, captured=False)), launch_of("0"), world)
    monkeypatch.setattr(FlatEngine, "__init__", built)
    train(inputs.run(case, tmp_path / "graph", STEPS, **options(case, captured=True)), launch_of("0"), world)
    assert hexes(losses(tmp_path / "graph")) == hexes(losses(tmp_path / "eager"))
    assert_same_checkpoint(tmp_path / "graph", tmp_path / "eager")


def train_on_a_gpu_each(rank: int, port: int, configs: list[RunConfig]) -> None:
    """Train the runs one after the other as one of two ranks."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    world = start_world()
    for config in configs:
        train(config, launch_of("0"), world)
    stop_world()


@pytest.mark.parametrize(("on", "case"), each(CASES[:2], []), indirect=["on"])
def test_the_losses_of_two_ranks_are_those_of_two_without_it(
    on: torch.device, case: Case, inputs: Inputs, tmp_path: Path
) -> None:
    """To the bit, with weights, moments and averages: a sum of two numbers has no order."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    named = {name: options(case, captured=name == "graph") | {"batch__micro": 4} for name in ("graph", "eager")}
    configs = [inputs.run(case, tmp_path / name, STEPS, **own) for name, own in named.items()]
    with ProcessPoolExecutor(2, get_context("spawn")) as ranks:
        port = reserved_port()
        for ended in [ranks.submit(train_on_a_gpu_each, rank, port, configs) for rank in range(2)]:
            ended.result(timeout=300)
    assert hexes(losses(tmp_path / "graph")) == hexes(losses(tmp_path / "eager"))
    assert_same_checkpoint(tmp_path / "graph", tmp_path / "eager")


def alone() -> World:
    return World(rank=0, size=1, device=torch.device("cuda"))


def capture_a_read() -> float:
    """Try to capture a read by the host; return the number that is read after the error."""
    number = torch.ones((), device="cuda")
    with pytest.raises(ConfigError, match=r"cannot be captured \(.*\); leave the flag out"):
        cuda_graphs.CudaGraphs(alone())(lambda: number * number.item(), Pool())
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
    capture, pool = cuda_graphs.CudaGraphs(world), Pool()
    first, second = (capture(section, pool) for section in (lambda: (number + 1).sum(), lambda: (number + 2).sum()))
    for factor in (1, 3):
        number.fill_(factor)
        assert [float(first()), float(second())] == [(factor + n) * 2**20 for n in (1, 2)]


@pytest.mark.gpu
def test_dropped_graphs_return_their_memory_beside_one_that_stays(world: World) -> None:
    """And others are captured after them."""
    number = torch.ones(2**26, device=world.device)
    capture, pool = cuda_graphs.CudaGraphs(world), Pool()
    stays = capture(lambda: number.add_(1), Pool())
    dropped = {"half": capture(lambda: (number * 0.5).sum(), pool), "twice": capture(lambda: (number * 2).sum(), pool)}
    held = torch.cuda.memory_reserved(world.device)
    dropped["twice"]()
    capture.free(dropped)
    assert not dropped
    assert torch.cuda.memory_reserved(world.device) <= held - number.nbytes
    after = capture(lambda: number.sum(), Pool())
    stays()
    assert float(after()) == 2 * number.numel()
