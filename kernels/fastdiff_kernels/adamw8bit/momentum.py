"""Momentum with 8 bits per element: codes, blocks, scales and dither of the first moment of ``AdamW8bit``.

There is no second moment. With the momentum m decoded from the codes of ``companding``, and encoded again::

    m = beta * m + (1 - beta) * grad            grad = grad + share * (m - grad)

In plain torch on every device, some rows of blocks at a time. The trajectory is the same for every cut into ranks, if
the pieces of a block that straddles ranks agree on its scale: the MAX over the ranks of ``largest``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.adamw8bit.blocks import Blocks
from fastdiff_kernels.adamw8bit.companding import decode_m_reference, dither_reference, encode_m_reference
from fastdiff_kernels.adamw8bit.reference import fixed_scales, rows_at_once, rows_of, write


def largest(grad: Tensor, codes: Tensor, scales: Tensor, blocks: Blocks, beta: float, shared: Tensor) -> None:
    """Put the largest magnitudes of the new momentum of straddling blocks into ``shared``, fp32 ``[straddling]``.

    Args:
        grad: fp32 ``[N]``.
        codes: int8 ``[N]``.
        scales: fp32 ``[pieces]``.
        blocks: the pieces.
        beta: decay rate of the momentum.
        shared: changed where this tensor has a piece of the block.
    """
    straddles = blocks.slots >= 0
    piece, slot = blocks.others[straddles].long(), blocks.slots[straddles].long()
    if piece.numel():
        gradients, held = rows_of(grad, blocks.slices)[piece], rows_of(codes, blocks.slices)[piece]
        shared[slot] = _advanced(gradients, held, scales[piece], beta).abs().amax(1)


def mix_(
    grad: Tensor,
    codes: Tensor,
    scales: Tensor,
    blocks: Blocks,
    beta: float,
    share: float,
    number: int,
    shared: Tensor | None = None,
) -> None:
    """Move the momentum by the gradient, and the gradient towards the momentum by ``share``.

    Args:
        grad: fp32 ``[N]``, changed.
        codes: int8 ``[N]``, changed.
        scales: fp32 ``[pieces]``, changed: the largest magnitude of the momentum in each block.
        blocks: the pieces.
        beta: decay rate of the momentum.
        share: 1: the gradient becomes the momentum.
        number: of the step, from 1, for the dither.
        shared: magnitudes of straddling blocks from ``largest``, the largest over the ranks.
    """
    gradients, held = rows_of(grad, blocks.slices), rows_of(codes, blocks.slices)
    fixed = fixed_scales(blocks, None if shared is None else shared[:, None])
    step = rows_at_once(grad.device)
    for first in range(0, blocks.pieces, step):
        some = slice(first, first + step)
        momentum = _advanced(gradients[some], held[some], scales[some], beta)
        found = momentum.abs().amax(1, keepdim=True)
        if fixed is not None:
            found = torch.where(fixed[0][some, None], fixed[1][some], found)
        scales[some] = found[:, 0]
        dither, _ = dither_reference(blocks.phases[some, None], number)
        held[some] = encode_m_reference(momentum, found, dither)
        gradients[some] = torch.lerp(gradients[some], momentum, share)
    for tensor, rows in ((grad, gradients), (codes, held)):
        write(tensor, rows, blocks.slices)


def _advanced(gradients: Tensor, codes: Tensor, scales: Tensor, beta: float) -> Tensor:
    return decode_m_reference(codes, scales[:, None]).lerp_(gradients, 1 - beta)
