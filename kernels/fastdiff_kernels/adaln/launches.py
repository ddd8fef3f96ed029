"""Launches of the adaLN kernels, for outputs in 16 bits and for operands of FP8 products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff_kernels.adaln.kernels import (
    adaln_bwd_kernel,
    adaln_fold_kernel,
    adaln_fwd_kernel,
    adaln_gate_bwd_kernel,
)
from fastdiff_kernels.adaln.plan import Plan
from fastdiff_kernels.launch import run, triton

_FOLD: dict[str, int] = {"BLOCK_D": 512, "BLOCK_R": 64, "BLOCK_C": 16, "num_warps": 2}


class Target(NamedTuple):
    """What a kernel writes of ``[B * T, D]``; None: not."""

    plain: Tensor | None
    """In the dtype of the input."""
    rows: Tensor | None = None
    """e4m3 ``[B * T, D]``."""
    columns: Tensor | None = None
    """e4m3 ``[D, B * T]``, read from ``rows``."""
    maxima: Tensor | None = None
    """fp32, one per program."""
    unit: Tensor | None = None
    """Scale of the e4m3 numbers, fp32 ``[]``."""


def norm_forward(
    y: Target, h: Tensor | None, mean: Tensor | None, rstd: Tensor, x: Tensor, branch: Tensor | None,
    bias: Tensor | None, weight: Tensor | None, packed: Tensor, part: int, eps: float, plan: Plan,
) -> None:  # fmt: skip
    """Write ``y``, and for a branch ``h``; no ``mean``: by RMSNorm, which may have a weight."""
    batch, length, width = x.shape
    modulation, stride = _rows(packed, part, 2 if branch is None else 3, width)
    run(
        adaln_fwd_kernel, (batch * plan.blocks,),
        *y, h, mean, rstd, *_contiguous(x, branch, bias, weight), modulation, stride, batch * length, length,
        plan.rows, plan.blocks, eps, **plan.constants,
    )  # fmt: skip


def norm_backward(
    dbranch: Target, dx: Tensor, dpacked: Tensor, dbias: Tensor | None, dweight: Tensor | None, later: Tensor | None,
    dy: Tensor, dh: Tensor | None, x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor | None,
    packed: Tensor, part: int, mean: Tensor | None, rstd: Tensor, plan: Plan,
) -> None:  # fmt: skip
    """Write all gradients; ``dpacked`` is that of this op's parts and ``later``; no ``mean``: of RMSNorm."""
    batch, length, width = x.shape
    parts = 2 if branch is None else 3
    modulation, stride = _rows(packed, part, parts, width)
    partials = _partials(x, plan, parts, bias, weight)
    run(
        adaln_bwd_kernel, (batch * plan.blocks,),
        dx, *dbranch, partials, *_contiguous(dy, dh, x, branch, bias, weight), modulation, *_contiguous(mean, rstd),
        stride, batch * length, length, plan.rows, plan.blocks, **plan.constants,
    )  # fmt: skip
    _fold(dpacked, dbias, dweight, partials, later, part)


def gate_backward(
    dbranch: Target, dpacked: Tensor, dbias: Tensor | None, later: Tensor | None, dh: Tensor, branch: Tensor,
    bias: Tensor | None, packed: Tensor, part: int, plan: Plan,
) -> None:  # fmt: skip
    """Write all gradients; see ``norm_backward``."""
    batch, length, width = dh.shape
    gate, stride = _rows(packed, part, 1, width)
    partials = _partials(dh, plan, 1, bias)
    run(
        adaln_gate_bwd_kernel, gate_grid(dh, plan),
        *dbranch, partials, *_contiguous(dh, branch, bias), gate, stride, batch * length, length, plan.rows,
        plan.blocks, **plan.constants,
    )  # fmt: skip
    _fold(dpacked, dbias, None, partials, later, part)


def gate_grid(x: Tensor, plan: Plan) -> tuple[int, int]:
    """Return the programs of ``gate_backward``, over tokens and columns."""
    return x.shape[0] * plan.blocks, triton.cdiv(x.shape[2], plan.constants["BLOCK_C"])


def _rows(packed: Tensor, part: int, count: int, width: int) -> tuple[Tensor, int]:
    """``count`` parts of a modulation with contiguous rows, usually as they are, and the distance between rows."""
    parts = packed.narrow(1, part * width, count * width)
    parts = parts if parts.stride(1) == 1 else parts.contiguous()
    return parts, parts.stride(0)


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _partials(x: Tensor, plan: Plan, parts: int, *vectors: Tensor | None) -> Tensor:
    """Memory for the partial sums of a backward kernel: those of the modulation, then those of the vectors."""
    sums = parts + sum(vector is not None for vector in vectors)
    return x.new_empty((sums, x.shape[0], plan.blocks, x.shape[2]), dtype=torch.float32)


def _fold(
    dpacked: Tensor, dbias: Tensor | None, dweight: Tensor | None, partials: Tensor, later: Tensor | None, part: int
) -> None:
    """Add up partial sums into the gradients of the modulation, of the bias and of the weight."""
    sums, batch, blocks, width = partials.shape
    parts, vectors = dpacked.shape[1] // width, sum(vector is not None for vector in (dbias, dweight))
    each = triton.cdiv(width, _FOLD["BLOCK_C"])
    run(
        adaln_fold_kernel, (vectors * each + batch * parts * triton.cdiv(width, _FOLD["BLOCK_D"]),),
        dpacked, dbias, dweight, partials, *_contiguous(later), batch, blocks, part, each,
        D=width, SUMS=sums - vectors, PARTS=parts, **_FOLD,
    )  # fmt: skip
