"""Tables of memory, time and price in the recipes: ``python docs/scripts/plans.py`` writes them anew.

A table stands between ``<!-- plan: PRESET | GPUS PRICE | ... -->`` and ``<!-- end -->``. The price is per GPU and hour.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fastdiff.cli.main import main

PAGES = Path(__file__).parents[1] / "recipes"
BLOCK = re.compile(r"(?P<head><!-- plan: (?P<spec>.+?) -->\n)(?P<table>.*?)(?=<!-- end -->)", re.DOTALL)
_HEAD = """
| `{preset}` on | ZeRO | micro-batch | recompute | memory of a rank | images/s | time | price |
|---|---|---|---|---|---|---|---|
"""


def plan(preset: str, gpus: str, price: str) -> Any:
    """Return what ``fastdiff plan --json`` prints."""
    with redirect_stdout(io.StringIO()) as printed:
        flags = ["--preset", preset, "--data.path", "", "--gpus", gpus, "--price", price, "--json"]
        if (code := main(["plan", *flags])) != 0:
            raise SystemExit(code)
    return json.loads(printed.getvalue())


def table(spec: str) -> str:
    """Return the Markdown table of a marker."""
    preset, *wanted = [part.strip() for part in spec.split("|")]
    rows = [_row(gpus, plan(preset, gpus, price)) for gpus, price in map(str.split, wanted)]
    return _HEAD.format(preset=preset) + "".join(f"{row}\n" for row in rows) + "\n"


def _row(gpus: str, found: Any) -> str:
    if not found["options"]:
        reasons = "; ".join(dict.fromkeys(one["reason"] for one in found["not_possible"]))
        return f"| {gpus} | does not fit: {reasons} | | | | | | |"
    best = found["options"][0]
    memory, rate, days = f"{best['peak_gib']:.1f} of {best['room_gib']:.0f} GiB", best["images_per_s"], best["days"]
    return (
        f"| {gpus} | {best['zero_stage']} | {best['micro']} | {_recomputed(best)} | {memory} "
        f"| {_rounded(rate['low'])} to {_rounded(rate['high'])} | {_span(days['low'], days['high'])} "
        f"| {_rounded(best['price'])} |"
    )


def _recomputed(option: Any) -> str:
    """Return which blocks of an option are recomputed."""
    if not option["recompute"]:
        return "no"
    stored, blocks = option["stored_blocks"], option["blocks"]
    return f"{blocks - stored} of {blocks}" if stored else "yes"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _span(low: float, high: float) -> str:
    """Return an interval of days in the unit that suits its end."""
    for unit, days in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if float(_rounded(high / days).replace(",", "")) >= 2 or unit == "minutes":
            return f"{_rounded(low / days)} to {_rounded(high / days)} {unit}"
    raise AssertionError


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the specification and the table of every marker of a page."""
    for block in BLOCK.finditer(text):
        yield block["spec"], block["table"]


def rewrite(pages: Iterable[Path]) -> None:
    """Write all tables of the pages anew."""
    for page in pages:
        page.write_text(BLOCK.sub(lambda block: block["head"] + table(block["spec"]), page.read_text()))


if __name__ == "__main__":
    rewrite(sorted(PAGES.glob("*.md")))
