"""The tokens of each sample that pass the middle blocks of a training pass (``--model.routing``)."""

from torch import Tensor


class KeptTokens:
    """A choice of K of T tokens per sample: those of the lowest scores, the first one among equals.

    Without synchronisation, and of a number that is known before: shapes do not depend on values. They are chosen
    outside of the blocks, so that a block that runs again in the backward pass gets the same ones.

    Args:
        scores: ``[B, T]``.
        count: K.
    """

    def __init__(self, scores: Tensor, count: int) -> None:
        self._length = scores.shape[1]
        self._index = scores.argsort(dim=1, stable=True)[:, :count]  # [B, T] -> [B, K]

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """``[B, T, D] -> [B, K, D]``."""
        return tokens.gather(1, self._like(tokens))

    def of_table(self, table: Tensor) -> Tensor:
        """``[T, d] -> [B, K, d]``; further rows in front do not count."""
        return table[-self._length :][self._index]

    def of_values(self, values: Tensor) -> Tensor:
        """``[B, H, T, d] -> [B, H, K, d]``."""
        batch, heads, _, width = values.shape
        return values.gather(2, self._index[:, None, :, None].expand(batch, heads, -1, width))

    def back_in(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Return ``tokens [B, T, D]`` with ``kept [B, K, D]`` in their places."""
        return tokens.scatter(1, self._like(kept), kept)

    def _like(self, tokens: Tensor) -> Tensor:
        return self._index[..., None].expand(-1, -1, tokens.shape[2])
