"""Terminal output of benchmarks: tables and progress."""

import sys
from collections.abc import Sequence

from fastdiff import tables
from fastdiff.terminal import columns
from fastdiff_bench.records import record_warnings
from fastdiff_bench.records.number_format import interval, number
from fastdiff_bench.records.record import Measurement


def table(rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Format rows with aligned columns that fit the terminal; the first row is the heading.

    Args:
        rows: cells, the same number in each row.
        alignment: ``<`` (left) or ``>`` (right) per column.
    """
    left = [column for column, side in enumerate(alignment) if side == "<"]
    return tables.table(rows, left, columns(sys.stdout))


def figures(rows: Sequence[Measurement], *, smoke: bool) -> str:
    """Format measurements with their ranges, one a line; those of a smoke run without ratios."""
    lines = [["", "quantity", "median", "unit", "p20 to p80"]]
    for m in rows:
        if not (smoke and record_warnings.is_ratio(m)):
            lines.append([m.provider, m.quantity, number(m.value), "" if m.unit == "1" else m.unit, interval(m)])
    return table(lines, "<<><<")


def progress(text: str) -> None:
    """Replace the progress line, ``""`` clears it; prints only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
