"""Kills at random moments: the run resumes each time and ends with equal bits.

Two gloo ranks under ZeRO-3, both with SIGKILL. The moments are spread evenly over the steps of the run, and within a
step over its time; every third comes while the run starts again. By night: if none of 300 kills does harm, fewer than
1 % of all kills do, with 95 % confidence.
"""

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from fastdiff.config.run import RunConfig
from fastdiff.ledger.reader import read_ledger
from tests.support.forked import Ranks, forked_ranks, values
from tests.support.injected.holding import HOLD, held_at
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, losses, records, tiny, train_losses

SEED = 20
START_S = 2.0
"""About what a start takes; who is faster is killed at the first step."""
_END = 16_384
"""Bytes, more than a record has."""


def config_of(digits: Path, folder: Path, optimizer: str, steps: int, every: int) -> RunConfig:
    """Two averages, a changing learning rate, and a checkpoint every few steps."""
    return tiny(
        digits,
        folder,
        steps=steps,
        optim__name=optimizer,
        optim__schedule="cosine",
        optim__warmup_steps=5,
        ema__power_stds=(0.1,),
        output__checkpoint_every=every,
        output__callbacks=(HOLD,),
    )


@dataclass(frozen=True)
class Moment:
    """When to kill: a time after the run has logged this step or, for step None, after its processes have started."""

    step: int | None
    delay_s: float


def moments(kills: int, first: int, last: int, step_s: float) -> Iterator[Moment]:
    """Draw moments; those of steps (``first`` to ``last``) in their order, so that every start has some way to go."""
    draw = random.Random(SEED)
    targets = iter(sorted(draw.randint(first, last) for _ in range(kills - kills // 3)))
    for number in range(kills):
        if number % 3 == 2:
            yield Moment(None, draw.uniform(0, START_S))
        else:
            yield Moment(next(targets), draw.uniform(0, step_s))


def logged(folder: Path) -> int:
    """Number of the last step in the log, of which the end alone is read: it is asked for all the time."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END))
        whole = file.read().split(b"\n")[:-1]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def last_start(folder: Path) -> int:
    """Return the inode of ``run.json``, which every start replaces."""
    path = folder / "run.json"
    return path.stat().st_ino if path.exists() else 0


def log_of(folder: Path) -> tuple[int, int]:
    """Return what differs once the log has been written to: its inode and the time of the last change."""
    path = folder / "metrics.jsonl"
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else (0, 0)


def wait_for(ranks: Ranks, folder: Path, moment: Moment, before: int, timeout_s: float = 180) -> None:
    """Return at the moment, or when the run has ended; a run that takes no step for the time fails."""
    seen, deadline = 0, time.monotonic() + timeout_s
    while moment.step is not None and (last_start(folder) == before or logged(folder) < moment.step):
        if not any(process.is_alive() for process in ranks.processes):
            return
        if (now := logged(folder)) != seen:
            seen, deadline = now, time.monotonic() + timeout_s
        assert time.monotonic() < deadline, f"no step for {timeout_s} s behind {seen}, expected {moment.step}"
        time.sleep(0.002)
    until = time.monotonic() + moment.delay_s
    while time.monotonic() < until and (moment.step is not None or last_start(folder) == before):
        time.sleep(0.002)


def kill_again_and_again(config: RunConfig, kills: int, step_s: float) -> None:
    """Train in sessions that are killed at random moments, and then to the end."""
    folder, every = Path(config.output.folder), config.output.checkpoint_every
    newest = taken = 0
    # From this step on a kill finds a checkpoint, as is asserted below.
    for number, moment in enumerate(moments(kills, 2 * every + 1, config.steps - 1, step_s)):
        before, log = last_start(folder), log_of(folder)
        # It cannot end before it is killed.
        with held_at(config.steps - 1, folder), Ranks(train_losses, config, launch(3)) as ranks:
            wait_for(ranks, folder, moment, before)
            ranks.kill()
            ended = ranks.wait()
        committed = intact(folder) if folder.exists() else []
        left = [path.name for path in folder.glob("checkpoints/*.tmp*")]
        report = (
            f"kill {number + 1} of {kills}, seed {SEED}: {moment}, step {logged(folder)} logged, {committed} intact"
        )
        print(f"{report}, {left} left, exit codes {[end.code for end in ended]}")  # noqa: T201
        assert [end.code for end in ended] == [-9, -9], ("it ended before the kill", [end.trace for end in ended])
        found = committed[0] if committed else 0
        assert found >= newest, "a checkpoint was lost"
        assert found >= logged(folder) - 2 * every, "more than the steps since the last checkpoint was lost"
        taken += logged(folder) - newest if log_of(folder) != log and logged(folder) > newest else 0
        newest = found
    values(forked_ranks(train_losses, config, launch(3), timeout_s=4 * 3600))
    sums = read_ledger(folder)
    assert (sums.steps_kept, sums.steps_lost) == (config.steps, taken - newest), "the ledger knows what the kills cost"
    assert sum(sums.seconds.values()) == pytest.approx(sums.wall_s, rel=0.01)


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Returns the folder of the run that is not killed, of an optimizer and a number of steps."""

    @cache
    def run(optimizer: str, steps: int) -> Path:
        config = config_of(digits, tmp_path_factory.mktemp("whole") / "run", optimizer, steps, every=0)
        values(forked_ranks(train_losses, config, launch(3), timeout_s=4 * 3600))
        return Path(config.output.folder)

    return run


def assert_survives(config: RunConfig, kills: int, whole: Path) -> None:
    killed = Path(config.output.folder)
    step_s = statistics.median(record["step_ms"] for record in records(whole)) / 1e3
    kill_again_and_again(config, kills, step_s)
    assert len(losses(killed)) == config.steps
    assert hexes(losses(killed)) == hexes(losses(whole))
    assert all(math.isfinite(loss) for loss in losses(whole))
    assert_same_checkpoint(whole, killed)


@pytest.mark.fault(1)
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(
    ("optimizer", "by_day", "by_night"),
    [("adamw", 3, 180), pytest.param("adamw8bit", 1, 120, marks=pytest.mark.nightly)],
)
def test_a_run_that_is_killed_at_random_moments_ends_hex_equal(
    undisturbed: Callable[[str, int], Path],
    digits: Path,
    tmp_path: Path,
    optimizer: str,
    by_day: int,
    by_night: int,
    nightly: bool,
    record_property: Callable[[str, object], None],
) -> None:
    """3 kills, by night 300: losses, weights, moments and averages have equal bytes."""
    kills = by_night if nightly else by_day
    record_property("trials", kills)
    steps = max(3 * kills, 9) + 1
    assert_survives(config_of(digits, tmp_path, optimizer, steps, every=3), kills, undisturbed(optimizer, steps))


@pytest.mark.nightly
@pytest.mark.fault(30)
@pytest.mark.timeout(8 * 3600)
def test_a_long_run_that_is_killed_now_and_then_ends_hex_equal(
    undisturbed: Callable[[str, int], Path],
    digits: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """10,000 steps (89 epochs of the digits), killed about every 200."""
    steps, kills, every = 10_000, 50, 20
    record_property("trials", kills)
    assert_survives(config_of(digits, tmp_path, "adamw", steps, every), kills, undisturbed("adamw", steps))
