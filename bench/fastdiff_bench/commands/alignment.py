"""``bench alignment``: what an alignment with stored features of a teacher adds to a step, and what the teacher would.

Four runs of one network step in turns: on data without features; on data with features, which are read and not used;
aligned with them, by a head at a third of the depth; and the same with a forward pass of the teacher in every step.
Each is compared with the one before it, round by round: the cost of reading, of the head, and of the teacher. The
teacher is a DINOv2-B with random weights in the precision of the network, not compiled; reading and decoding its
pictures is not counted.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_measuring, device, open_log
from fastdiff_bench.measure import stepping, sweep, synthetic
from fastdiff_bench.measure.interleaved import Effort, Program, Result, ratios, run_interleaved
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Failure, Measurement
from fastdiff_bench.records.tables import figures
from fastdiff_bench.trainers import online_teacher

BENCH = "alignment"
PLAIN, READ, ALIGNED, TAUGHT = "no features", "features, unused", "aligned", "aligned, teacher in every step"
COSTS = {READ: ("reading", PLAIN), ALIGNED: ("head", READ), TAUGHT: ("teacher", ALIGNED)}
"""What a run has more than another one, by name: what it is, and the name of the other."""
LIMIT = 1.02
"""Largest step with features that are read, over one without."""
_FULL = Effort(rounds=10, steps=10, warm_up=5, settling=DataConfig().prefetch)
_SMOKE = Effort(rounds=2, steps=2, warm_up=2, settling=1)
_SAMPLES = 512
_BATCH_ON_CPU = 8
_WIDTH, _LATEST = 64, 8
"""Components of a feature, as ``fastdiff encode`` stores them; last block that REPA aligns."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(BENCH, description=__doc__)
    add_measuring(parser)
    parser.add_argument("--preset", help="preset of a DiT; default: dit-s-2-256, with --smoke digits")
    parser.add_argument("--batch", type=int, metavar="N", help="samples per step; default: the preset's, on a CPU 8")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"])
    sweep.add_deepspeed(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    where = device(arguments)
    plain = Workload(
        preset=arguments.preset or ("digits" if arguments.smoke else "dit-s-2-256"),
        batch=arguments.batch or (_BATCH_ON_CPU if where == "cpu" else None),
        precision=arguments.precision,
        deepspeed=arguments.deepspeed,
    )
    aligned = with_head(plain)
    with tempfile.TemporaryDirectory(prefix="fastdiff-bench-") as name, open_log(arguments, BENCH) as log:
        folder = Path(name)
        for part, workload in (("plain", plain), ("features", aligned)):
            synthetic.write(folder / part, workload.config(Path(), Path()).model, _SAMPLES)
        online_teacher.write(folder / "teacher", tiny=arguments.smoke)
        found = run_interleaved(
            [
                Program(PLAIN, stepping.run_fastdiff, (plain, folder / "plain")),
                Program(READ, stepping.run_fastdiff, (plain, folder / "features")),
                Program(ALIGNED, stepping.run_fastdiff, (aligned, folder / "features")),
                Program(TAUGHT, online_teacher.run, (aligned, folder / "features", folder / "teacher")),
            ],
            _SMOKE if arguments.smoke else _FULL,
            device=where,
        )
        case = f"{plain.case}; {plain.provider}"
        failures = [
            Failure(bench=BENCH, case=case, provider=provider, reason=one.failure)
            for provider, one in found.items()
            if one.failure is not None
        ]
        rows = list(measurements(plain, found))
        log.write(*rows, *failures)
        print(figures(rows, smoke=arguments.smoke))
        print("\n".join([*(f"{one.provider}: {one.reason}" for one in failures), *verdict(rows)]))
    return int(bool(failures))


def with_head(plain: Workload) -> Workload:
    """Return the workload with a head at a third of the depth, at most the block of REPA; BenchError: it is no DiT."""
    model = plain.config(Path(), Path()).model
    if not isinstance(model, DiTConfig):
        raise BenchError(f"--preset {plain.preset} is no DiT, and only a DiT has the head; try dit-s-2-256")
    block = min(_LATEST, max(1, model.depth // 3))
    return replace(plain, model=(*plain.model, f"aligned_width={_WIDTH}", f"aligned_block={block}"))


def measurements(workload: Workload, found: Mapping[str, Result]) -> Iterator[Measurement]:
    """Yield times and memory of the runs that ended, and their costs over others of these."""
    ended = {name: one for name, one in found.items() if one.failure is None}
    case = f"{workload.case}; {workload.provider}"
    for name, one in ended.items():
        row = partial(Measurement.of, BENCH, case, name, facts=workload.facts | one.facts)
        yield from stepping.figures(row, one, workload.samples)
        what, base = COSTS.get(name, ("", ""))
        if base in ended:
            yield row(f"cost of the {what}: step time / {base}", "1", ratios(ended[base], one), "lower")


def verdict(rows: list[Measurement]) -> Iterator[str]:
    """Yield a line on the cost of reading, if it was measured."""
    for row in rows:
        if row.provider == READ and row.unit == "1":
            word = "within" if row.value <= LIMIT else "above"
            yield f"reading the features costs {row.value - 1:+.2%} of the step, {word} the limit of {LIMIT - 1:.0%}"
