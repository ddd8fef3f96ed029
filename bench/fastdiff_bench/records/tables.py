"""Terminal output of benchmarks: tables and progress."""

import sys
from collections.abc import Sequence

from fastdiff import tables
from fastdiff.terminal import columns


def table(rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Format rows with aligned columns that fit the terminal; the first row is the heading.

    Args:
        rows: cells, the same number in each row.
        alignment: ``<`` (left) or ``>`` (right) per column.
    """
    left = [column for column, side in enumerate(alignment) if side == "<"]
    return tables.table(rows, left, columns(sys.stdout))


def progress(text: str) -> None:
    """Replace the progress line, ``""`` clears it; prints only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
