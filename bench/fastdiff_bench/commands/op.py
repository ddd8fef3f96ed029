"""``bench op``: timings of every op by every implementation: kernel, eager PyTorch, ``torch.compile``, other libraries.

An implementation is timed only if it is correct (``correctness.check``). Times are compared with the least bytes
and operations of the op, and these with the limits of the machine, measured in the same run. A time that may be that of
the launch instead of the device (``Timing.launch_bound``) is marked.
"""

import argparse
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_measuring, open_log
from fastdiff_bench.arguments import device as device_of
from fastdiff_bench.cases import OPS, add_choice, chosen
from fastdiff_bench.cases.case import Case, Inputs, as_sequence
from fastdiff_bench.correctness import check
from fastdiff_bench.measure import roofline
from fastdiff_bench.measure.roofline import Limits
from fastdiff_bench.measure.timing import FULL, QUICK, Stopwatch, Timing
from fastdiff_bench.records import record
from fastdiff_bench.records.fingerprint import Fingerprint
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.records.tables import progress
from fastdiff_kernels import dispatch, launch

BENCH = "op"

_OURS = {"triton", "compile"}
_MUST_BE_RIGHT = {"triton", "eager", "auto", "every"}
"""Default implementations of fastdiff, the reference, and cases as a whole: if one fails, so does the command."""
_LINE = "{:<52} {:<12} {:<8} {:>10} {:>21} {:>6} {:>6} {:>8} {:>7} {:>8}  {}"
_HEADING = _LINE.format(
    "case", "provider", "pass", "median us", "[p20, p80]", "GB/s", "% copy", "TFLOP/s", "% mm", "/compile", "default"
)
_TIMED_ALL_THE_SAME = "; timed nevertheless, as the baseline of the comparison"
_LAUNCH_BOUND = "launch bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one implementation of a case in one direction."""

    case: Case
    provider: str
    direction: str
    """``forward`` or ``backward``."""
    time: Timing
    bytes: int
    """Least bytes that the direction moves."""
    operations: int | None
    """Least operations of the direction; None: not counted."""
    compiled: Timing | None
    """Timing of ``torch.compile``; None: not timed."""
    default: str
    """Default implementation on this device."""

    @property
    def over_compile(self) -> float | None:
        """Speed-up over ``torch.compile``."""
        return self.compiled.median / self.time.median if self.compiled else None

    def quantities(self, limits: Limits) -> dict[str, tuple[str, Timing]]:
        """Return unit and reading by quantity, without the comparison with ``torch.compile``."""
        bandwidth = self.time.per_second(self.bytes)
        found = {
            "time": ("us", self.time.times(1e6)),
            "bandwidth": ("GB/s", bandwidth.times(1e-9)),
            "of copy": ("1", bandwidth.times(1 / limits.copy_bytes_per_s)),
        }
        if self.operations is not None:
            rate = self.time.per_second(self.operations)
            found["rate"] = ("TFLOP/s", rate.times(1e-12))
            if limit := limits.matmul_flops_per_s.get(self.case.arithmetic):
                found["of matmul"] = ("1", rate.times(1 / limit))
        return found

    def measurements(self, limits: Limits) -> Iterator[Measurement]:
        """Yield the measurements for the record."""
        case = f"{self.case} {self.direction}"
        facts: dict[str, record.Fact] = {
            "op": self.case.op, "shape": self.case.shape, "dtype": self.case.dtype_name, "direction": self.direction,
            "bytes": self.bytes, "operations": self.operations, "arithmetic": self.case.arithmetic,
            "default": self.default, _LAUNCH_BOUND: self.time.launch_bound,
        }  # fmt: skip
        for quantity, (unit, reading) in self.quantities(limits).items():
            better: record.Better = "lower" if quantity == "time" else "higher"
            yield Measurement.of(BENCH, case, self.provider, quantity, unit, reading, better, facts=facts)
        if self.over_compile is not None and self.provider != "compile":
            yield Measurement(
                bench=BENCH, case=case, provider=self.provider, quantity="over compile", unit="1",
                value=self.over_compile, n=self.time.repetitions, better="higher", facts=facts,
            )  # fmt: skip


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("op")
    add_choice(parser, OPS)
    parser.add_argument("--case", metavar="REGEX", help="only cases in whose name, as records have it, this is found")
    parser.add_argument("--large", action="store_true", help="the batch of a training step also on a CPU")
    add_measuring(parser)
    parser.set_defaults(run=_run_command)


def _run_command(arguments: argparse.Namespace) -> int:
    device, cases = device_of(arguments), _named(chosen(arguments, OPS), arguments.case)
    if device == "cuda" and launch.INTERPRETED:
        raise BenchError("TRITON_INTERPRET is set: the kernels would run on the CPU; unset it")
    with open_log(arguments, "op") as log:
        if arguments.smoke:  # the first of every op
            cases = list({case.op: case for case in reversed(cases)}.values())[::-1]
        return main(cases, device, log, smoke=arguments.smoke, large=arguments.large)


def _named(cases: Sequence[Case], pattern: str | None) -> list[Case]:
    """Return the cases in whose name ``pattern`` is found; None: all."""
    try:
        found = [case for case in cases if re.search(pattern or "", str(case))]
    except re.error as error:
        raise BenchError(f"--case {pattern}: {error}; expected a regular expression") from None
    if not found:
        near = ", ".join(str(case) for case in cases[:3])
        raise BenchError(f"--case {pattern}: in no name of the {len(cases)} cases, which are such as {near}")
    return found


def main(cases: Sequence[Case], device: str, log: Log, *, smoke: bool, large: bool = False) -> int:
    """Time the cases, record and print every result; return 1 if a default implementation or the reference fails.

    Args:
        cases: the cases.
        device: ``cuda`` or ``cpu``.
        log: gets every result.
        smoke: few repetitions of the smallest sizes.
        large: use the batch of a training step, as on a GPU without ``smoke``.
    """
    effort = QUICK if smoke else FULL
    stopwatch, limits = Stopwatch(device, effort), roofline.kept(log.path.parent, device, effort, smoke=smoke)
    log.write(*limits.measurements(BENCH))
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in limits.matmul_flops_per_s.items())
    print(f"{Fingerprint.here()}\n\ncopy {limits.copy_bytes_per_s / 1e9:.0f} GB/s, matrix products: {rates}")
    print(f"\n{_HEADING}", flush=True)
    results: list[Result] = []
    failures: list[Failure] = []
    # Repeated backward passes must not free the tensors saved by the forward pass.
    with torch._functorch.config.patch(donated_buffer=False):
        for case in cases:
            progress(str(case))
            for row in run(case, device, stopwatch, large=large or (device == "cuda" and not smoke)):
                progress("")
                if isinstance(row, Result):
                    results.append(row)
                    log.write(*row.measurements(limits))
                    print(_line(row, limits, compared=not smoke), flush=True)
                else:
                    failures.append(row)
                    log.write(row)
                    print(f"{row.case:<52} {row.provider:<12} {row.reason}", flush=True)
    if any(result.time.launch_bound for result in results):
        print(
            f"\n{_LAUNCH_BOUND}: the device may have waited for the host, because the launch took longer than the work"
        )
    print(f"\n{'' if smoke else _verdict(results)}")
    return 1 if any(f.provider.split()[0] in _MUST_BE_RIGHT for f in failures) else 0


def run(case: Case, device: str, stopwatch: Stopwatch, *, large: bool) -> Iterator[Result | Failure]:
    """Check and time one case; if the whole case fails, yield one failure of provider ``every``."""
    try:
        yield from _run(case, device, stopwatch, large)
    except Exception as error:  # one failure must not stop the other cases
        yield Failure(bench=BENCH, case=str(case), provider="every", reason=check.reason(error))


def _run(case: Case, device: str, stopwatch: Stopwatch, large: bool) -> Iterator[Result | Failure]:
    torch._dynamo.reset()  # without a reset, a function would be compiled for dynamic shapes at its second shape
    gc.collect()

    def inputs() -> Inputs:
        torch.manual_seed(0)
        return (case.build_large if large and case.build_large else case.build)(device)

    passed, failures = check.run_checks(case, inputs, check.providers(case, device))
    for name, error in failures.items():
        reason = check.reason(error) + (_TIMED_ALL_THE_SAME if name in passed else "")
        yield Failure(bench=BENCH, case=str(case), provider=name, reason=reason)
    if not passed:
        return
    given = inputs()
    timings, moved = _timings(case, given, passed, stopwatch)
    counts = {"forward": case.forward_operations, "backward": case.backward_operations}
    default = _default(case, given)
    for direction, times in timings.items():
        count = counts[direction]
        for name, time in times.items():
            yield Result(
                case=case, provider=name, direction=direction, time=time, bytes=moved[direction],
                operations=count(given) if count else None, compiled=times.get("compile"), default=default,
            )  # fmt: skip


def _default(case: Case, inputs: Inputs) -> str:
    if "auto" in case.backends:
        return "auto"
    if "triton" not in case.backends:
        return check.provider_name(case.backends[0])
    example = next(v for v in inputs.values() if isinstance(v, Tensor))
    return check.provider_name(dispatch.choose(case.chosen_as or case.op, example))


def _timings(
    case: Case, inputs: Inputs, providers: Mapping[str, check.Prepare], stopwatch: Stopwatch
) -> tuple[dict[str, dict[str, Timing]], dict[str, int]]:
    """Return timings by direction and implementation, and the least bytes of each direction."""
    calls = {name: provider(inputs) for name, provider in providers.items()}
    outputs = {name: as_sequence(call()) for name, call in calls.items()}
    upstream = {name: check.upstream_of(tensors) for name, tensors in outputs.items()}
    gradients = {name: case.gradients(inputs, outputs[name], upstream[name]) for name in calls}
    timings = {"forward": stopwatch.measure(calls)}
    if backward := {name: _backward(case, inputs, outputs[name], upstream[name]) for name in calls if gradients[name]}:
        timings["backward"] = stopwatch.measure(backward)
    return timings, _least_bytes(case, inputs, outputs["eager"], gradients["eager"])


def _backward(
    case: Case, inputs: Inputs, outputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    return lambda: case.gradients(inputs, outputs, upstream)


def _least_bytes(case: Case, inputs: Inputs, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> dict[str, int]:
    def total(tensors: Iterator[Any]) -> int:
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    read, written = total(iter(inputs.values())), total(iter(outputs))
    return {
        "forward": case.forward_bytes(inputs) if case.forward_bytes else read + written,
        "backward": case.backward_bytes(inputs) if case.backward_bytes else read + written + total(iter(gradients)),
    }


def _line(result: Result, limits: Limits, *, compared: bool) -> str:
    found = {name: reading for name, (_, reading) in result.quantities(limits).items()}
    time, rate, share = found["time"], found.get("rate"), found.get("of matmul")
    return _LINE.format(
        str(result.case), result.provider, result.direction, f"{time.median:.1f}",
        f"[{time.p20:.1f}, {time.p80:.1f}]", f"{found['bandwidth'].median:.0f}",
        f"{100 * found['of copy'].median:.0f}", f"{rate.median:.3g}" if rate else "-",
        f"{100 * share.median:.1f}" if share else "-",
        f"{result.over_compile:.2f}x" if compared and result.over_compile is not None else "-",
        f"{result.default}{f'  {_LAUNCH_BOUND}' if time.launch_bound else ''}",
    )  # fmt: skip


def _verdict(results: Sequence[Result]) -> str:
    """Summarize the cases in which the kernel loses to ``torch.compile``, both directions together."""
    total: dict[str, dict[str, float]] = {}
    for result in results:
        times = total.setdefault(str(result.case), {})
        times[result.provider] = times.get(result.provider, 0.0) + result.time.median
    compared = {case: times["compile"] / times["triton"] for case, times in total.items() if times.keys() >= _OURS}
    lost = [f"  {case}: {ratio:.2f}x" for case, ratio in compared.items() if ratio < 1]
    if not compared:
        return "No case has both the kernel and torch.compile."
    if not lost:
        return f"The kernel is as fast as torch.compile or faster in all {len(compared)} cases."
    claim = (
        f"The kernel loses to torch.compile in {len(lost)} of {len(compared)} cases; it should not be the default for:"
    )
    return "\n".join([claim, *lost])
