"""``bench checkpoint``: the cost of checkpoints for the training.

Three kinds of steps alternate in one run: steps while nothing is written, steps while a checkpoint is written in the
background, and a step that waits until one is committed. Ratios are computed per cycle, so noise affects both sides
alike.
"""

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_measuring, device, open_log
from fastdiff_bench.measure import sweep, synthetic
from fastdiff_bench.measure.interleaved import Effort, Program, Result, run_interleaved
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Failure, Measurement
from fastdiff_bench.records.tables import figures
from fastdiff_bench.trainers import saving
from fastdiff_bench.trainers.saving import Cycle

BENCH = "checkpoint"
FULL, SMOKE = (Effort(rounds=8, steps=1, warm_up=1), 20), (Effort(rounds=2, steps=1, warm_up=1), 3)
"""Cycles, and the steps without a save in each."""
_SAMPLES = 256


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("checkpoint", description=__doc__)
    add_measuring(parser)
    parser.add_argument("--preset", default="digits", help="preset to train (default: digits)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples per step")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"])
    sweep.add_deepspeed(parser)
    parser.add_argument("--ranks", type=int, default=1, metavar="W", help="ranks on this machine; default: 1")
    parser.add_argument(
        "--folder", type=Path, help="folder on the storage to measure; default: the system's folder for temporary files"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    workload = Workload(
        preset=arguments.preset, batch=arguments.batch, precision=arguments.precision, deepspeed=arguments.deepspeed
    )
    model = workload.config(Path(), Path()).model  # fails before anything is written
    gpus = torch.cuda.device_count() if device(arguments) == "cuda" else arguments.ranks
    if not 1 <= arguments.ranks <= gpus:
        raise BenchError(f"--ranks {arguments.ranks}: expected at least 1, on GPUs at most as many as there are")
    effort, quiet = SMOKE if arguments.smoke else FULL
    with tempfile.TemporaryDirectory(prefix="fastdiff-bench-") as folder, open_log(arguments, BENCH) as log:
        data = Path(folder) / "data"
        synthetic.write(data, model, _SAMPLES)
        given = (workload, data, arguments.folder, quiet)
        program = Program(workload.provider, saving.run, given, arguments.ranks)
        result = run_interleaved([program], effort, device=device(arguments))[program.name]
        if result.failure is not None:
            log.write(Failure(bench=BENCH, case=workload.case, provider=workload.provider, reason=result.failure))
            print(f"{workload.provider}: {result.failure}")
        else:
            found = list(measurements(workload, result, arguments.ranks))
            log.write(*found)
            print(figures(found, smoke=arguments.smoke))
    return int(result.failure is not None)


def measurements(workload: Workload, result: Result, ranks: int) -> Iterator[Measurement]:
    """Yield the measurements of the cycles."""
    cycles: list[Cycle] = saving.cycles(result.facts["cycles"])
    facts = workload.facts | {
        "ranks": ranks,
        "parameters": result.facts["parameters"],
        "steps beside a save": sum(len(cycle.beside) for cycle in cycles),
    }
    row = partial(Measurement.of, BENCH, workload.case, workload.provider, better="lower", facts=facts)
    for quantity, seconds in (
        ("step time", [seconds for cycle in cycles for seconds in cycle.quiet]),
        ("step time beside a save", [seconds for cycle in cycles for seconds in cycle.beside]),
        ("step time with a save that it waits for", [cycle.blocking for cycle in cycles]),
        ("pause", [cycle.pause for cycle in cycles]),
        ("save time", [cycle.save for cycle in cycles]),
    ):
        yield row(quantity, "ms", Timing.of(seconds), scale=1e3)
    for quantity, ratios in (
        ("step time beside a save / step time", [cycle.slow_down for cycle in cycles]),
        ("step time with a save that it waits for / step time", [cycle.slow_down_by_waiting for cycle in cycles]),
        ("cost of a save beside the training in steps", [cycle.cost for cycle in cycles]),
    ):
        yield row(quantity, "1", Timing.of(ratios))
    yield row("checkpoint", "MiB", int(str(result.facts["bytes"])) / 2**20)
