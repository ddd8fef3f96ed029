"""Owners of the weights that an optimizer updates whole, and what the ranks send them and back.

Of the ranks with a slice of a weight, the one with the least work so far owns it. It gets the other slices and sends
back the results; of a weight that every rank has whole, it sends the result alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Loads:
    """The work of each rank so far."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def owner(self, ranks: Iterable[int], work: int) -> int:
        """Return the owner of the next weight, and count its work.

        Args:
            ranks: those with a slice.
            work: in any unit, the same for all weights.
        """
        found = min(ranks, key=lambda rank: (self._of.get(rank, 0), rank))
        self._of[found] = self._of.get(found, 0) + work
        return found

    @property
    def largest(self) -> int:
        """Work of the rank with the most."""
        return max(self._of.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeWeights:
    """Work of an optimizer step on the weights that it updates whole."""

    flops: tuple[int, ...]
    """Operations on each trained parameter; 0: it is updated element by element."""
    dtype: str
    """Of these operations, a key of the GPU's rates."""
    width: int
    """Bytes per element of what is sent."""

    def spread(self, parameters: Sequence[int], slices: Iterable[Sequence[int]]) -> tuple[int, int]:
        """Return the operations of the rank with the most, and the bytes that all ranks send.

        Args:
            parameters: elements of each trained one.
            slices: of each the elements that each rank updates (``Zero.slices``).
        """
        loads, sent = Loads(), 0
        for size, flops, held in zip(parameters, self.flops, slices, strict=True):
            if not flops:
                continue
            owner = loads.owner((rank for rank, own in enumerate(held) if own), flops)
            whole = held[owner] == size
            sent += sum(held) - held[owner] if whole else 2 * (size - held[owner])
        return loads.largest, self.width * sent
