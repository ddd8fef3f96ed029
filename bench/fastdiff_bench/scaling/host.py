"""Time of the host in a step, measured by ZeRO stage: the source of ``fastdiff.planning.step_time``.

A step cannot be faster than the processor that launches its kernels and runs DeepSpeed's hooks. Its time is nearly a
fixed part and one per parameter tensor, since every tensor has its hooks, its entries in lists and its kernels. Both
are fitted to the processor time of networks of two depths whose arithmetic is negligible. One rank measures, with the
calls of several: its own messages take no time.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from fastdiff.config.run import RunConfig
from fastdiff.planning.scaling.zero import parameters_of
from fastdiff.planning.step_time import Host
from fastdiff_bench.measure.interleaved import Effort, Program, run_interleaved
from fastdiff_bench.measure.session import StepTimer
from fastdiff_bench.measure.stepping import run_fastdiff
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Fact, Failure, Measurement
from fastdiff_bench.records.tables import table

DEPTHS = (4, 20)
_HIDDEN, _BATCH = 32, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow(Workload):
    """A DiT of any depth, so narrow that its arithmetic takes next to no time."""

    depth: int

    def _config(self, data: Path, folder: Path) -> RunConfig:
        config = Workload._config(self, data, folder)
        model = replace(config.model, depth=self.depth, hidden=_HIDDEN, heads=2)  # type: ignore[call-arg]
        return replace(config, model=model)

    @property
    def tensors(self) -> int:
        """Number of parameter tensors."""
        return len(parameters_of(self.config(Path(), Path()).model))


def measure(stages: Mapping[str, Workload], data: Path, effort: Effort, device: str) -> Iterator[Measurement | Failure]:
    """Measure the host time of each stage and print a table.

    Args:
        stages: a workload for each name of a stage, with its DeepSpeed JSON.
        data: folder of shards for the digits.
        effort: of each network; all processor time of a session counts.
        device: ``cuda`` or ``cpu``.
    """
    rows = [["host time", *(f"depth {depth}, ms" for depth in DEPTHS), "fixed ms", "ms per tensor"]]
    for name, workload in stages.items():
        narrow = [_narrow(workload, depth) for depth in DEPTHS]
        programs = [
            Program(f"{name}, depth {one.depth}", _run_as_one_of_many, (one, data), 1, {"OMP_NUM_THREADS": "1"})
            for one in narrow
        ]
        results = run_interleaved(programs, effort, device=device)
        failed = [result.failure for result in results.values() if result.failure is not None]
        if failed:
            yield Failure(bench="scale", case="host", provider=name, reason=failed[0])
            continue
        times = [[one.cpu_seconds / effort.steps for one in result.sessions] for result in results.values()]
        found = fit([one.tensors for one in narrow], [statistics.median(time) for time in times])
        medians = [f"{1e3 * statistics.median(time):.1f}" for time in times]
        rows.append([name, *medians, f"{1e3 * found.fixed:.2f}", f"{1e3 * found.per_tensor:.4f}"])
        yield from _measurements(name, workload, narrow, times, found)
    print(table(rows, "<" + ">" * (len(rows[0]) - 1)))


def _run_as_one_of_many(timer: StepTimer, workload: Workload, data: Path) -> None:
    """Step with the hooks of ZeRO-3 on several ranks; a single rank keeps its parameters whole and has none."""
    engine = import_module("fastdiff.training.engines.deepspeed")  # of this process, which loads DeepSpeed
    engine.keep_whole = lambda optimizer: None  # type: ignore[attr-defined]
    run_fastdiff(timer, workload, data)


def _narrow(workload: Workload, depth: int) -> Narrow:
    """Return the narrow network under the engine and in the precision of a workload."""
    return Narrow(
        preset="digits", batch=_BATCH, deepspeed=workload.deepspeed, precision=workload.precision, compile=False,
        loader="prefetch", depth=depth,
    )  # fmt: skip


def fit(tensors: Sequence[int], seconds: Sequence[float]) -> Host:
    """Return the line through the times of two networks."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (tensors[1] - tensors[0]))
    return Host(max(0.0, seconds[0] - slope * tensors[0]), slope)


def without_persistence(stage: Workload, folder: Path) -> Workload:
    """Return the workload with a JSON of ZeRO-3 that also gathers small parameters, as those of a large network."""
    config = dict(stage.deepspeed_json())
    config["zero_optimization"] = {**config["zero_optimization"], "stage3_param_persistence_threshold": 0}
    path = folder / f"{Path(stage.deepspeed).stem}.json"
    path.write_text(json.dumps(config))
    return replace(stage, deepspeed=str(path))


def _measurements(
    name: str, workload: Workload, narrow: Sequence[Narrow], times: Sequence[Sequence[float]], found: Host
) -> Iterator[Measurement]:
    stage = int(workload.deepspeed_json().get("zero_optimization", {}).get("stage", 0))
    facts: dict[str, Fact] = {
        "stage": stage, "precision": workload.precision, "hidden": _HIDDEN, "compile": False, "batch": _BATCH,
    }  # fmt: skip

    row = partial(Measurement.of, "scale", "host", name, unit="ms", better="lower", scale=1e3)
    for one, time in zip(narrow, times, strict=True):
        depth = {**facts, "depth": one.depth, "tensors": one.tensors}
        yield row(quantity=f"host time, depth {one.depth}", value=Timing.of(time), facts=depth)
    yield row(quantity="host time, fixed", value=found.fixed, facts=facts)
    yield row(quantity="host time per tensor", value=found.per_tensor, facts=facts)
