"""Tables of text: aligned columns in one line per row, or fitted into the width of a terminal."""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from fastdiff.terminal import filled, fitted, width

_GAP = 2
_PIECE = re.compile(r"[^\s/-]*[/-]*\s*")
"""Part of a cell that is not broken; a break may follow a space, a slash or a hyphen."""


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), room: int | None = None) -> str:
    """Return rows of cells, the first of them the head, as a text.

    Args:
        rows: all of the same length.
        left: columns that align on the left; the others align on the right.
        room: columns of the terminal; where it does not suffice, cells take several lines, or each row becomes a
            sentence. None: one line per row.
    """
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    gap = _GAP
    if room is not None and sum(widths) + gap * (len(widths) - 1) > room:
        gap = 1
        widths = _narrowed(rows, widths, room - gap * (len(widths) - 1))
        if sum(widths) + gap * (len(widths) - 1) > room:
            return "\n".join(fitted(line, room) for line in _in_words(rows))
    return _drawn(rows, left, widths, gap)


def _narrowed(rows: Sequence[Sequence[str]], widths: Sequence[int], room: int) -> list[int]:
    """Take columns from the widest until the sum is at most ``room``, as far as the pieces of the cells allow it."""
    least = [
        max(width(piece.rstrip()) for cell in column for piece in _PIECE.findall(cell))
        for column in zip(*rows, strict=True)
    ]
    found = list(widths)
    while sum(found) > room:
        wide = [column for column in range(len(found)) if found[column] > least[column]]
        if not wide:
            break
        found[max(wide, key=found.__getitem__)] -= 1
    return found


def _in_words(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each row but the head in words: ``start 1, began 12:30, end done``."""
    head, *rest = rows
    for row in rest:
        yield ", ".join(f"{name} {cell}".strip() for name, cell in zip(head, row, strict=True) if cell)


def _drawn(rows: Sequence[Sequence[str]], left: Collection[int], widths: Sequence[int], gap: int) -> str:
    lines = []
    for row in rows:
        cells = [list(filled(_PIECE.findall(cell), room, room)) for cell, room in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (
                part + " " * (room - width(part)) if column in left else " " * (room - width(part)) + part
                for column, (part, room) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append((" " * gap).join(padded).rstrip())
    return "\n".join(lines)
