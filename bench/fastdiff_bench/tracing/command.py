"""``bench step --trace``: time of a step by class, launches by phase, share of idleness."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fastdiff_bench.measure import stepping
from fastdiff_bench.measure.interleaved import Effort, Program, run_interleaved
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Failure, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.tracing.breakdown import Breakdown, break_down
from fastdiff_bench.tracing.classes import CLASSES, IDLE
from fastdiff_bench.tracing.events import read

BENCH = "step"


def run(workload: Workload, data: Path, effort: Effort, device: str, folder: Path) -> list[Measurement | Failure]:
    """Trace one workload and print its table.

    Args:
        workload: the workload.
        data: folder of shards for its model.
        effort: of the other measurements; ``steps`` of a round are traced, after its warm-up.
        device: ``cuda`` or ``cpu``.
        folder: for the traces, one folder per workload.
    """
    name = f"{workload.case}; {workload.provider}, traced"
    place = folder / "".join(c if c.isalnum() or c in "-." else "_" for c in f"{workload.case} {workload.provider}")
    program = Program(name, stepping.run_fastdiff, (workload, data, None, (place, effort.steps)))
    short = Effort(rounds=2, steps=1, warm_up=effort.warm_up, limit_seconds=effort.limit_seconds)
    result = run_interleaved([program], short, device=device)[name]
    if result.failure is not None:
        return [Failure(bench=BENCH, case=workload.case, provider=workload.provider, reason=result.failure)]
    path = Path(str(result.facts["trace"]))
    found = break_down(read(path))
    print(f"\n{name}: {found.steps} steps\n{text(found)}\ntrace: {path}, open it at https://ui.perfetto.dev")
    return list(_measurements(workload.decided(result.facts), found))


def text(found: Breakdown) -> str:
    """Return the tables of a breakdown."""
    rows = [["class", "ms", "share", "kernels" if found.on_device else "operators"]]
    for kind in sorted(CLASSES, key=lambda kind: -found.seconds[kind]):
        if seconds := found.seconds[kind]:
            rows.append([kind, *_cells(found, seconds), f"{found.operations.get(kind, 0):.0f}"])
    rows.append([IDLE, *_cells(found, found.seconds[IDLE]), ""])
    rows.append(["step", *_cells(found, found.wall), f"{sum(found.operations.values()):.0f}"])
    launched = [["launches per step", *found.launches], ["", *(f"{n:.0f}" for n in found.launches.values())]]
    what = "no kernel runs on the device" if found.on_device else "no operator runs: Python, hooks, waiting for data"
    return "\n".join(
        [
            table(rows, "<>>>"),
            "",
            table(launched, "<" + ">" * len(found.launches)),
            f"idle: {found.idle_share:.1%} of the step, in which {what}. The profiler itself slows the host.",
        ]
    )


def _cells(found: Breakdown, seconds: float) -> list[str]:
    return [f"{1e3 * seconds:.3f}", f"{seconds / found.wall:.1%}"]


def _measurements(workload: Workload, found: Breakdown) -> Iterator[Measurement]:
    facts = workload.facts | {"traced_steps": found.steps, "on_device": found.on_device}

    row = partial(Measurement.of, BENCH, workload.case, workload.provider, better="lower", facts=facts)
    yield row("traced step time", "ms", 1e3 * found.wall)
    yield row("traced idle share", "1", found.idle_share)
    for kind, seconds in found.seconds.items():
        yield row(f"traced {kind}", "ms", 1e3 * seconds)
    for phase, number in found.launches.items():
        yield row(f"launches in {phase}", "1", number)
