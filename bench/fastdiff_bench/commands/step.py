"""``bench step``: step time, its phases, memory and utilization of the device, by configuration."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastdiff.config.sections.data import DataConfig
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_measuring, device, open_log
from fastdiff_bench.measure import largest_batch, roofline, stepping, sweep, synthetic, timing
from fastdiff_bench.measure.interleaved import Effort, in_another_process
from fastdiff_bench.measure.roofline import Limits
from fastdiff_bench.measure.stepping import BENCH, PHASES, Stepped
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Failure, Measurement
from fastdiff_bench.records.tables import progress, table

_SAMPLES = 512
"""Samples of the synthetic data."""
_FULL = Effort(rounds=5, steps=10, warm_up=5, settling=DataConfig().prefetch)
"""The first steps of a session use batches that were prefetched during other sessions; they are not measured."""
_SMOKE = Effort(rounds=2, steps=2, warm_up=2, settling=1)

_COLUMNS = {
    "samples/s": ("throughput", "{:.1f}"),
    "ms": ("step time", "{:.2f}"),
    "marked ms": ("marked step time", "{:.2f}"),
    **{name: (f"phase {name}", "{:.2f}") for name in PHASES},
    "allocated GiB": ("peak allocated", "{:.2f}"),
    "reserved GiB": ("peak reserved", "{:.2f}"),
    "resident GiB": ("peak resident", "{:.2f}"),
    "MFU": ("mfu", "{:.1%}"),
    "of matmul": ("of matmul", "{:.1%}"),
    "breaks": ("graph breaks in code", "{:.0f}"),
    "compiled": ("compilations", "{:.0f}"),
}
"""Heading, quantity and format."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("step")
    sweep.add_workload(parser)
    parser.add_argument("--steps", type=int, help=f"steps per round; default: {_FULL.steps}")
    parser.add_argument("--rounds", type=int, help=f"rounds, at least 2; default: {_FULL.rounds}")
    parser.add_argument("--find-batch", action="store_true", help="find the largest batch that fits into memory")
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory for --find-batch; default: 95 %% of the free GPU memory, or 80 %% of the available RAM",
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        metavar="NAME",
        help="compare with these baselines, measured interleaved with fastdiff: plain, dit, diffusers",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="trace steps: time by class of operation, launches by phase, idle share",
    )
    add_measuring(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    where, effort = device(arguments), _effort(arguments)
    if arguments.memory is not None and not arguments.find_batch:
        raise BenchError("--memory is the limit of --find-batch; add --find-batch, or leave it out")
    if arguments.find_batch and arguments.peer:
        raise BenchError(
            "--find-batch with --peer: the batch would be the largest for fastdiff alone, not for the baselines; "
            "give --batch instead"
        )
    if arguments.trace and (arguments.find_batch or arguments.peer):
        raise BenchError("--trace is of given batches and of fastdiff alone; leave out --find-batch and --peer")
    workloads = sweep.workloads(arguments, where)
    limit = largest_batch.memory_limit(where, arguments.memory) if arguments.find_batch else None
    with (
        tempfile.TemporaryDirectory(prefix="fastdiff-bench-data-") as folder,
        open_log(arguments, "peer" if arguments.peer else BENCH) as log,
    ):
        measuring = _Measuring(Path(folder), effort, where, log, trace=arguments.trace)
        if arguments.peer:
            return measuring.peers(workloads, arguments.peer)
        return measuring.steps(workloads, limit, timing.QUICK if arguments.smoke else timing.FULL)


def _effort(arguments: argparse.Namespace) -> Effort:
    default = _SMOKE if arguments.smoke else _FULL
    rounds = default.rounds if arguments.rounds is None else arguments.rounds
    steps = default.steps if arguments.steps is None else arguments.steps
    if rounds < 2 or steps < 1:
        raise BenchError(f"--rounds {rounds}, --steps {steps}: at least 2 rounds and 1 step")
    return replace(default, rounds=rounds, steps=steps)


class _Measuring:
    """One run of the command."""

    def __init__(self, folder: Path, effort: Effort, device: str, log: record.Log, *, trace: bool = False) -> None:
        self._folder, self._effort, self._device, self._log, self._trace = folder, effort, device, log, trace

    def steps(self, workloads: Sequence[Workload], memory: int | None, care: timing.Effort) -> int:
        """Measure and print all workloads; return the exit code: 1 if one failed, unless for lack of memory."""
        progress("limits of the machine")
        # In another process, so that no GPU memory stays allocated in this one.
        where, smoke = self._log.path.parent, self._log.fingerprint.smoke
        found, bounds = [], in_another_process(partial(roofline.kept, smoke=smoke), where, self._device, care)
        self._log.write(*bounds.measurements(BENCH))
        for number, workload in enumerate(workloads, 1):
            progress(f"{number} of {len(workloads)}: {workload.case}; {workload.provider}")
            stepped = self._step(workload, memory, bounds)
            self._log.write(*([stepped.failure] if stepped.failure else []))
            progress("")
            print("\n".join(_verdict(stepped)), flush=True)
            if self._trace and stepped.failure is None:
                self._add_trace(stepped)
            found.append(stepped)
        done = [stepped for stepped in found if stepped.failure is None]
        if done:
            print(f"\n{_table(done)}")
        return int(not done or any(s.failure is not None and not s.out_of_memory for s in found))

    def _add_trace(self, stepped: Stepped) -> None:
        from fastdiff_bench.tracing import command

        workload, folder = stepped.workload, self._log.path.parent / "traces"
        rows = command.run(workload, self._data(workload), self._effort, self._device, folder)
        self._log.write(*rows)
        stepped.failure = next((row for row in rows if isinstance(row, Failure)), None)

    def peers(self, workloads: Sequence[Workload], names: Sequence[str]) -> int:
        """Compare the baselines on every workload; return the worst exit code."""
        from fastdiff_bench.measure import baselines

        return max(baselines.run(workload, names, self._effort, self._device, self._log) for workload in workloads)

    def _step(self, workload: Workload, memory: int | None, bounds: Limits) -> Stepped:
        data = self._data(workload)
        largest: list[Measurement] = []
        try:
            if memory is not None:
                workload, row = self._fitted(workload, memory)
                largest = [row]
                self._log.write(*largest)
        except BenchError as error:
            case = workload.case_of_any_batch
            failure = Failure(bench=BENCH, case=case, provider=workload.provider, reason=str(error))
            return Stepped(
                workload, failure=failure, out_of_memory=isinstance(error.__cause__, largest_batch.DoesNotFit)
            )
        stepped = stepping.step(workload, data, self._effort, self._device, bounds, self._log)
        stepped.measurements += largest
        return stepped

    def _fitted(self, workload: Workload, memory: int) -> tuple[Workload, Measurement]:
        """Return the workload with the largest batch that fits, and its measurement.

        Raises:
            BenchError: none fits, or a trial failed in another way.
        """
        peak = partial(stepping.peak, workload, self._data(workload), self._device, self._effort.limit_seconds)
        try:
            found = largest_batch.largest(peak, memory)
        except largest_batch.DoesNotFit as error:
            raise BenchError(str(error)) from error
        fit = {"limit_gib": memory / 2**30, "peak_gib": found.peak / 2**30, "trials": found.trials}
        facts = {**workload.facts, **fit, "batch": found.batch}
        names = (BENCH, workload.case_of_any_batch, workload.provider)
        row = Measurement.of(*names, "largest batch", "1", found.batch, "higher", facts=facts)
        return replace(workload, batch=found.batch), row

    def _data(self, workload: Workload) -> Path:
        folder = self._folder / workload.network
        if not folder.exists():
            progress(f"synthetic data for {workload.preset}")
            synthetic.write(folder, workload.config(Path(), Path()).model, _SAMPLES)
        return folder


def _verdict(stepped: Stepped) -> list[str]:
    values, workload = stepped.values, stepped.workload
    if stepped.failure is not None:
        return [f"{stepped.failure.case}; {workload.provider}: FAILED: {stepped.failure.reason}"]
    parts = [f"{values['throughput']:.1f} samples/s, {values['step time']:.2f} ms per step"]
    if "phase data" in values:  # not of a graph
        marked = sum(values[f"phase {name}"] for name in PHASES)
        parts.append(
            f"its phases, measured with marks, {marked:.2f} ms, {values['phase data'] / marked:.1%} of it data"
        )
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    lines = [f"{workload.case}; {workload.provider}: {'; '.join(parts)}"]
    compiled, loaded = (int(values[f"parts of graphs {how}"]) for how in ("compiled", "from a cache"))
    told = f"; compiled {compiled} graphs" if compiled else f"; loaded {loaded} graphs" if loaded else ""
    lines.append(f"  started in {values['start']:.1f} s{told}")
    if "largest batch" in values:
        row = next(row for row in stepped.measurements if row.quantity == "largest batch")
        facts = row.facts
        lines.append(
            f"  largest batch {row.value:.0f}: {facts['peak_gib']:.2f} of {facts['limit_gib']:.2f} GiB, "
            f"{facts['trials']} trials"
        )
    return lines + [f"  problem: {problem}" for problem in stepped.problems]


def _table(found: Sequence[Stepped]) -> str:
    columns = {name: how for name, how in _COLUMNS.items() if any(how[0] in s.values for s in found)}
    rows = [["configuration", *columns]]
    for stepped in found:
        values = stepped.values
        cells = [form.format(values[q]) if q in values else "-" for q, form in columns.values()]
        rows.append([f"{stepped.workload.case}; {stepped.workload.provider}", *cells])
    return table(rows, "<" + ">" * len(columns))
