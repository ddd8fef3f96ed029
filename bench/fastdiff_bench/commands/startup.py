"""``bench startup``: from a command to its first optimizer step, against diffusers' scripts.

Every program is started anew in every round, in turns: fastdiff by ``fastdiff launch local``, by Python and by
DeepSpeed's launcher, one rank each, and the script by Python and by ``accelerate launch``. Processor time is the sum
over all processes. The rehearsal, which the scripts do not have, is shown by itself, too. A tiny pipeline and small
images leave the start alone. fastdiff's flags are those that ``fastdiff compat`` translates from the script's. The
first round, which fills the caches of the file system, does not count.

The cases of one network compare two starts of its compilation on the CPU: cold, with an empty cache of compiled code,
and warm, on another node, as after a preemption: processor time, processes of compilers, and kernels of Triton.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fastdiff.cli.compat.run import train_flags
from fastdiff.cli.compat.translation import LAUNCH
from fastdiff.json_lines import record_of
from fastdiff.ledger.records import FILE
from fastdiff.models.pretrained import tiny_pipeline
from fastdiff.version import PACKAGE
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_cases, add_output, cases, open_log
from fastdiff_bench.measure import warm_start
from fastdiff_bench.measure.first_step import Start, environment, start
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.records.record import Fact, Failure, Measurement
from fastdiff_bench.records.tables import figures, progress
from fastdiff_bench.trainers import images
from fastdiff_bench.trainers.compiled_pass import NETWORKS
from fastdiff_bench.trainers.scripts import diffusers

BENCH = "startup"
SCRIPTS = ("t2i", "t2i-lora")
CASES = (*SCRIPTS, *NETWORKS)
COLD, WARM = "cold", "warm, another node"
OURS = ("fastdiff, launch local", "fastdiff, python", "fastdiff, deepspeed")
SCRIPT_MODULE = "fastdiff_bench.trainers.scripts.first_step"
SCRIPT, SCRIPT_LAUNCHED = "script, python", "script, accelerate launch"
REHEARSAL = ("time of the rehearsal", "processor time of the rehearsal")
_BATCH, _IMAGES = 2, 16
_LIMIT_S = 300.0
_FULL, _SMOKE = 10, 2


@dataclass(frozen=True, slots=True)
class _Program:
    name: str
    command: tuple[str, ...]
    mark: Path
    """File that appears after the first step."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(BENCH, description=__doc__)
    add_cases(parser, CASES)
    parser.add_argument("--rounds", type=int, default=_FULL, metavar="N", help="measured starts; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="OMP_NUM_THREADS; default: 1")
    add_output(parser, "two rounds", "<machine>/<date>_startup")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    chosen, rounds = cases(arguments, CASES), _SMOKE if arguments.smoke else arguments.rounds
    if rounds < 2:
        raise BenchError(f"--rounds {rounds}: at least 2")
    failed = False
    with tempfile.TemporaryDirectory(prefix="fastdiff-bench-") as folder, open_log(arguments, BENCH) as log:
        if not NETWORKS.keys() >= set(chosen):
            tiny_pipeline.build(Path(folder) / "pipeline")
            images.write(Path(folder) / "images", _IMAGES, tiny_pipeline.IMAGE_SIZE)
        for case in chosen:
            variables = environment(arguments.threads)
            if case in NETWORKS:
                rows, failures = _compilations(case, Path(folder), rounds, variables)
            else:
                starts, failures = _measure(case, Path(folder), rounds, variables)
                rows = list(_measurements(case, starts, arguments.threads))
            log.write(*rows)
            for name, reason in failures.items():
                log.write(Failure(bench=BENCH, case=case, provider=name, reason=reason.splitlines()[0]))
                print(f"{name}: {reason}", file=sys.stderr)
            failed |= bool(failures)
            print(f"{case}\n{figures(rows, smoke=arguments.smoke)}")
    return int(failed)


def _measure(
    case: str, folder: Path, rounds: int, variables: dict[str, str]
) -> tuple[dict[str, list[Start]], dict[str, str]]:
    """Return the starts of every program, in turns, and the reasons of those that failed."""
    starts: dict[str, list[Start]] = {}
    failures: dict[str, str] = {}
    for number in range(rounds + 1):
        for program in _programs(case, folder, folder / f"{case}-{number}"):
            if program.name in failures:
                continue
            progress(f"{case}, round {number} of {rounds}: {program.name}")
            log = folder / "log"
            try:
                found = start(program.command, _appears(program.mark), log, variables, _LIMIT_S)
            except BenchError as error:
                failures[program.name] = str(error)
                starts.pop(program.name, None)
                continue
            if number:
                starts.setdefault(program.name, []).append(replace(found, rehearsal=_rehearsal(program.mark.parent)))
    progress("")
    return starts, failures


def _compilations(
    case: str, folder: Path, rounds: int, variables: dict[str, str]
) -> tuple[list[Measurement], dict[str, str]]:
    """Return the figures of cold and warm compilations of a network, or why one failed."""
    pairs = []
    for number in range(rounds):
        progress(f"{case}, round {number + 1} of {rounds}")
        place = folder / f"{case}-{number}"
        try:
            pairs.append(warm_start.pair(case, place, variables))
        except BenchError as error:
            progress("")
            return [], {COLD: str(error)}
        shutil.rmtree(place)
    progress("")
    return list(_compared(case, pairs)), {}


def _compared(
    case: str, pairs: Sequence[tuple[warm_start.Compilation, warm_start.Compilation]]
) -> Iterator[Measurement]:
    """Yield the figures of both starts, of counts the largest, and their ratio."""
    row = partial(Measurement.of, BENCH, case, better="lower")
    for name, found in zip((COLD, WARM), zip(*pairs, strict=True), strict=True):
        facts: dict[str, Fact] = {"graphs": found[0].graphs, "kernels": found[0].kernels}
        yield row(name, "processor time", "s", Timing.of([one.cpu_seconds for one in found]), facts=facts)
        yield row(name, "processes of compilers", "1", float(max(one.compilers for one in found)), facts=facts)
        yield row(name, "kernels compiled by Triton", "1", float(max(one.triton for one in found)), facts=facts)
        yield row(name, "parts of graphs compiled", "1", float(max(one.anew for one in found)), facts=facts)
    ratio = Timing.of([warm.cpu_seconds / cold.cpu_seconds for cold, warm in pairs])
    yield row(WARM, f"processor time / {COLD}", "1", ratio)


def _rehearsal(run: Path) -> tuple[float, float] | None:
    """Return the seconds and processor seconds of the rehearsal, as the ledger of a run of fastdiff has them."""
    ledger = run / FILE
    lines = ledger.read_bytes().splitlines() if ledger.exists() else []
    for record in filter(None, map(record_of, lines)):
        if "processor_s" in record:
            return float(record["seconds"]["compile"]), float(record["processor_s"])
    return None


def _appears(mark: Path) -> Callable[[], bool]:
    return lambda: mark.exists() and (mark.suffix != ".jsonl" or mark.stat().st_size > 0)


def _programs(case: str, folder: Path, runs: Path) -> Iterator[_Program]:
    """Yield the programs of a case, with fresh run folders."""
    python, bin_ = sys.executable, Path(sys.executable).parent
    train = str(PACKAGE / "train.py")
    starts: dict[str, Sequence[str]] = {
        OURS[0]: (python, "-c", "from fastdiff.cli.main import entry; entry()", *LAUNCH[1:], "--ranks", "1", "--"),
        OURS[1]: (python, train),
        OURS[2]: (python, str(bin_ / "deepspeed"), "--num_gpus", "1", train),
    }
    for number, (name, words) in enumerate(starts.items()):
        run = runs / str(number)
        # By the flag, because DeepSpeed's launcher shows its rank a hidden GPU.
        cpu = ("--performance.device", "cpu")
        flags = (*train_flags(case, _flags(case, folder, run)), "--output.log_every", "1", *cpu)
        yield _Program(name, (*words, *flags), run / "metrics.jsonl")
    for name, launcher in {
        SCRIPT: (python, "-m"),
        SCRIPT_LAUNCHED: (python, str(bin_ / "accelerate"), "launch", "--cpu", "--num_processes", "1", "-m"),
    }.items():
        run = runs / name.replace(", ", "-").replace(" ", "-")
        mark = run.with_name(f"{run.name}.mark")
        yield _Program(name, (*launcher, SCRIPT_MODULE, case, str(mark), *_flags(case, folder, run)), mark)


def _flags(case: str, folder: Path, run: Path) -> list[str]:
    flags = diffusers.flags(case, folder / "pipeline", folder / "images", tiny_pipeline.IMAGE_SIZE, _BATCH)
    return [*flags, "--output_dir", str(run)]


def _measurements(case: str, starts: dict[str, list[Start]], threads: int) -> Iterator[Measurement]:
    """Yield the figures of each program, and those of fastdiff relative to both starts of the script."""
    row = partial(Measurement.of, BENCH, case, better="lower")
    for name, found in starts.items():
        facts: dict[str, Fact] = {"threads": threads, "batch": _BATCH, "processes": max(one.processes for one in found)}
        cpu, wall = Timing.of([one.cpu_seconds for one in found]), Timing.of([one.seconds for one in found])
        yield row(name, "processor time to the first step", "s", cpu, facts=facts)
        yield row(name, "time to the first step", "s", wall, facts=facts)
        rehearsals = [one.rehearsal for one in found if one.rehearsal is not None]
        for number, quantity in enumerate(REHEARSAL if rehearsals else ()):
            yield row(name, quantity, "s", Timing.of([seconds[number] for seconds in rehearsals]), facts=facts)
    for name in OURS:
        for theirs in (SCRIPT, SCRIPT_LAUNCHED):
            if name in starts and theirs in starts:
                pairs = zip(starts[name], starts[theirs], strict=True)
                ratio = Timing.of([mine.cpu_seconds / other.cpu_seconds for mine, other in pairs])
                yield row(name, f"processor time to the first step / {theirs}", "1", ratio)
