"""Attention to keys of which some are masked, ``softmax(q k^T / sqrt(head_dim)) v`` over the valid ones.

A mask leaves two of torch's kernels, the memory-efficient one (CUTLASS) and plain products; FlashAttention 2, short and
xformers' operators are not given one here, and cuDNN's form with a bias is not tried. So every backend of
``attention.py`` but ``reference`` is torch's choice. Where captions are the keys, their scores are a small share of the
network's work: 300 keys beside 1,024 to 16,384 tokens of an image.

Bytes moved are those of ``attention.py`` and, per score, none: the mask is read as ``[B, 1, T, S]`` with strides of 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels import attention as general
from fastdiff_kernels.dispatch import Choice
from fastdiff_kernels.names import AttentionBackend


def masked_attention_reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """``masked_attention`` in plain torch, in the dtype of its arguments."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5  # [B, H, T, S]
    mixed: Tensor = scores.masked_fill(~_of_scores(mask), -torch.inf).softmax(-1) @ value  # [B, H, T, head_dim]
    return mixed


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, backend: AttentionBackend = "auto"
) -> Tensor:
    """Attention of every query over the valid keys of its sample, scaled by ``1 / sqrt(head_dim)``.

    Args:
        query: ``[B, H, T, head_dim]``, of any strides.
        key: ``[B, H, S, head_dim]``, of the dtype and device of ``query``.
        value: like ``key``.
        mask: ``[B, S]`` bool, True for the valid keys, of which each sample needs one: nothing checks it, and without
            one its results are NaN.
        backend: ``reference``, or any other for torch's choice.

    Returns:
        ``[B, H, T, head_dim]`` in the dtype of ``query``.

    Raises:
        ValueError: no such backend, or shapes or dtypes that do not fit.
    """
    general.validate(query, key, value, backend)
    if mask.dtype != torch.bool or mask.shape != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"mask is {tuple(mask.shape)} of {mask.dtype}, expected {(key.shape[0], key.shape[2])} of torch.bool"
        )
    if backend == "reference":
        return masked_attention_reference(query, key, value, mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=_of_scores(mask))


def masked_choice(
    head_dim: int, query_length: int, key_length: int, example: Tensor, backend: AttentionBackend = "auto"
) -> Choice:
    """The kernel that ``masked_attention`` would run, and the reason; arguments as for ``attention.choice``."""
    general.validate_backend(backend)
    if backend == "reference":
        return Choice("attention", "reference", "reference", "asked for")
    query, key = (
        torch.zeros(1, 1, length, head_dim, device=example.device, dtype=example.dtype, requires_grad=True)
        for length in (query_length, key_length)
    )
    mask = torch.ones(1, 1, query_length, key_length, dtype=torch.bool, device=example.device)
    number = torch._fused_sdp_choice(query, key, key, mask)
    kernel = f"sdpa ({general.name_of(number)})"
    why = "torch's choice with a mask" + ("" if backend in ("auto", "sdpa") else f"; {backend} takes none")
    return Choice("attention", kernel, kernel, why)


def _of_scores(mask: Tensor) -> Tensor:
    """``[B, S] -> [B, 1, 1, S]``."""
    return mask[:, None, None, :]
