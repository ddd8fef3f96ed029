"""Contestants step in turns, each in its own processes; what fails is left out and told."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from bench.race import Contestant, Effort, Result, race, ratios
from bench.turn import Steps
from tests import racing


def raced(
    *contestants: Contestant, limit_seconds: float = 120.0, warm_up: int = 2, device: str = "cpu"
) -> list[Result]:
    effort = Effort(rounds=3, steps=2, warm_up=warm_up, limit_seconds=limit_seconds)
    return list(race(contestants, effort, device=device).values())


def test_contestants_step_in_turns_and_the_failed_one_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps"
    a, broken, b = raced(
        Contestant("a", racing.writing, (file, "a"), environment={"GIVEN": "a's"}),
        Contestant("broken", racing.failing, (4,)),
        Contestant("b", racing.writing, (file, "b")),
    )
    assert file.read_text() == "aabb" + 3 * "aabb", "the warm-up of each, then the rounds"
    assert (a.facts["given"], b.facts["given"]) == ("a's", None)
    for result, word in ((a, "a"), (b, "b")):
        assert result.failure is None
        assert result.facts["word"] == word
        assert [len(turn.seconds) for turn in result.turns] == [2, 2, 2]
        assert all(second >= 0.01 for second in result.seconds)
        assert result.timing.repetitions == 6
        inside = [s for turn in result.turns for s in turn.phases["sleep"]]
        assert all(0.01 <= part <= whole for part, whole in zip(inside, result.seconds, strict=True))
        assert result.phase("sleep").median <= result.timing.median
        assert result.memory is not None
        assert result.memory.peak == result.memory.resident > 0
    assert broken.failure == "ValueError: step 4"
    assert not broken.out_of_memory
    assert len(broken.turns) == 0, "it took the warm-up, and failed in its first turn"
    assert "ValueError: step 4" in capfd.readouterr().err, "with what it printed"


def test_each_way_to_end_is_told_apart() -> None:
    memory, system, crashed, ended = raced(
        Contestant("memory", racing.out_of_memory),
        Contestant("system", racing.killed, (signal.SIGKILL,)),
        Contestant("crashed", racing.killed, (signal.SIGABRT,)),
        Contestant("ended", racing.ending),
        warm_up=0,
    )
    assert (memory.failure, memory.out_of_memory) == ("OutOfMemoryError: CUDA out of memory", True)
    assert (system.failure, system.out_of_memory) == (
        "the process was killed, most likely by the system for its memory", True,
    )  # fmt: skip
    assert (crashed.failure, crashed.out_of_memory) == ("the process ended without a word, with exit code -6", False)
    assert (ended.failure, ended.out_of_memory) == (
        "RuntimeError: the contestant ended before it had enough steps", False,
    )  # fmt: skip


def test_one_that_hangs_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (result,) = raced(Contestant("hanging", racing.hanging, (file,)), limit_seconds=15)
    assert result.failure == "no answer within 15 s"
    assert not psutil.pid_exists(int(file.read_text()))


def test_all_ranks_end_when_one_fails() -> None:
    began = time.monotonic()
    (result,) = raced(Contestant("two", racing.second_rank_fails, ranks=2), limit_seconds=200)
    assert result.failure == "ValueError: I am the second"
    assert result.facts == {"rank": "0", "ranks": "2"}
    assert time.monotonic() - began < 150, "the first rank, which waits, was not waited for"


def test_peak_memory_is_what_the_process_knows() -> None:
    (result,) = raced(Contestant("allocating", racing.allocating))
    assert result.memory is not None
    assert result.memory.allocated is result.memory.reserved is None
    assert result.memory.resident == pytest.approx(result.facts["high_water"], rel=0.1)
    assert result.memory.resident >= float(result.facts["before"] or 0) + 0.9 * racing.BALLAST


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_allocator() -> None:
    (result,) = raced(Contestant("allocating", racing.allocating), device="cuda")
    assert result.memory is not None
    assert result.memory.peak == result.memory.allocated == result.facts["allocated"]
    assert result.memory.reserved == result.facts["reserved"]
    assert racing.BALLAST <= result.memory.peak < 1.1 * racing.BALLAST


def test_ratios_are_taken_round_by_round() -> None:
    fast = Result(turns=[Steps([1.0, 1.0]), Steps([2.0, 2.0])])
    slow = Result(turns=[Steps([2.0, 2.0]), Steps([6.0, 6.0])])
    assert (ratios(fast, slow).median, ratios(slow, fast).median) == pytest.approx((2.5, (1 / 2 + 1 / 3) / 2))
    assert ratios(fast, slow).repetitions == 2
