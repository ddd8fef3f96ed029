"""LoKr: layers whose weight changes by a Kronecker product (LyCORIS, Yeh et al. 2023, arXiv:2309.14859)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class KroneckerShape:
    """How large the factors of a layer are, and which of them are products of low rank; the rules are LyCORIS'."""

    rank: int
    """Of the factors that are products, above 0."""
    factor: int
    """Rows and columns of the first factor, if they divide those of the weight; -1: as near as possible to the second
    factor's."""
    full_matrix: bool = False
    """Whether no factor is a product."""
    decompose_both: bool = False
    """Whether the first factor may be a product, too."""

    def of(self, weight: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each matrix by its name, for a weight ``[outputs, inputs, ...]``.

        ``lokr_w1`` is ``[a, b]`` and ``lokr_w2`` ``[c, d, ...]`` where the weight is ``[a * c, b * d, ...]``. In their
        places ``_a`` and ``_b`` stand for a factor that is a product. It is one where the rank is below half of its
        larger side.
        """
        outputs, inputs, *kernel = weight
        (a, c), (b, d) = divided(outputs, self.factor), divided(inputs, self.factor)
        apart = not self.full_matrix and self.decompose_both and self.rank < max(a, b) / 2
        shapes: dict[str, tuple[int, ...]] = (
            {"lokr_w1_a": (a, self.rank), "lokr_w1_b": (self.rank, b)} if apart else {"lokr_w1": (a, b)}
        )
        if self.full_matrix or self.rank >= max(c, d) / 2:
            return shapes | {"lokr_w2": (c, d, *kernel)}
        return shapes | {"lokr_w2_a": (c, self.rank), "lokr_w2_b": (self.rank, d * math.prod(kernel))}


def divided(size: int, factor: int) -> tuple[int, int]:
    """Return two numbers with the product ``size``, the smaller one first.

    The smaller is ``factor`` or its partner if ``factor`` divides the size; otherwise the largest divisor that is no
    larger than ``factor`` or its own partner. -1 sets no limit.
    """
    if factor > 0 and size % factor == 0:
        small = min(factor, size // factor)
    else:
        limit = math.isqrt(size)
        small = max(n for n in range(1, (min(limit, factor) if factor > 0 else limit) + 1) if size % n == 0)
    return small, size // small


def has_products(names: Sequence[str] | Mapping[str, object]) -> bool:
    """Whether one of the factors with these matrices is a product: only then does LyCORIS scale by alpha / rank."""
    return any(name.endswith(("_a", "_b")) for name in names)


class KroneckerLayer(nn.Module):
    """``base(x) + scale * (w1 kron w2) x``, computed without the product of the two factors.

    The inputs ``[b * d]`` are a matrix ``X`` ``[b, d]``, and the change is ``w1 X w2.T`` ``[a, c]``. peft's layer
    builds the product, and reads the shape of the base's weight, which is neither in quantised layers nor in parts of
    ZeRO-3.

    Args:
        base: frozen linear layer or convolution without groups.
        shape: of the factors.
        alpha: numerator of the scale ``alpha / rank``, which is 1 where no factor is a product.
    """

    lokr_w1: Tensor
    lokr_w1_a: Tensor
    lokr_w1_b: Tensor
    lokr_w2: Tensor
    lokr_w2_a: Tensor
    lokr_w2_b: Tensor

    def __init__(self, base: nn.Linear | nn.Conv2d, shape: KroneckerShape, alpha: float) -> None:
        super().__init__()
        self.base_layer, self._enabled = base, True
        shapes = shape.of(base.weight.shape)
        for name, size in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
        self.scale = alpha / shape.rank if has_products(shapes) else 1.0
        self._first_is_product, self._second_is_product = "lokr_w1_a" in shapes, "lokr_w2_a" in shapes
        self._columns = divided(base.weight.shape[1], shape.factor)[0]
        self._kernel = tuple(base.weight.shape[2:])
        self.reset()

    def reset(self) -> None:
        """Draw the matrices as LyCORIS does: the second factor is 0, which changes nothing."""
        for name, parameter in self.named_parameters(recurse=False):
            if name in ("lokr_w2", "lokr_w2_b"):
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """That of the base, of which some networks ask the dtype."""
        return self.base_layer.weight

    def enable_adapters(self, enabled: bool) -> None:
        """Compute with or without the change."""
        self._enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        """Shapes and dtype are those of the base layer."""
        out = cast(Tensor, self.base_layer(x))
        if not self._enabled:
            return out
        first = self.lokr_w1_a @ self.lokr_w1_b if self._first_is_product else self.lokr_w1
        change = self._mixed_maps if self._kernel else self._mixed
        return out + change(x.to(first.dtype), self.scale * first).to(out.dtype)

    def _mixed(self, x: Tensor, first: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:-1], self._columns, -1)  # [..., b, d]
        if self._second_is_product:
            x = F.linear(F.linear(x, self.lokr_w2_b), self.lokr_w2_a)
        else:
            x = F.linear(x, self.lokr_w2)
        return (first @ x).flatten(-2)  # [..., b, c] -> [..., a * c]

    def _mixed_maps(self, x: Tensor, first: Tensor) -> Tensor:
        base = cast(nn.Conv2d, self.base_layer)
        size, x = len(x), x.reshape(len(x) * self._columns, -1, *x.shape[2:])  # [B * b, d, H, W]
        whole = not self._second_is_product
        second = self.lokr_w2 if whole else self.lokr_w2_b.reshape(len(self.lokr_w2_b), -1, *self._kernel)
        x = F.conv2d(x, second, None, base.stride, base.padding, base.dilation)
        if not whole:
            x = F.conv2d(x, self.lokr_w2_a[:, :, None, None])
        return torch.einsum("ab, nbchw -> nachw", first, x.reshape(size, -1, *x.shape[1:])).flatten(1, 2)
