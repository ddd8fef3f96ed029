"""AdamW with 8-bit moments: one pass over a flat tensor of parameters, however they are cut over ranks.

Formula (Loshchilov & Hutter 2019, "Decoupled weight decay regularization", algorithm 2), for each element, with the
moments decoded from the codes of ``companding`` and encoded again::

    g = grad_scale * grad                    m = beta1 * m + (1 - beta1) * g      v = beta2 * v + (1 - beta2) * g^2
    w = (1 - lr * weight_decay) * w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

``grad_scale`` unscales and clips. In the same pass, on request: a copy of w in another dtype, and any number of
averages of w (``adamw.averages``). Parameters in bf16 are rounded stochastically (``rounding``). The numbers of the
step are arguments of the launch (``Step``), or are read on the device (``DeviceStep``), with equal bits. The flag
``skip`` is read on the device, and leaves everything as it is, whatever the gradient.

Blocks of 256 elements are cut in the coordinates of the parameter, and dither and rounding are functions of the place
in the parameter and the step, so that the trajectory is bitwise the same for every cut into ranks. The pieces of a
block that straddles ranks agree on its two scales in an all-reduce (MAX) of 8 bytes per such block.

Every operation is rounded on its own (no fused multiply-add) and correctly, so that torch and Triton agree to the bit.

Bytes per parameter, fp32 parameters, bf16 gradient and bf16 copy: parameter 4 + 4, gradient 2, m 1 + 1, v 1 + 1, copy 2
= 16, scales and block table (8 + 8 + 16 of 256 elements) 0.13; each average adds 8. That is the limit: nothing is read
or written twice. Inductor's code for one flat tensor that is cut into blocks from its beginning moves 16.06;
DeepSpeed's separate passes (gradient to fp32, unscale, Adam, copy, average) 48 to 60. The state holds 2 + 24 / 256 =
2.09 bytes per parameter, the table of blocks included.

Limits: pieces that are not a whole block at a multiple of 16 elements go through a launch with masks and accesses of
one element per thread. Those are the last block of a parameter, everything behind a parameter of odd size in a flat
tensor, and under ZeRO-1 and 2 nearly all blocks of a rank whose part does not begin at a multiple of 16 elements in the
parameter that it cuts (DiT-XL/2 on 2, 4 and 8 ranks: all ranks but the first).

A gradient that is not finite, or whose square overflows, makes a scale of its block NaN or infinite, and with it, two
steps later at the latest, all the block's parameters NaN. The trainer skips such steps before they reach the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastdiff_kernels.adamw import NUMBERS
from fastdiff_kernels.adamw.arguments import check, check_averages, check_skip
from fastdiff_kernels.adamw.averages import update_averages
from fastdiff_kernels.adamw8bit.blocks import Blocks
from fastdiff_kernels.adamw8bit.companding import decode_m, decode_root_v, dither, encode_m, encode_root_v
from fastdiff_kernels.adamw8bit.compiled import adamw8bit_compiled
from fastdiff_kernels.adamw8bit.reference import (
    DeviceStep,
    Extras,
    Moments,
    Step,
    adamw8bit_reference,
    largest_reference,
)
from fastdiff_kernels.adamw8bit.rounding import round_to_bf16
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend

_ROWS = 8
_WARPS = 4  # 16 elements per thread: one access of 128 bits for the codes
_MASKED_ROWS = 4
_MASKED_WARPS = 8


@jit
def _load(  # type: ignore[no-untyped-def]
    rows, offsets_ptr, phases_ptr, table_ptr, count, lanes_ptr, lengths_ptr,
    BLOCK_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Of ``BLOCK_ROWS`` pieces: which exist, index and phase; of their elements: place in the flat tensor and mask."""
    lane = tl.arange(0, 256)[None, :]
    exists = rows < count
    piece = tl.load(table_ptr + rows, mask=exists, other=0)
    offset = tl.load(offsets_ptr + piece, mask=exists, other=0)
    phase = tl.load(phases_ptr + piece, mask=exists, other=0)
    if ALIGNED:
        mask = exists[:, None] & (lane >= 0)
        place = tl.multiple_of(offset, 16)[:, None] + lane
    else:
        first = tl.load(lanes_ptr + rows, mask=exists, other=0)
        length = tl.load(lengths_ptr + rows, mask=exists, other=0)
        mask = (lane >= first[:, None]) & (lane < (first + length)[:, None])
        place = (offset - first)[:, None] + lane
    return exists, piece, phase, place, mask


@jit
def _moments(  # type: ignore[no-untyped-def]
    grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr,
    exists, piece, place, mask, beta1, beta1_rest, beta2, beta2_rest,
):  # fmt: skip
    """New m and root of v, fp32 ``[BLOCK_ROWS, 256]``; zero where masked."""
    g = tl.load(grad_ptr + place, mask=mask, other=0).to(tl.float32)
    if grad_scale_ptr is not None:
        g = g * tl.load(grad_scale_ptr)
    m_scale = tl.load(m_scales_ptr + piece, mask=exists, other=0)[:, None]
    v_scale = tl.load(v_scales_ptr + piece, mask=exists, other=0)[:, None]
    m = decode_m(tl.load(m_codes_ptr + place, mask=mask, other=0), m_scale) * beta1 + g * beta1_rest
    root = decode_root_v(tl.load(v_codes_ptr + place, mask=mask, other=0), v_scale)
    v = root * root * beta2 + g * beta2_rest * g
    # A masked element of a block whose scale is not finite would be NaN.
    return tl.where(mask, m, 0.0), tl.where(mask, tl.math.sqrt_rn(v), 0.0)


@jit
def _row_maximum(value):  # type: ignore[no-untyped-def]
    """Largest magnitude of each row. The patterns of non-negative floats are ordered as they are, NaN above all."""
    return tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)


@jit
def _adamw8bit_largest_kernel(  # type: ignore[no-untyped-def]
    shared_ptr, grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, offsets_ptr, phases_ptr,
    table_ptr, lanes_ptr, lengths_ptr, slots_ptr,
    count, beta1, beta1_rest, beta2, beta2_rest,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program finds the largest m and root of v in ``BLOCK_ROWS`` pieces, and stores those of straddling blocks."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists, piece, _, place, mask = _load(
        rows, offsets_ptr, phases_ptr, table_ptr, count, lanes_ptr, lengths_ptr, BLOCK_ROWS, False
    )
    slot = tl.load(slots_ptr + rows, mask=exists, other=-1)
    straddles = slot >= 0
    mask = mask & straddles[:, None]
    m, root = _moments(
        grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, exists, piece, place, mask,
        beta1, beta1_rest, beta2, beta2_rest,
    )  # fmt: skip
    tl.store(shared_ptr + 2 * slot, _row_maximum(m), mask=straddles)
    tl.store(shared_ptr + 2 * slot + 1, _row_maximum(root), mask=straddles)


@jit
def _applies(skip_ptr):  # type: ignore[no-untyped-def]
    """Whether the step is taken."""
    if skip_ptr is None:
        return True
    else:
        return tl.load(skip_ptr) == 0


@jit
def _update(  # type: ignore[no-untyped-def]
    param_ptr, grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, shared_ptr, copy_ptr,
    averages_ptr, shares_ptr, offsets_ptr, phases_ptr, number_ptr, numbers_ptr, table_ptr, lanes_ptr, lengths_ptr,
    slots_ptr, count, step16, seed, beta1, beta1_rest, beta2, beta2_rest, shrink, rate, correction, eps,
    BLOCK_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    step = step16 // 16
    if numbers_ptr is not None:
        step = tl.load(number_ptr)
        beta1, beta1_rest = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
        beta2, beta2_rest = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
        shrink, rate = tl.load(numbers_ptr + 4), tl.load(numbers_ptr + 5)
        correction, eps = tl.load(numbers_ptr + 6), tl.load(numbers_ptr + 7)
    exists, piece, phase, place, mask = _load(
        rows, offsets_ptr, phases_ptr, table_ptr, count, lanes_ptr, lengths_ptr, BLOCK_ROWS, ALIGNED
    )
    m, root = _moments(
        grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, exists, piece, place, mask,
        beta1, beta1_rest, beta2, beta2_rest,
    )  # fmt: skip
    m_scale, v_scale = _row_maximum(m), _row_maximum(root)
    if shared_ptr is not None and not ALIGNED:
        slot = tl.load(slots_ptr + rows, mask=exists, other=-1)
        m_scale = tl.where(slot >= 0, tl.load(shared_ptr + 2 * slot, mask=slot >= 0, other=0), m_scale)
        v_scale = tl.where(slot >= 0, tl.load(shared_ptr + 2 * slot + 1, mask=slot >= 0, other=0), v_scale)
    tl.store(m_scales_ptr + piece, m_scale, mask=exists)
    tl.store(v_scales_ptr + piece, v_scale, mask=exists)
    w = tl.load(param_ptr + place, mask=mask, other=0).to(tl.float32)
    w = w * shrink - tl.math.div_rn(m * rate, root * correction + eps)
    if param_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(param_ptr + place, round_to_bf16(w, phase, step, seed, BLOCK_ROWS), mask=mask)
    else:
        tl.store(param_ptr + place, w, mask=mask)
    update_averages(averages_ptr, shares_ptr, place, mask, w)
    if copy_ptr is not None:
        tl.store(copy_ptr + place, w.to(copy_ptr.dtype.element_ty), mask=mask)
    m_dither, v_dither = dither(phase[:, None], tl.arange(0, 256)[None, :], step)
    tl.store(m_codes_ptr + place, encode_m(m, m_scale[:, None], m_dither), mask=mask)
    tl.store(v_codes_ptr + place, encode_root_v(root, v_scale[:, None], v_dither), mask=mask)


@jit
def _adamw8bit_aligned_kernel(  # type: ignore[no-untyped-def]
    param_ptr, grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, copy_ptr, averages_ptr,
    shares_ptr, offsets_ptr, phases_ptr, number_ptr, numbers_ptr, skip_ptr, table_ptr,
    count, step16, seed, beta1, beta1_rest, beta2, beta2_rest, shrink, rate, correction, eps,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program updates ``BLOCK_ROWS`` aligned blocks."""
    if _applies(skip_ptr):
        _update(
            param_ptr, grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, None, copy_ptr,
            averages_ptr, shares_ptr, offsets_ptr, phases_ptr, number_ptr, numbers_ptr, table_ptr, None, None, None,
            count, step16, seed, beta1, beta1_rest, beta2, beta2_rest, shrink, rate, correction, eps, BLOCK_ROWS, True,
        )  # fmt: skip


@jit
def _adamw8bit_masked_kernel(  # type: ignore[no-untyped-def]
    param_ptr, grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, copy_ptr, averages_ptr,
    shares_ptr, offsets_ptr, phases_ptr, number_ptr, numbers_ptr, skip_ptr, table_ptr,
    count, step16, seed, beta1, beta1_rest, beta2, beta2_rest, shrink, rate, correction, eps,
    shared_ptr, lanes_ptr, lengths_ptr, slots_ptr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program updates ``BLOCK_ROWS`` pieces of any length and place."""
    if _applies(skip_ptr):
        _update(
            param_ptr, grad_ptr, m_codes_ptr, v_codes_ptr, m_scales_ptr, v_scales_ptr, grad_scale_ptr, shared_ptr,
            copy_ptr, averages_ptr, shares_ptr, offsets_ptr, phases_ptr, number_ptr, numbers_ptr, table_ptr, lanes_ptr,
            lengths_ptr, slots_ptr,
            count, step16, seed, beta1, beta1_rest, beta2, beta2_rest, shrink, rate, correction, eps, BLOCK_ROWS, False,
        )  # fmt: skip


def _table(blocks: Blocks) -> list[Tensor]:
    b = blocks
    return [b.offsets, b.phases, b.aligned, b.others, b.lanes, b.lengths, b.slots]


def _validate(
    param: Tensor, grad: Tensor, moments: Moments, blocks: Blocks, step: Step | DeviceStep, extras: Extras
) -> None:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    numel, pieces = (param.numel(),), (blocks.pieces,)
    check("param", param, numel, (torch.float32, torch.bfloat16), param.device)
    check("grad", grad, numel, floats, param.device)
    check("m_codes", moments.m_codes, numel, (torch.int8,), param.device)
    check("v_codes", moments.v_codes, numel, (torch.uint8,), param.device)
    check("m_scales", moments.m_scales, pieces, (torch.float32,), param.device)
    check("v_scales", moments.v_scales, pieces, (torch.float32,), param.device)
    if isinstance(step, DeviceStep):
        check("number", step.number, (), (torch.int64,), param.device)
        check("numbers", step.numbers, (NUMBERS,), (torch.float32,), param.device)
    if extras.grad_scale is not None:
        check("grad_scale", extras.grad_scale, (), (torch.float32,), param.device)
    if extras.skip is not None:
        check_skip(extras.skip, param.device)
    check_averages(extras.averages, extras.shares, param)
    if extras.copy is not None:
        check("copy", extras.copy, numel, floats, param.device)
    if extras.shared is not None:
        check("shared", extras.shared, (blocks.straddling, 2), (torch.float32,), param.device)
    elif blocks.straddling:
        raise ValueError(
            f"{blocks.straddling} blocks straddle ranks, expected their shared scales: the maximum over the ranks of "
            "what adamw8bit.kernels.largest returns"
        )


@torch.library.custom_op(
    "fastdiff::adamw8bit", mutates_args=("param", "m_codes", "v_codes", "m_scales", "v_scales", "copy", "averages")
)
def _adamw8bit_triton(
    param: Tensor, grad: Tensor, m_codes: Tensor, v_codes: Tensor, m_scales: Tensor, v_scales: Tensor,
    copy: Tensor | None, averages: Sequence[Tensor], shares: Tensor | None, grad_scale: Tensor | None,
    shared: Tensor | None, skip: Tensor | None, table: Sequence[Tensor], number: int, seed: int,
    numbers: Sequence[float], device_number: Tensor | None, device_numbers: Tensor | None,
) -> None:  # fmt: skip
    """Launch the update; ``table`` as from ``_table``, ``number`` and ``numbers`` unless those of the device exist."""
    offsets, phases, aligned, others, *masks = table
    flats = (
        param, grad, m_codes, v_codes, m_scales, v_scales, grad_scale, copy, tuple(averages), shares, offsets, phases,
        device_number, device_numbers, skip,
    )  # fmt: skip
    # An integer argument that 16 divides is a type of its own to Triton: the number of the step would be two.
    steps = (16 * number, seed, *numbers)
    run(
        _adamw8bit_aligned_kernel, (-(-aligned.numel() // _ROWS),), *flats, aligned, aligned.numel(), *steps,
        BLOCK_ROWS=_ROWS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    run(
        _adamw8bit_masked_kernel, (-(-others.numel() // _MASKED_ROWS),), *flats, others, others.numel(), *steps,
        shared, *masks, BLOCK_ROWS=_MASKED_ROWS, num_warps=_MASKED_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@torch.library.custom_op("fastdiff::adamw8bit_largest", mutates_args=())
def _largest_triton(
    grad: Tensor, m_codes: Tensor, v_codes: Tensor, m_scales: Tensor, v_scales: Tensor, grad_scale: Tensor | None,
    table: Sequence[Tensor], straddling: int, numbers: Sequence[float],
) -> Tensor:  # fmt: skip
    offsets, phases, _, others, lanes, lengths, slots = table
    shared = torch.zeros(straddling, 2, dtype=torch.float32, device=grad.device)
    run(
        _adamw8bit_largest_kernel, (-(-others.numel() // _MASKED_ROWS),),
        shared, grad, m_codes, v_codes, m_scales, v_scales, grad_scale, offsets, phases, others, lanes, lengths, slots,
        others.numel(), *numbers, BLOCK_ROWS=_MASKED_ROWS, num_warps=_MASKED_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return shared


@_largest_triton.register_fake
def _(
    grad: Tensor, m_codes: Tensor, v_codes: Tensor, m_scales: Tensor, v_scales: Tensor, grad_scale: Tensor | None,
    table: Sequence[Tensor], straddling: int, numbers: Sequence[float],
) -> Tensor:  # fmt: skip
    return grad.new_empty(straddling, 2, dtype=torch.float32)


def largest(
    grad: Tensor, moments: Moments, blocks: Blocks, step: Step, scale: Tensor | None, backend: Backend | None = None
) -> Tensor:
    """Largest m and root of v after ``step`` in this rank's pieces of the blocks that straddle ranks.

    Args:
        grad: ``[N]``, fp32, bf16 or fp16.
        moments: before the step.
        blocks: where the pieces lie in ``[N]``.
        step: the numbers of the step.
        scale: fp32 scalar that multiplies the gradient, or None.
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        fp32 ``[blocks.straddling, 2]``, zero for blocks of which this rank has no piece. The int32 patterns are
        ordered as the numbers are, with NaN above all: their maximum over the ranks makes ``Extras.shared``.
    """
    chosen = choose("adamw8bit", grad, backend)
    if chosen != "triton":
        # On a CPU a rank has at most two such blocks per tensor, too few to compile for.
        function = largest_reference if grad.device.type == "cpu" else plain(largest_reference, chosen)
        shared: Tensor = function(grad, moments, blocks, step, scale)
        return shared
    m = moments
    out: Tensor = _largest_triton(
        grad, m.m_codes, m.v_codes, m.m_scales, m.v_scales, scale, _table(blocks), blocks.straddling,
        step.numbers[:4],
    )  # fmt: skip
    return out


def adamw8bit(
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    blocks: Blocks,
    step: Step | DeviceStep,
    extras: Extras | None = None,
    backend: Backend | None = None,
) -> None:
    """Take one step of AdamW in place; elements of ``param`` outside of all pieces stay as they are.

    Args:
        param: ``[N]``, fp32 or bf16.
        grad: ``[N]``, fp32, bf16 or fp16.
        moments: of the parameters; zeros before the first step.
        blocks: where the pieces of the parameters' blocks lie in ``[N]``.
        step: the numbers of the step.
        extras: scale of the gradient, shared scales (needed if ``blocks.straddling``), copy, averages and ``skip``.
        backend: implementation; None: the default of ``dispatch.choose``.

    Raises:
        ValueError: a tensor of another shape, dtype, device or stride, or shared scales missing.
        RuntimeError: Triton was requested, or ``compile`` on a CPU, and cannot run here.
    """
    extras = extras or Extras()
    _validate(param, grad, moments, blocks, step, extras)
    chosen = choose("adamw8bit", param, backend)
    if chosen == "triton":
        _launch(param, grad, moments, blocks, step, extras)
        return
    if param.device.type == "cpu" and extras.skip is not None and not torch.compiler.is_compiling():
        if extras.skip:  # the host waits for no device
            return
        extras = replace(extras, skip=None)
    if chosen == "compile" and param.device.type == "cpu" and param.dtype == torch.float32:
        adamw8bit_compiled(param, grad, moments, blocks, step, extras)
    else:
        plain(adamw8bit_reference, chosen)(param, grad, moments, blocks, step, extras)


def _launch(param: Tensor, grad: Tensor, m: Moments, blocks: Blocks, step: Step | DeviceStep, extras: Extras) -> None:
    of_device = isinstance(step, DeviceStep)
    number, numbers = (0, [0.0] * NUMBERS) if of_device else (step.number, step.numbers)
    _adamw8bit_triton(
        param, grad, m.m_codes, m.v_codes, m.m_scales, m.v_scales, extras.copy, extras.averages, extras.shares,
        extras.grad_scale, extras.shared, extras.skip, _table(blocks), number, step.seed, numbers,
        step.number if of_device else None, step.numbers if of_device else None,
    )  # fmt: skip
