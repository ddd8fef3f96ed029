"""The change of one layer by a LoKr, and its conversion between the layouts of layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.models.adapter_files.forms import Form

Factor = tuple[Tensor, ...]
"""A matrix, or two whose product it is."""


@dataclass(frozen=True, slots=True)
class Kronecker:
    """The change ``scale * kron(w1, w2)`` of a weight ``[a * c, b * d, ...]`` (Yeh et al. 2023, arXiv:2309.14859).

    The scale is ``alpha / rank``, but 1 if both factors are whole; so it is in LyCORIS, ComfyUI and diffusers.
    """

    first: Factor
    """w1: ``[a, b]``, or ``[a, rank]`` and ``[rank, b]``."""
    second: Factor
    """w2: ``[c, d, ...]``, or ``[c, rank]`` and ``[rank, d * ...]``; a convolution has the size of its kernel behind
    d."""
    alpha: float
    """Numerator of the scale."""

    @property
    def rank(self) -> int:
        """Rank of the second factor, or of the first one if that alone is a product; 0: both are whole."""
        return next((len(factor[1]) for factor in (self.second, self.first) if len(factor) > 1), 0)

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank if self.rank else 1.0

    @property
    def rows(self) -> tuple[int, int]:
        """A and c: the rows of both factors."""
        return len(self.first[0]), len(self.second[0])

    @property
    def columns(self) -> tuple[int, int]:
        """b, and d times the size of the kernel."""
        return self.first[-1].shape[1], self.second[-1].flatten(1).shape[1]

    def change(self) -> Tensor:
        """Return what is added to the weight, ``[outputs, inputs * ...]``."""
        return self.scale * torch.kron(product(self.first), product(self.second))

    def merged(self, weight: Tensor) -> Tensor:
        """Return the changed weight."""
        return weight + self.change().view(weight.shape)

    def tensors(self, form: Form) -> dict[str, Tensor]:
        """Return the matrices of a file under LyCORIS' names, which all forms have, and alpha if it is beside them."""
        stored = self if form.alpha else self.with_scale_in_factor()
        found = {".alpha": torch.tensor(self.alpha)} if form.alpha else {}
        for name, factor in (("lokr_w1", stored.first), ("lokr_w2", stored.second)):
            ends = ("",) if len(factor) == 1 else ("_a", "_b")
            found |= {f".{name}{end}": matrix for end, matrix in zip(ends, factor, strict=True)}
        return found

    def with_scale_in_factor(self) -> "Kronecker":
        """Return the same change with alpha equal to the rank."""
        left, *right = self.first
        return Kronecker((self.scale * left, *right), self.second, float(self.rank))

    def with_halves_swapped(self) -> "Kronecker":
        """Return the change of the layer whose first and second half of outputs are swapped.

        Raises:
            ConfigError: a half ends within a block.
        """
        first, second = self.split([self.rows[0] * self.rows[1] // 2] * 2)
        if self.rows[0] % 2 == 0:
            return replace(self, first=(torch.cat([second.first[0], first.first[0]]), *self.first[1:]))
        return replace(self, second=(torch.cat([second.second[0], first.second[0]]), *self.second[1:]))

    def stacked(self, parts: "Sequence[Kronecker | None]", rows: Sequence[int]) -> "Kronecker":
        """Return the change of a layer that has the outputs of several one after another.

        It is a Kronecker product if all parts have the same w2, or only one part is changed.

        Raises:
            ConfigError: it is none.
        """
        present = [part for part in parts if part is not None]
        same = all(_equal(part.second, present[0].second) for part in present)
        if not same or any(count % self.rows[1] for count in rows):
            _refuse_parts(rows, f"its parts have a w2 each, or w2 has {self.rows[1]} rows, which divide no part")
        left = [
            product(part.first) * part.scale if part is not None else self.first[0].new_zeros(a, self.columns[0])
            for part, a in zip(parts, (count // self.rows[1] for count in rows), strict=True)
        ]
        whole = Kronecker((torch.cat(left),), self.second, self.alpha)
        return replace(whole, alpha=float(whole.rank))

    def split(self, rows: Sequence[int]) -> "Sequence[Kronecker]":
        """Return the changes of the layers whose outputs a layer has one after another.

        The rows of the product are blocks with the rows of ``w2``, one for each row of ``w1``.

        Raises:
            ConfigError: a part ends within a block.
        """
        a, c = self.rows
        if all(count % c == 0 for count in rows):
            parts = torch.split_with_sizes(self.first[0], [count // c for count in rows])
            return [replace(self, first=(part, *self.first[1:])) for part in parts]
        if a == 1:
            parts = torch.split_with_sizes(self.second[0], list(rows))
            return [replace(self, second=(part, *self.second[1:])) for part in parts]
        _refuse_parts(rows, f"w1 has {a} rows, expected 1 or a multiple of {len(rows)}")


def _refuse_parts(rows: Sequence[int], why: str) -> NoReturn:
    raise ConfigError(
        f"a layer of {sum(rows)} outputs is {len(rows)} layers in diffusers, and a Kronecker product of one is none of "
        f"the other: {why}"
    )


def product(factor: Factor) -> Tensor:
    """Return a factor as one matrix ``[rows, columns * ...]``."""
    left, *right = factor
    return left @ right[0] if right else left.flatten(1)


def _equal(first: Factor, second: Factor) -> bool:
    return len(first) == len(second) and all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def without_core(core: Tensor, left: Tensor, right: Tensor) -> Factor:
    """Return a convolution's w2 that LyCORIS stored as a Tucker decomposition as a product of the same rank.

    Args:
        core: lokr_t2, ``[rank, rank, height, width]``.
        left: lokr_w2_a, ``[rank, c]``.
        right: lokr_w2_b, ``[rank, d]``.

    Returns:
        ``[c, rank]`` and ``[rank, d * height * width]``.
    """
    return left.T.contiguous(), torch.einsum("ijhw, jd -> idhw", core, right).flatten(1)
