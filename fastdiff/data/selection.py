"""What an encode took from its source, what it left out, and what else a user should know of it, by reason.

Counts of the same reason add up over the partitions and ranks of an encode, in the order of the partitions, so the
result depends neither on the number of ranks nor on kills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastdiff.plurals import counted
from fastdiff.sanitize import escape

_NAMES = 3
_LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Files or samples that were treated alike."""

    reason: str
    """What they are; of pictures, what follows the word: ``without a row in metadata.csv``."""
    count: int
    first: tuple[str, ...] = ()
    """Up to three names, without control characters."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.count}{self._names}"

    @property
    def of_pictures(self) -> str:
        """The words for pictures that were left out."""
        return f"{counted(self.count, 'picture')} {self.reason}{self._names}"

    @property
    def _names(self) -> str:
        return f" (first: {', '.join(self.first)})" if self.first else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What was left out of a source."""

    left_out: tuple[Counted, ...] = ()
    """Pictures that were not taken."""
    noted: tuple[Counted, ...] = ()
    """Everything else: files that were not read, empty captions, losses."""

    def and_then(self, others: Iterable[Selection]) -> Selection:
        """Return the sums over this selection and those of later partitions."""
        every = [self, *others]
        return Selection(
            left_out=_sum(each for selection in every for each in selection.left_out),
            noted=_sum(each for selection in every for each in selection.noted),
        )

    def lines(self, taken: int) -> list[str]:
        """Return the summary, the first line with the number of pictures."""
        total = taken + sum(each.count for each in self.left_out)
        kept = "all taken" if total == taken else f"{taken} taken, {total - taken} left out"
        lines = [f"{counted(total, 'picture')}: {kept}"]
        lines += [f"  left out: {each.of_pictures}" for each in self.left_out]
        return lines + [f"  note: {each}" for each in self.noted]


@dataclass
class Tally:
    """Counts that grow one by one."""

    _counts: dict[str, list[int]] = field(default_factory=dict)
    _names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str = "", count: int = 1) -> None:
        """Count one more; ``name`` is escaped."""
        self._counts.setdefault(reason, [0])[0] += count
        names = self._names.setdefault(reason, [])
        if name and len(names) < _NAMES:
            names.append(escape(name)[:_LONGEST_NAME])

    def counted(self) -> tuple[Counted, ...]:
        """Return the counts in the order of their first additions."""
        return tuple(
            Counted(reason=reason, count=count, first=tuple(self._names[reason]))
            for reason, (count,) in self._counts.items()
        )


def _sum(counts: Iterable[Counted]) -> tuple[Counted, ...]:
    total: dict[str, Counted] = {}
    for each in counts:
        before = total.get(each.reason)
        total[each.reason] = (
            each
            if before is None
            else dataclasses.replace(
                before, count=before.count + each.count, first=(*before.first, *each.first)[:_NAMES]
            )
        )
    return tuple(total.values())
