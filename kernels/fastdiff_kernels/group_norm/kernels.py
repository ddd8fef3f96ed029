"""Triton kernels of ``group_norm``: statistics, folds and apply passes, and the forms that do all in one program.

A sample is a matrix of ``hw`` positions and ``channels`` columns, whose strides ``stride_p`` and ``stride_c`` are
``(channels, 1)`` for channels_last and ``(1, hw)`` for contiguous memory: a stride that is 1 is compiled as a constant,
so one kernel has wide accesses in both. Elements of a sample are addressed in 32 bits, samples in 64.

Statistics are gathered per channel first, because SD has 10, 20, 30, 40, 60 or 80 channels per group: no power of two,
and in channels_last memory no multiple of 16 bytes. Partial results are ``[N, chunks, 2, C]`` fp32, where a chunk is
``rows`` positions. Everything is summed in a fixed order.

Variance: sums about a pivot, the mean of the first tile, merged by the formulas of Chan, Golub & LeVeque 1983,
"Algorithms for computing the sample variance", so that a mean that is large against the spread costs nothing.
"""

from __future__ import annotations

from fastdiff_kernels.group_norm.arithmetic import (
    activation,
    activation_gradient,
    divide,
    fold_in_registers,
    not_negative,
    reciprocal_root,
)
from fastdiff_kernels.launch import jit, tl


@jit
def _place(chunks, blocks):  # type: ignore[no-untyped-def]
    """Sample (int64), chunk and block of channels of this program; neighbours share the rows of memory."""
    program = tl.program_id(0)
    return (program // (chunks * blocks)).to(tl.int64), (program // blocks) % chunks, program % blocks


@jit
def _tile(p, c, last, channels, stride_p, stride_c):  # type: ignore[no-untyped-def]
    """Offsets within a sample and mask of positions ``p`` below ``last`` and channels ``c``."""
    return p[None, :] * stride_p + c[:, None] * stride_c, (p < last)[None, :] & (c < channels)[:, None]


@jit
def _load(x_ptr, offset, mask):  # type: ignore[no-untyped-def]
    """An fp32 block, 0 where it is masked; zeros if there is no such tensor."""
    value = tl.zeros_like(offset).to(tl.float32)
    if x_ptr is not None:
        value = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return value


@jit
def _sum_input(x_ptr, residual_ptr, h_ptr, added, offset, inside):  # type: ignore[no-untyped-def]
    """``x``; with a residual ``x + residual + added``, which is stored, as the dtype of ``h`` holds it."""
    value = _load(x_ptr, offset, inside)
    if residual_ptr is not None:
        total = (value + _load(residual_ptr, offset, inside) + added[:, None]).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + offset, total, mask=inside)
        value = total.to(tl.float32)
    return value


@jit
def group_norm_fwd_statistics_kernel(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, residual_ptr, h_ptr, partial_ptr, hw, channels, stride_p, stride_c, rows, chunks, blocks,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of each channel of a chunk; stores ``h`` if there is a residual."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    added = _load(shift_ptr, sample * channels + c, c < channels)
    x_ptr += sample * channels * hw
    if residual_ptr is not None:
        residual_ptr += sample * channels * hw
        h_ptr += sample * channels * hw
    first = chunk * rows
    last = tl.minimum(first + rows, hw)
    p = first + tl.arange(0, BLOCK_HW)
    offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
    value = _sum_input(x_ptr, residual_ptr, h_ptr, added, offset, inside)
    pivot = divide(tl.sum(value, axis=1), tl.minimum(BLOCK_HW, last - first))
    deviation = tl.where(inside, value - pivot[:, None], 0.0)
    sums, squares = deviation, deviation * deviation
    for start in range(first + BLOCK_HW, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        value = _sum_input(x_ptr, residual_ptr, h_ptr, added, offset, inside)
        deviation = tl.where(inside, value - pivot[:, None], 0.0)
        sums += deviation
        squares += deviation * deviation
    total = tl.sum(sums, axis=1)
    off_pivot = divide(total, last - first)
    mean = pivot + off_pivot
    if residual_ptr is None:
        mean += added
    out_ptr = partial_ptr + (sample * chunks + chunk) * 2 * channels + c
    tl.store(out_ptr, mean, mask=c < channels)
    tl.store(out_ptr + channels, not_negative(tl.sum(squares, axis=1) - total * off_pivot), mask=c < channels)


@jit
def group_norm_fwd_fold_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, mean_ptr, rstd_ptr, hw, channels, rows, chunks, groups, eps,
    PER_GROUP: tl.constexpr, BLOCK_PARTIALS: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / standard deviation of one group of one sample from its channels' chunks."""
    program = tl.program_id(0).to(tl.int64)
    partial_ptr += (program // groups) * chunks * 2 * channels + (program % groups) * PER_GROUP
    number = hw * (PER_GROUP * 1.0)
    sums = tl.zeros([BLOCK_PARTIALS], tl.float32)
    for start in range(0, chunks * PER_GROUP, BLOCK_PARTIALS):
        index = start + tl.arange(0, BLOCK_PARTIALS)
        chunk = index // PER_GROUP
        inside = chunk < chunks
        count = tl.minimum(rows, hw - chunk * rows).to(tl.float32)
        sums += count * tl.load(partial_ptr + chunk * 2 * channels + index % PER_GROUP, mask=inside, other=0.0)
    mean = divide(tl.sum(sums, axis=0), number)
    sums = tl.zeros([BLOCK_PARTIALS], tl.float32)
    squares = tl.zeros([BLOCK_PARTIALS], tl.float32)
    for start in range(0, chunks * PER_GROUP, BLOCK_PARTIALS):
        index = start + tl.arange(0, BLOCK_PARTIALS)
        chunk = index // PER_GROUP
        inside = chunk < chunks
        count = tl.minimum(rows, hw - chunk * rows).to(tl.float32)
        at_ptr = partial_ptr + chunk * 2 * channels + index % PER_GROUP
        deviation = tl.where(inside, tl.load(at_ptr, mask=inside, other=0.0) - mean, 0.0)
        sums += count * deviation
        squares += tl.load(at_ptr + channels, mask=inside, other=0.0) + count * deviation * deviation
    # The mean was rounded: what is left of the deviations corrects it and the variance.
    rest = divide(tl.sum(sums, axis=0), number)
    variance = not_negative(divide(tl.sum(squares, axis=0), number) - rest * rest)
    tl.store(mean_ptr + program, mean + rest)
    tl.store(rstd_ptr + program, reciprocal_root(variance + eps))


@jit
def _affine_place(sample, c, channels, OWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of weight and bias of channels ``c``; ``OWN``: each sample has its own."""
    if OWN:
        c = sample * channels + c
    return c


@jit
def _numbers(  # type: ignore[no-untyped-def]
    mean_ptr, rstd_ptr, shift_ptr, weight_ptr, bias_ptr, sample, c, here, channels,
    PER_GROUP: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Per channel: center of the input, reciprocal of its spread, weight and bias."""
    group = sample * (channels // PER_GROUP) + c // PER_GROUP
    center = _load(mean_ptr, group, here) - _load(shift_ptr, sample * channels + c, here)
    at = _affine_place(sample, c, channels, OWN)
    return center, _load(rstd_ptr, group, here), _load(weight_ptr, at, here), _load(bias_ptr, at, here)


@jit
def group_norm_fwd_apply_kernel(  # type: ignore[no-untyped-def]
    h_ptr, shift_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, y_ptr, hw, channels, stride_p, stride_c, rows, chunks,
    blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Output of one chunk of a block of channels."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    here = c < channels
    center, spread, factor, base = _numbers(
        mean_ptr, rstd_ptr, shift_ptr, weight_ptr, bias_ptr, sample, c, here, channels, PER_GROUP, OWN
    )
    scale = spread * factor
    h_ptr += sample * channels * hw
    y_ptr += sample * channels * hw
    last = tl.minimum((chunk + 1) * rows, hw)
    for start in range(chunk * rows, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        z = (_load(h_ptr, offset, inside) - center[:, None]) * scale[:, None] + base[:, None]
        tl.store(y_ptr + offset, activation(z, SILU).to(y_ptr.dtype.element_ty), mask=inside)


@jit
def group_norm_fwd_one_pass_kernel(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, residual_ptr, weight_ptr, bias_ptr, h_ptr, y_ptr, mean_ptr, rstd_ptr, hw, channels, stride_p,
    stride_c, blocks, eps,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, SPAN: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Output and statistics of ``SPAN`` whole groups of one sample; ``BLOCK_GROUPS``: the next power of 2."""
    sample, _, block = _place(1, blocks)
    lane = tl.arange(0, BLOCK_C)
    c = block * (SPAN * PER_GROUP) + lane
    end = tl.minimum(channels, (block + 1) * (SPAN * PER_GROUP))
    group, here = lane // PER_GROUP, c < end
    added = _load(shift_ptr, sample * channels + c, here)
    x_ptr += sample * channels * hw
    y_ptr += sample * channels * hw
    if residual_ptr is not None:
        residual_ptr += sample * channels * hw
        h_ptr += sample * channels * hw
    offset, inside = _tile(tl.arange(0, BLOCK_HW), c, hw, end, stride_p, stride_c)
    value = _sum_input(x_ptr, residual_ptr, h_ptr, added, offset, inside)
    if residual_ptr is not None:
        added = tl.zeros_like(added)
    channel_mean = tl.where(here, divide(tl.sum(value, axis=1), hw) + added, 0.0)
    center = divide(fold_in_registers(channel_mean, group, BLOCK_GROUPS), PER_GROUP) - added
    deviation = tl.where(inside, value - center[:, None], 0.0)
    number = hw * (PER_GROUP * 1.0)
    # The mean was rounded: what is left of the deviations corrects it and the variance.
    rest = divide(fold_in_registers(tl.sum(deviation, axis=1), group, BLOCK_GROUPS), number)
    squares = fold_in_registers(tl.sum(deviation * deviation, axis=1), group, BLOCK_GROUPS)
    rstd = reciprocal_root(not_negative(divide(squares, number) - rest * rest) + eps)
    at = _affine_place(sample, c, channels, OWN)
    z = (deviation - rest[:, None]) * (rstd * _load(weight_ptr, at, here))[:, None] + _load(bias_ptr, at, here)[:, None]
    tl.store(y_ptr + offset, activation(z, SILU).to(y_ptr.dtype.element_ty), mask=inside)
    out = sample * (channels // PER_GROUP) + c // PER_GROUP
    leads = here & (c % PER_GROUP == 0)
    tl.store(mean_ptr + out, center + rest + added, mask=leads)
    tl.store(rstd_ptr + out, rstd, mask=leads)


@jit
def _gradient(h_ptr, dy_ptr, center, spread, factor, base, offset, inside, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The normalised input, and the gradient of the argument of the activation: 0 where masked."""
    normal = (_load(h_ptr, offset, inside) - center[:, None]) * spread[:, None]
    z = normal * factor[:, None] + base[:, None]
    return normal, activation_gradient(z, _load(dy_ptr, offset, inside), SILU)


@jit
def group_norm_bwd_statistics_kernel(  # type: ignore[no-untyped-def]
    h_ptr, dy_ptr, shift_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, partial_ptr, hw, channels, stride_p, stride_c,
    rows, chunks, blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums over one chunk of the gradients of bias and of weight."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    here = c < channels
    center, spread, factor, base = _numbers(
        mean_ptr, rstd_ptr, shift_ptr, weight_ptr, bias_ptr, sample, c, here, channels, PER_GROUP, OWN
    )
    h_ptr += sample * channels * hw
    dy_ptr += sample * channels * hw
    last = tl.minimum((chunk + 1) * rows, hw)
    dbias = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    dweight = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(chunk * rows, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        normal, dz = _gradient(h_ptr, dy_ptr, center, spread, factor, base, offset, inside, SILU)
        dbias += dz
        dweight += dz * normal
    out_ptr = partial_ptr + (sample * chunks + chunk) * 2 * channels + c
    tl.store(out_ptr, tl.sum(dbias, axis=1), mask=c < channels)
    tl.store(out_ptr + channels, tl.sum(dweight, axis=1), mask=c < channels)


@jit
def group_norm_bwd_fold_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, weight_ptr, rstd_ptr, level_ptr, slope_ptr, hw, channels, chunks, groups,
    PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK_PARTIALS: tl.constexpr,
):  # fmt: skip
    """Terms of the input gradient that a group shares: constant and slope of the normalised input, per channel."""
    program = tl.program_id(0).to(tl.int64)
    sample, c0 = program // groups, (program % groups) * PER_GROUP
    partial_ptr += sample * chunks * 2 * channels + c0
    level = tl.zeros([BLOCK_PARTIALS], tl.float32)
    slope = tl.zeros([BLOCK_PARTIALS], tl.float32)
    for start in range(0, chunks * PER_GROUP, BLOCK_PARTIALS):
        index = start + tl.arange(0, BLOCK_PARTIALS)
        chunk = index // PER_GROUP
        inside = chunk < chunks
        factor = _load(weight_ptr, _affine_place(sample, c0 + index % PER_GROUP, channels, OWN), inside)
        at_ptr = partial_ptr + chunk * 2 * channels + index % PER_GROUP
        level += factor * tl.load(at_ptr, mask=inside, other=0.0)
        slope += factor * tl.load(at_ptr + channels, mask=inside, other=0.0)
    scale = tl.load(rstd_ptr + program) / (hw * (PER_GROUP * 1.0))
    out = sample * channels + c0
    for start in range(0, PER_GROUP, BLOCK_PARTIALS):
        c = start + tl.arange(0, BLOCK_PARTIALS)
        # One number for the whole group: so the apply pass reads neighbours, 16 bytes at a time.
        tl.store(level_ptr + out + c, tl.zeros_like(level) + scale * tl.sum(level, axis=0), mask=c < PER_GROUP)
        tl.store(slope_ptr + out + c, tl.zeros_like(slope) + scale * tl.sum(slope, axis=0), mask=c < PER_GROUP)


@jit
def group_norm_bwd_apply_kernel(  # type: ignore[no-untyped-def]
    h_ptr, dy_ptr, dh_ptr, shift_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, level_ptr, slope_ptr, dx_ptr,
    dshift_ptr, hw, channels, stride_p, stride_c, rows, chunks, blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradient of the input for one chunk, and its sums per channel ``[N, chunks, C]`` where there is a shift."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    here = c < channels
    center, spread, factor, base = _numbers(
        mean_ptr, rstd_ptr, shift_ptr, weight_ptr, bias_ptr, sample, c, here, channels, PER_GROUP, OWN
    )
    level_c, slope_c = _load(level_ptr, sample * channels + c, here), _load(slope_ptr, sample * channels + c, here)
    h_ptr += sample * channels * hw
    dy_ptr += sample * channels * hw
    dx_ptr += sample * channels * hw
    if dh_ptr is not None:
        dh_ptr += sample * channels * hw
    last = tl.minimum((chunk + 1) * rows, hw)
    sums = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(chunk * rows, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        normal, dz = _gradient(h_ptr, dy_ptr, center, spread, factor, base, offset, inside, SILU)
        gradient = (spread * factor)[:, None] * dz - level_c[:, None] - normal * slope_c[:, None]
        if dh_ptr is not None:
            gradient += _load(dh_ptr, offset, inside)
        tl.store(dx_ptr + offset, gradient.to(dx_ptr.dtype.element_ty), mask=inside)
        if dshift_ptr is not None:
            sums += tl.where(inside, gradient, 0.0)
    if dshift_ptr is not None:
        out_ptr = dshift_ptr + (sample * chunks + chunk) * channels + c
        tl.store(out_ptr, tl.sum(sums, axis=1).to(dshift_ptr.dtype.element_ty), mask=c < channels)


@jit
def group_norm_bwd_one_pass_kernel(  # type: ignore[no-untyped-def]
    h_ptr, dy_ptr, dh_ptr, shift_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, dshift_ptr, partial_ptr, hw,
    channels, stride_p, stride_c, blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, SPAN: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of input and shift, and this sample's part of those of bias and weight, for ``SPAN`` whole groups."""
    sample, _, block = _place(1, blocks)
    lane = tl.arange(0, BLOCK_C)
    c = block * (SPAN * PER_GROUP) + lane
    end = tl.minimum(channels, (block + 1) * (SPAN * PER_GROUP))
    group, here = lane // PER_GROUP, c < end
    center, spread, factor, base = _numbers(
        mean_ptr, rstd_ptr, shift_ptr, weight_ptr, bias_ptr, sample, c, here, channels, PER_GROUP, OWN
    )
    h_ptr += sample * channels * hw
    dy_ptr += sample * channels * hw
    dx_ptr += sample * channels * hw
    offset, inside = _tile(tl.arange(0, BLOCK_HW), c, hw, end, stride_p, stride_c)
    normal, dz = _gradient(h_ptr, dy_ptr, center, spread, factor, base, offset, inside, SILU)
    dbias, dweight = tl.sum(dz, axis=1), tl.sum(dz * normal, axis=1)
    number = hw * (PER_GROUP * 1.0)
    scale = spread * factor
    level = fold_in_registers(scale * dbias, group, BLOCK_GROUPS) / number
    slope = fold_in_registers(scale * dweight, group, BLOCK_GROUPS) / number
    gradient = scale[:, None] * dz - level[:, None] - normal * slope[:, None]
    if dh_ptr is not None:
        gradient += _load(dh_ptr + sample * channels * hw, offset, inside)
    tl.store(dx_ptr + offset, gradient.to(dx_ptr.dtype.element_ty), mask=inside)
    if dshift_ptr is not None:
        sums = tl.sum(tl.where(inside, gradient, 0.0), axis=1)
        tl.store(dshift_ptr + sample * channels + c, sums.to(dshift_ptr.dtype.element_ty), mask=here)
    out_ptr = partial_ptr + sample * 2 * channels + c
    tl.store(out_ptr, dbias, mask=here)
    tl.store(out_ptr + channels, dweight, mask=here)


@jit
def group_norm_fold_rows_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, first_ptr, second_ptr, rows, channels, blocks, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Sums over the rows of fp32 ``[B, rows, 2, channels]``, or ``[B, rows, channels]`` with one output."""
    batch, _, block = _place(1, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    stride = channels
    if second_ptr is not None:
        stride = 2 * channels
    first = tl.zeros([BLOCK_C, BLOCK_R], tl.float32)
    second = tl.zeros([BLOCK_C, BLOCK_R], tl.float32)
    for start in range(0, rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        at_ptr = partial_ptr + (batch * rows + row[None, :]) * stride + c[:, None]
        inside = (row < rows)[None, :] & (c < channels)[:, None]
        first += tl.load(at_ptr, mask=inside, other=0.0)
        if second_ptr is not None:
            second += tl.load(at_ptr + channels, mask=inside, other=0.0)
    out = batch * channels + c
    tl.store(first_ptr + out, tl.sum(first, axis=1).to(first_ptr.dtype.element_ty), mask=c < channels)
    if second_ptr is not None:
        tl.store(second_ptr + out, tl.sum(second, axis=1).to(second_ptr.dtype.element_ty), mask=c < channels)
