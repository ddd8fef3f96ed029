"""Published recipes of a DiT in float64 without modules, one sample and one head after the other.

Each is written from the description of its authors: LightningDiT (Yao et al. 2025, arXiv:2501.01423), SR-DiT with the
token dropping of SPRINT (Park et al. 2025, arXiv:2510.21986) or of TREAD (Krause et al. 2025, arXiv:2501.04765), JiT
(Li & He 2025, arXiv:2511.13720), RiT (arXiv:2605.21981), and the block of PixArt (Chen et al. 2023, arXiv:2310.00426)
with a class in place of the text. Those with the class token of a teacher return its prediction
behind that of the image.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tests.support.references.dit_reference import reference_gelu, reference_norm, reference_position, reference_silu

Weights = dict[str, Tensor]
Norm = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a small network, and how it errs."""

    depth: int
    heads: int
    patch: int
    side: int
    in_context: int = 0
    in_context_from: int = 0
    norm_eps: float = 1e-6
    qk_norm_eps: float = 1e-6
    routing: Literal["none", "tread", "sprint"] = "none"
    routed: range = range(0)
    """Blocks that take the kept tokens alone."""
    half_split: bool = False
    """A trap: pairs of a rotation are half a head apart, instead of neighbours."""
    columns_first: bool = False
    """A trap: the first half of a head turns by the column."""
    halves_swapped: bool = False
    """A trap: SiLU on the second half of w12."""
    turned_first: bool = False
    """A trap: the norm of queries and keys behind the rotation."""


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[name + ".weight"].T + w[name + ".bias"]


def rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turned(x: Tensor, place: tuple[int, int] | None, shape: Shape) -> Tensor:
    """A head ``[d]`` of the patch in this row and column, as complex numbers; None: a token that is no patch."""
    if place is None:
        return x
    quarter = len(x) // 4
    first, second = reversed(place) if shape.columns_first else place
    angles = [first / 10000 ** (2 * i / (2 * quarter)) for i in range(quarter)]
    angles += [second / 10000 ** (2 * i / (2 * quarter)) for i in range(quarter)]
    turn = torch.polar(torch.ones(len(angles), dtype=x.dtype), torch.tensor(angles, dtype=x.dtype))
    pairs = x.reshape(2, -1).T if shape.half_split else x.reshape(-1, 2)
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return out.T.reshape(-1) if shape.half_split else out.reshape(-1)


def attention(
    qkv: Tensor, shape: Shape, places: list[tuple[int, int] | None], norm_q: Callable[[Tensor], Tensor],
    norm_k: Callable[[Tensor], Tensor], mixed: Callable[[Tensor], Tensor] = lambda value: value,
) -> Tensor:  # fmt: skip
    """Attention of all tokens of a sample; ``mixed`` takes the values ``[T, H, d]``."""
    query, key, value = (part.reshape(len(qkv), shape.heads, -1) for part in qkv.chunk(3, dim=-1))
    value = mixed(value)

    def prepared(head: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        if shape.turned_first:
            return norm(torch.stack([turned(x, place, shape) for x, place in zip(head, places, strict=True)]))
        return torch.stack([turned(norm(x), place, shape) for x, place in zip(head, places, strict=True)])

    heads = []
    for h in range(shape.heads):
        q, k = prepared(query[:, h], norm_q), prepared(key[:, h], norm_k)
        odds = torch.exp(q @ k.T / math.sqrt(q.shape[1]))
        heads.append(odds / odds.sum(1, keepdim=True) @ value[:, h])
    return torch.cat(heads, dim=1)


def swiglu(w: Weights, name: str, x: Tensor, shape: Shape) -> Tensor:
    u = linear(w, f"{name}.w12", x)
    half = u.shape[1] // 2
    gate, other = (u[:, half:], u[:, :half]) if shape.halves_swapped else (u[:, :half], u[:, half:])
    return linear(w, f"{name}.w3", reference_silu(gate) * other)


def gelu_mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.fc2", reference_gelu(linear(w, f"{name}.fc1", x)))


def places(shape: Shape) -> list[tuple[int, int] | None]:
    return [(row, column) for row in range(shape.side) for column in range(shape.side)]


def patches(image: Tensor, shape: Shape) -> Tensor:
    p = shape.patch
    cut = [image[:, i * p : (i + 1) * p, j * p : (j + 1) * p].reshape(-1) for i, j in places(shape)]  # type: ignore[misc]
    return torch.stack(cut)


def image_of(out: Tensor, shape: Shape) -> Tensor:
    p, channels = shape.patch, out.shape[1] // shape.patch**2
    rows = [torch.cat([pixels.reshape(p, p, channels) for pixels in row], dim=1) for row in out.chunk(shape.side)]
    return torch.cat(rows, dim=0).permute(2, 0, 1)


def embedded(w: Weights, time: float, label: int) -> tuple[Tensor, Tensor]:
    """Embeddings of the time and of the class."""
    angles = torch.tensor([time * 10000 ** (-k / 128) for k in range(128)], dtype=torch.float64)
    wave = torch.cat([torch.cos(angles), torch.sin(angles)])
    of_time = linear(w, "t_embedder.mlp.2", reference_silu(linear(w, "t_embedder.mlp.0", wave)))
    return of_time, w["y_embedder.embedding_table.weight"][label]


def six(w: Weights, n: int, condition: Tensor) -> Tensor:
    return linear(w, f"blocks.{n}.adaLN_modulation.1", reference_silu(condition)).reshape(6, -1)


def last(w: Weights, x: Tensor, condition: Tensor, norm: Norm, shape: Shape) -> Tensor:
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", reference_silu(condition)).reshape(2, -1)
    out = norm("final_layer.norm_final", x) * (1 + scale) + shift
    return image_of(linear(w, "final_layer.linear", out), shape)


def last_of_token(w: Weights, x: Tensor, condition: Tensor, norm: Norm, shape: Shape) -> tuple[Tensor, Tensor]:
    """The image of all but the first token, and the class token of the teacher that the first one predicts."""
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", reference_silu(condition)).reshape(2, -1)
    first = norm("final_layer.norm_final", x[:1]) * (1 + scale) + shift
    return last(w, x[1:], condition, norm, shape), linear(w, "final_layer.linear_cls", first)[0]


def tokens_of(w: Weights, image: Tensor, shape: Shape) -> Tensor:
    kernel = w["x_embedder.proj.weight"].flatten(1)
    x = patches(image, shape) @ kernel.T + w["x_embedder.proj.bias"]
    return x + reference_position(shape.side, x.shape[1])


def lightning(w: Weights, shape: Shape, image: Tensor, time: float, label: int) -> Tensor:
    """RMSNorm with weight, SwiGLU, rotation beside the table, no norm of queries and keys."""

    def norm(name: str, x: Tensor) -> Tensor:
        return rms(x, 1e-6) * w[name + ".weight"]

    x, condition = tokens_of(w, image, shape), sum(embedded(w, time, label))
    assert isinstance(condition, Tensor)
    for n in range(shape.depth):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six(w, n, condition)
        qkv = linear(w, f"blocks.{n}.attn.qkv", norm(f"blocks.{n}.norm1", x) * (1 + scale_a) + shift_a)
        heads = attention(qkv, shape, places(shape), lambda q: q, lambda k: k)
        x = x + gate_a * linear(w, f"blocks.{n}.attn.proj", heads)
        inner = norm(f"blocks.{n}.norm2", x) * (1 + scale_m) + shift_m
        x = x + gate_m * swiglu(w, f"blocks.{n}.mlp", inner, shape)
    return last(w, x, condition, norm, shape)


def speedrun(
    w: Weights, shape: Shape, image: Tensor, time: float, label: int, token: Tensor | None = None,
    keeps: Sequence[int] | None = None, has_path: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm without weight, GELU, rotation, norm of queries and keys with torch's epsilon, values of block 0.

    The embedded class token of a teacher has a norm with a weight. ``keeps`` are the tokens that pass the blocks
    ``routed``, None: all; without a path SPRINT has the mask token in place of them, too.
    """
    x, condition, where = tokens_of(w, image, shape), sum(embedded(w, time, label)), places(shape)
    assert isinstance(condition, Tensor)
    if token is not None:
        x = torch.cat([rms(linear(w, "cls_projectors", token[None]), 1e-6) * w["wg_norm.weight"], x])
        where = [None, *where]
    everything = list(range(len(x)))
    chosen = everything if keeps is None else list(keeps)
    first_value: list[Tensor] = []
    for n in range(shape.depth):
        if n == shape.routed.start and shape.routing != "none":
            before, x = x, x[chosen]
        inside = chosen if n in shape.routed else everything
        x = _speedrun_block(w, shape, n, x, condition, [where[i] for i in inside], first_value, inside)
        if n == shape.routed.stop - 1 and shape.routing != "none":
            x = _joined(w, shape, before, x, chosen, has_path)
    if token is not None:
        return last_of_token(w, x, condition, lambda name, x: rms(x, 1e-6), shape)
    return last(w, x, condition, lambda name, x: rms(x, 1e-6), shape)


def _joined(w: Weights, shape: Shape, before: Tensor, x: Tensor, chosen: list[int], has_path: bool) -> Tensor:
    """Every token behind the blocks that leave some out, one after the other."""
    rows = []
    for i in range(len(before)):
        passed = x[chosen.index(i)] if i in chosen else None
        if shape.routing == "tread":
            rows.append(before[i] if passed is None else passed)
            continue
        mask = w["mask_token"][0, 0]
        second = passed if passed is not None and has_path else mask
        rows.append(torch.cat([before[i], second]) @ w["fusion_proj.weight"].T + w["fusion_proj.bias"])
    return torch.stack(rows)


def _speedrun_block(
    w: Weights, shape: Shape, n: int, x: Tensor, condition: Tensor, where: list[tuple[int, int] | None],
    first_value: list[Tensor], inside: list[int],
) -> Tensor:  # fmt: skip
    """A block; that of number 0 puts the values of all tokens into ``first_value``."""
    name = f"blocks.{n}.attn"
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six(w, n, condition)
    qkv = linear(w, f"{name}.qkv", rms(x, 1e-6) * (1 + scale_a) + shift_a)

    def mixed(value: Tensor) -> Tensor:
        if not first_value:
            first_value.append(value)
            return value
        if f"{name}.v1_lambda" not in w:
            return value
        share = w[f"{name}.v1_lambda"]
        return share * first_value[0][inside] + (1 - share) * value

    heads = attention(
        qkv, shape, where, lambda q: rms(q, 2.0**-23) * w[f"{name}.q_norm.weight"],
        lambda k: rms(k, 2.0**-23) * w[f"{name}.k_norm.weight"], mixed,
    )  # fmt: skip
    x = x + gate_a * linear(w, f"{name}.proj", heads)
    return x + gate_m * gelu_mlp(w, f"blocks.{n}.mlp", rms(x, 1e-6) * (1 + scale_m) + shift_m)


def jit(w: Weights, shape: Shape, image: Tensor, time: float, label: int) -> Tensor:
    """The blocks of RiT behind patches that are embedded by two layers, the first one narrow."""
    narrow = patches(image, shape) @ w["x_embedder.proj1.weight"].flatten(1).T
    x = narrow @ w["x_embedder.proj2.weight"].flatten(1).T + w["x_embedder.proj2.bias"]
    x = x + reference_position(shape.side, x.shape[1])
    x, condition = in_context(w, shape, x, places(shape), *embedded(w, time, label))
    return last(w, x, condition, lambda name, x: weighted(w, shape, name, x), shape)


def rit(
    w: Weights, shape: Shape, image: Tensor, time: float, label: int, token: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """The class token of a teacher in front of the patches, behind the tokens of the class."""
    x = torch.cat([linear(w, "cls_projectors", token[None]), tokens_of(w, image, shape)])
    x, condition = in_context(w, shape, x, [None, *places(shape)], *embedded(w, time, label))
    return last_of_token(w, x, condition, lambda name, x: weighted(w, shape, name, x), shape)


def weighted(w: Weights, shape: Shape, name: str, x: Tensor) -> Tensor:
    return rms(x, shape.qk_norm_eps if "attn" in name else shape.norm_eps) * w[name + ".weight"]


def in_context(
    w: Weights, shape: Shape, x: Tensor, where: list[tuple[int, int] | None], of_time: Tensor, of_class: Tensor
) -> tuple[Tensor, Tensor]:
    """RMSNorm with weight, SwiGLU, rotation, norm of queries and keys, class tokens from a block on, cut off again."""

    def norm(name: str, x: Tensor) -> Tensor:
        return weighted(w, shape, name, x)

    condition = of_time + of_class
    for n in range(shape.depth):
        name = f"blocks.{n}.attn"
        if n == shape.in_context_from:
            x = torch.cat([of_class.expand(shape.in_context, -1) + w["in_context_posemb"][0], x])
            where = [None] * shape.in_context + where
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six(w, n, condition)
        qkv = linear(w, f"{name}.qkv", norm(f"blocks.{n}.norm1", x) * (1 + scale_a) + shift_a)
        heads = attention(
            qkv, shape, where, lambda q, name=name: norm(f"{name}.q_norm", q),  # type: ignore[misc]
            lambda k, name=name: norm(f"{name}.k_norm", k),  # type: ignore[misc]
        )  # fmt: skip
        x = x + gate_a * linear(w, f"{name}.proj", heads)
        inner = norm(f"blocks.{n}.norm2", x) * (1 + scale_m) + shift_m
        x = x + gate_m * swiglu(w, f"blocks.{n}.mlp", inner, shape)
    return x[shape.in_context :], condition


def single(w: Weights, shape: Shape, image: Tensor, time: float, label: int) -> Tensor:
    """Layer norm, GELU, one layer of modulations for all blocks and a table per block."""
    x, condition = tokens_of(w, image, shape), sum(embedded(w, time, label))
    assert isinstance(condition, Tensor)
    shared = linear(w, "t_block.1", reference_silu(condition)).reshape(6, -1)
    for n in range(shape.depth):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (
            shared + w[f"blocks.{n}.adaLN_modulation.scale_shift_table"]
        )
        qkv = linear(w, f"blocks.{n}.attn.qkv", reference_norm(x) * (1 + scale_a) + shift_a)
        heads = attention(qkv, replace(shape), [None] * len(x), lambda q: q, lambda k: k)
        x = x + gate_a * linear(w, f"blocks.{n}.attn.proj", heads)
        x = x + gate_m * gelu_mlp(w, f"blocks.{n}.mlp", reference_norm(x) * (1 + scale_m) + shift_m)
    shift, scale = w["final_layer.adaLN_modulation.scale_shift_table"] + condition
    return image_of(linear(w, "final_layer.linear", reference_norm(x) * (1 + scale) + shift), shape)
