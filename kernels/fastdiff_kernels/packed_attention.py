"""Self-attention on a packed projection ``[B, T, 3, H, D]``, which a transformer's ``qkv`` layer writes.

The backend ``short``, the kernels of ``short_attention.py``, takes it as it is; every other is one of ``attention.py``
and takes views of queries, keys and values. ``short`` asked for runs wherever shape and strides allow, and ``auto``
elsewhere. ``auto`` takes ``short`` where a measurement has it fastest (``FASTEST``), and in 16 bits where torch wants
deterministic algorithms, because of the others only slower forms add in a fixed order.

Given the bias of the layer, its gradient is summed here: by ``short``, or by the kernel of ``bias_gradient.py`` that
joins the gradients of queries, keys and values. The other backends leave three, because torch gives no way to have them
packed: the backward passes of cuDNN and flash allocate each as ``empty_like`` of its argument, which makes of a view of
a packed projection a dense ``[B, T, H, D]``, and their ops have no form with outputs given. (CUTLASS's,
``_efficient_attention_backward``, packs with ``shared_storage_dqdkdv``; it is not tried here.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fastdiff_kernels import attention as general
from fastdiff_kernels import launch
from fastdiff_kernels.attention import Machine, machine
from fastdiff_kernels.bias_gradient import unpacked
from fastdiff_kernels.dispatch import Choice
from fastdiff_kernels.names import AttentionBackend
from fastdiff_kernels.rotary import Rotary, rotated, rotated_parts
from fastdiff_kernels.short_attention import DTYPES, shape_problem, short_attention

FASTEST: frozenset[tuple[tuple[int, int], int, int]] = frozenset()
"""Compute capability, tokens and head dim at which ``short`` is the fastest in 16 bits, forward and backward together,
by a record of ``fastdiff bench op attention`` in ``bench/results``. Empty: no record has the present kernels, and on an
H200 cuDNN was faster than those before, of seven products, at 256 tokens and head dim 72.
"""


def short_problem(dtype: torch.dtype, here: Machine, *, triton: bool = launch.triton is not None) -> str | None:
    """Why ``short`` cannot run on this machine in this dtype; None if it can."""
    if not triton:
        return "needs Triton, which is not installed"
    if here.device != "cuda" and not launch.INTERPRETED:
        return f"needs a CUDA device, the tensors are on {here.device}"
    if here.device == "cuda" and here.capability < (8, 0):
        return f"needs sm_80 or newer, this device is {here.architecture}"
    return (
        None if dtype in DTYPES else f"computes in bf16, fp16 and fp32, the tensors are {dtype}".replace("torch.", "")
    )


def _why_short(backend: AttentionBackend, dtype: torch.dtype, length: int, head_dim: int, here: Machine) -> str | None:
    """Why ``backend`` is ``short`` for heads that its kernels take; None: it is another."""
    if backend == "short":
        return "asked for"
    if backend != "auto" or here.device != "cuda" or dtype == torch.float32 or short_problem(dtype, here):
        return None
    if here.deterministic:
        return "adds in a fixed order"
    return "measured fastest" if (here.capability, length, head_dim) in FASTEST else None


def packed_attention(
    qkv: Tensor, *, bias: Tensor | None = None, rotary: Rotary | None = None, backend: AttentionBackend = "auto"
) -> Tensor:
    """Self-attention of all tokens of each sample, scaled by ``1 / sqrt(D)``.

    Args:
        qkv: ``[B, T, 3, H, D]``, of any strides; ``short`` takes it only if it is contiguous.
        bias: ``[3 * H * D]``, contained in ``qkv``; its gradient is the sum of that of ``qkv``; see
            ``bias_gradient.unpacked``. None: the layer sums it.
        rotary: norm and rotation of queries and keys before (``rotary.rotated``); None: they are taken as they are.
        backend: as for ``attention.attention``.

    Returns:
        ``[B, T, H * D]`` in the dtype of ``qkv``.

    Raises:
        ValueError: no such backend, or another shape.
        RuntimeError: ``backend`` cannot run on these tensors; the message says why.
    """
    parts = projected(qkv, backend)
    if rotary is not None:
        if len(parts) == 1:
            return short_attention(rotated(qkv, *rotary, bias=bias))
        return attended(rotated_parts(qkv, *rotary, bias=bias), backend)
    if len(parts) == 1:
        return short_attention(qkv, bias)
    return attended(parts if bias is None else unpacked(qkv, bias), backend)


def projected(qkv: Tensor, backend: AttentionBackend = "auto") -> tuple[Tensor, ...]:
    """What ``attended`` takes of a packed projection: itself where ``short`` runs, else queries, keys and values.

    Arguments and errors as for ``packed_attention``.

    Returns:
        ``[B, T, 3, H, D]``, or three views ``[B, H, T, D]``.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}, expected [B, T, 3, H, D]")
    length, head_dim = qkv.shape[1], qkv.shape[4]
    here: Machine = machine(qkv.device, backend)
    if backend == "short":
        _refuse(qkv.dtype, here)
    fits = qkv.is_contiguous() and shape_problem(head_dim, length, length) is None
    if fits and _why_short(backend, qkv.dtype, length, head_dim, here) is not None:
        return (qkv,)
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, T, 3, H, D] -> 3 x [B, H, T, D]


def attended(parts: Sequence[Tensor], backend: AttentionBackend = "auto") -> Tensor:
    """Attention of what ``projected`` returns, the heads joined: ``[B, T, H * D]``."""
    if len(parts) == 1:
        return short_attention(parts[0])
    query, key, value = parts
    return general.attention(query, key, value, backend=backend).transpose(1, 2).flatten(2)


def _refuse(dtype: torch.dtype, here: Machine) -> None:
    if why := short_problem(dtype, here):
        raise RuntimeError(f"attention backend 'short': {why}; use 'auto'")


def packed_choice(
    head_dim: int, length: int, example: Tensor, backend: AttentionBackend = "auto", *, contiguous: bool = True
) -> Choice:
    """The kernel that ``packed_attention`` would run, and the reason.

    Args:
        head_dim: channels of a head.
        length: tokens per sample.
        example: any tensor of the device and dtype that the attention will work in.
        backend: as for ``packed_attention``.
        contiguous: whether the packed projection is.

    Raises:
        ValueError: no such backend.
        RuntimeError: ``backend`` cannot run there; the message says why.
    """
    here: Machine = machine(example.device, backend)
    if backend == "short":
        _refuse(example.dtype, here)
    problem = shape_problem(head_dim, length, length)
    problem = problem or (None if contiguous else "takes a contiguous packed projection")
    if problem is None and (why := _why_short(backend, example.dtype, length, head_dim, here)):
        if backend == "short" or here.device == "cuda":
            _try(head_dim, length, example.dtype, example.device)
        return Choice("attention", "short", "short", why)
    chosen = general.choice(head_dim, length, length, example, backend)
    return replace(chosen, why=f"short {problem}") if backend == "short" else chosen


@cache
def _try(head_dim: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
    """Run the kernels once on one head, so that a driver or a compiler that fails is named at the start."""
    try:
        with torch.enable_grad():
            qkv = torch.zeros(1, length, 3, 1, head_dim, dtype=dtype, device=device, requires_grad=True)
            short_attention(qkv).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # of the compiler, the driver or the kernel
        raise RuntimeError(f"attention backend 'short': failed when tried: {error}; use 'sdpa'") from error
