"""Terminal output of benchmarks: tables and progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Format rows with aligned columns; the first row is the heading.

    Args:
        rows: cells, the same number in each row.
        alignment: ``<`` (left) or ``>`` (right) per column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in rows
    )


def progress(text: str) -> None:
    """Replace the progress line, ``""`` clears it; prints only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
