"""Attention with a mask against float64, and its refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff_kernels.masked_attention import masked_attention, masked_attention_reference, masked_choice

_BATCH, _HEADS, _QUERIES, _KEYS, _WIDTH = 3, 2, 16, 9, 24
_LENGTHS = torch.tensor([1, 4, _KEYS])


def given(dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """Queries, keys and values as views of projections, as networks give them, and a mask."""
    generator = torch.Generator().manual_seed(0)
    parts = tuple(
        torch.randn(_BATCH, length, _HEADS * _WIDTH, generator=generator).to(dtype).requires_grad_()
        for length in (_QUERIES, _KEYS, _KEYS)
    )
    return parts, torch.arange(_KEYS)[None] < _LENGTHS[:, None]


def results(parts: tuple[Tensor, ...], mask: Tensor, op: Any, **options: Any) -> list[Tensor]:
    """Output and gradients."""
    leaves = [part.detach().requires_grad_() for part in parts]
    views = [leaf.view(*leaf.shape[:2], _HEADS, _WIDTH).transpose(1, 2) for leaf in leaves]
    out = op(*views, mask, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flash", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_as_accurate_as_eager(dtype: torch.dtype, backend: Any) -> None:
    parts, mask = given(dtype)
    exact = results(tuple(part.double() for part in parts), mask, masked_attention_reference)
    eager = results(parts, mask, masked_attention_reference)
    found = results(parts, mask, masked_attention, backend=backend)
    for got, plain, expected in zip(found, eager, exact, strict=True):
        assert got.dtype == dtype
        least = torch.finfo(dtype).eps * expected.abs().max()
        assert (got - expected).norm() <= 2 * (plain - expected).norm() + least


def test_masked_keys_count_for_nothing() -> None:
    (query, key, value), mask = given(torch.float32)
    found = results((query, key, value), mask, masked_attention)
    other = [part.detach().masked_fill(~mask[..., None], 1e4) for part in (key, value)]
    assert torch.equal(found[0], results((query, *other), mask, masked_attention)[0])
    assert not any(gradient[~mask].any() for gradient in found[2:])
    alone = results((query[:1], key[:1, :1], value[:1, :1]), mask[:1, :1], masked_attention)
    torch.testing.assert_close(found[0][:1], alone[0])


def test_what_does_not_fit_is_refused() -> None:
    (query, key, value), mask = given(torch.float32)
    q, k, v = (part.view(*part.shape[:2], _HEADS, _WIDTH).transpose(1, 2) for part in (query, key, value))
    with pytest.raises(ValueError, match=r"mask is \(3, 9\) of torch.int64, expected \(3, 9\) of torch.bool"):
        masked_attention(q, k, v, mask.long())
    with pytest.raises(ValueError, match=r"mask is \(3, 8\) of torch.bool, expected \(3, 9\)"):
        masked_attention(q, k, v, mask[:, :8])
    with pytest.raises(ValueError, match="attention backend 'slow': expected one of auto"):
        masked_attention(q, k, v, mask, backend="slow")  # type: ignore[arg-type]


def test_it_says_what_it_uses() -> None:
    example = torch.zeros(1)
    assert masked_choice(24, 16, 9, example).why == "torch's choice with a mask"
    assert masked_choice(24, 16, 9, example, "flash").why == "torch's choice with a mask; flash takes none"
    assert masked_choice(24, 16, 9, example, "reference").forward == "reference"
