"""What ``fastdiff ledger`` tells of the sums: costs, nodes and stragglers, as a table and as JSON."""

from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fastdiff import durations
from fastdiff.ledger.reader import CLASSES, Class, Start, Sums
from fastdiff.ledger.records import FILE
from fastdiff.tables import table

_LATE = 0.05
"""Share of the time in steps for which the others must have waited for a rank: equal machines differ by less."""
_KWH = 3.6e6
_MOST_LINES = 5


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank for which the others waited longest in a start."""

    start: int
    """Number of the start, from 1."""
    rank: int
    node: str
    late_s: float
    """Seconds from the end of the others' forward passes to the end of its own, over the steps."""
    longer: float
    """``late_s`` over the time that the others needed up to there."""
    share: float
    """``late_s`` over the time of the steps, kept or lost."""


@dataclass(frozen=True, slots=True)
class Node:
    """What one host gave to the run."""

    name: str
    gpu_hours: float
    late_s: float
    """Seconds for which the others waited for ranks of this node."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Money and energy; None: the price or the power is not known."""

    dollars: float | None
    kwh: float | None
    watts: float | None
    """Of a GPU."""
    is_measured: bool
    """Whether the power is measured by NVML, not given."""
    images: int

    def per_million(self, amount: float | None) -> float | None:
        """Return an amount per million kept images."""
        return amount / self.images * 1e6 if amount is not None and self.images else None


def costs(sums: Sums, price: float | None, watts: float | None) -> Costs:
    """Return the costs at ``price`` dollars per GPU-hour; ``watts`` per GPU take the place of measured ones."""
    used = sums.watts if watts is None else watts
    dollars = None if price is None else price * sums.gpu_hours
    kwh = None if used is None else used * sums.gpu_hours * 3600 / _KWH
    return Costs(dollars, kwh, used, watts is None, sums.images_kept)


def stragglers(sums: Sums) -> list[Straggler]:
    """Return the slowest rank of every start in which ranks told their times."""
    found = []
    for number, start in enumerate(sums.starts, 1):
        if start.late_s and start.others_s:
            rank = max(start.late_s, key=lambda rank: start.late_s[rank])
            late_s, steps_s = start.late_s[rank], start.seconds["step kept"] + start.seconds["step lost"]
            share = late_s / steps_s if steps_s else 0.0
            found.append(Straggler(number, rank, start.nodes[rank], late_s, late_s / start.others_s, share))
    return found


def nodes(sums: Sums) -> list[Node]:
    """Return the nodes of all starts, by name."""
    hours: dict[str, float] = defaultdict(float)
    late_s: dict[str, float] = defaultdict(float)
    for start in sums.starts:
        for name in start.nodes:
            hours[name] += start.wall_s / 3600
        for rank, late in start.late_s.items():
            late_s[start.nodes[rank]] += late
    return [Node(name, hours[name], late_s[name]) for name in sorted(hours)]


def as_json(run: Path, sums: Sums, cost: Costs) -> dict[str, Any]:
    """Return everything as JSON values; times in seconds, those of the clock since 1970."""
    return {
        "run": str(run),
        "wall_s": sums.wall_s,
        "goodput": sums.goodput,
        "seconds": sums.seconds,
        "steps_kept": sums.steps_kept,
        "steps_lost": sums.steps_lost,
        "images_kept": sums.images_kept,
        "gpu_hours": sums.gpu_hours,
        "dollars": cost.dollars,
        "dollars_per_million_images": cost.per_million(cost.dollars),
        "kwh": cost.kwh,
        "kwh_per_million_images": cost.per_million(cost.kwh),
        "watts": cost.watts,
        "watts_measured": cost.is_measured if cost.watts is not None else None,
        "starts": [asdict(start) | {"wall_s": start.wall_s, "gpu_hours": start.gpu_hours} for start in sums.starts],
        "nodes": [asdict(node) for node in nodes(sums)],
        "stragglers": [asdict(straggler) for straggler in stragglers(sums)],
        "left_out": list(sums.left_out),
    }


def in_words(run: Path, sums: Sums, cost: Costs, room: int | None = None) -> str:
    """Return everything as tables, fitted into ``room`` columns of a terminal; None: one line per row."""
    first, last = sums.starts[0].began, sums.starts[-1].ended
    starts = f"{len(sums.starts)} starts" if len(sums.starts) > 1 else "1 start"
    parts = [
        f"{run}: {starts}, from {_time(first)} to {_time(last)}: {durations.in_words(sums.wall_s)}, goodput "
        f"{_share(sums.seconds['step kept'], sums)} %",
        table(_classes(sums), (0, 3), room),
        table(_starts(sums), (7,), room),
        table(_nodes(sums), (0,), room),
        "\n".join([*_costs(sums, cost), *_late(sums), *_messages(sums), *_left_out(sums)]),
    ]
    return "\n\n".join(parts)


def _classes(sums: Sums) -> list[list[str]]:
    notes: dict[Class, str] = {
        "step kept": f"{sums.steps_kept:,} steps, {sums.images_kept:,} images",
        "step lost": f"{sums.steps_lost:,} steps that were taken again or undone" if sums.steps_lost else "",
        "unknown": "no record tells",
    }
    found = sums.seconds
    spent = [name for name in CLASSES if found[name]]
    rows = [[name, durations.in_words(found[name]), _share(found[name], sums), notes.get(name, "")] for name in spent]
    return [["time", "", "%", ""], *rows, ["all", durations.in_words(sums.wall_s), _share(sums.wall_s, sums), ""]]


def _starts(sums: Sums) -> list[list[str]]:
    head = ["start", "began", "lasted", "GPUs", "from step", "steps kept", "lost", "end"]
    return [head, *(_start(number, start) for number, start in enumerate(sums.starts, 1))]


def _start(number: int, start: Start) -> list[str]:
    end = start.outcome or "runs, or was killed"
    steps = [f"{steps:,}" for steps in (start.resumed, start.steps_kept, start.steps_lost)]
    return [str(number), _time(start.began), durations.in_words(start.wall_s), str(len(start.nodes)), *steps, end]


def _nodes(sums: Sums) -> list[list[str]]:
    rows = [[node.name, f"{node.gpu_hours:.2f}", durations.in_words(node.late_s)] for node in nodes(sums)]
    return [["node", "GPU-hours", "waited for it"], *rows]


def _costs(sums: Sums, cost: Costs) -> list[str]:
    lines = []
    if cost.dollars is not None:
        lines.append(
            f"{cost.dollars:,.2f} dollars for {sums.gpu_hours:,.2f} GPU-hours{_per_million(cost, cost.dollars)}"
        )
    if cost.kwh is None:
        return [*lines, "energy: not measured; give the power of a GPU with --watts"]
    how = "measured" if cost.is_measured else "given"
    return [*lines, f"{cost.kwh:,.2f} kWh at {cost.watts:.0f} W per GPU ({how}){_per_million(cost, cost.kwh)}"]


def _messages(sums: Sums) -> list[str]:
    return [f"start {number} ended: {start.message}" for number, start in enumerate(sums.starts, 1) if start.message]


def _left_out(sums: Sums) -> list[str]:
    lines = sums.left_out
    more = f", and {len(lines) - _MOST_LINES:,} more" if len(lines) > _MOST_LINES else ""
    return [f"left out of {FILE}: {'; '.join(lines[:_MOST_LINES])}{more}"] if lines else []


def _per_million(cost: Costs, amount: float) -> str:
    per = cost.per_million(amount)
    return "" if per is None else f", {per:,.2f} per million kept images"


def _late(sums: Sums) -> list[str]:
    found = stragglers(sums)
    named = [
        f"straggler: in start {one.start} the others waited {durations.in_words(one.late_s)} "
        f"({100 * one.share:.0f} % of the steps) for rank {one.rank} on {one.node}, whose forward passes took "
        f"{100 * one.longer:.0f} % longer"
        for one in found
        if one.share >= _LATE
    ]
    none = f"no straggler: the others waited for no rank longer than {100 * _LATE:.0f} % of the steps"
    return named or ([none] if found else [])


def _share(seconds: float, sums: Sums) -> str:
    return f"{100 * seconds / sums.wall_s:.1f}" if sums.wall_s else "-"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
