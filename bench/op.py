"""Times every op by every implementation: the kernel, eager PyTorch, ``torch.compile`` and other libraries.

An implementation is timed only if it is right: forward and every gradient at most twice as far from fp64 as eager
PyTorch is, the rule of the tests. Only ``torch.compile``, which the others are compared with, is timed even if it is
further away.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from bench import BenchError, record
from bench.accuracy import assert_no_worse, exact, poisoned_memory
from bench.arguments import Commands, add_measuring
from bench.arguments import device as device_of
from bench.cases import OPS, add_choice, chosen
from bench.cases.case import Case, Inputs, Outputs, as_sequence, differentiable
from bench.table import progress
from bench.timing import FULL, QUICK, Stopwatch, Timing
from fastdiff_kernels import dispatch, launch

Prepare = Callable[[Inputs], Callable[[], Outputs]]

_OURS = {"triton", "compile"}
_LINE = "{:<50}  {:<16} {:<8} {:>10} {:>21} {:>8} {:>6} {:>10}  {}"


@dataclass(frozen=True, slots=True)
class Result:
    """One direction of one implementation of a case."""

    op: str
    shape: str
    dtype: str
    provider: str
    direction: str
    """``forward`` or ``backward``."""
    median_us: float
    p20_us: float
    p80_us: float
    repetitions: int
    bytes: int
    """That the direction moves at least."""
    gb_per_s: float
    """``bytes`` over the median."""
    of_copy: float
    """Share of the bandwidth of a large copy, measured in the same run."""
    over_compile: float | None
    """Times as fast as ``torch.compile``; None: that was not timed."""
    default: str
    """What runs on this device if nobody asks for another."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An implementation that is wrong or does not run."""

    op: str
    shape: str
    dtype: str
    provider: str
    reason: str
    timed: bool = False


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("op", help="time every op by every implementation")
    add_choice(parser, OPS)
    add_measuring(parser)
    parser.set_defaults(run=_run_command)


def _run_command(arguments: argparse.Namespace) -> int:
    return main(chosen(arguments, OPS), device_of(arguments), arguments.out, arguments.smoke)


def main(cases: Sequence[Case], device: str, path: Path | None, quick: bool) -> int:
    """Time the cases and print a line each; 1 if a kernel or its reference is wrong or fails.

    Raises:
        BenchError: the device is not there, or Triton would interpret its kernels on a CPU instead of running them.
    """
    if device == "cuda" and launch.INTERPRETED:
        raise BenchError("TRITON_INTERPRET is set: the kernels would run on the CPU; unset it")
    stopwatch = Stopwatch(device, QUICK if quick else FULL)
    results: list[Result] = []
    failures: list[Failure] = []
    # A backward pass that runs more than once may not take the memory of what the forward pass saved.
    with torch._functorch.config.patch(donated_buffer=False), record.Log(path) as log:
        copy = stopwatch.copy_bandwidth()
        print(f"{record.Fingerprint.here()}\ncopy bandwidth {copy / 1e9:.0f} GB/s\n\n{_heading()}", flush=True)
        log.write({"copy_gb_per_s": copy / 1e9})
        for case in cases:
            progress(str(case))
            for row in run(case, device, stopwatch, copy, large=device == "cuda" and not quick):
                log.write(asdict(row))
                progress("")
                if isinstance(row, Result):
                    results.append(row)
                    print(_line(row), flush=True)
                else:
                    failures.append(row)
                    timed = "timed, but" if row.timed else "not timed:"
                    print(f"{case!s:<50}  {row.provider:<16} {timed} {row.reason}", flush=True)
    print(_verdict(results))
    return 1 if any(f.provider.split()[0] in ("triton", "eager", "every") for f in failures) else 0


def run(case: Case, device: str, stopwatch: Stopwatch, copy: float, *, large: bool) -> Iterator[Result | Failure]:
    """Check and time one case; if that is not possible at all, one failure of provider ``every``.

    Args:
        case: what to time.
        device: ``cuda`` or ``cpu``.
        stopwatch: of that device.
        copy: bandwidth to compare with, in bytes per second.
        large: with the batch of a training step.
    """
    try:
        yield from _run(case, device, stopwatch, copy, large)
    except Exception as error:  # the other cases are measured
        yield Failure(*_about(case), "every", _reason(error))


def _about(case: Case) -> tuple[str, str, str]:
    return case.op, case.shape, str(case.dtype).removeprefix("torch.")


def _run(case: Case, device: str, stopwatch: Stopwatch, copy: float, large: bool) -> Iterator[Result | Failure]:
    torch._dynamo.reset()  # the second shape that a compiled function meets would be compiled for all shapes
    gc.collect()

    def inputs() -> Inputs:
        torch.manual_seed(0)
        return (case.build_large if large and case.build_large else case.build)(device)

    right, failures = _right(case, inputs, _providers(case, device))
    about = _about(case)
    yield from (Failure(*about, name, _reason(error), timed=name in right) for name, error in failures.items())
    if not right:
        return
    given = inputs()
    timings, moved = _timings(case, given, right, stopwatch)
    default = _default(case, given)
    for direction, times in timings.items():
        compiled = times.get("compile")
        for name, time in times.items():
            rate = moved[direction] / time.median
            yield Result(
                *about, name, direction, time.median * 1e6, time.p20 * 1e6, time.p80 * 1e6, time.repetitions,
                moved[direction], rate / 1e9, rate / copy, compiled.median / time.median if compiled else None, default,
            )  # fmt: skip


def _name(backend: str) -> str:
    return "eager" if backend == "reference" else backend


def _default(case: Case, inputs: Inputs) -> str:
    if "auto" in case.backends:
        return "auto"
    return _name(dispatch.choose(case.op, next(v for v in inputs.values() if isinstance(v, Tensor))))


def _providers(case: Case, device: str) -> dict[str, Prepare]:
    def ours(backend: str) -> Prepare:
        return lambda inputs: lambda: case.call(inputs, backend)

    providers = {_name(backend): ours(backend) for backend in case.backends}
    if device == "cpu" and "triton" in providers:
        kernel = providers.pop("triton")
        if launch.INTERPRETED:
            providers["triton (interpreter)"] = kernel
    return providers | dict(case.rivals)


def _right(
    case: Case, inputs: Callable[[], Inputs], providers: Mapping[str, Prepare]
) -> tuple[dict[str, Prepare], dict[str, Exception]]:
    """The implementations that are no worse than eager, and why the others are not timed."""
    oracle = _results(case, exact(inputs()), lambda given: lambda: case.in_fp64(given))
    eager = _results(case, inputs(), providers["eager"])
    right: dict[str, Prepare] = {}
    failures: dict[str, Exception] = {}
    for name, provider in providers.items():
        try:
            with poisoned_memory() if name.startswith("triton") else nullcontext():
                got = _results(case, inputs(), provider)
        except Exception as error:  # whatever is wrong with one, the others are measured
            failures[name] = error
            continue
        try:
            if got or name not in case.rivals:
                assert_no_worse(got, eager, oracle)
        except AssertionError as error:
            failures[name] = error
        if name not in failures or name == "compile":
            right[name] = provider
    return right, failures


def _results(case: Case, inputs: Inputs, provider: Prepare) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    outputs = as_sequence(provider(inputs)())
    gradients = case.gradients(inputs, outputs, _upstream(outputs))
    results = {f"out{i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"d{name}": g for name, g in zip(differentiable(inputs), gradients, strict=False)}


def _upstream(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random upstream gradients: the same number for the same element, whatever the dtype and strides of the output."""
    gradients = []
    for output in outputs:
        generator = torch.Generator(output.device).manual_seed(1)
        values = torch.randn(output.shape, generator=generator, device=output.device).bfloat16()
        gradients.append(torch.empty_like(output).copy_(values))
    return gradients


def _timings(
    case: Case, inputs: Inputs, providers: Mapping[str, Prepare], stopwatch: Stopwatch
) -> tuple[dict[str, dict[str, Timing]], dict[str, int]]:
    """Timings by direction and implementation, and the bytes that each direction moves at least."""
    calls = {name: provider(inputs) for name, provider in providers.items()}
    outputs = {name: as_sequence(call()) for name, call in calls.items()}
    upstream = {name: _upstream(tensors) for name, tensors in outputs.items()}
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


def _reason(error: Exception) -> str:
    known = {ImportError: "not installed", AssertionError: "wrong"}
    name = next((text for kind, text in known.items() if isinstance(error, kind)), type(error).__name__)
    return f"{name}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _heading() -> str:
    return _LINE.format(
        "case", "provider", "pass", "median us", "[p20, p80]", "GB/s", "% copy", "vs compile", "default"
    )


def _line(r: Result) -> str:
    return _LINE.format(
        f"{r.op} {r.shape} {r.dtype}", r.provider, r.direction, f"{r.median_us:.1f}",
        f"[{r.p20_us:.1f}, {r.p80_us:.1f}]", f"{r.gb_per_s:.0f}", f"{100 * r.of_copy:.0f}",
        "-" if r.over_compile is None else f"{r.over_compile:.2f}x", r.default,
    )  # fmt: skip


def _verdict(results: Sequence[Result]) -> str:
    """Where the kernel loses to ``torch.compile``, both directions together."""
    total: dict[str, dict[str, float]] = {}
    for r in results:
        times = total.setdefault(f"{r.op} {r.shape} {r.dtype}", {})
        times[r.provider] = times.get(r.provider, 0.0) + r.median_us
    compared = {case: times["compile"] / times["triton"] for case, times in total.items() if times.keys() >= _OURS}
    lost = [f"  {case}: {ratio:.2f}x" for case, ratio in compared.items() if ratio < 1]
    if not compared:
        return "\nNo case has both the kernel and torch.compile."
    if not lost:
        return f"\nThe kernel is as fast as torch.compile or faster in all {len(compared)} cases."
    claim = (
        f"The kernel loses to torch.compile in {len(lost)} of {len(compared)} cases; it should not be the default for:"
    )
    return "\n".join(["", claim, *lost])
