"""Attention of SD 1.5, SD 2 (64x64 latents; image and 77 text tokens), DiT and PixArt, by every registered backend."""

from functools import partial

import torch
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs
from fastdiff_kernels import dispatch, launch
from fastdiff_kernels.attention import attention
from fastdiff_kernels.masked_attention import masked_attention
from fastdiff_kernels.names import ATTENTION_BACKENDS, AttentionBackend
from fastdiff_kernels.packed_attention import packed_attention

_TEXT = 77
_CAPTION = 300
_QUERIES_LARGE = 2**15
_SHAPES = (
    ("sd15", 8, 4096, 40),
    ("sd15", 8, 1024, 80),
    ("sd15", 8, 256, 160),
    ("sd2", 5, 4096, 64),
    ("sd2", 10, 1024, 64),
)
_PACKED = (("dit-xl", 16, 256, 72), ("dit-xl-4", 16, 64, 72), ("dit-b", 12, 256, 64))
"""One projection for queries, keys and values, as ``short`` takes it; all give one packed gradient, summed too."""

_MASKED = (("pixart", 16, 256, 72), ("pixart", 16, 4096, 72))
"""Cross-attention to captions of 300 tokens, of which a mask leaves up to all."""


def _build(device: str, samples: int, heads: int, queries: int, keys: int, head_dim: int) -> Inputs:
    lengths = {"query": queries, "key": keys, "value": keys}
    return {
        name: torch.randn(samples, length, heads, head_dim, device=device).bfloat16().requires_grad_()
        for name, length in lengths.items()
    }


def _call(inputs: Inputs, backend: AttentionBackend) -> Tensor:
    """Call attention on ``[B, T, H, head_dim]``, the layout of the projections, and return the same layout."""
    query, key, value = (inputs[name].transpose(1, 2) for name in ("query", "key", "value"))
    return attention(query, key, value, backend=backend).transpose(1, 2)


def _operations(inputs: Inputs, products: int) -> int:
    """Count the operations of ``products`` matrix products of ``T x S x head_dim`` per head.

    Forward: scores and mixture. Backward: gradients of value, probabilities, query and key. Kernels that do not store
    the scores recompute them, so published rates, which count five products, are 1.25 times the ones here.
    """
    samples, queries, heads, head_dim = inputs["query"].shape
    return int(2 * products * samples * heads * queries * inputs["key"].shape[1] * head_dim)


def _case(model: str, heads: int, queries: int, head_dim: int, keys: int) -> Case:
    build = partial(_build, queries=queries, keys=keys, head_dim=head_dim)
    return Case(
        op="attention",
        shape=f"{model}-{heads}x{queries}x{head_dim}-{'text' if keys == _TEXT else 'self'}",
        dtype=torch.bfloat16,
        backends=tuple(backend for backend in ATTENTION_BACKENDS if backend != "short"),
        build=partial(build, samples=1, heads=1),
        build_large=partial(build, samples=_QUERIES_LARGE // queries, heads=heads),
        call=_call,
        forward_operations=partial(_operations, products=2),
        backward_operations=partial(_operations, products=4),
        arithmetic="bf16",
    )


def _build_packed(device: str, samples: int, heads: int, tokens: int, head_dim: int) -> Inputs:
    shapes = {"qkv": (samples, tokens, 3, heads, head_dim), "bias": (3 * heads * head_dim,)}
    return {n: torch.randn(shape, device=device).bfloat16().requires_grad_() for n, shape in shapes.items()}


def _call_packed(inputs: Inputs, backend: AttentionBackend) -> Tensor:
    """Call attention as a DiT block does: times include the packed gradient of ``qkv`` and that of its bias."""
    qkv = inputs["qkv"]
    kernels = launch.runs_on(qkv) and qkv.dtype != torch.float64  # in fp64 it is the oracle
    with dispatch.forced(adaln="triton" if kernels else "reference"):
        return packed_attention(qkv, bias=inputs["bias"], backend=backend)


def _packed_operations(inputs: Inputs, products: int) -> int:
    samples, tokens, _, heads, head_dim = inputs["qkv"].shape
    return int(2 * products * samples * heads * tokens**2 * head_dim)


def _packed_case(model: str, heads: int, tokens: int, head_dim: int) -> Case:
    build = partial(_build_packed, tokens=tokens, head_dim=head_dim)
    return Case(
        op="attention",
        shape=f"{model}-{heads}x{tokens}x{head_dim}-self",
        dtype=torch.bfloat16,
        backends=ATTENTION_BACKENDS,
        build=partial(build, samples=1, heads=1),
        build_large=partial(build, samples=_QUERIES_LARGE // tokens, heads=heads),
        call=_call_packed,
        sums=("dbias",),
        forward_operations=partial(_packed_operations, products=2),
        backward_operations=partial(_packed_operations, products=4),
        arithmetic="bf16",
    )


def _build_masked(device: str, samples: int, heads: int, queries: int, head_dim: int) -> Inputs:
    lengths = torch.arange(1, samples + 1, device=device) * _CAPTION // samples
    mask = torch.arange(_CAPTION, device=device) < lengths[:, None]  # [B, S]
    return {**_build(device, samples, heads, queries, _CAPTION, head_dim), "mask": mask}


def _call_masked(inputs: Inputs, backend: AttentionBackend) -> Tensor:
    query, key, value = (inputs[name].transpose(1, 2) for name in ("query", "key", "value"))
    return masked_attention(query, key, value, inputs["mask"], backend=backend).transpose(1, 2)


def _masked_operations(inputs: Inputs, products: int) -> int:
    """``_operations`` of the valid keys."""
    _, queries, heads, head_dim = inputs["query"].shape
    return int(2 * products * int(inputs["mask"].sum()) * heads * queries * head_dim)


def _masked_case(model: str, heads: int, queries: int, head_dim: int) -> Case:
    build = partial(_build_masked, queries=queries, head_dim=head_dim)
    return Case(
        op="attention",
        shape=f"{model}-{heads}x{queries}x{head_dim}-masked",
        dtype=torch.bfloat16,
        backends=("auto", "reference"),
        build=partial(build, samples=2, heads=1),
        build_large=partial(build, samples=_QUERIES_LARGE // queries, heads=heads),
        call=_call_masked,
        forward_operations=partial(_masked_operations, products=2),
        backward_operations=partial(_masked_operations, products=4),
        arithmetic="bf16",
    )


CASES = [
    *(_case(*shape, keys) for shape in _SHAPES for keys in (shape[2], _TEXT)),
    *(_packed_case(*shape) for shape in _PACKED),
    *(_masked_case(*shape) for shape in _MASKED),
]
