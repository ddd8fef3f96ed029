"""``python -m bench data``: samples per second of fastdiff's readers and of others, over the same samples.

Every reader gives the same samples, mixed, as batches of arrays in host memory; fastdiff's loaders and DALI give them
on the GPU where there is one. First with all files in the page cache, then with none of them, as far as the kernel
forgets them. fastdiff's readers check the crc32 of every array, the others check nothing.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

from bench import BenchError, arguments, race
from bench.readers import ours, page_cache, reading, rivals
from bench.readers.figures import READER, Case
from bench.readers.samples import KINDS, Samples
from bench.record import Failure, Log
from bench.table import progress
from bench.turn import cpu_seconds_of_started
from fastdiff.data import dali_installed

_LEFT_IN_CACHE = 0.01
"""Share of the files above which it is not called cold."""


def add(commands: arguments.Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("data", help="readers of samples on disk", description=__doc__)
    parser.add_argument("--samples", type=int, help="of each kind, rounded up to whole shards; default: 4096")
    parser.add_argument("--batch", type=int, help="samples per batch; default: 64")
    parser.add_argument("--workers", type=int, default=2, help="processes of those that have some; default: 2")
    parser.add_argument(
        "--sample-kb", type=int, nargs="+", choices=list(KINDS), help="kB per sample; default: all, --smoke: the first"
    )
    arguments.add_measuring(parser)
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    count, batch = given.samples or (64 if given.smoke else 4096), given.batch or (8 if given.smoke else 64)
    if min(count, batch, given.workers) < 1:
        raise BenchError("--samples, --batch and --workers are 1 at least")
    device, kinds = arguments.device(given), given.sample_kb or list(KINDS)[: 1 if given.smoke else None]
    folder = Path(tempfile.mkdtemp(prefix="fastdiff-bench-data-"))
    try:
        with arguments.open_log(given, "data") as log:
            for kilobytes in kinds:
                _require_room(folder, 3000 * kilobytes * count)
                progress(f"writing {count} samples of {kilobytes} kB")
                samples = Samples.write(
                    folder / f"{kilobytes}", kilobytes, at_least=count, batch=batch, shards=given.workers
                )
                for heat in ("warm", "cold"):
                    _measure(Case(samples, given.workers, heat, device), log, smoke=given.smoke)
                shutil.rmtree(samples.folder)
            print(f"\n{log.path}")
    finally:
        shutil.rmtree(folder)
    return 0


def _measure(case: Case, log: Log, *, smoke: bool) -> None:
    """Let all readers of a case read in turns; write and print what they did."""
    steps = case.samples.count // case.samples.batch
    effort = race.Effort(rounds=2 if smoke else 10, steps=steps, warm_up=steps)
    contestants = _contestants(case)
    if smoke and case.heat == "cold":  # where the readers themselves do nothing else, but for one
        contestants = [one for one in contestants if one.name in (READER, "dali webdataset")]
    files, left = case.samples.files, [0.0]

    def before_turn() -> None:
        _wait_until_idle()
        if case.heat == "cold":
            page_cache.drop(files)
            left.append(page_cache.cached_share(files))

    results = race.race(contestants, effort, device=case.device, before_turn=before_turn)
    if not dali_installed():
        for name in ("fastdiff dali", "dali webdataset"):
            results[name] = race.Result(failure="not installed")
    if max(left) > _LEFT_IN_CACHE:
        reason = f"{max(left):.0%} of the files stayed in the page cache; set TMPDIR to a folder on a disk"
        log.write(Failure(bench="data", case=case.name, provider="page cache", reason=reason))
        print(f"\n{case.name}: {reason}")
    else:
        case.report(results, log)


def _wait_until_idle() -> None:
    """Wait until the contestants have read ahead all that they will, 5 s at most."""
    for _ in range(50):
        before = cpu_seconds_of_started()
        time.sleep(0.1)
        if cpu_seconds_of_started() - before < 0.02:
            break


def _contestants(case: Case) -> list[race.Contestant]:
    workers = case.workers
    with_workers = f"{workers} worker{'s' if workers > 1 else ''}"
    readers: dict[str, reading.Reader] = {
        READER: ours.reader,
        "fastdiff prefetch": ours.prefetch,
        "fastdiff dali": ours.dali,
        # Files that are mapped stay in the page cache, and are read faster if they are there.
        "dali webdataset": partial(rivals.dali, threads=workers, mapped=case.heat == "warm"),
        "webdataset": partial(rivals.webdataset, workers=0),
        f"webdataset {with_workers}": partial(rivals.webdataset, workers=workers),
        "npy dataloader": partial(rivals.npy_files, workers=0),
        f"npy dataloader {with_workers}": partial(rivals.npy_files, workers=workers),
    }
    return [
        race.Contestant(name, reading.run, (reader, case.samples))
        for name, reader in readers.items()
        if "dali" not in name or dali_installed()
    ]


def _require_room(folder: Path, expected: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < expected:
        raise BenchError(
            f"{folder.parent} has {free / 2**30:.1f} GiB free, expected {expected / 2**30:.1f} GiB; take fewer "
            "--samples, or set TMPDIR to a folder on another disk"
        )
