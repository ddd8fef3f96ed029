"""The kernels of ``adaln``: the norm forward and backward, the gate backward, and the sum of their partial sums.

Each writes the output of a norm, or the gradient of a branch, in 16 bits, or as an operand of FP8 products: e4m3 rows,
their transpose ``columns``, and one maximum per program (``fastdiff_kernels.fp8``). What has no pointer is not written.
"""

from __future__ import annotations

from fastdiff_kernels.fp8.rounding import inverse, largest, magnitude, to_e4m3
from fastdiff_kernels.launch import jit, tl

# A row is held as two parts, because blocks have power-of-two sizes: 1152 columns as 1024 (_a) and 128 (_b). In one
# part they would cost as many instructions as 2048.


@jit
def _columns(BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.arange(0, BLOCK_HEAD), BLOCK_HEAD + tl.arange(0, BLOCK_TAIL)


@jit
def _load(row_ptr, head, tail, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both parts of the row that starts at the pointer ``row``, in fp32; 0 past its end."""
    a = tl.load(row_ptr + head)
    b = tl.load(row_ptr + tail, mask=tail < D, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@jit
def _store(row_ptr, head, tail, a, b, D: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(row_ptr + head, a.to(row_ptr.dtype.element_ty))
    tl.store(row_ptr + tail, b.to(row_ptr.dtype.element_ty), mask=tail < D)


@jit
def _lane_sums(a, b, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum over both parts of a row, as far as one lane holds them: one exchange between lanes remains."""
    lanes = tl.sum(tl.reshape(a, (LANES, a.shape[0] // LANES)), 1)
    return lanes + tl.sum(tl.reshape(b, (LANES, b.shape[0] // LANES)), 1)


@jit
def _row_mean(a, b, D: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.sum(_lane_sums(a, b, LANES), 0) / D


@jit
def _row_means(a, b, c, d, D: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Means of two rows, (a, b) and (c, d), in one exchange."""
    pair = tl.join(_lane_sums(a, b, LANES), _lane_sums(c, d, LANES))
    return tl.split(tl.sum(pair, 0) / D)


@jit
def _stream(  # type: ignore[no-untyped-def]
    x_ptr, branch_ptr, at, gate_a, gate_b, bias_a, bias_b, head, tail, D: tl.constexpr, GATED: tl.constexpr
):
    """The row to normalise: ``x``, or ``x + gate * (branch + bias)`` as it is stored."""
    a, b = _load(x_ptr + at, head, tail, D)
    if GATED:
        branch_a, branch_b = _load(branch_ptr + at, head, tail, D)
        branch_a, branch_b = branch_a + bias_a, branch_b + bias_b
        a = (a + gate_a * branch_a).to(x_ptr.dtype.element_ty).to(tl.float32)
        b = (b + gate_b * branch_b).to(x_ptr.dtype.element_ty).to(tl.float32)
        return a, b, branch_a, branch_b
    else:
        return a, b, a, b


@jit
def _load_if(  # type: ignore[no-untyped-def]
    EXISTS: tl.constexpr, row_ptr, head, tail, D: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr
):
    """``_load``; 0 if it does not exist."""
    if EXISTS:
        return _load(row_ptr, head, tail, D)
    else:
        return tl.zeros((BLOCK_HEAD,), tl.float32), tl.zeros((BLOCK_TAIL,), tl.float32)


@jit
def _factor(scale_ptr, weight_ptr, head, tail, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """What multiplies a normed row: ``1 + scale``, times a weight if there is one."""
    a, b = _load(scale_ptr, head, tail, D)
    a, b = 1 + a, 1 + b
    if weight_ptr is not None:
        weight_a, weight_b = _load(weight_ptr, head, tail, D)
        a, b = a * weight_a, b * weight_b
    return a, b


@jit
def _store_factors(  # type: ignore[no-untyped-def]
    dscale_ptr, dweight_ptr, scale_ptr, weight_ptr, a, b, head, tail, D: tl.constexpr
):
    """Sums for scale and weight: each has those of dy * normed, times the other factor."""
    if weight_ptr is not None:
        weight_a, weight_b = _load(weight_ptr, head, tail, D)
        scale_a, scale_b = _load(scale_ptr, head, tail, D)
        _store(dscale_ptr, head, tail, a * weight_a, b * weight_b, D)
        _store(dweight_ptr, head, tail, a * (1 + scale_a), b * (1 + scale_b), D)
    else:
        _store(dscale_ptr, head, tail, a, b, D)


@jit
def _normed(a, b, mean_ptr, row, rstd):  # type: ignore[no-untyped-def]
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
        return (a - mean) * rstd, (b - mean) * rstd
    else:
        return a * rstd, b * rstd


@jit
def _before_norm(up_a, up_b, a, b, rstd, CENTRED: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of a row by that of its norm, ``up``; ``a, b`` is the normed row."""
    if CENTRED:
        offset, slope = _row_means(up_a, up_b, up_a * a, up_b * b, D, LANES)
        return rstd * (up_a - offset - a * slope), rstd * (up_b - offset - b * slope)
    else:
        slope = _row_mean(up_a * a, up_b * b, D, LANES)
        return rstd * (up_a - a * slope), rstd * (up_b - b * slope)


@jit
def _inverse_if(unit_ptr):  # type: ignore[no-untyped-def]
    """``inverse``; 1 without a scale."""
    if unit_ptr is not None:
        return inverse(unit_ptr)
    else:
        return 1.0


@jit
def _lane_maxima(a, b, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """``magnitude`` of a row, the largest as far as one lane holds them."""
    lanes = tl.max(magnitude(tl.reshape(a, (LANES, a.shape[0] // LANES))), 1)
    return tl.maximum(lanes, tl.max(magnitude(tl.reshape(b, (LANES, b.shape[0] // LANES))), 1))


@jit
def _turn(  # type: ignore[no-untyped-def]
    columns_ptr, rows_ptr, start, stop, total, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Write the transpose of e4m3 rows of which this program wrote those from ``start`` to ``stop``.

    By tiles, so that whole sectors of 32 bytes are written: one row alone is a byte of each column.
    """
    tl.debug_barrier()  # a thread reads what others wrote
    for first in range(start, stop, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        for left in tl.range(0, D, BLOCK_C, num_stages=2):
            column = left + tl.arange(0, BLOCK_C)
            inside = (row < stop)[:, None] & (column < D)[None, :]
            numbers = tl.load(rows_ptr + row[:, None] * D + column[None, :], mask=inside)
            turned = (column < D)[:, None] & (row < stop)[None, :]
            tl.store(columns_ptr + column[:, None].to(tl.int64) * total + row[None, :], tl.trans(numbers), mask=turned)


@jit
def adaln_fwd_kernel(  # type: ignore[no-untyped-def]
    y_ptr, rows_ptr, columns_ptr, maxima_ptr, unit_ptr, h_ptr, mean_ptr, rstd_ptr, x_ptr, branch_ptr, bias_ptr,
    weight_ptr, modulation_ptr, modulation_stride, total, length, rows, blocks, eps,
    D: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program does ``rows`` tokens of one sample; there are ``total``. No mean: RMSNorm."""
    program = tl.program_id(0).to(tl.int64)
    sample, start = program // blocks, program % blocks * rows
    stop = tl.minimum(start + rows, length)
    head, tail = _columns(BLOCK_HEAD, BLOCK_TAIL)
    part_ptr = modulation_ptr + sample * modulation_stride
    gate_a, gate_b = _load_if(GATED, part_ptr, head, tail, D, BLOCK_HEAD, BLOCK_TAIL)
    bias_a, bias_b = _load_if(bias_ptr is not None, bias_ptr, head, tail, D, BLOCK_HEAD, BLOCK_TAIL)
    part_ptr += D if GATED else 0
    shift_a, shift_b = _load(part_ptr, head, tail, D)
    factor_a, factor_b = _factor(part_ptr + D, weight_ptr, head, tail, D)
    inverse_unit, most = _inverse_if(unit_ptr), tl.zeros((LANES,), tl.int32)
    for row in tl.range(sample * length + start, sample * length + stop, num_stages=STAGES):
        at = row * D
        a, b, _, _ = _stream(x_ptr, branch_ptr, at, gate_a, gate_b, bias_a, bias_b, head, tail, D, GATED)
        if GATED:
            _store(h_ptr + at, head, tail, a, b, D)
        if mean_ptr is not None:
            mean = _row_mean(a, b, D, LANES)
            a, b = a - mean, tl.where(tail < D, b - mean, 0.0)
        rstd = tl.rsqrt(_row_mean(a * a, b * b, D, LANES) + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
        a, b = a * rstd * factor_a + shift_a, b * rstd * factor_b + shift_b
        if y_ptr is not None:
            _store(y_ptr + at, head, tail, a, b, D)
        if rows_ptr is not None:
            _store(rows_ptr + at, head, tail, to_e4m3(a * inverse_unit), to_e4m3(b * inverse_unit), D)
        if maxima_ptr is not None:
            most = tl.maximum(most, _lane_maxima(a, b, LANES))
    if maxima_ptr is not None:
        tl.store(maxima_ptr + program, largest(most))
    if columns_ptr is not None:
        _turn(columns_ptr, rows_ptr, sample * length + start, sample * length + stop, total, D, BLOCK_R, BLOCK_C)


@jit
def adaln_bwd_kernel(  # type: ignore[no-untyped-def]
    dx_ptr, dbranch_ptr, rows_ptr, columns_ptr, maxima_ptr, unit_ptr, partials_ptr, dy_ptr, dh_ptr, x_ptr, branch_ptr,
    bias_ptr, weight_ptr, modulation_ptr, mean_ptr, rstd_ptr, modulation_stride, total, length, rows, blocks,
    D: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program does ``rows`` tokens of one sample, and one row of each partial sum. No mean: RMSNorm."""
    program = tl.program_id(0).to(tl.int64)
    sample, start = program // blocks, program % blocks * rows
    stop = tl.minimum(start + rows, length)
    head, tail = _columns(BLOCK_HEAD, BLOCK_TAIL)
    part_ptr = modulation_ptr + sample * modulation_stride
    gate_a, gate_b = _load_if(GATED, part_ptr, head, tail, D, BLOCK_HEAD, BLOCK_TAIL)
    bias_a, bias_b = _load_if(bias_ptr is not None, bias_ptr, head, tail, D, BLOCK_HEAD, BLOCK_TAIL)
    scale_ptr = part_ptr + (2 * D if GATED else D)
    factor_a, factor_b = _factor(scale_ptr, weight_ptr, head, tail, D)
    dshift_a, dshift_b = tl.zeros((BLOCK_HEAD,), tl.float32), tl.zeros((BLOCK_TAIL,), tl.float32)
    dscale_a, dscale_b, dgate_a, dgate_b = dshift_a, dshift_b, dshift_a, dshift_b
    dbias_a, dbias_b = dshift_a, dshift_b
    inverse_unit, most = _inverse_if(unit_ptr), tl.zeros((LANES,), tl.int32)
    for row in tl.range(sample * length + start, sample * length + stop, num_stages=STAGES):
        at = row * D
        a, b, branch_a, branch_b = _stream(x_ptr, branch_ptr, at, gate_a, gate_b, bias_a, bias_b, head, tail, D, GATED)
        up_a, up_b = _load(dy_ptr + at, head, tail, D)
        rstd = tl.load(rstd_ptr + row)
        a, b = _normed(a, b, mean_ptr, row, rstd)
        dshift_a, dshift_b = dshift_a + up_a, dshift_b + up_b
        dscale_a, dscale_b = dscale_a + up_a * a, dscale_b + up_b * b
        up_a, up_b = up_a * factor_a, up_b * factor_b
        a, b = _before_norm(up_a, up_b, a, b, rstd, mean_ptr is not None, D, LANES)
        if dh_ptr is not None:
            dh_a, dh_b = _load(dh_ptr + at, head, tail, D)
            a, b = a + dh_a, b + dh_b
        if dbranch_ptr is not None:
            _store(dbranch_ptr + at, head, tail, a * gate_a, b * gate_b, D)
        if rows_ptr is not None:
            numbers_a, numbers_b = to_e4m3(a * gate_a * inverse_unit), to_e4m3(b * gate_b * inverse_unit)
            _store(rows_ptr + at, head, tail, numbers_a, numbers_b, D)
        if maxima_ptr is not None:
            most = tl.maximum(most, _lane_maxima(a * gate_a, b * gate_b, LANES))
        if GATED:
            dgate_a, dgate_b = dgate_a + a * branch_a, dgate_b + b * branch_b
        if bias_ptr is not None:
            dbias_a, dbias_b = dbias_a + a, dbias_b + b
        _store(dx_ptr + at, head, tail, a, b, D)
    step = tl.num_programs(0).to(tl.int64) * D
    sums_ptr = partials_ptr + program * D
    if GATED:
        _store(sums_ptr, head, tail, dgate_a, dgate_b, D)
        sums_ptr += step
    _store(sums_ptr, head, tail, dshift_a, dshift_b, D)
    if bias_ptr is not None:
        _store(sums_ptr + 2 * step, head, tail, dbias_a * gate_a, dbias_b * gate_b, D)
    dweight_ptr = sums_ptr + (3 * step if bias_ptr is not None else 2 * step)
    _store_factors(sums_ptr + step, dweight_ptr, scale_ptr, weight_ptr, dscale_a, dscale_b, head, tail, D)
    if maxima_ptr is not None:
        tl.store(maxima_ptr + program, largest(most))
    if columns_ptr is not None:
        _turn(columns_ptr, rows_ptr, sample * length + start, sample * length + stop, total, D, BLOCK_R, BLOCK_C)


@jit
def adaln_gate_bwd_kernel(  # type: ignore[no-untyped-def]
    dbranch_ptr, rows_ptr, columns_ptr, maxima_ptr, unit_ptr, partials_ptr, dh_ptr, branch_ptr, bias_ptr, gate_ptr,
    gate_stride, total, length, rows, blocks,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program does ``rows`` tokens of one sample for a block of columns, and their partial sums."""
    program = tl.program_id(0).to(tl.int64)
    sample, start = program // blocks, program % blocks * rows
    stop = tl.minimum(start + rows, length)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = column < D
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=exists, other=0.0).to(tl.float32)
    dgate = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    ups = dgate
    inverse_unit, most = _inverse_if(unit_ptr), tl.zeros((BLOCK_R,), tl.int32)
    for first in range(start, stop, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        token = sample * length + row
        at = token[:, None] * D + column[None, :]
        inside = (row < stop)[:, None] & exists[None, :]
        up = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + at, mask=inside, other=0.0).to(tl.float32)
        gated = up * gate[None, :]
        if dbranch_ptr is not None:
            tl.store(dbranch_ptr + at, gated.to(dbranch_ptr.dtype.element_ty), mask=inside)
        if rows_ptr is not None:
            tl.store(rows_ptr + at, to_e4m3(gated * inverse_unit), mask=inside)
        if columns_ptr is not None:
            turned_ptr = columns_ptr + column[:, None].to(tl.int64) * total + token[None, :]
            turned = exists[:, None] & (row < stop)[None, :]
            tl.store(turned_ptr, tl.trans(to_e4m3(gated * inverse_unit)), mask=turned)
        if maxima_ptr is not None:
            most = tl.maximum(most, tl.max(magnitude(gated), 1))
        dgate += up * branch
        if bias_ptr is not None:
            ups += up
    sums_ptr = partials_ptr + program * D + column
    dgates = tl.sum(dgate, 0)
    if bias_ptr is not None:  # sum(dh * (branch + bias))
        up = tl.sum(ups, 0)
        dgates += up * tl.load(bias_ptr + column, mask=exists, other=0.0).to(tl.float32)
        tl.store(sums_ptr + tl.num_programs(0).to(tl.int64) * D, up * gate, mask=exists)
    tl.store(sums_ptr, dgates, mask=exists)
    if maxima_ptr is not None:
        tl.store(maxima_ptr + program * tl.num_programs(1) + tl.program_id(1), largest(most))


@jit
def adaln_fold_kernel(  # type: ignore[no-untyped-def]
    out_ptr, dbias_ptr, dweight_ptr, partials_ptr, later_ptr, batch, blocks, part, each,
    D: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add up partial sums ``[SUMS, batch, blocks, D]``, and after them those of a bias and of a weight, in order.

    The first programs do the bias and then the weight, ``each`` of them, over all samples. Each other program does
    ``BLOCK_D`` columns of one of the ``PARTS`` of the modulation of a sample. The sums belong to the parts from
    ``part`` on, and are added to ``later``, the gradient by the later ops; without it other parts are 0.
    """
    program = tl.program_id(0).to(tl.int64)
    rows_ptr = partials_ptr + SUMS * batch * blocks * D
    if dbias_ptr is not None:
        if program < each:
            _fold_rows(dbias_ptr, rows_ptr, program, batch * blocks, D, BLOCK_R, BLOCK_C)
        program -= each
        rows_ptr += batch * blocks * D
    if dweight_ptr is not None:
        if (program >= 0) & (program < each):
            _fold_rows(dweight_ptr, rows_ptr, program, batch * blocks, D, BLOCK_R, BLOCK_C)
        program -= each
    if program >= 0:
        _fold_part(out_ptr, partials_ptr, later_ptr, program, batch, blocks, part, D, SUMS, PARTS, BLOCK_D)


@jit
def _fold_part(  # type: ignore[no-untyped-def]
    out_ptr, partials_ptr, later_ptr, program, batch, blocks, part,
    D: tl.constexpr, SUMS: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up a block of columns of one part of one sample."""
    COLUMNS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    column = program % COLUMNS * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = column < D
    row = program // COLUMNS
    sample, index = row // PARTS, row % PARTS - part  # of the sums
    row_ptr = partials_ptr + (index * batch + sample) * blocks * D + column
    total = tl.zeros((BLOCK_D,), tl.float32)
    if later_ptr is not None:
        total += tl.load(later_ptr + row * D + column, mask=exists, other=0.0).to(tl.float32)
    for _ in range(tl.where((index >= 0) & (index < SUMS), blocks, 0)):
        total += tl.load(row_ptr, mask=exists, other=0.0)
        row_ptr += D
    tl.store(out_ptr + row * D + column, total.to(out_ptr.dtype.element_ty), mask=exists)


@jit
def _fold_rows(  # type: ignore[no-untyped-def]
    out_ptr, rows_ptr, program, rows, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Add up a block of columns of ``[rows, D]``."""
    column = program * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, rows, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        total += tl.load(rows_ptr + row[:, None] * D + column[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < D)
