"""Measurement of one workload in fastdiff's own loop.

Times, memory and throughput come from steps without marks. Later ones of the same process, with marks between the
phases of a step, give the share of each phase; a CUDA graph has no phases.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fastdiff.models.cost.flops import training_flops
from fastdiff.planning.gpus import of_device
from fastdiff.training.forward_backward.cuda_graphs import WARM_UP
from fastdiff_bench import BenchError
from fastdiff_bench.measure.interleaved import Effort, Program, Result, run_interleaved
from fastdiff_bench.measure.largest_batch import DoesNotFit
from fastdiff_bench.measure.roofline import Limits
from fastdiff_bench.measure.session import StepTimer
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Failure, Log, Measurement

BENCH = "step"
PHASES = ("data", "objective", "forward", "backward", "optimizer", "ema", "other")
"""Phases of a step; "other" is the remainder."""
_MARKED_ROUNDS = 2
_ONCE = {"last_compilation": "torch.compile recompiled", "last_capture": "a CUDA graph was captured"}
"""Facts: the last step that did what belongs to the warm-up."""
_PARTS = {"compiled_anew": "compiled", "from_cache": "from a cache"}


@dataclass(slots=True)
class Stepped:
    """Result of one workload."""

    workload: Workload
    measurements: list[Measurement] = field(default_factory=list)
    failure: Failure | None = None
    out_of_memory: bool = False
    problems: list[str] = field(default_factory=list)
    """Known causes of worse figures than necessary."""

    @property
    def values(self) -> dict[str, float]:
        """Values by quantity."""
        return {row.quantity: row.value for row in self.measurements}


def step(
    workload: Workload,
    data: Path,
    effort: Effort,
    device: str,
    limits: Limits,
    log: Log,
) -> Stepped:
    """Measure one workload.

    Args:
        workload: the workload.
        data: folder of shards for its model.
        effort: of the measurement without marks; two more rounds have them.
        device: ``cuda`` or ``cpu``.
        limits: of this machine, measured now.
        log: gets the measurements as soon as they exist: first the unmarked steps, later the marked ones.
    """
    found = Stepped(workload)
    effort = warmed(effort, workload)
    marked = 0 if workload.cuda_graph else _MARKED_ROUNDS

    def write(result: Result) -> None:
        if result.failure is not None or len(result.sessions) != effort.rounds:
            return
        found.workload = workload.decided(result.facts)
        found.measurements = [*_clean(found.workload, result, limits)]
        found.problems = problems(result, effort.warm_up)
        log.write(*found.measurements)

    result = _run(workload, data, effort, device, marked, write)
    if result.failure is not None:
        found.out_of_memory = result.out_of_memory
        where = found.workload
        found.failure = Failure(bench=BENCH, case=where.case, provider=where.provider, reason=result.failure)
    elif marked:
        rows = [*_marked(found.workload, replace(result, sessions=result.sessions[effort.rounds :]))]
        log.write(*rows)
        found.measurements += rows
    return found


def warmed(effort: Effort, workload: Workload) -> Effort:
    """Return the effort with a warm-up that has the capture of CUDA graphs, if the workload has them."""
    return replace(effort, warm_up=max(effort.warm_up, WARM_UP + 1)) if workload.cuda_graph else effort


def problems(result: Result, warm_up: int) -> list[str]:
    """List the problems of figures from ``fastdiff_bench.trainers.ours`` after ``warm_up`` steps."""
    found, breaks = [], result.facts["graph_breaks"]
    for fact, what in _ONCE.items():
        last = result.facts[fact]
        if isinstance(last, int) and last > warm_up:
            found.append(f"{what} in step {last}, after the {warm_up} steps of warm-up")
    if breaks:
        found.append(f"{breaks} graph breaks: the blocks are not compiled as a whole")
    if result.allocation_retries:
        found.append(
            f"torch's allocator returned memory to the GPU and retried {result.allocation_retries} times, which "
            "costs time: the batch is close to the largest that fits"
        )
    return found


def peak(workload: Workload, data: Path, device: str, limit_seconds: float, batch: int) -> int:
    """Return the peak memory in bytes of a few steps with this batch: resident, or reserved by torch on the GPU.

    Raises:
        DoesNotFit: it ran out of memory.
        BenchError: it failed in another way.
    """
    effort = warmed(Effort(rounds=2, steps=1, warm_up=2, limit_seconds=limit_seconds), workload)
    result = _run(replace(workload, batch=batch), data, effort, device)
    if result.out_of_memory:
        raise DoesNotFit(result.failure)
    if result.failure is not None or result.memory is None:
        raise BenchError(f"batch {batch}: {result.failure}")
    return result.memory.resident if result.memory.reserved is None else result.memory.reserved


def run_fastdiff(
    timer: StepTimer,
    workload: Workload,
    data: Path,
    unmarked: int | None = None,
    traced: tuple[Path, int] | None = None,
) -> None:
    """Run ``trainers.ours.run``, imported in its own process, so that this process does not load DeepSpeed."""
    from fastdiff_bench.trainers import ours

    ours.run(timer, workload, data, unmarked, traced)


def _run(
    workload: Workload, data: Path, effort: Effort, device: str, marked: int = 0,
    write: Callable[[Result], None] = lambda _: None,
) -> Result:  # fmt: skip
    """Run the rounds of ``effort`` and ``marked`` more; call ``write`` after every round."""
    name = f"{workload.case}; {workload.provider}"
    unmarked = effort.rounds + (effort.warm_up > 0) if marked else None
    program, all_rounds = Program(name, run_fastdiff, (workload, data, unmarked)), effort.rounds + marked
    rounds = replace(effort, rounds=all_rounds)
    return run_interleaved([program], rounds, device=device, after_round=lambda found: write(found[name]))[name]


def _clean(workload: Workload, result: Result, limits: Limits) -> Iterator[Measurement]:
    config = workload.config(Path(), Path())
    flops = training_flops(config.model, dream=config.objective.takes_two_passes)  # without recomputation
    facts = workload.facts | {"parameters": result.facts["parameters"], "flops_per_sample": flops}
    row = partial(Measurement.of, BENCH, workload.case, workload.provider, facts=facts)
    timing, precision = result.timing, config.performance.precision
    yield from figures(row, result, workload.samples)
    gpu = of_device(str(result.facts["device"]))
    device_peak = gpu.peak if gpu is not None and precision in ("bf16", "fp16") else None
    for quantity, rate in (("mfu", device_peak), ("of matmul", limits.matmul_flops_per_s.get(precision))):
        if rate is not None:
            yield row(quantity, "1", timing.per_second(workload.samples * flops / rate), "higher")
    # Counted when the code is compiled; they occur in every step that runs it.
    yield row("graph breaks in code", "1", float(result.facts["graph_breaks"] or 0), "lower")
    yield row("start", "s", float(result.facts["start_s"] or 0), "lower")
    for quantity in ("compiled_anew", "from_cache"):
        yield row(f"parts of graphs {_PARTS[quantity]}", "1", float(result.facts[quantity] or 0), "neither")
    yield row("compilations", "1", float(result.facts["compilations"] or 0), "neither")


def figures(row: Callable[..., Measurement], result: Result, samples: int) -> Iterator[Measurement]:
    """Yield step time, throughput, processor time and peak memory of any trainer.

    Args:
        row: ``Measurement.of`` without bench, case and provider.
        result: of a program that ran to the end.
        samples: of a step.
    """
    assert result.memory is not None
    yield row("step time", "ms", result.timing, "lower", scale=1e3)
    yield row("throughput", "samples/s", result.timing.per_second(samples), "higher")
    yield row("processor time", "ms", result.processor_time, "lower", scale=1e3)
    for quantity, size in result.memory.peaks.items():
        yield row(quantity, "GiB", size, "lower", scale=2**-30)


def phases_of(result: Result) -> dict[str, list[float]]:
    """Return the seconds of every step by phase, with the remainder as "other"."""
    # A step that is skipped under fp16 updates no EMA.
    seconds = {
        name: [
            second for session in result.sessions for second in session.phases.get(name, [0.0] * len(session.seconds))
        ]
        for name in PHASES[:-1]
    }
    marked = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
    return seconds | {"other": [whole - parts for whole, parts in zip(result.seconds, marked, strict=True)]}


def _marked(workload: Workload, result: Result) -> Iterator[Measurement]:
    facts = workload.facts | {"marked_step_ms": 1e3 * result.timing.median}
    row = partial(Measurement.of, BENCH, workload.case, workload.provider, unit="ms", scale=1e3, facts=facts)
    yield row("marked step time", value=result.timing, better="neither")
    for name, seconds in phases_of(result).items():
        yield row(f"phase {name}", value=Timing.of(seconds), better="lower")
