"""Tables of predicted memory, time and price in the documents: ``python docs/scripts/plans.py`` writes them anew.

A table ends at ``<!-- end -->``. It begins with one of two markers:

- ``<!-- plan: PRESET | GPUS PRICE | ... -->``: a row per set of GPUs; the price is per GPU and hour.
- ``<!-- methods: PRESET FLAGS | GPUS | ... -->``: a row per method of ``METHODS``.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fastdiff.cli.main import main

DOCS = Path(__file__).parents[1]
PAGES = (*sorted((DOCS / "recipes").glob("*.md")), DOCS / "objectives.md")
BLOCK = re.compile(r"(?P<head><!-- (?P<spec>(?:plan|methods): .+?) -->\n)(?P<table>.*?)(?=<!-- end -->)", re.DOTALL)
METHODS = {
    "AdamW": "",
    "8-bit AdamW": "--optim.name adamw8bit",
    "Muon": "--optim.name muon",
    "Muon, momentum in bf16": "--optim.name muon-bf16",
    "Muon, all state in 8 bits": "--optim.name muon8bit",
    "alignment": "--objective.alignment_weight 0.5 --model.aligned_width 64",
    "TREAD": "--model.routing tread",
    "SPRINT": "--model.routing sprint",
    "x-prediction": "--objective.prediction x0",
    "contrastive term": "--objective.contrastive_weight 0.05",
    "muP": "--model.base_width 288",
    "sums in one order": "--performance.grad_accum_order micro_batches",
}
"""Flags of training methods, each beside the first one."""
_HEAD = """
| `{preset}` on | ZeRO | micro-batch | recompute | memory of a rank | images/s | time | price |
|---|---|---|---|---|---|---|---|
"""


def plan(*flags: str) -> Any:
    """Return what ``fastdiff plan --json`` prints."""
    with redirect_stdout(io.StringIO()) as printed:
        if (code := main(["plan", *flags, "--data.path", "", "--json"])) != 0:
            raise SystemExit(code)
    return json.loads(printed.getvalue())


def table(spec: str) -> str:
    """Return the Markdown table of a marker."""
    kind, given = spec.split(": ", 1)
    first, *wanted = [part.strip() for part in given.split("|")]
    return _of_preset(first, wanted) if kind == "plan" else _of_methods(first.split(), wanted)


def _of_preset(preset: str, wanted: Sequence[str]) -> str:
    rows = ""
    for gpus, price in map(str.split, wanted):
        rows += _row(gpus, plan("--preset", preset, "--gpus", gpus, "--price", price)) + "\n"
    return _HEAD.format(preset=preset) + rows + "\n"


def _of_methods(run: Sequence[str], sets: Sequence[str]) -> str:
    head = ["method", "flags"]
    for gpus in sets:
        head += [f"{gpus}: memory of a rank", "time of a step", "relative"]
    rows = [head, ["---"] * len(head)]
    plain: dict[str, Any] = {}
    for name, flags in METHODS.items():
        options = plan("--preset", *run, *flags.split(), "--gpus", *sets)["options"]
        fastest = {one["gpus"]: one for one in reversed(options)}
        plain = plain or fastest
        rows.append([name, flags and f"`{flags}`"])
        for gpus in sets:
            rows[-1] += _costs(fastest[gpus], plain[gpus])
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def _costs(option: Any, plain: Any) -> tuple[str, str, str]:
    step, ratio = option["step_s"], option["step_s"]["middle"] / plain["step_s"]["middle"]
    return f"{option['peak_gib']:.1f} GiB", f"{1e3 * step['low']:.0f} to {1e3 * step['high']:.0f} ms", f"{ratio:.2f}"


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
    rewrite(PAGES)
