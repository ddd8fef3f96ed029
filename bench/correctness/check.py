"""Who may be timed: the implementations of a case that are right.

Right is what the tests hold kernels to: forward and every gradient at most twice as far from fp64 as eager PyTorch is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from bench.cases.case import Case, Inputs, Outputs, as_sequence, differentiable
from bench.correctness.accuracy import assert_no_worse, exact, poisoned_memory
from fastdiff_kernels import launch

Prepare = Callable[[Inputs], Callable[[], Outputs]]


def provider_name(backend: str) -> str:
    """What a backend of ours is called in tables and records."""
    return "eager" if backend == "reference" else backend


def providers(case: Case, device: str) -> dict[str, Prepare]:
    """All implementations of a case by name; on a CPU without the kernel, unless Triton interprets it."""

    def ours(backend: str) -> Prepare:
        return lambda inputs: lambda: case.call(inputs, backend)

    found = {provider_name(backend): ours(backend) for backend in case.backends}
    if device == "cpu" and "triton" in found:
        kernel = found.pop("triton")
        if launch.INTERPRETED:
            found["triton (interpreter)"] = kernel
    return found | dict(case.rivals)


def right(
    case: Case, inputs: Callable[[], Inputs], providers: Mapping[str, Prepare]
) -> tuple[dict[str, Prepare], dict[str, Exception]]:
    """The implementations that are to be timed, and what is wrong with each that fails.

    Only ``compile``, which the others are compared with, can be in both: it is timed even if it is less accurate.
    """
    oracle = _results(case, exact(inputs()), lambda given: lambda: case.in_fp64(given))
    eager = _results(case, inputs(), providers["eager"])
    passed: dict[str, Prepare] = {}
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
            passed[name] = provider
    return passed, failures


def reason(error: Exception) -> str:
    """Why an implementation is not right, in one line."""
    known = {ImportError: "not installed", AssertionError: "wrong"}
    name = next((text for kind, text in known.items() if isinstance(error, kind)), type(error).__name__)
    return f"{name}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _results(case: Case, inputs: Inputs, provider: Prepare) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    outputs = as_sequence(provider(inputs)())
    gradients = case.gradients(inputs, outputs, upstream_of(outputs))
    results = {f"out{i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"d{name}": g for name, g in zip(differentiable(inputs), gradients, strict=False)}


def upstream_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random upstream gradients: the same number for the same element, whatever the dtype and strides of the output."""
    gradients = []
    for output in outputs:
        generator = torch.Generator(output.device).manual_seed(1)
        values = torch.randn(output.shape, generator=generator, device=output.device).bfloat16()
        gradients.append(torch.empty_like(output).copy_(values))
    return gradients
