"""Profiles of real runs: named ranges, equal losses, and no fault of a profile ends a run."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError, Preempted
from fastdiff.models import kernel_choice
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.loop import train
from fastdiff.training.profiling.recording import Recording, trace_path
from tests.support.forked import forked_ranks, values
from tests.support.injected.tiny_disk import fill, tiny_disk
from tests.support.nights import by_day
from tests.support.runs import assert_same_checkpoint, hexes, launch, losses, tiny, train_losses

Event = dict[str, Any]


def ranges(run: Path, first: int, rank: int = 0) -> list[Event]:
    """The named ranges of a rank's trace from a step on, in the order of their start."""
    with gzip.open(trace_path(run / "profile", rank, first), "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def named(found: list[Event]) -> Counter[str]:
    """How often each range occurs; blocks without the path of their module."""
    return Counter(event["name"].partition(" (")[0] for event in found)


def inside(found: list[Event], inner: str, outer: str) -> bool:
    """Whether every range whose name begins with ``inner`` lies in one that begins with ``outer``."""
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in found if e["name"].startswith(outer)]
    inners = [(e["ts"], e["ts"] + e["dur"]) for e in found if e["name"].startswith(inner)]
    assert inners, inner
    return all(any(a <= begin and end <= b for a, b in spans) for begin, end in inners)


@pytest.mark.parametrize("stage", by_day([0], 1, 3))
def test_a_profile_names_the_parts_of_its_steps_and_changes_no_bit(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Compiled and recomputed blocks, two micro-batches per step: ranges in order, no other graph."""
    monkeypatch.setattr(kernel_choice, "compile_options", lambda config: {"backend": "aot_eager"})
    given = {
        "performance__compile": True, "performance__recompute": True, "performance__precision": "bf16",
        "batch__micro": 8,
    }  # fmt: skip
    graphs = []
    for name, profile in (("plain", ""), ("profiled", "0:2")):
        torch._dynamo.reset()
        counters.clear()
        config = tiny(digits, tmp_path / name, 4, performance__profile=profile, **given)
        train(config, launch(stage), world)
        graphs.append((counters["stats"]["unique_graphs"], counters["graph_break"].total()))
    assert graphs[0] == graphs[1]
    assert graphs[0][1] == 0
    assert hexes(losses(tmp_path / "plain")) == hexes(losses(tmp_path / "profiled"))
    assert_same_checkpoint(tmp_path / "plain", tmp_path / "profiled")
    assert not (tmp_path / "plain" / "profile").exists()
    found = ranges(tmp_path / "profiled", 1)
    counts = named(found)
    assert [e["name"] for e in found if e["name"].startswith("step ")] == ["step 1", "step 2"]
    once = ["optimizer", "averages", "callbacks", "data", "forward", "backward", "objective"]
    once += [f"block {number} {phase}" for number in (0, 1) for phase in ("forward", "recompute", "backward")]
    per_step = dict.fromkeys(once, 2) | {"optimizer": 2, "averages": 1, "callbacks": 1, "objective": 4}
    # The rehearsal before step 1 is not part of it, and the callbacks of the last step end with it.
    assert {name: counts[name] for name in per_step} == {name: 2 * number for name, number in per_step.items()}
    assert (counts["reduce"] > 0, counts["hooks"] > 0) == (stage > 0, stage > 0)  # one rank of the flat engine has none
    assert inside(found, "block 0 forward", "forward")
    assert inside(found, "block 1 recompute", "block 1 backward")
    assert inside(found, "block 0 backward", "backward")
    order = [e["name"].partition(" (")[0] for e in found if " backward" in e["name"]]
    assert order == ["block 1 backward", "block 0 backward"] * 4


def test_nothing_of_a_profile_stays_in_the_run(world: World, digits: Path, tmp_path: Path) -> None:
    """The step after it runs the methods of the classes, and the modules have their own hooks."""
    found: list[tuple[set[str], int]] = []
    update = DeepSpeedEngine.optimizer_step

    def watched(self: DeepSpeedEngine) -> None:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.module.modules())
        found.append(({"optimizer_step", "backward"} & vars(self).keys(), hooks))
        update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "optimizer_step", watched)
        train(tiny(digits, tmp_path / "run", 3, performance__profile="1:2"), launch(1), world)
    _, before, during, after = found  # the first is the rehearsal
    assert during == ({"optimizer_step", "backward"}, before[1] + 2 * 4)
    assert before == after == (set(), before[1])


def _losses_of_both(world: World, plain: RunConfig, profiled: RunConfig, stage: int) -> list[list[float]]:
    return [train_losses(world, config, launch(stage)) for config in (plain, profiled)]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 2])
def test_every_rank_writes_its_own(digits: Path, tmp_path: Path, stage: int) -> None:
    """With its reductions, also those of the flat engine."""
    plain, profiled = tiny(digits, tmp_path / "a", 3), tiny(digits, tmp_path / "b", 3, performance__profile="0:2")
    for expected, found in values(forked_ranks(_losses_of_both, plain, profiled, stage)):
        assert found == expected
    for rank in (0, 1):
        events = ranges(tmp_path / "b", 1, rank)
        assert named(events)["optimizer"] == 4  # each step: its norm, and the update
        assert inside(events, "reduce", "backward")
    names = sorted(path.name for path in (tmp_path / "b" / "profile").iterdir())
    assert names == ["rank-0-from-1.json.gz", "rank-1-from-1.json.gz"]


def test_a_resumed_run_profiles_what_is_left(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(digits, tmp_path / "run", 2, performance__profile="1:2"), launch(1), world)
    assert capsys.readouterr().err.count("https://ui.perfetto.dev") == 1
    train(tiny(digits, tmp_path / "run", 4, performance__profile="1:3"), launch(1), world)
    for step in (2, 3):
        found = ranges(tmp_path / "run", step)
        assert [e["name"] for e in found if e["name"].startswith("step ")] == [f"step {step}"]
    train(tiny(digits, tmp_path / "run", 5, performance__profile="1:3"), launch(1), world)
    assert "no profile" not in capsys.readouterr().err
    train(tiny(digits, tmp_path / "run", 6, performance__profile="3:4"), launch(1), world)
    assert "no profile: the run is at step 5" in capsys.readouterr().err


def test_no_profile_ends_a_run(world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a folder that cannot be made nor a full disk, which torch does not report."""
    blocked = tmp_path / "blocked"
    (blocked / "checkpoints").mkdir(parents=True)
    (blocked / "profile").write_text("a file")
    train(tiny(digits, blocked, 2, performance__profile="0:1"), launch(1), world)
    assert "no profile of this rank" in capsys.readouterr().err
    with tiny_disk(tmp_path / "disk", 1) as disk:
        fill(disk)
        (tmp_path / "full" / "checkpoints").mkdir(parents=True)
        (tmp_path / "full" / "profile").symlink_to(disk)
        train(tiny(digits, tmp_path / "full", 2, performance__profile="0:1"), launch(1), world)
        assert [path.name for path in disk.iterdir()] == ["ballast"]
    message = capsys.readouterr().err
    assert "no profile of this rank" in message
    assert len(losses(tmp_path / "full")) == 2


def test_a_run_that_is_stopped_in_its_profile_writes_none(world: World, digits: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    stop.reason = "a test"
    with pytest.raises(Preempted):
        train(tiny(digits, tmp_path / "run", 4, performance__profile="0:3"), launch(1), world, stop)
    assert not (tmp_path / "run" / "profile").exists()
    assert not torch.autograd._profiler_enabled()


def test_a_recording_that_cannot_begin_leaves_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> None:
        raise RuntimeError("no history")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fail)
    with pytest.raises(RuntimeError, match="no history"):
        Recording(torch.device("cuda"))
    assert not torch.autograd._profiler_enabled()


def test_only_the_compressed_trace_meets_the_disk_of_the_run(tmp_path: Path) -> None:
    """And between the parts of its writing the rank shows that it is alive."""
    seen: list[list[str]] = []
    with Recording(torch.device("cpu")) as recording:
        torch.ones(4).add_(1)
        recording.stop()
        recording.write(tmp_path, 0, 1, lambda: seen.append([p.name for p in tmp_path.rglob("*") if p.is_file()]))
    assert seen == [[], ["rank-0-from-1.json.gz"]]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-from-1.json.gz"]


def test_a_profile_of_many_steps_is_refused() -> None:
    assert len(PerformanceConfig(profile="10:60").profiled) == 50
    with pytest.raises(ConfigError, match="5000 steps, expected at most 50"):
        PerformanceConfig(profile="0:5000")


@pytest.mark.parametrize("given", ["3:3", "4:2", "3", "a:b", "-1:2", "1:2:3", "0:5"])
def test_a_profile_without_steps_is_refused(digits: Path, tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=f"--performance.profile {given}: "):
        tiny(digits, tmp_path, 4, performance__profile=given)
