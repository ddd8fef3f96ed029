"""The kernels of ``adaln``: forward, backward, and the sum of the backward's partial sums."""

from __future__ import annotations

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
def _row_mean(a, b, D: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean over both parts of a row. Each lane adds up its own columns first: one exchange between lanes."""
    lanes = tl.sum(tl.reshape(a, (LANES, a.shape[0] // LANES)), 1)
    lanes += tl.sum(tl.reshape(b, (LANES, b.shape[0] // LANES)), 1)
    return tl.sum(lanes, 0) / D


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
def _load_bias(row_ptr, head, tail, D: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """``_load``; 0 if there is no bias."""
    if row_ptr is not None:
        return _load(row_ptr, head, tail, D)
    else:
        return tl.zeros((BLOCK_HEAD,), tl.float32), tl.zeros((BLOCK_TAIL,), tl.float32)


@jit
def adaln_fwd_kernel(  # type: ignore[no-untyped-def]
    y_ptr, h_ptr, mean_ptr, rstd_ptr, x_ptr, branch_ptr, bias_ptr, gate_ptr, shift_ptr, scale_ptr,
    gate_stride, shift_stride, scale_stride, length, rows, blocks, eps,
    D: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One program does ``rows`` tokens of one sample."""
    program = tl.program_id(0).to(tl.int64)
    sample, start = program // blocks, program % blocks * rows
    stop = tl.minimum(start + rows, length)
    head, tail = _columns(BLOCK_HEAD, BLOCK_TAIL)
    shift_a, shift_b = _load(shift_ptr + sample * shift_stride, head, tail, D)
    scale_a, scale_b = _load(scale_ptr + sample * scale_stride, head, tail, D)
    if GATED:
        gate_a, gate_b = _load(gate_ptr + sample * gate_stride, head, tail, D)
    else:
        gate_a, gate_b = scale_a, scale_b
    bias_a, bias_b = _load_bias(bias_ptr, head, tail, D, BLOCK_HEAD, BLOCK_TAIL)
    for row in range(sample * length + start, sample * length + stop):
        at = row * D
        a, b, _, _ = _stream(x_ptr, branch_ptr, at, gate_a, gate_b, bias_a, bias_b, head, tail, D, GATED)
        if GATED:
            _store(h_ptr + at, head, tail, a, b, D)
        mean = _row_mean(a, b, D, LANES)
        a, b = a - mean, tl.where(tail < D, b - mean, 0.0)
        rstd = tl.rsqrt(_row_mean(a * a, b * b, D, LANES) + eps)
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
        a, b = a * rstd * (1 + scale_a) + shift_a, b * rstd * (1 + scale_b) + shift_b
        _store(y_ptr + at, head, tail, a, b, D)


@jit
def adaln_bwd_kernel(  # type: ignore[no-untyped-def]
    dx_ptr, dbranch_ptr, partials_ptr, dy_ptr, dh_ptr, x_ptr, branch_ptr, bias_ptr, gate_ptr, scale_ptr, mean_ptr,
    rstd_ptr,
    gate_stride, scale_stride, length, rows, blocks,
    D: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One program does ``rows`` tokens of one sample, and one row of partial sums for each modulation and the bias."""
    program = tl.program_id(0).to(tl.int64)
    sample, start = program // blocks, program % blocks * rows
    stop = tl.minimum(start + rows, length)
    head, tail = _columns(BLOCK_HEAD, BLOCK_TAIL)
    scale_a, scale_b = _load(scale_ptr + sample * scale_stride, head, tail, D)
    if GATED:
        gate_a, gate_b = _load(gate_ptr + sample * gate_stride, head, tail, D)
    else:
        gate_a, gate_b = scale_a, scale_b
    bias_a, bias_b = _load_bias(bias_ptr, head, tail, D, BLOCK_HEAD, BLOCK_TAIL)
    dshift_a, dshift_b = tl.zeros((BLOCK_HEAD,), tl.float32), tl.zeros((BLOCK_TAIL,), tl.float32)
    dscale_a, dscale_b, dgate_a, dgate_b = dshift_a, dshift_b, dshift_a, dshift_b
    dbias_a, dbias_b = dshift_a, dshift_b
    for row in range(sample * length + start, sample * length + stop):
        at = row * D
        a, b, branch_a, branch_b = _stream(x_ptr, branch_ptr, at, gate_a, gate_b, bias_a, bias_b, head, tail, D, GATED)
        up_a, up_b = _load(dy_ptr + at, head, tail, D)
        if RESIDUAL:  # read here, so that it does not wait for the means
            dh_a, dh_b = _load(dh_ptr + at, head, tail, D)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        a, b = (a - mean) * rstd, (b - mean) * rstd
        dshift_a, dshift_b = dshift_a + up_a, dshift_b + up_b
        dscale_a, dscale_b = dscale_a + up_a * a, dscale_b + up_b * b
        up_a, up_b = up_a * (1 + scale_a), up_b * (1 + scale_b)
        offset, slope = _row_mean(up_a, up_b, D, LANES), _row_mean(up_a * a, up_b * b, D, LANES)
        a, b = rstd * (up_a - offset - a * slope), rstd * (up_b - offset - b * slope)
        if RESIDUAL:
            a, b = a + dh_a, b + dh_b
        if GATED:
            _store(dbranch_ptr + at, head, tail, a * gate_a, b * gate_b, D)
            dgate_a, dgate_b = dgate_a + a * branch_a, dgate_b + b * branch_b
        if bias_ptr is not None:
            dbias_a, dbias_b = dbias_a + a, dbias_b + b
        _store(dx_ptr + at, head, tail, a, b, D)
    step = tl.num_programs(0).to(tl.int64) * D
    _store(partials_ptr + program * D, head, tail, dshift_a, dshift_b, D)
    _store(partials_ptr + step + program * D, head, tail, dscale_a, dscale_b, D)
    if GATED:
        _store(partials_ptr + 2 * step + program * D, head, tail, dgate_a, dgate_b, D)
    if bias_ptr is not None:
        _store(partials_ptr + 3 * step + program * D, head, tail, dbias_a * gate_a, dbias_b * gate_b, D)


@jit
def adaln_fold_kernel(  # type: ignore[no-untyped-def]
    out_ptr, dbias_ptr, partials_ptr, blocks, modulations, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program adds up the partial sums of one modulation of one sample, in order; after them those of the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = column < D
    total = tl.zeros((BLOCK_D,), tl.float32)
    for block in range(blocks):
        total += tl.load(partials_ptr + (row * blocks + block) * D + column, mask=exists, other=0.0)
    tl.store(out_ptr + row * D + column, total.to(out_ptr.dtype.element_ty), mask=exists & (row < modulations))
    if dbias_ptr is not None:
        tl.store(dbias_ptr + (row - modulations) * D + column, total, mask=exists & (row >= modulations))
