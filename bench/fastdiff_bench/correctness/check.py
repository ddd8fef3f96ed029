"""Correctness check before timing, forward and backward, by the criterion of the kernel tests (``accuracy.py``)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs, Outputs, as_sequence, differentiable
from fastdiff_bench.correctness.accuracy import assert_no_worse, exact, poisoned_memory
from fastdiff_kernels import launch

Prepare = Callable[[Inputs], Callable[[], Outputs]]


def provider_name(backend: str) -> str:
    """Return the name of one of our backends in tables and records."""
    return "eager" if backend == "reference" else backend


def providers(case: Case, device: str) -> dict[str, Prepare]:
    """Return all implementations of a case by name; on a CPU the Triton kernel only if the interpreter is active."""

    def ours(backend: str) -> Prepare:
        return lambda inputs: lambda: case.call(inputs, backend)

    found = {provider_name(backend): ours(backend) for backend in case.backends}
    if device == "cpu" and "triton" in found:
        kernel = found.pop("triton")
        if launch.INTERPRETED:
            found["triton (interpreter)"] = kernel
    return found | dict(case.other_libraries)


def run_checks(
    case: Case, inputs: Callable[[], Inputs], providers: Mapping[str, Prepare]
) -> tuple[dict[str, Prepare], dict[str, Exception]]:
    """Return the implementations to time, and the error of each that fails.

    Only ``compile``, the baseline of the comparison, can be in both: it is timed even if it is less accurate.
    """
    oracle = _results(case, exact(inputs()), lambda given: lambda: case.in_fp64(given))
    eager = _results(case, inputs(), providers["eager"])
    passed: dict[str, Prepare] = {}
    failures: dict[str, Exception] = {}
    for name, provider in providers.items():
        try:
            with poisoned_memory() if name.startswith("triton") else nullcontext():
                got = _results(case, inputs(), provider)
        except Exception as error:  # one failure must not stop the rest
            failures[name] = error
            continue
        try:
            if got or name not in case.other_libraries:
                assert_no_worse(got, eager, oracle, sums=case.sums)
        except AssertionError as error:
            failures[name] = error
        if name not in failures or name == "compile":
            passed[name] = provider
    return passed, failures


def reason(error: Exception) -> str:
    """Return the reason of a failure in one line."""
    known = {ImportError: "not installed", AssertionError: "wrong"}
    name = next((text for kind, text in known.items() if isinstance(error, kind)), type(error).__name__)
    return f"{name}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _results(case: Case, inputs: Inputs, provider: Prepare) -> dict[str, Tensor]:
    outputs = as_sequence(provider(inputs)())
    gradients = case.gradients(inputs, outputs, upstream_of(outputs))
    results = {f"out{i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"d{name}": g for name, g in zip(differentiable(inputs), gradients, strict=False)}


def upstream_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return random upstream gradients, equal for equal elements regardless of the output's dtype and strides."""
    gradients = []
    for output in outputs:
        generator = torch.Generator(output.device).manual_seed(1)
        values = torch.randn(output.shape, generator=generator, device=output.device).bfloat16()
        gradients.append(torch.empty_like(output).copy_(values))
    return gradients
