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
def _load(pointer, offset, mask):  # type: ignore[no-untyped-def]
    """An fp32 block, 0 where it is masked; zeros if there is no such tensor."""
    value = tl.zeros_like(offset).to(tl.float32)
    if pointer is not None:
        value = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
    return value


@jit
def _sum_input(x, residual, h, added, offset, inside):  # type: ignore[no-untyped-def]
    """``x``; with a residual ``x + residual + added``, which is stored, as the dtype of ``h`` holds it."""
    value = _load(x, offset, inside)
    if residual is not None:
        total = (value + _load(residual, offset, inside) + added[:, None]).to(h.dtype.element_ty)
        tl.store(h + offset, total, mask=inside)
        value = total.to(tl.float32)
    return value


@jit
def _not_negative(value):  # type: ignore[no-untyped-def]
    """``max(value, 0)`` that keeps NaN."""
    return tl.where(value < 0.0, 0.0, value)


@jit
def _reciprocal_root(value):  # type: ignore[no-untyped-def]
    """1 / sqrt(value), each rounded correctly."""
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(value))


@jit
def _divide(total, number):  # type: ignore[no-untyped-def]
    """``total / number`` rounded correctly, which ``/`` is not on a GPU: so a constant input has no spread."""
    return tl.math.div_rn(total, number * 1.0)


@jit
def _activation(z, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU, or ``z`` itself."""
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    return z


@jit
def _activation_gradient(z, dy, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of ``z`` from that of ``_activation(z)``."""
    if SILU:
        sigmoid = tl.sigmoid(z)
        dy = dy * sigmoid * (1.0 + z * (1.0 - sigmoid))
    return dy


@jit
def _fold_in_registers(values, group, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each channel the sum of ``values`` over the channels of its group; ``group`` is in [0, GROUPS)."""
    member = group[None, :] == tl.arange(0, GROUPS)[:, None]
    total = tl.sum(tl.where(member, values[None, :], 0.0), axis=1)
    return tl.sum(tl.where(member, total[:, None], 0.0), axis=0)


@jit
def statistics_kernel(  # type: ignore[no-untyped-def]
    x, shift, residual, h, partial, hw, channels, stride_p, stride_c, rows, chunks, blocks,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of each channel of a chunk; stores ``h`` if there is a residual."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    added = _load(shift, sample * channels + c, c < channels)
    x += sample * channels * hw
    if residual is not None:
        residual += sample * channels * hw
        h += sample * channels * hw
    first = chunk * rows
    last = tl.minimum(first + rows, hw)
    p = first + tl.arange(0, BLOCK_HW)
    offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
    value = _sum_input(x, residual, h, added, offset, inside)
    pivot = _divide(tl.sum(value, axis=1), tl.minimum(BLOCK_HW, last - first))
    deviation = tl.where(inside, value - pivot[:, None], 0.0)
    sums, squares = deviation, deviation * deviation
    for start in range(first + BLOCK_HW, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        value = _sum_input(x, residual, h, added, offset, inside)
        deviation = tl.where(inside, value - pivot[:, None], 0.0)
        sums += deviation
        squares += deviation * deviation
    total = tl.sum(sums, axis=1)
    off_pivot = _divide(total, last - first)
    mean = pivot + off_pivot
    if residual is None:
        mean += added
    out = partial + (sample * chunks + chunk) * 2 * channels + c
    tl.store(out, mean, mask=c < channels)
    tl.store(out + channels, _not_negative(tl.sum(squares, axis=1) - total * off_pivot), mask=c < channels)


@jit
def fold_statistics_kernel(  # type: ignore[no-untyped-def]
    partial, mean_out, rstd_out, hw, channels, rows, chunks, groups, eps, PER_GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean and 1 / standard deviation of one group of one sample from its channels' chunks."""
    program = tl.program_id(0).to(tl.int64)
    partial += (program // groups) * chunks * 2 * channels + (program % groups) * PER_GROUP
    number = hw * (PER_GROUP * 1.0)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunks * PER_GROUP, BLOCK):
        index = start + tl.arange(0, BLOCK)
        chunk = index // PER_GROUP
        inside = chunk < chunks
        count = tl.minimum(rows, hw - chunk * rows).to(tl.float32)
        sums += count * tl.load(partial + chunk * 2 * channels + index % PER_GROUP, mask=inside, other=0.0)
    mean = _divide(tl.sum(sums, axis=0), number)
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunks * PER_GROUP, BLOCK):
        index = start + tl.arange(0, BLOCK)
        chunk = index // PER_GROUP
        inside = chunk < chunks
        count = tl.minimum(rows, hw - chunk * rows).to(tl.float32)
        at = partial + chunk * 2 * channels + index % PER_GROUP
        deviation = tl.where(inside, tl.load(at, mask=inside, other=0.0) - mean, 0.0)
        sums += count * deviation
        squares += tl.load(at + channels, mask=inside, other=0.0) + count * deviation * deviation
    # The mean was rounded: what is left of the deviations corrects it and the variance.
    rest = _divide(tl.sum(sums, axis=0), number)
    variance = _not_negative(_divide(tl.sum(squares, axis=0), number) - rest * rest)
    tl.store(mean_out + program, mean + rest)
    tl.store(rstd_out + program, _reciprocal_root(variance + eps))


@jit
def _affine_place(sample, c, channels, OWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where weight and bias of channels ``c`` are; ``OWN``: each sample has its own."""
    if OWN:
        c = sample * channels + c
    return c


@jit
def _numbers(  # type: ignore[no-untyped-def]
    mean, rstd, shift, weight, bias, sample, c, here, channels, PER_GROUP: tl.constexpr, OWN: tl.constexpr
):
    """Per channel: what to subtract from the input, the reciprocal of its spread, weight and bias."""
    group = sample * (channels // PER_GROUP) + c // PER_GROUP
    center = _load(mean, group, here) - _load(shift, sample * channels + c, here)
    at = _affine_place(sample, c, channels, OWN)
    return center, _load(rstd, group, here), _load(weight, at, here), _load(bias, at, here)


@jit
def apply_kernel(  # type: ignore[no-untyped-def]
    h, shift, weight, bias, mean, rstd, y, hw, channels, stride_p, stride_c, rows, chunks, blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Output of one chunk of a block of channels."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    here = c < channels
    center, spread, factor, base = _numbers(mean, rstd, shift, weight, bias, sample, c, here, channels, PER_GROUP, OWN)
    scale = spread * factor
    h += sample * channels * hw
    y += sample * channels * hw
    last = tl.minimum((chunk + 1) * rows, hw)
    for start in range(chunk * rows, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        z = (_load(h, offset, inside) - center[:, None]) * scale[:, None] + base[:, None]
        tl.store(y + offset, _activation(z, SILU).to(y.dtype.element_ty), mask=inside)


@jit
def one_pass_kernel(  # type: ignore[no-untyped-def]
    x, shift, residual, weight, bias, h, y, mean_out, rstd_out, hw, channels, stride_p, stride_c, blocks, eps,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Output and statistics of ``SPAN`` whole groups of one sample; ``GROUPS`` is the power of 2 from ``SPAN`` on."""
    sample, _, block = _place(1, blocks)
    lane = tl.arange(0, BLOCK_C)
    c = block * (SPAN * PER_GROUP) + lane
    end = tl.minimum(channels, (block + 1) * (SPAN * PER_GROUP))
    group, here = lane // PER_GROUP, c < end
    added = _load(shift, sample * channels + c, here)
    x += sample * channels * hw
    y += sample * channels * hw
    if residual is not None:
        residual += sample * channels * hw
        h += sample * channels * hw
    offset, inside = _tile(tl.arange(0, BLOCK_HW), c, hw, end, stride_p, stride_c)
    value = _sum_input(x, residual, h, added, offset, inside)
    if residual is not None:
        added = tl.zeros_like(added)
    channel_mean = tl.where(here, _divide(tl.sum(value, axis=1), hw) + added, 0.0)
    center = _divide(_fold_in_registers(channel_mean, group, GROUPS), PER_GROUP) - added
    deviation = tl.where(inside, value - center[:, None], 0.0)
    number = hw * (PER_GROUP * 1.0)
    # The mean was rounded: what is left of the deviations corrects it and the variance.
    rest = _divide(_fold_in_registers(tl.sum(deviation, axis=1), group, GROUPS), number)
    squares = _fold_in_registers(tl.sum(deviation * deviation, axis=1), group, GROUPS)
    rstd = _reciprocal_root(_not_negative(_divide(squares, number) - rest * rest) + eps)
    at = _affine_place(sample, c, channels, OWN)
    z = (deviation - rest[:, None]) * (rstd * _load(weight, at, here))[:, None] + _load(bias, at, here)[:, None]
    tl.store(y + offset, _activation(z, SILU).to(y.dtype.element_ty), mask=inside)
    out = sample * (channels // PER_GROUP) + c // PER_GROUP
    leads = here & (c % PER_GROUP == 0)
    tl.store(mean_out + out, center + rest + added, mask=leads)
    tl.store(rstd_out + out, rstd, mask=leads)


@jit
def _gradient(h, dy, center, spread, factor, base, offset, inside, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The normalised input, and the gradient of what enters the activation: 0 where masked."""
    normal = (_load(h, offset, inside) - center[:, None]) * spread[:, None]
    z = normal * factor[:, None] + base[:, None]
    return normal, _activation_gradient(z, _load(dy, offset, inside), SILU)


@jit
def statistics_backward_kernel(  # type: ignore[no-untyped-def]
    h, dy, shift, weight, bias, mean, rstd, partial, hw, channels, stride_p, stride_c, rows, chunks, blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums over one chunk of the gradients of bias and of weight."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    here = c < channels
    center, spread, factor, base = _numbers(mean, rstd, shift, weight, bias, sample, c, here, channels, PER_GROUP, OWN)
    h += sample * channels * hw
    dy += sample * channels * hw
    last = tl.minimum((chunk + 1) * rows, hw)
    dbias = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    dweight = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(chunk * rows, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        normal, dz = _gradient(h, dy, center, spread, factor, base, offset, inside, SILU)
        dbias += dz
        dweight += dz * normal
    out = partial + (sample * chunks + chunk) * 2 * channels + c
    tl.store(out, tl.sum(dbias, axis=1), mask=c < channels)
    tl.store(out + channels, tl.sum(dweight, axis=1), mask=c < channels)


@jit
def fold_groups_kernel(  # type: ignore[no-untyped-def]
    partial, weight, rstd, level_out, slope_out, hw, channels, chunks, groups,
    PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What one group's input gradient lacks, as a constant and per normalised input, written for each channel."""
    program = tl.program_id(0).to(tl.int64)
    sample, c0 = program // groups, (program % groups) * PER_GROUP
    partial += sample * chunks * 2 * channels + c0
    level = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunks * PER_GROUP, BLOCK):
        index = start + tl.arange(0, BLOCK)
        chunk = index // PER_GROUP
        inside = chunk < chunks
        factor = _load(weight, _affine_place(sample, c0 + index % PER_GROUP, channels, OWN), inside)
        at = partial + chunk * 2 * channels + index % PER_GROUP
        level += factor * tl.load(at, mask=inside, other=0.0)
        slope += factor * tl.load(at + channels, mask=inside, other=0.0)
    scale = tl.load(rstd + program) / (hw * (PER_GROUP * 1.0))
    out = sample * channels + c0
    for start in range(0, PER_GROUP, BLOCK):
        c = start + tl.arange(0, BLOCK)
        # One number for the whole group: so the apply pass reads neighbours, 16 bytes at a time.
        tl.store(level_out + out + c, tl.zeros_like(level) + scale * tl.sum(level, axis=0), mask=c < PER_GROUP)
        tl.store(slope_out + out + c, tl.zeros_like(slope) + scale * tl.sum(slope, axis=0), mask=c < PER_GROUP)


@jit
def apply_backward_kernel(  # type: ignore[no-untyped-def]
    h, dy, dh, shift, weight, bias, mean, rstd, level, slope, dx, dshift, hw, channels, stride_p, stride_c, rows,
    chunks, blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradient of the input for one chunk, and its sums per channel ``[N, chunks, C]`` where there is a shift."""
    sample, chunk, block = _place(chunks, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    here = c < channels
    center, spread, factor, base = _numbers(mean, rstd, shift, weight, bias, sample, c, here, channels, PER_GROUP, OWN)
    level_c, slope_c = _load(level, sample * channels + c, here), _load(slope, sample * channels + c, here)
    h += sample * channels * hw
    dy += sample * channels * hw
    dx += sample * channels * hw
    if dh is not None:
        dh += sample * channels * hw
    last = tl.minimum((chunk + 1) * rows, hw)
    sums = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(chunk * rows, last, BLOCK_HW):
        p = start + tl.arange(0, BLOCK_HW)
        offset, inside = _tile(p, c, last, channels, stride_p, stride_c)
        normal, dz = _gradient(h, dy, center, spread, factor, base, offset, inside, SILU)
        gradient = (spread * factor)[:, None] * dz - level_c[:, None] - normal * slope_c[:, None]
        if dh is not None:
            gradient += _load(dh, offset, inside)
        tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=inside)
        if dshift is not None:
            sums += tl.where(inside, gradient, 0.0)
    if dshift is not None:
        out = dshift + (sample * chunks + chunk) * channels + c
        tl.store(out, tl.sum(sums, axis=1).to(dshift.dtype.element_ty), mask=c < channels)


@jit
def one_pass_backward_kernel(  # type: ignore[no-untyped-def]
    h, dy, dh, shift, weight, bias, mean, rstd, dx, dshift, partial, hw, channels, stride_p, stride_c, blocks,
    SILU: tl.constexpr, PER_GROUP: tl.constexpr, OWN: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of input and shift, and this sample's part of those of bias and weight, for ``SPAN`` whole groups."""
    sample, _, block = _place(1, blocks)
    lane = tl.arange(0, BLOCK_C)
    c = block * (SPAN * PER_GROUP) + lane
    end = tl.minimum(channels, (block + 1) * (SPAN * PER_GROUP))
    group, here = lane // PER_GROUP, c < end
    center, spread, factor, base = _numbers(mean, rstd, shift, weight, bias, sample, c, here, channels, PER_GROUP, OWN)
    h += sample * channels * hw
    dy += sample * channels * hw
    dx += sample * channels * hw
    offset, inside = _tile(tl.arange(0, BLOCK_HW), c, hw, end, stride_p, stride_c)
    normal, dz = _gradient(h, dy, center, spread, factor, base, offset, inside, SILU)
    dbias, dweight = tl.sum(dz, axis=1), tl.sum(dz * normal, axis=1)
    number = hw * (PER_GROUP * 1.0)
    scale = spread * factor
    level = _fold_in_registers(scale * dbias, group, GROUPS) / number
    slope = _fold_in_registers(scale * dweight, group, GROUPS) / number
    gradient = scale[:, None] * dz - level[:, None] - normal * slope[:, None]
    if dh is not None:
        gradient += _load(dh + sample * channels * hw, offset, inside)
    tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=inside)
    if dshift is not None:
        sums = tl.sum(tl.where(inside, gradient, 0.0), axis=1)
        tl.store(dshift + sample * channels + c, sums.to(dshift.dtype.element_ty), mask=here)
    out = partial + sample * 2 * channels + c
    tl.store(out, dbias, mask=here)
    tl.store(out + channels, dweight, mask=here)


@jit
def fold_rows_kernel(  # type: ignore[no-untyped-def]
    partial, first_out, second_out, rows, channels, blocks, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Sums over the rows of fp32 ``[B, rows, 2, channels]``, or ``[B, rows, channels]`` with one output."""
    batch, _, block = _place(1, blocks)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    stride = channels
    if second_out is not None:
        stride = 2 * channels
    first = tl.zeros([BLOCK_C, BLOCK_R], tl.float32)
    second = tl.zeros([BLOCK_C, BLOCK_R], tl.float32)
    for start in range(0, rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        at = partial + (batch * rows + row[None, :]) * stride + c[:, None]
        inside = (row < rows)[None, :] & (c < channels)[:, None]
        first += tl.load(at, mask=inside, other=0.0)
        if second_out is not None:
            second += tl.load(at + channels, mask=inside, other=0.0)
    out = batch * channels + c
    tl.store(first_out + out, tl.sum(first, axis=1).to(first_out.dtype.element_ty), mask=c < channels)
    if second_out is not None:
        tl.store(second_out + out, tl.sum(second, axis=1).to(second_out.dtype.element_ty), mask=c < channels)
