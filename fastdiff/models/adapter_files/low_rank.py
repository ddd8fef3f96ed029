"""The change of one layer by a LoRA, and its conversion between the layouts of layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastdiff.models.adapter_files.forms import Form


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change ``alpha / rank * B A`` of a weight (Hu et al. 2021, arXiv:2106.09685)."""

    down: Tensor
    """A, ``[rank, inputs, ...]``; a convolution has the size of its kernel behind."""
    up: Tensor
    """B, ``[outputs, rank, ...]``; a convolution has ones behind."""
    alpha: float
    """Numerator of the scale."""
    magnitude: Tensor | None = None
    """Of a DoRA (Liu et al. 2024, arXiv:2402.09353): norm of each row of the changed weight, ``[outputs]``."""

    @property
    def rank(self) -> int:
        """Rank of the change."""
        return len(self.down)

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank

    def change(self) -> Tensor:
        """Return what is added to the weight, ``[outputs, inputs, ...]``."""
        product = self.up.flatten(1) @ self.down.flatten(1)
        return self.scale * product.view(len(self.up), *self.down.shape[1:])

    def merged(self, weight: Tensor) -> Tensor:
        """Return the changed weight (section 4.1 of the paper)."""
        changed = weight + self.change()
        if self.magnitude is None:
            return changed
        norm = row_norms(changed)
        gain = torch.where(norm > 0, self.magnitude / norm, 1.0)
        return changed * gain.view(-1, *[1] * (weight.ndim - 1))

    def tensors(self, form: Form) -> dict[str, Tensor]:
        """Return the matrices of a file, and alpha if it is beside them, by the ends of their keys."""
        stored = self if form.alpha else self.with_scale_in_up()
        alpha = {".alpha": torch.tensor(stored.alpha)} if form.alpha else {}
        return {form.down: stored.down, form.up: stored.up, **alpha, **self._magnitudes(form)}

    def _magnitudes(self, form: Form) -> dict[str, Tensor]:
        """Return them as ``[outputs, 1, ...]``; peft has ``[outputs]``, of a convolution ``[1, outputs, 1, 1]``."""
        if self.magnitude is None:
            return {}
        column = self.magnitude.view(-1, *[1] * (self.down.ndim - 1))
        of_peft = self.magnitude if self.down.ndim == 2 else column.transpose(0, 1)
        return {form.magnitude: of_peft.contiguous() if form.name == "diffusers" else column}

    def with_scale_in_up(self) -> "LowRank":
        """Return the same change with alpha equal to the rank."""
        return replace(self, up=self.scale * self.up, alpha=float(self.rank))

    def with_halves_swapped(self) -> "LowRank":
        """Return the change of the layer whose first and second half of outputs are swapped."""
        magnitude = None if self.magnitude is None else torch.cat(self.magnitude.chunk(2)[::-1])
        return replace(self, up=torch.cat(self.up.chunk(2)[::-1]), magnitude=magnitude)

    def stacked(self, parts: Sequence["LowRank | None"], rows: Sequence[int]) -> "LowRank":
        """Return ``stack_rows`` of these parts."""
        return stack_rows(parts, rows)

    def split(self, rows: Sequence[int]) -> "Sequence[LowRank | None]":
        """Return ``split_rows`` of this change."""
        return split_rows(self, rows)


def stack_rows(parts: Sequence[LowRank | None], rows: Sequence[int]) -> LowRank:
    """Return the change of a layer that has the outputs of several linear layers one after another.

    A is stacked, B block-diagonal, and alpha is the sum, because the rank grows.

    Args:
        parts: the change of each, at least one; None: it stays as it is, which no magnitudes say.
        rows: outputs of each.
    """
    present = [part for part in parts if part is not None]
    scale, rank = present[0].scale, sum(part.rank for part in present)
    up = present[0].up.new_zeros(sum(rows), rank)
    row = column = 0
    for part, height in zip(parts, rows, strict=True):
        if part is not None:
            up[row : row + height, column : column + part.rank] = part.up * (part.scale / scale)
            column += part.rank
        row += height
    magnitudes = [part.magnitude for part in present if part.magnitude is not None]
    magnitude = torch.cat(magnitudes) if magnitudes else None
    return LowRank(torch.cat([part.down for part in present]), up, scale * rank, magnitude)


def split_rows(whole: LowRank, rows: Sequence[int]) -> list[LowRank | None]:
    """Return the changes of the linear layers whose outputs a layer has one after another.

    One that was made by ``stack_rows`` of equal ranks falls apart into its parts; otherwise all parts share A.

    Returns:
        One change per entry of ``rows``; None: these rows are all zero, others are not, and there are no magnitudes.
    """
    ups = torch.split_with_sizes(whole.up, list(rows))
    zero = [whole.magnitude is None and not up.any() for up in ups]
    magnitudes = [None] * len(ups) if whole.magnitude is None else torch.split(whole.magnitude, list(rows))
    changed = [i for i in range(len(ups)) if not zero[i] or all(zero)]
    found: list[LowRank | None] = [None] * len(ups)
    width, left = divmod(whole.rank, len(changed))
    blocks = [slice(width * i, width * (i + 1)) for i in range(len(changed))]
    apart = width > 0 and left == 0 and all(_only(ups[i], block) for i, block in zip(changed, blocks, strict=True))
    for i, block in zip(changed, blocks, strict=True):
        if apart:
            up, alpha = ups[i][:, block].contiguous(), whole.alpha * width / whole.rank
            found[i] = LowRank(whole.down[block], up, alpha, magnitudes[i])
        else:
            found[i] = replace(whole, up=ups[i], magnitude=magnitudes[i])
    return found


def _only(up: Tensor, columns: slice) -> bool:
    """Whether all other columns are zero."""
    return not up[:, : columns.start].any() and not up[:, columns.stop :].any()


def row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each row of a weight, of a convolution of the weights of each output, ``[outputs]``."""
    return weight.flatten(1).square().sum(1).sqrt()
