"""Count of the captions that a text encoder cuts, among those that a run draws."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fastdiff.console import log

_EARLY = 1000
"""Drawn captions after which the share is told for the first time."""


class CutCaptions:
    """Counts drawn captions, and tells which share is cut: the first one at once, then after 1,000, and at the end.

    Only the first rank counts and tells: the samples of each rank are drawn alike.

    Args:
        lost: Returns the tokens of captions that are not read, by the number that is (``TextEncoders.lost``).
        rank: Of this process.
        ranks: Their number.
    """

    def __init__(self, lost: Callable[[Sequence[str]], Mapping[int, int]], rank: int, ranks: int) -> None:
        self._lost, self._counts = lost, rank == 0
        self._where = f" on rank 0 of {ranks}" if ranks > 1 else ""
        self._drawn = self._told = 0
        self._cut: Counter[int] = Counter()
        self._unread: Counter[int] = Counter()

    def add(self, names: Sequence[str], captions: Sequence[str]) -> None:
        """Count one caption of each of these images."""
        if not self._counts:
            return
        lost = {caption: self._lost([caption]) for caption in dict.fromkeys(captions)}
        first = not self._cut
        for name, caption in zip(names, captions, strict=True):
            for limit, tokens in lost[caption].items():
                if first:
                    log.warning(
                        f"{name}: its caption is longer than the {limit} tokens that the text encoder reads, and is "
                        "cut there; the share of such captions is told later"
                    )
                first = False
                self._cut[limit] += 1
                self._unread[limit] += tokens
        self._drawn += len(captions)
        if self._told == 0 and self._drawn >= _EARLY:
            self.tell()

    def tell(self) -> None:
        """Say which share of the drawn captions was cut; nothing if none was, or if it was said."""
        if self._told == self._drawn:
            return
        self._told = self._drawn
        for limit, count in self._cut.items():
            share = f"{count / self._drawn:.1%} of the captions drawn{self._where} ({count} of {self._drawn})"
            unread = f"; {self._unread[limit]} tokens were not read" if self._unread[limit] else ""
            log.warning(f"{share} were cut after {limit} tokens{unread}")
