"""``bench scale``: the cost of several ranks, measured on this machine, and predicted for many GPUs.

Measured, for one ZeRO stage after the other: steps of one rank, of W independent runs (which share the machine but do
not communicate), and of W ranks together, interleaved, with the same samples per rank (weak scaling), and the bytes
sent, beside those of the model in ``fastdiff/planning/scaling/communication.py``. Ranks together are measured in each
of the ``--orders`` in which they add up gradients. Predicted: see
``bench/fastdiff_bench/scaling/projection.py``.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from fastdiff.config.sections.performance import SumOrder
from fastdiff.planning.scaling.communication import Message, sent
from fastdiff.planning.scaling.zero import Zero, parameters_of, width_of
from fastdiff.planning.step_time import repeated
from fastdiff.plurals import counted
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_measuring, device, open_log
from fastdiff_bench.measure import synthetic
from fastdiff_bench.measure.interleaved import Effort, Program, Result, run_interleaved
from fastdiff_bench.measure.session import Fact
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.scaling import host, projection
from fastdiff_bench.trainers import collectives

_STAGES = ("ddp", "zero1", "zero2", "zero3")
_ORDERS: tuple[str, ...] = get_args(SumOrder)
FULL, SMOKE = Effort(rounds=8, steps=5, warm_up=10), Effort(rounds=2, steps=2, warm_up=4)
_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of the measurement."""

    workload: Workload
    """Workload of one rank."""
    stages: tuple[str, ...]
    ranks: tuple[int, ...]
    orders: tuple[str, ...]
    device: str
    effort: Effort

    def name(self, stage: str, ranks: int, order: str = "ranks", *, apart: bool = False) -> str:
        """Return the provider in the records."""
        how = " apart" if apart else "" if order == "ranks" else ", sums in one order"
        return f"{provider(stage)}, {counted(ranks, 'rank')}{how}"

    def together(self, stage: str, ranks: int, order: str) -> Workload:
        """Return the workload of ranks that train one network."""
        own = self.workload.batch or 1
        micro = self.workload.micro or own  # sums in one order need a number
        return replace(self.workload, deepspeed=stage, batch=ranks * own, micro=micro, grad_accum_order=order)

    @property
    def row(self) -> Callable[..., Measurement]:
        """``Measurement.of`` without bench and case."""
        return partial(Measurement.of, "scale", self.workload.case)

    def zero(self, stage: str, order: str = "ranks") -> Zero:
        """Return the communication settings of a stage's DeepSpeed JSON."""
        zero = Zero.of(replace(self.workload, deepspeed=stage).deepspeed_json())
        return replace(zero, in_order=order == "micro_batches")

    def messages(self, stage: str, ranks: int, order: str = "ranks") -> list[Message]:
        """Return the modelled messages of a step."""
        config = self.together(stage, ranks, order).config(Path(), Path())
        performance = config.performance
        widths = width_of(performance.precision), ranks, width_of(performance.sums)
        zero = self.zero(stage, order)
        last = zero.messages(parameters_of(config.model), *widths)
        before = repeated(last, zero) * (config.batch.accumulation(ranks) - 1)
        return [*before, *last, consensus(zero.stage)]


def consensus(stage: int) -> Message:
    """Return the all-reduce of flags and losses in a step (``fastdiff.parallel.consensus``).

    Five numbers of 8 bytes, or six with the engine of stage 0, which leaves on the device whether the step is skipped.
    """
    return Message("all-reduce", 8 * (6 if stage == 0 else 5))


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("scale", description=__doc__)
    add_measuring(parser)
    parser.add_argument("--preset", help="preset to train (default: digits)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples per rank and step (default: 8)")
    parser.add_argument("--micro", type=int, metavar="N", help="samples of a forward pass (default: all of a rank)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"])
    parser.add_argument(
        "--orders", nargs="+", choices=_ORDERS, default=_ORDERS[:1],
        help="as --performance.grad_accum_order; default: ranks",
    )  # fmt: skip
    parser.add_argument(
        "--stages", nargs="+", default=_STAGES, metavar="NAME|FILE", help="as --deepspeed_config; default: all stages"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, metavar="W", help="numbers of ranks; default: 1 2 (on a single GPU: 1)"
    )
    parser.add_argument(
        "--host", action="store_true", help="measure the processor time of a step by stage, which predictions use"
    )
    projection.add_flags(parser)
    parser.set_defaults(run=_run)


def provider(stage: str) -> str:
    """Return the name of a DeepSpeed JSON in the records: ``zero0`` for ``ddp``."""
    return {"ddp": "zero0"}.get(Path(stage).stem, Path(stage).stem)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.source is not None:
        return projection.run(arguments, provider)
    projection.refuse(arguments, projection.FLAGS, "without --from, because steps are measured")
    if arguments.host:
        return _measure_host(arguments)
    plan = _plan(arguments)
    with tempfile.TemporaryDirectory(prefix="fastdiff-bench-") as folder, open_log(arguments, "scale") as log:
        data = Path(folder) / "data"
        synthetic.write(data, plan.workload.config(data, data).model, _SAMPLES)
        results: dict[str, Result] = {}
        for stage in plan.stages:  # one stage at a time: each trainer keeps its processes and their memory
            results |= run_interleaved(_programs(plan, data, stage), plan.effort, device=plan.device)
        failed = [name for name, result in results.items() if result.failure is not None]
        for name in failed:
            log.write(Failure(bench="scale", case=plan.workload.case, provider=name, reason=str(results[name].failure)))
        _report_measured(plan, results, log)
    return int(bool(failed))


def _measure_host(arguments: argparse.Namespace) -> int:
    projection.refuse(arguments, ["preset", "batch", "ranks"], "with --host, which has its own networks")
    effort = SMOKE if arguments.smoke else replace(FULL, steps=20)
    with (
        tempfile.TemporaryDirectory(prefix="fastdiff-bench-") as name,
        open_log(arguments, "scale", "scale-host") as log,
    ):
        folder = Path(name)
        base = Workload(preset="digits", precision=arguments.precision or "bf16")
        stages = {provider(stage): replace(base, deepspeed=stage) for stage in arguments.stages}
        stages = {
            name: host.without_persistence(one, folder) if "zero3" in name else one for name, one in stages.items()
        }
        synthetic.write(folder / "data", base.config(folder, folder).model, _SAMPLES)
        rows = [*host.measure(stages, folder / "data", effort, device(arguments))]
        log.write(*rows)
    return int(any(isinstance(row, Failure) for row in rows))


def _plan(arguments: argparse.Namespace) -> Plan:
    on, smoke = device(arguments), arguments.smoke
    gpus = torch.cuda.device_count() if on == "cuda" else None
    ranks = tuple(dict.fromkeys(arguments.ranks or ([1] if gpus == 1 else [1, 2])))
    bad = [rank for rank in ranks if rank < 1 or (gpus is not None and rank > gpus)]
    if bad:
        most = "" if gpus is None else f" and at most the number of GPUs, {gpus}"
        raise BenchError(f"--ranks {bad[0]}: expected at least 1{most}")
    batch = 8 if arguments.batch is None else arguments.batch
    if batch < 1:
        raise BenchError(f"--batch {batch}: expected at least one sample per rank")
    workload = Workload(
        preset=arguments.preset or "digits", batch=batch, micro=arguments.micro, precision=arguments.precision
    )
    stages = tuple(arguments.stages[-1:] if smoke else arguments.stages)
    orders = tuple(dict.fromkeys(arguments.orders))
    plan = Plan(workload, stages, ranks, orders, on, SMOKE if smoke else FULL)
    for stage in stages:
        for order in orders:
            plan.messages(stage, 1, order)
    return plan


def _programs(plan: Plan, data: Path, stage: str) -> list[Program]:
    # One thread per rank for any number of ranks, so that the compute resources of a rank are constant.
    threads = {} if plan.device == "cuda" else {"OMP_NUM_THREADS": "1"}
    warm_up = plan.effort.warm_up
    alone, found = replace(plan.workload, deepspeed=stage), []
    for ranks in plan.ranks:
        if ranks > 1:
            name = plan.name(stage, ranks, apart=True)
            found.append(Program(name, collectives.run_apart, (alone, data), ranks, threads))
        for order in plan.orders:
            given = (plan.together(stage, ranks, order), data, (warm_up // 2, warm_up))
            found.append(Program(plan.name(stage, ranks, order), collectives.run, given, ranks, threads))
    return found


def _report_measured(plan: Plan, results: dict[str, Result], log: Log) -> None:
    rows = [["measured", "step ms", "p20", "p80", "collectives", "sent MiB", "by the model", "communication ms"]]
    for stage in plan.stages:
        for ranks in plan.ranks:
            kinds = [("ranks", True)] if ranks > 1 else []
            for order, apart in [*kinds, *((order, False) for order in plan.orders)]:
                name = plan.name(stage, ranks, order, apart=apart)
                result = results[name]
                if result.failure is not None:
                    continue
                timing = result.timing
                times = [f"{1e3 * value:.1f}" for value in (timing.median, timing.p20, timing.p80)]
                facts: dict[str, Fact] = {"stage": plan.zero(stage).stage, "ranks": ranks, "apart": apart}
                facts |= {"order of sums": order, "parameters": result.facts["parameters"]}
                log.write(plan.row(name, "step time", "ms", timing, "lower", scale=1e3, facts=facts))
                counts = ["", "", "", ""] if apart else _report_counted(plan, name, stage, order, result, facts, log)
                rows.append([name, *times, *counts])
    print(table(rows, "<>>>>>>>"))


def _report_counted(
    plan: Plan, name: str, stage: str, order: str, result: Result, facts: dict[str, Fact], log: Log
) -> list[str]:
    ranks = int(facts["ranks"] or 1)
    steps: list[list[collectives.Call]] = json.loads(str(result.facts["calls"]))
    by_kind: dict[str, float] = {}
    for kind, size, _ in steps[-1]:
        by_kind[kind] = by_kind.get(kind, 0.0) + sent(kind, size, ranks) / 2**20
    model = sum(sent(message.kind, message.bytes, ranks) for message in plan.messages(stage, ranks, order)) / 2**20
    counts = Timing.of([float(len(calls)) for calls in steps])
    log.write(plan.row(name, "collectives", "1", counts, "neither", facts=facts))
    more: dict[str, Fact] = {**by_kind, "by the model": model, "bytes": "the least that any algorithm sends"}
    log.write(plan.row(name, "bytes sent", "MiB", sum(by_kind.values()), "neither", facts=facts | more))
    seconds = Timing.of([sum(seconds for *_, seconds in calls) for calls in steps])
    log.write(plan.row(name, "communication time", "ms", seconds, "lower", scale=1e3, facts=facts))
    return [f"{counts.median:.0f}", f"{sum(by_kind.values()):.3f}", f"{model:.3f}", f"{1e3 * seconds.median:.2f}"]
