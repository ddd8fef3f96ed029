"""``bench data``: samples per second of fastdiff's readers and of other libraries, on the same samples.

Every reader yields the same samples, shuffled, as batches of arrays in host memory; fastdiff's loaders and DALI yield
them on the GPU if there is one. A session is one pass over the samples: first with all files in the page cache, then
starting with none. fastdiff's readers check the crc32 of every array, the rest check nothing. Worker processes with a
shuffle buffer of their own (webdataset) fill it for the next pass while other readers run, which favours them.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastdiff.data.dali_trial import dali_installed
from fastdiff.plurals import counted
from fastdiff_bench import BenchError, arguments
from fastdiff_bench.measure import interleaved
from fastdiff_bench.measure.session import cpu_seconds_of_started
from fastdiff_bench.readers import other_libraries, ours, page_cache, reading
from fastdiff_bench.readers.figures import READER, Case
from fastdiff_bench.readers.samples import KINDS, Samples
from fastdiff_bench.records.record import Failure, Log
from fastdiff_bench.records.tables import progress

_TOLERATED = 0.01
"""Tolerated share of files in the page cache in a cold case, or missing from it in a warm case."""
_NOT_INSTALLED = "not installed"


def add(commands: arguments.Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("data", description=__doc__)
    parser.add_argument("--samples", type=int, help="samples of each kind, rounded up to whole shards; default: 4096")
    parser.add_argument("--batch", type=int, help="samples per batch; default: 64")
    parser.add_argument("--rounds", type=int, help="sessions of each reader, at least 2; default: 10, --smoke: 2")
    parser.add_argument("--workers", type=int, default=2, help="processes of readers that use them; default: 2")
    parser.add_argument(
        "--sample-kb", type=int, nargs="+", choices=list(KINDS), help="kB per sample; default: all, --smoke: the first"
    )
    arguments.add_measuring(parser)
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    count = (64 if given.smoke else 4096) if given.samples is None else given.samples
    batch = (8 if given.smoke else 64) if given.batch is None else given.batch
    rounds = (2 if given.smoke else 10) if given.rounds is None else given.rounds
    if min(count, batch, given.workers) < 1 or rounds < 2:
        raise BenchError("--samples, --batch and --workers must be at least 1, --rounds at least 2")
    device, kinds = arguments.device(given), given.sample_kb or list(KINDS)[: 1 if given.smoke else None]
    folder, done = Path(tempfile.mkdtemp(prefix="fastdiff-bench-data-")), True
    try:
        with arguments.open_log(given, "data") as log:
            for kilobytes in kinds:
                _require_room(folder, 3000 * kilobytes * count)
                progress(f"writing {count} samples of {kilobytes} kB")
                samples = Samples.write(
                    folder / f"{kilobytes}", kilobytes, at_least=count, batch=batch, shards=given.workers
                )
                for heat in ("warm", "cold"):
                    done &= measure(Case(samples, given.workers, heat, device), rounds, log, smoke=given.smoke)
                shutil.rmtree(samples.folder)
    finally:
        shutil.rmtree(folder)
    return int(not done)


def measure(case: Case, rounds: int, log: Log, *, smoke: bool = False) -> bool:
    """Let all readers of a case read in turns; write and print the results.

    Returns:
        True if all installed readers read to the end, with the page cache in the state of the case.
    """
    files, cold = case.samples.files, case.heat == "cold"
    cached: list[float] = []

    def before_session() -> None:
        _wait_until_idle()
        cached.append(page_cache.empty(files) if cold else page_cache.cached_share(files))

    def worst() -> float:
        return max(cached) if cold else min(cached)

    def impossible() -> bool:
        # With few files, evictions by other processes are a larger share.
        tolerated = 5 * _TOLERATED if smoke else _TOLERATED
        return worst() > tolerated if cold else worst() < 1 - tolerated

    before_session()
    results = {} if impossible() else _interleave(case, rounds, before_session, smoke=smoke)
    if impossible():
        what = "set TMPDIR to a folder on a disk" if cold else "take fewer --samples"
        reason = f"{worst():.0%} of the files were in the page cache at the start of a session; {what}"
        log.write(Failure(bench="data", case=case.name, provider="page cache", reason=reason))
        print(f"\n{case.name}: {reason}")
        return False
    case.report(results, worst(), log)
    return all(result.failure in (None, _NOT_INSTALLED) for result in results.values())


def _interleave(
    case: Case, rounds: int, before_session: Callable[[], None], *, smoke: bool
) -> dict[str, interleaved.Result]:
    steps = case.samples.count // case.samples.batch
    # Each reader starts with one batch, so its warm-up ends with a pass.
    effort = interleaved.Effort(rounds=rounds, steps=steps, warm_up=steps - 1)
    programs = _programs(case)
    if smoke and case.heat == "cold":  # all readers except one behave as in the warm case
        programs = [one for one in programs if one.name in (READER, "dali webdataset")]
    results = interleaved.run_interleaved(programs, effort, device=case.device, before_session=before_session)
    if not dali_installed():
        for name in ("fastdiff dali", "dali webdataset"):
            results[name] = interleaved.Result(failure=_NOT_INSTALLED)
    return results


def _wait_until_idle() -> None:
    """Wait until the readers have prefetched all that they can, at most 5 s."""
    for _ in range(50):
        before = cpu_seconds_of_started()
        time.sleep(0.1)
        if cpu_seconds_of_started() - before < 0.02:
            break


def _programs(case: Case) -> list[interleaved.Program]:
    workers = case.workers
    # Upper bound: fastdiff's loaders read 4 batches ahead, DALI 2, a worker process 2.
    ahead = 4 + 2 * workers
    with_workers = counted(workers, "worker")
    readers: dict[str, tuple[reading.Reader, int]] = {
        READER: (ours.reader, 0),
        "fastdiff prefetch": (ours.prefetch, ahead),
        "fastdiff dali": (ours.dali, ahead),
        # Mapped files stay in the page cache, and reading is faster if they are cached.
        "dali webdataset": (partial(other_libraries.dali, threads=workers, mapped=case.heat == "warm"), ahead),
        "webdataset": (partial(other_libraries.webdataset, workers=0), 0),
        f"webdataset {with_workers}": (partial(other_libraries.webdataset, workers=workers), ahead),
        "npy dataloader": (partial(other_libraries.npy_files, workers=0), 0),
        f"npy dataloader {with_workers}": (partial(other_libraries.npy_files, workers=workers), ahead),
    }
    return [
        interleaved.Program(name, reading.run, (reader, case.samples, ahead))
        for name, (reader, ahead) in readers.items()
        if "dali" not in name or dali_installed()
    ]


def _require_room(folder: Path, expected: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < expected:
        raise BenchError(
            f"{folder.parent} has {free / 2**30:.1f} GiB free, expected {expected / 2**30:.1f} GiB; take fewer "
            "--samples, or set TMPDIR to a folder on another disk"
        )
