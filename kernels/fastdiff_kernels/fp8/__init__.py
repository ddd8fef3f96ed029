"""Matrix products in FP8 whose operands the ops before them write: no pass casts.

Format: e4m3 (Micikevicius et al. 2022, arXiv:2209.05433) for values and gradients, with one scale per tensor, its
``unit``, a power of two that the caller gives (delayed scaling)::

    number = round(value / unit),  |number| <= 448,     value ~ number * unit

A layer ``y = x W^T`` with its gradients is three products. Hopper multiplies FP8 only where both operands have the axis
that is summed as their last, so a gradient of a weight needs the transposes of its operands::

    y  [N, M] = x rows [N, K],        W rows [M, K]
    dx [N, K] = dy rows [N, M],       W columns [K, M]
    dW [M, K] = dy columns [M, N],    x columns [K, N]        or, in 16 bits, dy and x themselves

So an op that writes an operand writes two bytes per element either way: 16 bits, or rows and columns. It also gives
the maximum of the values before rounding, from which later scales come.

    values      the operand (``Quantised``), its forms, and plain quantisation
    products    the three products
    rounding    the cast inside a kernel, and maxima
    tiles       a matrix written by tiles
    cast        a tensor, or the attention's output, as an operand
    adaln, gelu, join    the ops of a DiT block, forward and backward, which write operands
"""
