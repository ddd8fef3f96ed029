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


@torch.library.custom_op("fastdiff::adamw_norm", mutates_args=())
def _norm_triton(grad: Tensor) -> Tensor:
    blocks = -(-grad.numel() // _BLOCK)
    each = max(1, -(-blocks // _PROGRAMS))
    programs = -(-blocks // each)
    partials, out = grad.new_empty(programs, dtype=torch.float64), grad.new_empty((), dtype=torch.float32)
    run(
        _adamw_squares_kernel, (programs,), partials, grad, grad.numel(), each,
        BLOCK_ELEMENTS=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    run(_adamw_norm_kernel, (1,), out, partials, programs, BLOCK_PROGRAMS=_PROGRAMS, num_warps=4)
    return out


@_norm_triton.register_fake
def _(grad: Tensor) -> Tensor:
    return grad.new_empty((), dtype=torch.float32)


def norm(grad: Tensor, backend: Backend | None = None) -> Tensor:
    """The 2-norm of a flat gradient, an fp32 scalar on its device.

    Args:
        grad: fp32 or bf16 ``[N]``.
        backend: implementation; None: the default of ``dispatch.choose`` for ``adamw``.

    Raises:
        ValueError: another shape, dtype or stride.
        RuntimeError: Triton was requested and cannot run here.
    """
    check("grad", grad, (grad.numel(),), (torch.float32, torch.bfloat16), grad.device)
    chosen = choose("adamw", grad, backend)
    result: Tensor = _norm_triton(grad) if chosen == "triton" else plain(norm_reference, chosen)(grad)
    return result


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
