"""One step of AdamW with 8-bit moments in plain torch, and the types of its arguments (``kernels``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastdiff_kernels.adamw import step_numbers
from fastdiff_kernels.adamw.averages import averaged_reference
from fastdiff_kernels.adamw8bit.blocks import Blocks, Slice
from fastdiff_kernels.adamw8bit.companding import (
    BLOCK,
    decode_m_reference,
    decode_root_v_reference,
    dither_reference,
    encode_m_reference,
    encode_root_v_reference,
    root_,
)
from fastdiff_kernels.adamw8bit.rounding import round_to_bf16_reference

# Few on a CPU, so that the temporaries stay in the cache; many on a GPU, where each operation is a launch.
_ROWS_AT_ONCE, _ROWS_AT_ONCE_GPU = 512, 2**19


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The numbers of one step, computed in fp64 on the host."""

    number: int
    """From 1."""
    beta1: float
    beta2: float
    shrink: float
    """``1 - lr * weight_decay``; as fp32 it is wrong by up to 3e-8, as in every earlier version."""
    rate: float
    """``lr / (1 - beta1^number)``."""
    correction: float
    """``1 / sqrt(1 - beta2^number)``."""
    eps: float
    seed: int = 0
    """Of the stochastic rounding, in [0, 2**63)."""

    @classmethod
    def of(
        cls, number: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, seed: int = 0
    ) -> Step:
        """Return the numbers of step ``number``."""
        beta1, _, beta2, _, shrink, rate, correction, eps = with_shrink(
            step_numbers(number, lr, betas, eps, weight_decay)
        )
        return cls(
            number=number, beta1=beta1, beta2=beta2, shrink=shrink, rate=rate, correction=correction, eps=eps, seed=seed
        )

    @property
    def numbers(self) -> Sequence[float]:
        """As ``with_shrink`` returns them."""
        betas = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
        return *betas, self.shrink, self.rate, self.correction, self.eps


def with_shrink(numbers: Sequence[float]) -> tuple[float, ...]:
    """Return the numbers of ``adamw.step_numbers`` with ``shrink`` instead of the decay, which this op keeps."""
    return *numbers[:4], 1 - numbers[4], *numbers[5:]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceStep:
    """The numbers of one step on the device of the parameters."""

    number: Tensor
    """int64 scalar, from 1."""
    numbers: Tensor
    """fp32 ``[8]``: those of ``with_shrink``."""
    seed: int = 0
    """As in ``Step``."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The state of one flat tensor."""

    m_codes: Tensor
    """int8 ``[N]``."""
    v_codes: Tensor
    """uint8 ``[N]``."""
    m_scales: Tensor
    """fp32 ``[pieces]``: largest magnitude of m in each block."""
    v_scales: Tensor
    """fp32 ``[pieces]``: largest root of v in each block."""


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """Optional inputs and outputs of a step."""

    grad_scale: Tensor | None = None
    """fp32 scalar that multiplies the gradient."""
    shared: Tensor | None = None
    """Scales of straddling blocks, fp32 ``[straddling, 2]``, from ``largest`` and a MAX over the ranks."""
    copy: Tensor | None = None
    """Receives the new parameters, ``[N]``, rounded to its dtype."""
    averages: Sequence[Tensor] = ()
    """Each fp32 ``[N]``, moved towards the new parameters (``adamw.averages``)."""
    shares: Tensor | None = None
    """By which each average is moved, fp32 ``[len(averages)]`` in [0, 1]."""
    skip: Tensor | None = None
    """bool or fp32 scalar: not zero: nothing changes."""


def _advance(
    grad: Tensor, m_codes: Tensor, v_codes: Tensor, m_scales: Tensor, v_scales: Tensor, step: Step | DeviceStep,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """New m and root of v, fp32 ``[blocks, BLOCK]``."""
    beta1, beta1_rest, beta2, beta2_rest = step.numbers[:4]
    g = grad.to(torch.float32) if scale is None else grad.to(torch.float32) * scale
    m = decode_m_reference(m_codes, m_scales[:, None]).mul_(beta1)
    m.add_(g * beta1_rest)
    v = decode_root_v_reference(v_codes, v_scales[:, None]).square_().mul_(beta2)
    v.add_((g * beta2_rest).mul_(g))
    return m, root_(v)


def largest_reference(grad: Tensor, moments: Moments, blocks: Blocks, step: Step, scale: Tensor | None) -> Tensor:
    """``largest`` in plain torch."""
    straddles = blocks.slots >= 0
    piece, slot = blocks.others[straddles].long(), blocks.slots[straddles].long()
    lane = torch.arange(BLOCK, device=grad.device) - blocks.lanes[straddles, None]
    inside = (lane >= 0) & (lane < blocks.lengths[straddles, None])
    index = torch.where(inside, blocks.offsets[piece, None] + lane, 0)
    g, m, v = (torch.where(inside, flat[index], 0) for flat in (grad, moments.m_codes, moments.v_codes))
    m, root = _advance(g, m, v, moments.m_scales[piece], moments.v_scales[piece], step, scale)
    shared = torch.zeros(blocks.straddling, 2, dtype=torch.float32, device=grad.device)
    shared[slot] = _largest(m, root)
    return shared


def over_ranks(shared: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the largest scales over the ranks, in place; as integers magnitudes keep their order, NaN above all."""
    torch.distributed.all_reduce(shared.view(torch.int32), torch.distributed.ReduceOp.MAX, group)
    return shared


def _largest(m: Tensor, root: Tensor) -> Tensor:
    # The magnitude also of the root, which is not negative: a NaN may be, and would lose the maximum over the ranks.
    return torch.stack([m.abs().amax(1), root.abs().amax(1)], 1)


def adamw8bit_reference(
    param: Tensor, grad: Tensor, moments: Moments, blocks: Blocks, step: Step | DeviceStep, extras: Extras
) -> None:
    """``adamw8bit`` in plain torch."""
    if extras.skip is not None:
        _skipping(param, grad, moments, blocks, step, extras, extras.skip)
        return
    _, _, _, _, shrink, rate, correction, eps = step.numbers
    flats = [param, moments.m_codes, moments.v_codes, *extras.averages]
    flats += [] if extras.copy is None else [extras.copy]
    rows = [rows_of(flat, blocks.slices) for flat in flats]
    grads = rows_of(grad, blocks.slices)
    fixed = fixed_scales(blocks, extras.shared)
    at_once = rows_at_once(param.device)
    for first in range(0, blocks.pieces, at_once):
        some = slice(first, first + at_once)
        w, m_codes, v_codes, *others = (row[some] for row in rows)
        m_scales, v_scales, phase = moments.m_scales[some], moments.v_scales[some], blocks.phases[some, None]
        m, root = _advance(grads[some], m_codes, v_codes, m_scales, v_scales, step, extras.grad_scale)
        scales = _largest(m, root)
        if fixed is not None:
            scales = torch.where(fixed[0][some, None], fixed[1][some], scales)
        m_scales.copy_(scales[:, 0])
        v_scales.copy_(scales[:, 1])
        m_dither, v_dither = dither_reference(phase, step.number)
        m_codes.copy_(encode_m_reference(m, scales[:, :1], m_dither))
        v_codes.copy_(encode_root_v_reference(root, scales[:, 1:], v_dither))
        new = (w.to(torch.float32) * shrink).sub_(m.mul_(rate).div_(root.mul_(correction).add_(eps)))
        w.copy_(new if w.dtype == torch.float32 else round_to_bf16_reference(new, phase, step.number, step.seed))
        if extras.shares is not None:
            for average, share in zip(others, extras.shares, strict=False):
                average.copy_(averaged_reference(average, new, share))
        if extras.copy is not None:
            others[-1].copy_(new)
    for flat, row in zip(flats, rows, strict=True):
        write(flat, row, blocks.slices)


def _skipping(
    param: Tensor, grad: Tensor, moments: Moments, blocks: Blocks, step: Step | DeviceStep, extras: Extras, skip: Tensor
) -> None:
    """Take the step on copies; keep nothing of them if ``skip`` is not zero."""
    states = [param, moments.m_codes, moments.v_codes, moments.m_scales, moments.v_scales, *extras.averages]
    states += [] if extras.copy is None else [extras.copy]
    new = [state.clone() for state in states]
    copy = None if extras.copy is None else new[-1]
    averages = new[5 : 5 + len(extras.averages)]
    without = replace(extras, skip=None, averages=averages, copy=copy)
    adamw8bit_reference(new[0], grad, Moments(*new[1:5]), blocks, step, without)
    for state, value in zip(states, new, strict=True):
        state.copy_(torch.where(skip != 0, state, value))


def fixed_scales(blocks: Blocks, shared: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Which pieces have scales that were agreed on, bool ``[pieces]``, and those, fp32 ``[pieces, K]``.

    Args:
        blocks: the pieces.
        shared: scales of straddling blocks, fp32 ``[straddling, K]``; None: there are none.
    """
    if shared is None:
        return None
    straddles = blocks.slots >= 0
    piece = blocks.others[straddles].long()
    which = torch.zeros(blocks.pieces, dtype=torch.bool, device=shared.device)
    values = torch.zeros(blocks.pieces, shared.shape[1], dtype=torch.float32, device=shared.device)
    which[piece] = True
    values[piece] = shared[blocks.slots[straddles].long()]
    return which, values


def rows_at_once(device: torch.device) -> int:
    """Return how many blocks plain torch updates at once."""
    return _ROWS_AT_ONCE if device.type == "cpu" else _ROWS_AT_ONCE_GPU


def _whole_blocks(slices: Sequence[Slice]) -> bool:
    return len(slices) == 1 and slices[0].start % BLOCK == 0 and slices[0].numel % BLOCK == 0


def rows_of(flat: Tensor, slices: Sequence[Slice]) -> Tensor:
    """The blocks ``[pieces, BLOCK]`` of a flat tensor, zero outside of the pieces; a view if there is no outside."""
    if _whole_blocks(slices):
        return flat.narrow(0, slices[0].offset, slices[0].numel).view(-1, BLOCK)
    zeros = flat.new_zeros(BLOCK)
    parts = [zeros[:0]]
    for piece in slices:
        head, tail = piece.start % BLOCK, -(piece.start + piece.numel) % BLOCK
        parts += [zeros[:head], flat.narrow(0, piece.offset, piece.numel), zeros[:tail]]
    return torch.cat(parts).view(-1, BLOCK)


def write(flat: Tensor, rows: Tensor, slices: Sequence[Slice]) -> None:
    """Copy blocks back to where ``rows_of`` took them from."""
    if not slices or _whole_blocks(slices):  # a view
        return
    targets, values, begin = [], [], 0
    for piece in slices:
        targets.append(flat.narrow(0, piece.offset, piece.numel))
        values.append(rows.view(-1).narrow(0, begin + piece.start % BLOCK, piece.numel))
        begin += BLOCK * (-(-(piece.start + piece.numel) // BLOCK) - piece.start // BLOCK)
    torch._foreach_copy_(targets, values)
