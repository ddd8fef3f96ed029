"""Passes as a CUDA graph: what a capture forbids is absent, a replay is always the same work, and refusals.

Without a GPU a replay runs the captured section again, operation by operation, on the same static tensors. Only
``tests/gpu/test_graphs.py`` captures, and sees what this watch does not: copies from pageable memory of the host, and
work on other streams.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch

from fastdiff.batch import Batch
from fastdiff.config.cuda_graph import Circumstances, require_static
from fastdiff.config.deepspeed import resolve
from fastdiff.config.engine import why_not_flat
from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from fastdiff.models import delayed_scales, fp8
from fastdiff.parallel.world import World
from fastdiff.plugins.promises import HostSyncError
from fastdiff.training.engines import flat_sum
from fastdiff.training.forward_backward import graph
from fastdiff.training.forward_backward.cuda_graphs import WARM_UP, Pool
from fastdiff.training.loop import train
from tests.gpu.cases import ADM, HYBRID
from tests.support.dispatch_modes import Replay
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.runs import assert_same_checkpoint, hexes, launch, losses, records, tiny
from tests.support.watched_graphs import Watched, watching
from tests.training.callbacks.test_divergence import in_step, marred

T = TypeVar("T")
SMALL = DiTConfig(depth=1, hidden=32, heads=2, patch=4, channels=1, size=8, classes=10)
EVERY_NOISE = DdpmConfig(
    condition_dropout=0.3, noise_offset=0.1, input_perturbation=0.1, multires_noise_iterations=2, dream=True,
)  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "dit": {"performance__precision": "bf16", "batch__micro": 4},
    "recomputed": {"performance__recompute": True, "objective": EVERY_NOISE},
    "flow": {"objective": FlowConfig(cosine_weight=0.5), "timesteps": TimestepConfig(stratified=True)},
    "adm": {"model": ADM, "objective": HYBRID, "performance__precision": "bf16"},
    "kernels": {"model": SMALL, "performance__kernels": "triton", "performance__precision": "bf16"},
    "update": {"performance__kernels": "auto,adamw=triton", "ema__power_stds": (0.1,)},
    "update-8bit": {"model": SMALL, "optim__name": "adamw8bit", "performance__kernels": "auto,adamw8bit=triton"},
}
UPDATES = {"kernels": "fastdiff::adamw", "update": "fastdiff::adamw", "update-8bit": "fastdiff::adamw8bit"}
"""Runs whose update a graph holds, with its op; plain torch on a CPU asks the host whether to skip."""


def names(replay: Replay) -> set[str]:
    """Return the names of its operations."""
    return {operation.partition("(")[0].removeprefix("aten::") for operation in replay.operations}


def with_graph(data: Path, folder: Path, steps: int = 6, **changes: Any) -> Any:
    """A run of two micro-batches per step unless it says otherwise."""
    options = {"batch__micro": 8, "optim__clip": 0.5, "performance__engine": "flat", "performance__cuda_graph": True}
    return tiny(data, folder, steps, **options | changes)


def options_of(name: str, ranks: int) -> dict[str, Any]:
    options = RUNS[name]
    if name == "kernels":  # the interpreter takes as long as there are samples
        options = options | {"batch__samples": 4, "samples": 4 * 4}
    return options | {"batch__micro": options.get("batch__samples", 16) // ranks // 2}


def watch_replays(world: World, data: Path, folder: Path, name: str) -> None:
    """Train, and compare all replays of each section."""
    steps = 6
    with watching() as found:
        config = with_graph(data, folder, steps, **options_of(name, world.size))
        train(config, launch(0), world)
    (watched,) = found
    accumulation, steps = config.batch.accumulation(world.size), config.steps
    passes = [own for own in watched.replays if len(own[0].operations) > 50]
    assert sum(map(len, passes)) == (steps - WARM_UP) * accumulation
    assert len(passes) == 2, "of the first micro-batch of a step, and of the others"
    updates = [own for own in watched.replays if own not in passes]
    assert len(updates) == (name in UPDATES)
    for replays in watched.replays:
        assert len(replays) > 1
        first, *others = replays
        for other in others:
            assert other.operations == first.operations
            assert other.found.keys() == first.found.keys()
            assert not any("c10d" in operation for operation in other.operations), "no collective"
    sums = [{name for name in names(own[0]) if name.startswith("_foreach_")} for own in passes]
    assert sorted(map(sorted, sums)) == [["_foreach_add_.List"], ["_foreach_copy_"]], "the first one overwrites"
    for own in updates:
        assert {found for found in names(own[0]) if "::" in found} == {UPDATES[name]}


@pytest.mark.parametrize(
    ("name", "ranks"),
    by_day(
        [("dit", 1), ("recomputed", 1), ("update", 2)],
        *[(name, 1) for name in ("flow", "adm", "kernels", "update", "update-8bit")],
        *[(name, 2) for name in ("dit", "recomputed", "flow", "adm", "kernels", "update-8bit")],
    ),
)
def test_every_replay_is_the_same_work_on_the_same_memory(
    world: World, digits: Path, tmp_path: Path, name: str, ranks: int
) -> None:
    """Equal operations, shapes, strides and numbers, no read by the host, and every input has its address for good."""
    if ranks == 1:
        watch_replays(world, digits, tmp_path, name)
    else:
        values(forked_ranks(watch_replays, digits, tmp_path, name, ranks=ranks))


def test_all_passes_are_captured_in_one_step(world: World, digits: Path, tmp_path: Path) -> None:
    """A graph keeps its memory, beside which no micro-batch may need its own once more."""
    (watched,) = train_watched(world, with_graph(digits, tmp_path, 4, batch__micro=4))
    assert [len(own) for own in watched.replays] == [4 - WARM_UP, 3 * (4 - WARM_UP)]


def test_graphs_of_other_products_are_dropped(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in 16 bits with the first step in FP8, before its warm-up: only the graph of the update stays."""
    monkeypatch.setattr(fp8, "LEAST", 64)
    monkeypatch.setattr(delayed_scales, "WINDOW", 4)
    options: dict[str, Any] = {
        "model": replace(SMALL, depth=3, hidden=64, heads=4, patch=2), "performance__precision": "bf16",
        "performance__fp8": True, "performance__kernels": "auto,adamw=triton",
    }  # fmt: skip
    (watched,) = train_watched(world, with_graph(digits, tmp_path / "graph", 10, **options))
    train(with_graph(digits, tmp_path / "eager", 10, **options, performance__cuda_graph=False), launch(0), world)
    assert hexes(losses(tmp_path / "graph")) == hexes(losses(tmp_path / "eager"))
    assert watched.left == [1]
    assert [len(own) for own in watched.replays] == [2, 2, 8, 4, 4], "of steps 3 and 4, of all, and from step 7 on"
    plain, again, update, in_fp8, again_in_fp8 = map(id, watched.pools)
    assert (plain, in_fp8) == (again, again_in_fp8)
    assert len({plain, update, in_fp8}) == 3, "a pool whose graphs are gone takes no others"


def train_both(world: World, data: Path, folder: Path, options: dict[str, Any]) -> int:
    """Train with and without graphs, the gradients in several chunks; return the number of captures."""
    with watching() as found, mock.patch.object(flat_sum, "_CHUNK_BYTES", 2**14):
        for name in ("graph", "eager"):
            own = with_graph(data, folder / name, 10, **options, performance__cuda_graph=name == "graph")
            train(own, launch(0), world)
    return len(found[0].replays)


@pytest.mark.parametrize(
    ("policy", "accumulation", "ranks", "kernels"),
    by_day(
        [("skip", 2, 1, "auto"), ("skip", 2, 2, "auto,adamw=triton")],
        *[("skip", 1, 1, "auto,adamw=triton"), ("log", 1, 1, "auto"), ("log", 2, 1, "auto,adamw=triton")],
        *[("log", 1, 2, "auto"), ("log", 2, 2, "auto,adamw=triton")],
    ),
)
def test_its_numbers_are_those_of_a_run_without_it(
    world: World, tmp_path: Path, policy: str, accumulation: int, ranks: int, kernels: str
) -> None:
    """Losses, log and checkpoint to the bit, with a spike, a step that is not finite, and an average."""
    data = marred(tmp_path / "data", {in_step(3, 11): np.nan, in_step(8, 9): 100.0})
    # In bf16 Triton's interpreter would round the copy in another way than torch; fp32 has none.
    options = {
        "batch__micro": 16 // accumulation // ranks, "divergence__policy": policy, "divergence__window": 8,
        "performance__precision": "fp32" if "triton" in kernels else "bf16", "performance__kernels": kernels,
    }  # fmt: skip
    if ranks == 1:
        captures = train_both(world, data, tmp_path, options)
    else:
        captures = values(forked_ranks(train_both, data, tmp_path, options, ranks=ranks))[0]
    assert captures == accumulation + ("triton" in kernels)
    found, expected = (records(tmp_path / name) for name in ("graph", "eager"))
    timeless = [key for key in expected[0] if not key.endswith(("_ms", "_per_s", "_gib", "mfu", "time"))]
    for ours, theirs in zip(found, expected, strict=True):
        assert [repr(ours[key]) for key in timeless] == [repr(theirs[key]) for key in timeless]
    assert expected[-1]["skipped"] == (2 if policy == "skip" else 1)
    for lines in ("skipped.jsonl", "spikes.jsonl"):
        assert (tmp_path / "graph" / lines).read_text() == (tmp_path / "eager" / lines).read_text()
    assert_same_checkpoint(tmp_path / "graph", tmp_path / "eager")


@pytest.mark.nightly
def test_losses_of_four_ranks_differ_by_the_order_of_a_sum(digits: Path, tmp_path: Path) -> None:
    """DistributedDataParallel cuts the gradient elsewhere."""
    options = {"batch__micro": 4, "performance__precision": "fp32"}
    values(forked_ranks(train_both, digits, tmp_path, options, ranks=4))
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "eager"), rel=5e-7)


def test_a_run_that_goes_from_one_rank_to_two_and_back_is_that_without_it(
    world: World, digits: Path, tmp_path: Path
) -> None:
    """Each start warms up and captures anew; weights, moments and averages are equal to the bit."""
    options = {"batch__micro": 4, "ema__power_stds": (0.1,), "performance__kernels": "auto,adamw=triton"}
    for name in ("graph", "eager"):
        for steps, ranks in ((4, 1), (8, 2), (12, 1)):
            config = with_graph(digits, tmp_path / name, steps, **options, performance__cuda_graph=name == "graph")
            if ranks == 1:
                train_watched(world, config)
            else:
                values(forked_ranks(train_watched, config, ranks=ranks))
    assert hexes(losses(tmp_path / "graph")) == hexes(losses(tmp_path / "eager"))
    assert_same_checkpoint(tmp_path / "graph", tmp_path / "eager")


def train_watched(world: World, config: RunConfig) -> list[Watched]:
    with watching() as found:
        train(config, launch(0), world)
    return found if world.size == 1 else []


def test_a_rewind_leaves_all_memory_where_the_graphs_find_it(world: World, tmp_path: Path) -> None:
    """Weights, moments, averages and the sums of the log."""
    data = marred(tmp_path / "data", {in_step(7): 100.0})
    options: dict[str, Any] = {
        "output__checkpoint_every": 4, "divergence__policy": "rewind", "divergence__window": 8,
        "performance__kernels": "auto,adamw=triton",
    }  # fmt: skip
    (watched,) = train_watched(world, with_graph(data, tmp_path / "run", 10, **options))
    assert (tmp_path / "run" / "spikes.jsonl").read_text()
    assert len(watched.replays) == 3
    for first, *others in watched.replays:
        assert len(others) > 4
        assert all(other.found.keys() == first.found.keys() for other in others)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"latents": torch.ones(1, 1, 8, 8)}, r"latents of a micro-batch: \[1, 1, 8, 8\] .*, expected \[4, 1, 8, 8\] "),
        ({"latents": torch.ones(4, 1, 8, 8).half()}, r"latents .* torch\.float16, expected .* torch\.float32 "),
        ({"condition": {"pooled": torch.ones(4, 2)}}, r"condition context .*: none, expected \[4, 2\] torch\.float32 "),
        (
            {"condition": {"context": torch.ones(4, 2), "pooled": torch.ones(4, 2)}},
            r"condition pooled .*: \[4, 2\] torch\.float32, expected none ",
        ),
    ],
)
def test_another_batch_than_the_first_is_refused(other: dict[str, Any], message: str) -> None:
    """``copy_`` would broadcast or cast it, and a condition of another name would be that of the first."""
    none: Any = mock.Mock()
    with watching():
        passes = graph.GraphForwardBackward(none, none, none, none, none)
    first = Batch(torch.zeros(4, 1, 8, 8), torch.zeros(4), {"context": torch.zeros(4, 2)})
    passes._load(first)
    with pytest.raises(ConfigError, match=message + ".*as in the first; leave the flag out") as raised:
        passes._load(replace(first, position=torch.ones(4), **other))
    assert not raised.value.everywhere, "so that it is printed on the node of its rank"
    assert passes._static is not None
    assert not passes._static.position.any(), "nothing of it is there"


class Changed(Watched):
    """Watches a section that reads a number of the host, which is another one in each replay."""

    def __call__(self, section: Callable[[], T], pool: Pool) -> Callable[[], T]:
        tensor: Any = section
        return super().__call__(lambda: tensor() * float(sum(map(len, self.replays))), pool)


def test_the_watch_sees_what_a_graph_would_freeze(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that changes, a tensor that is elsewhere, a collective, and a read by the host."""
    with watching(Changed) as found:
        train(with_graph(digits, tmp_path / "number", batch__micro=16), launch(0), world)
    first, second, *_ = found[0].replays[0]
    assert first.operations != second.operations
    assert first.found.keys() == second.found.keys()

    monkeypatch.setattr(graph.GraphForwardBackward, "_load", lambda self, batch: setattr(self, "_static", batch))
    with watching() as found:
        train(with_graph(digits, tmp_path / "address", batch__micro=16), launch(0), world)
    first, second, *_ = found[0].replays[0]
    assert first.operations == second.operations
    assert first.found.keys() != second.found.keys()
    with Replay() as replay:
        torch.distributed.all_reduce(torch.ones(2))
    assert ["c10d" in operation for operation in replay.operations].count(True) == 1
    with pytest.raises(HostSyncError, match="reads a number from the device"), Replay():
        torch.ones(()).item()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"performance__device": "cpu"}, "--performance.cuda_graph on a cpu: .* leave the flag out"),
    ({"performance__engine": "deepspeed"}, "there is none with --performance.engine deepspeed: use flat"),
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


BEGUN = {"zero_stage": 0, "engine": "deepspeed"}


@pytest.mark.parametrize(
    ("options", "start", "saved", "message"),
    [
        (
            {},
            launch(1),
            None,
            "with ZeRO stage 1: .*; use --deepspeed_config ddp, or leave",
        ),
        ({"performance__precision": "fp16"}, launch(0), None, "with --performance.precision fp16: .*use bf16 or fp32"),
        ({"optim__name": "adamw8bit-bnb"}, launch(0), None, "with --optim.name adamw8bit-bnb: use adamw or adamw8bit"),
        ({}, launch(0), BEGUN, "with a run that DeepSpeed has begun: use --performance.engine flat"),
    ],
)
def test_runs_of_deepspeed_are_refused_with_the_way_to_the_flat_engine(
    digits: Path, tmp_path: Path, options: dict[str, Any], start: Launch, saved: dict[str, Any] | None, message: str
) -> None:
    config = with_graph(digits, tmp_path, performance__engine="auto", **options)
    reason = why_not_flat(config.optim, config.performance, resolve(start.deepspeed, config, 2), saved)
    with pytest.raises(ConfigError, match=f"cuda_graph needs the flat engine, .*; there is none {message}"):
        require_static(Circumstances(config=config, device="cuda", not_flat=reason))


@pytest.mark.parametrize("ranks", [1, 8])
def test_any_number_of_ranks_is_accepted_on_gpus(digits: Path, tmp_path: Path, ranks: int) -> None:
    config = with_graph(digits, tmp_path, performance__engine="auto", batch__micro=2)
    reason = why_not_flat(config.optim, config.performance, resolve(launch(0).deepspeed, config, ranks))
    assert reason == ""
    require_static(Circumstances(config=config, device="cuda", not_flat=reason))


def test_latents_of_several_sizes_are_refused(digits: Path, tmp_path: Path) -> None:
    config = with_graph(digits, tmp_path)
    with pytest.raises(ConfigError, match=r"--performance\.cuda_graph with .* have 2 sizes: .* encode with one size"):
        require_static(Circumstances(config=config, device="cuda", sizes=2))
