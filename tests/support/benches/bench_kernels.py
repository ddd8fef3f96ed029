"""Small kernels for tests of the benchmarks: a correct one, and one for each fault."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs, elements
from fastdiff_kernels import dispatch
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend

SIZE = 2**16


@jit
def square_kernel(out, x, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < count)
    tl.store(out + offset, value * value * factor, mask=offset < count)


@jit
def every_third_kernel(out, x, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its loads cannot be wide."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + (offset * 3) % count, mask=offset < count)
    tl.store(out + offset, value * factor, mask=offset < count)


@jit
def spread_kernel(out, x, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its stores cannot be wide."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < count)
    tl.store(out + (offset * 3) % count, value * factor, mask=offset < count)


@jit
def greedy_kernel(out, x, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """It holds more numbers per thread than there are registers."""
    offset = tl.arange(0, BLOCK)
    value = tl.load(x + offset)
    tl.store(out + offset, value * tl.sum(value) * factor)


@jit
def fill_kernel(out, x, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads one number, whose width does not matter."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x) * factor + tl.zeros([BLOCK], tl.float32), mask=offset < count)


@jit
def partial_kernel(out, x, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Streams through its input by pointers that a loop carries on, and stores a small tensor number by number."""
    pointer = x + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, count, BLOCK):
        total += tl.load(pointer)
        pointer += BLOCK
    tl.store(out + tl.arange(0, BLOCK // 8) * 3, tl.sum(tl.reshape(total, [BLOCK // 8, 8]), 1) * factor)


def _launch(x: Tensor, kernel: Any, block: int, warps: int, small: bool) -> Tensor:
    out = torch.empty_like(x[:block] if small else x)
    count = x.numel()
    run(kernel, (-(-count // block),), out, x, count, 3.0, BLOCK=block, num_warps=warps)
    return out


def launching(name: str, kernel: Any, block: int = 1024, warps: int = 4, small: bool = False) -> Case:
    """A case that launches one kernel."""
    return Case(
        op="philox",
        shape=name,
        dtype=torch.float32,
        build=lambda device: {"x": torch.randn(SIZE, device=device)},
        call=lambda inputs, backend: _launch(inputs["x"], kernel, block, warps, small),
    )


LAUNCHING = {
    "wide": launching("wide", square_kernel),
    "narrow loads": launching("narrow loads", every_third_kernel),
    "narrow stores": launching("narrow stores", spread_kernel),
    "spills": launching("spills", greedy_kernel, block=2**14, warps=1),
    "single": launching("single", fill_kernel),
    "partial": launching("partial", partial_kernel, small=True),
}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        run(square_kernel, (1,), out, x, x.numel(), factor, BLOCK=1024)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return upstream * 2 * ctx.saved_tensors[0], None


def square_reference(x: Tensor) -> Tensor:
    """The square, element by element."""
    return x * x


def _square(inputs: Inputs, backend: Backend, factor: float) -> Tensor:
    if dispatch.choose("philox", inputs["x"], backend) == "triton":
        return _Square.apply(inputs["x"], factor)  # type: ignore[no-untyped-call, no-any-return]
    return dispatch.plain(square_reference, backend)(inputs["x"])  # type: ignore[no-any-return]


def squaring(
    other_libraries: dict[str, Callable[[Inputs], Callable[[], Any]]] | None = None, factor: float = 1.0
) -> Case:
    """1000 squares; wrong ones by the kernel if ``factor`` is not 1."""
    return Case(
        op="philox",
        shape="square",
        dtype=torch.float32,
        build=lambda device: {"x": torch.randn(1000, device=device).requires_grad_()},
        call=partial(_square, factor=factor),
        forward_operations=elements("x", 1),
        backward_operations=elements("x", 2),
        other_libraries=other_libraries or {},
    )
