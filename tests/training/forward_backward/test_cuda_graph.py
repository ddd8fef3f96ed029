"""Passes as a CUDA graph: what a capture forbids is absent, a replay is always the same work, and refusals.

Without a GPU a replay runs the captured section again, operation by operation, on the same static tensors. Only
``tests/gpu/test_graphs.py`` captures, and sees what this watch does not: copies from pageable memory of the host, and
work on other streams.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.data.loading.build import build_order
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.plugins.promises import HostSyncError
from fastdiff.training.forward_backward import graph
from fastdiff.training.forward_backward.build import require_capture, require_one_shape
from fastdiff.training.loop import train
from tests.gpu.cases import ADM, HYBRID
from tests.support.dispatch_modes import Replay
from tests.support.inputs import captioned
from tests.support.nights import by_day
from tests.support.runs import assert_same_checkpoint, launch, records, tiny
from tests.training.callbacks.test_divergence import in_step, marred

SMALL = DiTConfig(depth=1, hidden=32, heads=2, patch=4, channels=1, size=8, classes=10)
EVERY_NOISE = DdpmConfig(
    condition_dropout=0.3, noise_offset=0.1, input_perturbation=0.1, multires_noise_iterations=2, dream=True,
)  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "dit": {"performance__precision": "bf16", "batch__micro": 4},
    "recomputed": {"performance__recompute": True, "objective": EVERY_NOISE},
    "flow": {"objective": FlowConfig(cosine_weight=0.5), "timesteps": TimestepConfig(stratified=True)},
    "adm": {"model": ADM, "objective": HYBRID, "performance__precision": "bf16"},
    "kernels": {"model": SMALL, "performance__kernels": "triton", "performance__precision": "bf16", "batch__micro": 2},
}


class Watched:
    """In place of ``CudaGraphs``: watches each replay."""

    def __init__(self) -> None:
        self.replays: list[list[Replay]] = []
        """Of each section that was captured."""

    def __call__(self, section: Callable[[], Tensor]) -> Callable[[], Tensor]:
        own: list[Replay] = []
        self.replays.append(own)

        def replay() -> Tensor:
            own.append(Replay())
            with own[-1]:
                return section()

        return replay

    def warm_up(self, section: Callable[[], Tensor]) -> Tensor:
        return section()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The captures of the runs of a test, which a CPU may do."""
    found = Watched()
    monkeypatch.setattr(graph, "CudaGraphs", lambda: found)
    monkeypatch.setattr("fastdiff.training.build.require_capture", lambda *given: None)
    return found


def names(replay: Replay) -> set[str]:
    """Return the names of its operations."""
    return {operation.partition("(")[0].removeprefix("aten::") for operation in replay.operations}


def with_graph(data: Path, folder: Path, steps: int = 6, **changes: Any) -> Any:
    """A run of two micro-batches per step unless it says otherwise."""
    options = {"batch__micro": 8, "optim__clip": 0.5, "performance__engine": "flat", "performance__cuda_graph": True}
    return tiny(data, folder, steps, **options | changes)


@pytest.mark.parametrize("name", by_day(["dit", "recomputed"], "flow", "adm", "kernels"))
def test_every_replay_is_the_same_work_on_the_same_memory(
    world: World, digits: Path, tmp_path: Path, watched: Watched, name: str
) -> None:
    """Equal operations, shapes, strides and numbers; no read by the host; and every input has its address for good."""
    steps, options = 6, RUNS[name]
    if name == "kernels":  # the interpreter takes as long as there are samples
        steps, options = 3, options | {"batch__samples": 4, "samples": 3 * 4}
    config = with_graph(digits, tmp_path, steps, **options)
    train(config, launch(0), world)
    accumulation = config.batch.accumulation(1)
    assert sum(map(len, watched.replays)) == steps * accumulation - graph.WARM_UP
    assert len(watched.replays) == 2, "of the first micro-batch of a step, and of the others"
    for replays in watched.replays:
        first, *others = replays
        assert len(first.operations) > 50
        for other in others:
            assert other.operations == first.operations
            assert other.found.keys() == first.found.keys()
    assert any(len(replays) > 1 for replays in watched.replays)
    sums = [{name for name in names(own[0]) if name.startswith("_foreach_")} for own in watched.replays]
    assert sorted(map(sorted, sums)) == [["_foreach_add_.List"], ["_foreach_copy_"]], "the first one overwrites"


@pytest.mark.parametrize(("policy", "accumulation"), by_day([("skip", 2)], ("skip", 1), ("log", 1), ("log", 2)))
def test_its_numbers_are_those_of_a_run_without_it(
    world: World, tmp_path: Path, watched: Watched, policy: str, accumulation: int
) -> None:
    """Losses, log and checkpoint to the bit, with a spike, a step that is not finite, and an average."""
    data = marred(tmp_path / "data", {in_step(3, 11): np.nan, in_step(8, 9): 100.0})
    options = {
        "batch__micro": 16 // accumulation, "divergence__policy": policy, "divergence__window": 8,
        "performance__precision": "bf16",
    }  # fmt: skip
    for name in ("graph", "eager"):
        config = with_graph(data, tmp_path / name, 10, **options, performance__cuda_graph=name == "graph")
        train(config, launch(0), world)
    assert len(watched.replays) == accumulation
    found, expected = (records(tmp_path / name) for name in ("graph", "eager"))
    timeless = [key for key in expected[0] if not key.endswith(("_ms", "_per_s", "_gib", "mfu", "time"))]
    for ours, theirs in zip(found, expected, strict=True):
        assert [repr(ours[key]) for key in timeless] == [repr(theirs[key]) for key in timeless]
    assert expected[-1]["skipped"] == (2 if policy == "skip" else 1)
    for lines in ("skipped.jsonl", "spikes.jsonl"):
        assert (tmp_path / "graph" / lines).read_text() == (tmp_path / "eager" / lines).read_text()
    assert_same_checkpoint(tmp_path / "graph", tmp_path / "eager")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Batch(torch.zeros(1, 1, 8, 8), torch.zeros(4), {}), r"tensor \[1, 1, 8, 8\] .*, expected \[4, 1, 8, 8\] .* "),
        (Batch(torch.zeros(4, 1, 8, 8).half(), torch.zeros(4), {}), r"torch\.float16, expected .* torch\.float32 "),
    ],
)
def test_another_batch_than_the_first_is_refused(watched: Watched, other: Batch, message: str) -> None:
    """``copy_`` would broadcast or cast it."""
    none: Any = None
    passes = graph.GraphForwardBackward(none, none, none, none)
    passes._load(Batch(torch.zeros(4, 1, 8, 8), torch.zeros(4), {}))
    with pytest.raises(ConfigError, match=message + "as in the first; leave the flag out"):
        passes._load(other)


class Changed(Watched):
    """Watches a section that reads a number of the host, which is another one in each replay."""

    def __call__(self, section: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return super().__call__(lambda: section() * float(sum(map(len, self.replays))))


def test_the_watch_sees_what_a_graph_would_freeze(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    """A number that changes, a tensor that is elsewhere, and a read by the host."""
    changed = Changed()
    monkeypatch.setattr(graph, "CudaGraphs", lambda: changed)
    train(with_graph(digits, tmp_path / "number", batch__micro=16), launch(0), world)
    first, second, _ = changed.replays[0]
    assert first.operations != second.operations
    assert first.found.keys() == second.found.keys()

    monkeypatch.setattr(graph, "CudaGraphs", lambda: watched)
    monkeypatch.setattr(graph.GraphForwardBackward, "_load", lambda self, batch: setattr(self, "_static", batch))
    train(with_graph(digits, tmp_path / "address", batch__micro=16), launch(0), world)
    first, second, _ = watched.replays[0]
    assert first.operations == second.operations
    assert first.found.keys() != second.found.keys()
    with pytest.raises(HostSyncError, match="reads a number from the device"), Replay():
        torch.ones(()).item()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"performance__device": "cpu"}, "--performance.cuda_graph with --performance.device cpu: .* leave one"),
    ({"performance__engine": "deepspeed"}, "cuda_graph with --performance.engine deepspeed.*: use flat"),
    ({"performance__profile": "1:2"}, "cuda_graph with --performance.profile 1:2: .* without the graph"),
    ({"timesteps": TimestepConfig(density="importance")}, "with --timesteps.density importance: .* another density"),
    (
        {"model": UNetConfig(), "pretrained": PretrainedConfig(path="pipeline"), "data__online": True},
        "with --data.online: .* write shards",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_no_machine_can_capture_is_refused(
    digits: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_graph(digits, tmp_path, **options)


def test_a_cpu_is_refused_before_anything_is_written(world: World, digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--performance\.cuda_graph on a cpu: .* leave the flag out"):
        train(with_graph(digits, tmp_path / "run"), launch(0), world)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("engine", "ranks", "message"), [("flat", 4, "on 4 ranks: .* one GPU"), ("deepspeed", 1, "flat")]
)
def test_other_engines_and_several_ranks_are_refused_on_a_gpu(
    digits: Path, tmp_path: Path, engine: Any, ranks: int, message: str
) -> None:
    there: Any = SimpleNamespace(device=torch.device("cuda"), size=ranks)
    with pytest.raises(ConfigError, match=f"--performance.cuda_graph .*{message}"):
        require_capture(with_graph(digits, tmp_path).performance, engine, there)
    alone: Any = SimpleNamespace(device=there.device, size=1)
    require_capture(with_graph(digits, tmp_path).performance, "flat", alone)


def test_latents_of_several_sizes_are_refused(digits: Path, tmp_path: Path) -> None:
    captioned.encode(tmp_path, 48)
    with LatentReader(tmp_path) as reader:
        order = build_order(reader.info, seed=0, window_shards=1, global_batch=8)
    with pytest.raises(ConfigError, match=r"--performance\.cuda_graph .* several sizes: .* encode with one size"):
        require_one_shape(with_graph(digits, tmp_path).performance, str(tmp_path), order)
