"""The modulation of a block: shifts, scales and gates in one tensor, and one tensor for all their gradients."""

from __future__ import annotations

import torch
from torch import Tensor


class Modulation:
    """Shifts, scales and gates of a block, ``[B, K * D]``, in the order of their use: each op takes the next ones.

    Kernels write their gradients into one tensor of this shape, the last op of the forward pass first. For this each of
    them passes the tensor on to the next. So one object serves one forward pass, and nothing else may use the tensor
    after it was given away. An op after the last, which passes nothing on, is refused: it would write gradients of all
    parts a second time.
    """

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed
        """As the next op takes it."""
        self._next = 0
        self._ended = False
        self._parts: tuple[Tensor, ...] = ()

    def advance(self, count: int) -> int:
        """Return the number of the next part, and go on by ``count``."""
        self._next += count
        return self._next - count

    def take(self, count: int, width: int) -> tuple[Tensor, ...]:
        """Return the next ``count`` parts, ``[B, width]`` each, for an op in plain torch."""
        if not self._parts:  # one split for all ops: its gradient is one concatenation
            self._parts = torch.split(self.packed, width, 1)
        first = self.advance(count)
        return self._parts[first : first + count]

    def end(self) -> None:
        """Let no further op take parts."""
        self._ended = True

    def left(self, width: int) -> int:
        """Number of parts of ``width`` columns that were not taken.

        Raises:
            ValueError: an op ended it.
        """
        if self._ended:
            raise ValueError(
                "the op before is the last that takes its parts of this modulation: modulated_norm and gated_residual "
                "pass nothing on; make another Modulation"
            )
        return self.packed.shape[1] // width - self._next

    def passed_on(self, packed: Tensor) -> None:
        """Let the next ops take ``packed``, equal in value."""
        self.packed, self._parts = packed, ()
