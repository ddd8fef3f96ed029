"""Fixtures and helpers that the tests of the kernels share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastdiff_kernels import launch


@pytest.fixture
def device() -> str:
    """The device of the kernels: the GPU, or the CPU with Triton's interpreter."""
    assert torch.cuda.is_available() or launch.INTERPRETED
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["triton", "reference"])
def backend_on_cpu(request: pytest.FixtureRequest) -> str:
    """A backend that takes tensors of the CPU: beside a GPU, Triton's kernels are compiled for that alone."""
    if request.param == "triton" and not launch.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def nearest_even() -> Iterator[None]:
    """Round fp32 to the nearest bf16, as every GPU does; Triton's interpreter cuts the low bits off."""
    if not launch.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    convert = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (launch.tl.float32, launch.tl.bfloat16):
            return convert(self, source, target)
        bits = torch.tensor(source.data).bfloat16().view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(bits, target.scalar)

    interpreter.InterpreterBuilder.cast_impl = rounded
    yield
    interpreter.InterpreterBuilder.cast_impl = convert
