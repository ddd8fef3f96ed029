"""The norm of a flat gradient, and what follows from it on the device: the clip factor, and whether to skip the step.

``norm = sqrt(sum(grad^2))``, groups of eight elements in fp32 and the sum of the groups in fp64, rounded to fp32 once.
The order is fixed: each of at most 1024 programs adds up a range of its own, and a second launch adds up the
programs. Bytes per element: 2 in bf16, 4 in fp32, and 16 per program.

Clipping is that of ``torch.nn.utils.clip_grad_norm_`` (Pascanu et al. 2013, "On the difficulty of training recurrent
neural networks", algorithm 1). A norm that is NaN or infinite, as that of one such element or beyond 1.8e19, skips.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.adamw.arguments import check
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend

_BLOCK = 4096
_WARPS = 8  # 16 elements per thread
_PROGRAMS = 1024
_AT_ONCE = 2**15
"""Elements that plain torch adds up at once on a CPU, so that its temporaries stay in the cache."""


def norm_reference(grad: Tensor) -> Tensor:
    """``norm`` in plain torch."""
    each = _AT_ONCE if grad.device.type == "cpu" and not torch.compiler.is_compiling() else grad.numel()
    parts = [grad[first : first + each] for first in range(0, grad.numel(), each)] if grad.numel() else [grad]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum().to(torch.float32).sqrt()


@jit
def _adamw_squares_kernel(  # type: ignore[no-untyped-def]
    partials_ptr, grad_ptr, numel, blocks, BLOCK_ELEMENTS: tl.constexpr
):
    """One program adds up the squares of ``blocks`` blocks in a row."""
    first = tl.program_id(0).to(tl.int64) * blocks * BLOCK_ELEMENTS
    total = tl.zeros([BLOCK_ELEMENTS // 8], tl.float64)
    for block in range(blocks):
        place = first + block * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
        g = tl.load(grad_ptr + place, mask=place < numel, other=0).to(tl.float32)
        total += tl.sum(tl.reshape(g * g, [BLOCK_ELEMENTS // 8, 8]), axis=1).to(tl.float64)
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total))


@jit
def _adamw_norm_kernel(norm_ptr, partials_ptr, programs, BLOCK_PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program adds up the partial sums."""
    index = tl.arange(0, BLOCK_PROGRAMS)
    total = tl.sum(tl.load(partials_ptr + index, mask=index < programs, other=0))
    tl.store(norm_ptr, tl.math.sqrt_rn(total.to(tl.float32)))


def _cut(numel: int) -> tuple[int, int]:
    """Return the blocks of a program, and the programs, of a gradient of ``numel`` elements."""
    blocks = -(-numel // _BLOCK)
    each = max(1, -(-blocks // _PROGRAMS))
    return each, -(-blocks // each)


@torch.library.custom_op("fastdiff::adamw_squares", mutates_args=("partials",))
def _squares_triton(partials: Tensor, grad: Tensor, blocks: int) -> None:
    _squares(partials, grad, blocks)


def _squares(partials: Tensor, grad: Tensor, blocks: int) -> None:
    run(
        _adamw_squares_kernel, (partials.numel(),), partials, grad, grad.numel(), blocks,
        BLOCK_ELEMENTS=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@torch.library.custom_op("fastdiff::adamw_norm", mutates_args=("partials",))
def _norm_triton(partials: Tensor, grad: Tensor, blocks: int) -> Tensor:
    """The norm of a gradient, of which ``grad`` is what the last partial sums are still to be taken of."""
    rest = -(-grad.numel() // (blocks * _BLOCK))
    _squares(partials[partials.numel() - rest :], grad, blocks)
    out = partials.new_empty((), dtype=torch.float32)
    run(_adamw_norm_kernel, (1,), out, partials, partials.numel(), BLOCK_PROGRAMS=_PROGRAMS, num_warps=4)
    return out


@_norm_triton.register_fake
def _(partials: Tensor, grad: Tensor, blocks: int) -> Tensor:
    return partials.new_empty((), dtype=torch.float32)


class ArrivingNorm:
    """``norm`` of a flat gradient, whose ranges are added up as they arrive; equal to it to the bit.

    Plain torch has no ranges: it adds up the whole at the end.

    Args:
        grad: as for ``norm``.
        backend: as for ``norm``.
    """

    def __init__(self, grad: Tensor, backend: Backend | None = None) -> None:
        check("grad", grad, (grad.numel(),), (torch.float32, torch.bfloat16), grad.device)
        self._grad, self._chosen = grad, choose("adamw", grad, backend)
        self._each, programs = _cut(grad.numel())
        self._partials = grad.new_empty(programs, dtype=torch.float64)
        self._added = 0
        """Programs that have run."""

    def add(self, end: int) -> None:
        """Add up the ranges that end at or before element ``end`` and are not added up yet; ``take`` adds the last."""
        if self._chosen != "triton" or end == self._grad.numel():
            return
        size, first = self._each * _BLOCK, self._added
        self._added = end // size
        if self._added > first:
            arrived = self._grad[first * size : self._added * size]
            _squares_triton(self._partials[first : self._added], arrived, self._each)

    def take(self) -> Tensor:
        """Add up the others, and return the norm, an fp32 scalar on the device of the gradient; begin anew."""
        rest, self._added = self._grad[self._added * self._each * _BLOCK :], 0
        if self._chosen == "triton":
            return _norm_triton(self._partials, rest, self._each)  # type: ignore[no-any-return]
        whole: Tensor = plain(norm_reference, self._chosen)(self._grad)
        return whole


def norm(grad: Tensor, backend: Backend | None = None) -> Tensor:
    """The 2-norm of a flat gradient, an fp32 scalar on its device.

    Args:
        grad: fp32 or bf16 ``[N]``.
        backend: implementation; None: the default of ``dispatch.choose`` for ``adamw``.

    Raises:
        ValueError: another shape, dtype or stride.
        RuntimeError: Triton was requested and cannot run here.
    """
    return ArrivingNorm(grad, backend).take()


def clip(norm: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """``grad_scale`` (fp32) and ``skip`` (bool) of ``adamw``, scalars on the device of ``norm``.

    Args:
        norm: fp32 scalar.
        max_norm: to which longer gradients are scaled; 0: none is.
    """
    skip = (norm - norm) != 0  # NaN for a norm that is not finite
    if max_norm <= 0:
        return torch.ones_like(norm), skip
    return 1.0 / ((norm + 1e-6) / max_norm).clamp(min=1.0), skip
