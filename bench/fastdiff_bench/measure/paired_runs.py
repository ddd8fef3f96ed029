"""Pairs of runs that differ in one thing: each in a process of its own, and tests of the difference of their losses."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastdiff.errors import FastdiffError
from fastdiff.evaluation.comparison import MeasuredRun, compare
from fastdiff_bench.records.paired import SIGNIFICANT, Difference, difference, holm
from fastdiff_bench.records.record import Fact, Failure, Log, Measurement

LIMIT_PERCENT = 0.5
"""Mean difference of the loss that does not count."""

Pair = tuple[MeasuredRun, MeasuredRun]


class Study(Protocol):
    """A run of a pair."""

    @property
    def case(self) -> str:
        """What runs that are compared have in common, but for the seed."""

    @property
    def name(self) -> str:
        """What differs."""

    @property
    def seed(self) -> int:
        """Of the samples, the noise and the initial weights."""


Trial = TypeVar("Trial", bound=Study)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Tested:
    """Runs against others, by pairs of equal seeds; differences in percent."""

    seeds: int
    total: Difference
    levels: dict[str, tuple[Difference, float]]
    """By range of the log SNR, with its corrected probability."""

    @property
    def faults(self) -> list[str]:
        """What speaks against equal losses."""
        found = {
            "over two standard errors": not self.total.is_small,
            f"over {LIMIT_PERCENT:g} %": abs(self.total.mean) >= LIMIT_PERCENT,
            "a noise level is significant": self.least < SIGNIFICANT,
        }
        return [fault for fault, exists in found.items() if exists]

    @property
    def differs(self) -> bool:
        """Whether the mean difference, or that of a noise level, is significant."""
        return min(self.total.p, self.least) < SIGNIFICANT

    @property
    def least(self) -> float:
        """The smallest corrected probability of a level."""
        return min(p for _, p in self.levels.values())

    @property
    def cells(self) -> tuple[str, ...]:
        """Seeds, difference, its standard error, p, and the least p of a level, for a table."""
        total = self.total
        return str(self.seeds), f"{total.mean:+.3f}", f"{total.error:.3f}", f"{total.p:.3f}", f"{self.least:.3f}"


HEAD = ("seeds", "difference, %", "standard error", "p", "least p of a level")
"""Names of ``Tested.cells``."""


def tested(pairs: Sequence[Pair]) -> Tested:
    """Test the second run of each pair against the first, over all samples and by noise level.

    Probabilities of the levels are corrected for their number (Holm). ValueError: there are fewer than two pairs.
    """
    found = [compare(*pair) for pair in pairs]
    total = difference([100 * one.total.relative for one in found])
    levels = {
        rows[0].name: difference([100 * row.relative for row in rows])
        for rows in zip(*(one.bins for one in found), strict=True)
        if all(row.enough for row in rows)
    }
    corrected = holm([one.p for one in levels.values()])
    return Tested(len(pairs), total, dict(zip(levels, zip(levels.values(), corrected, strict=True), strict=True)))


def differences(bench: str, case: str, name: str, other: str, one: Tested) -> Iterator[Measurement]:
    """Yield the rows of a record: the mean difference of ``name`` from ``other``, and that of each noise level."""
    parts = {f"difference from {other}": (one.total, one.total.p)}
    parts |= {f"difference from {other}, log SNR {level}": values for level, values in one.levels.items()}
    for quantity, (found, corrected) in parts.items():
        facts: dict[str, Fact] = {
            "standard_error": found.error, "p": found.p, "p_corrected": corrected, "seeds": one.seeds
        }  # fmt: skip
        yield Measurement.of(bench, case, name, quantity, "%", found.mean, "neither", facts=facts)


def run_all(
    bench: str,
    wanted: Sequence[Trial],
    *,
    finished: Callable[[Trial], Found | None],
    run: Callable[[Trial], None],
    processes: int,
    log: Log,
    rows: Callable[[Found], Iterable[Measurement]],
    words: Callable[[Found], str],
) -> list[Found]:
    """Run what is not finished; record and print each as soon as it is, or why it failed. Return the finished ones.

    Args:
        bench: name in the record.
        wanted: the runs.
        finished: reads what a run has left; None: it is not finished.
        run: trains; called in a process of its own.
        processes: at a time.
        log: the record.
        rows: of a finished run, in the record.
        words: of a finished run, printed.
    """
    left = [trial for trial in wanted if finished(trial) is None]
    done: list[Found] = []

    def keep(trial: Trial) -> None:
        found = finished(trial)
        assert found is not None
        done.append(found)
        log.write(*rows(found))
        print(f"{len(done)} of {len(wanted)}: {words(found)}", flush=True)

    for trial in wanted:
        if trial not in left:
            keep(trial)
    for trial, error in in_processes(run, left, processes):
        if error is None:
            keep(trial)
        else:
            log.write(Failure(bench=bench, case=trial.case, provider=trial.name, reason=f"seed {trial.seed}: {error}"))
            print(f"{trial.case}, {trial.name}: seed {trial.seed}: {error}", flush=True)
    return done


def in_processes(
    run: Callable[[Trial], None], trials: Sequence[Trial], processes: int
) -> Iterator[tuple[Trial, FastdiffError | None]]:
    """Run each trial in a process of its own, so many at a time; yield each as it ends, with its error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _set_up, max_tasks_per_child=1) as pool:
        running: dict[Future[None], Trial] = {pool.submit(run, trial): trial for trial in trials}
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), _error_of(future)
        except BaseException:  # otherwise the pool would wait for all of them
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _error_of(future: Future[None]) -> FastdiffError | None:
    try:
        future.result()
    except FastdiffError as error:
        return error
    return None


def _set_up() -> None:
    """Make this process one that trains: quiet, in one thread."""
    import logging

    import torch

    from fastdiff.console import log, quieten
    from fastdiff.parallel.launcher import VARIABLES

    os.environ["OMP_NUM_THREADS"] = "1"  # for libraries that have not started theirs
    for name in VARIABLES:  # of ranks of the calling process, whose port is taken
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    quieten()
    log.setLevel(logging.WARNING)


def of_other_code(commits: Sequence[str | None], commit: str) -> Iterator[str]:
    """Yield a line if runs were finished before at another commit than this one."""
    others = [one for one in commits if one not in (None, commit)]
    if others:
        yield (
            f"{len(others)} of {len(commits)} runs are of other code, {' and '.join(sorted(set(map(str, others))))}; "
            "name an empty --folder to run them anew"
        )
