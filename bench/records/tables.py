"""What a benchmark shows in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Rows, the first the heading, as lines with aligned columns.

    Args:
        rows: cells of equally many columns.
        alignment: ``<`` (left) or ``>`` (right) per column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in rows
    )


def progress(text: str) -> None:
    """Show one line of progress in place of the last one, ``""`` none; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
