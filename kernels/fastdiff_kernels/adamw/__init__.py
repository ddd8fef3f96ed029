"""AdamW with fp32 moments: one pass over a flat tensor of parameters.

Formula (Loshchilov & Hutter 2019, "Decoupled weight decay regularization", algorithm 2), for each element::

    g = grad_scale * grad                    m = beta1 * m + (1 - beta1) * g      v = beta2 * v + (1 - beta2) * g^2
    w = w - (lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps) + lr * weight_decay * w)

``grad_scale`` unscales and clips (``norm``). In the same pass, on request: a copy of w in bf16, and any number of
averages of w (``averages``). If ``skip`` is not zero, nothing is read or written beyond it, whatever the gradient is.

The numbers of the step, ``grad_scale`` and ``skip`` are read on the device: a step waits for nothing from the host. The
decay is a number of its own: 1 - lr * weight_decay in fp32 is wrong by up to 3e-8; at lr * weight_decay 1e-7 by 19 %.

Every operation is rounded on its own (no fused multiply-add) and correctly, so that torch and Triton agree to the bit.

Bytes per parameter with a bf16 gradient, a bf16 copy and one average: parameter 4 + 4, gradient 2, m 4 + 4, v 4 + 4,
copy 2, average 4 + 4 = 36; each further average adds 8, an fp32 gradient 2. That is the limit: nothing is read or
written twice. DeepSpeed's separate passes (gradient to fp32, unscale, Adam, copy, average) move 66 to 94.

Limits: accesses have 128 bits where N is a multiple of 16 and every tensor begins at a multiple of 16 elements.
Gradients are fp32 or bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff_kernels.adamw.arguments import check, check_averages, check_skip
from fastdiff_kernels.adamw.averages import averaged_reference, update_averages
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend

NUMBERS = 8
"""Numbers of a step (``step_numbers``)."""
_BLOCK = 1024
_WARPS = 4  # 8 elements per thread: one access of 128 bits for a bf16 gradient


def step_numbers(
    number: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[float, ...]:
    """The numbers of step ``number`` (from 1), computed in fp64.

    Returns:
        ``beta1, 1 - beta1, beta2, 1 - beta2, lr * weight_decay, lr / (1 - beta1^number), 1 / sqrt(1 - beta2^number),
        eps``.
    """
    beta1, beta2 = betas
    rate, correction = lr / (1 - beta1**number), 1 / math.sqrt(1 - beta2**number)
    return beta1, 1 - beta1, beta2, 1 - beta2, lr * weight_decay, rate, correction, eps


def adamw_reference(
    param: Tensor, grad: Tensor, m: Tensor, v: Tensor, numbers: Tensor, grad_scale: Tensor, skip: Tensor,
    copy: Tensor | None, averages: Sequence[Tensor], shares: Tensor | None,
) -> None:  # fmt: skip
    """``adamw`` in torch's single operations, equal to the kernel to the bit."""
    beta1, beta1_rest, beta2, beta2_rest, decay, rate, correction, eps = numbers.unbind()
    g = grad.to(torch.float32) * grad_scale
    new_m = m * beta1 + g * beta1_rest
    new_v = v * beta2 + g * beta2_rest * g
    # Correctly rounded by way of fp64: MKL, behind torch on a CPU, is off by one at times.
    root = new_v.double().sqrt().to(torch.float32)
    new = param - (new_m * rate / (root * correction + eps) + param * decay)
    changes = [(m, new_m), (v, new_v), (param, new)]
    for index, average in enumerate(averages):
        assert shares is not None
        changes.append((average, averaged_reference(average, new, shares[index])))
    if copy is not None:
        changes.append((copy, new.to(copy.dtype)))
    for state, value in changes:
        state.copy_(torch.where(skip != 0, state, value))


@jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    param_ptr, grad_ptr, m_ptr, v_ptr, numbers_ptr, grad_scale_ptr, skip_ptr, copy_ptr, averages_ptr, shares_ptr,
    numel, BLOCK_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """One program updates ``BLOCK_ELEMENTS`` elements, unless the step is skipped."""
    if tl.load(skip_ptr) == 0:
        place = tl.program_id(0).to(tl.int64) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
        mask = place < numel
        g = tl.load(grad_ptr + place, mask=mask, other=0).to(tl.float32) * tl.load(grad_scale_ptr)
        m = tl.load(m_ptr + place, mask=mask, other=0) * tl.load(numbers_ptr) + g * tl.load(numbers_ptr + 1)
        v = tl.load(v_ptr + place, mask=mask, other=0) * tl.load(numbers_ptr + 2) + g * tl.load(numbers_ptr + 3) * g
        tl.store(m_ptr + place, m, mask=mask)
        tl.store(v_ptr + place, v, mask=mask)
        w = tl.load(param_ptr + place, mask=mask, other=0)
        denominator = tl.math.sqrt_rn(v) * tl.load(numbers_ptr + 6) + tl.load(numbers_ptr + 7)
        w = w - (tl.math.div_rn(m * tl.load(numbers_ptr + 5), denominator) + w * tl.load(numbers_ptr + 4))
        tl.store(param_ptr + place, w, mask=mask)
        if copy_ptr is not None:
            tl.store(copy_ptr + place, w.to(copy_ptr.dtype.element_ty), mask=mask)
        update_averages(averages_ptr, shares_ptr, place, mask, w)


@torch.library.custom_op("fastdiff::adamw", mutates_args=("param", "m", "v", "copy", "averages"))
def _adamw_triton(
    param: Tensor, grad: Tensor, m: Tensor, v: Tensor, numbers: Tensor, grad_scale: Tensor, skip: Tensor,
    copy: Tensor | None, averages: Sequence[Tensor], shares: Tensor | None,
) -> None:  # fmt: skip
    run(
        _adamw_kernel, (-(-param.numel() // _BLOCK),),
        param, grad, m, v, numbers, grad_scale, skip, copy, tuple(averages), shares, param.numel(),
        BLOCK_ELEMENTS=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def adamw(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    numbers: Tensor,
    grad_scale: Tensor,
    skip: Tensor,
    copy: Tensor | None = None,
    averages: Sequence[Tensor] = (),
    shares: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Take one step of AdamW in place, unless ``skip``: then nothing changes.

    Args:
        param: fp32 ``[N]``.
        grad: fp32 or bf16 ``[N]``; only read.
        m: first moment, fp32 ``[N]``; zeros before the first step.
        v: second moment, the same.
        numbers: of the step, fp32 ``[8]`` (``step_numbers``).
        grad_scale: fp32 scalar that multiplies the gradient.
        skip: bool or fp32 scalar.
        copy: bf16 ``[N]``, receives the new parameters.
        averages: each fp32 ``[N]``, moved towards the new parameters.
        shares: of the weights in each new average, fp32 ``[len(averages)]`` in [0, 1].
        backend: implementation; None: the default of ``dispatch.choose``.

    Raises:
        ValueError: a tensor of another shape, dtype, device or stride.
        RuntimeError: Triton was requested and cannot run here.
    """
    _validate(param, grad, m, v, numbers, grad_scale, skip, copy)
    check_averages(averages, shares, param)
    chosen = choose("adamw", param, backend)
    if chosen == "triton":
        _adamw_triton(param, grad, m, v, numbers, grad_scale, skip, copy, averages, shares)
    else:
        plain(adamw_reference, chosen)(param, grad, m, v, numbers, grad_scale, skip, copy, averages, shares)


def _validate(
    param: Tensor, grad: Tensor, m: Tensor, v: Tensor, numbers: Tensor, grad_scale: Tensor, skip: Tensor,
    copy: Tensor | None,
) -> None:  # fmt: skip
    flat, device, fp32 = (param.numel(),), param.device, (torch.float32,)
    check("grad", grad, flat, (torch.float32, torch.bfloat16), device)
    for name, tensor in (("param", param), ("m", m), ("v", v)):
        check(name, tensor, flat, fp32, device)
    check("numbers", numbers, (NUMBERS,), fp32, device)
    check("grad_scale", grad_scale, (), fp32, device)
    check_skip(skip, device)
    if copy is not None:
        check("copy", copy, flat, (torch.bfloat16,), device)
