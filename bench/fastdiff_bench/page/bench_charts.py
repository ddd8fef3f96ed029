"""Row charts of the report: the comparisons of all records, and those of one bench in the order of its tables."""

from collections.abc import Iterator, Mapping, Sequence

from fastdiff_bench.page import row_charts
from fastdiff_bench.page.row_charts import Axis, ChartRow, Kind, RowChart
from fastdiff_bench.page.tables import ordered, parts
from fastdiff_bench.records.comparisons import Comparison, is_ours
from fastdiff_bench.records.number_format import label, number
from fastdiff_bench.records.record import Measurement, by_provider

_KINDS: dict[str, Kind] = {"faster": "ours", "slower": "rival"}
_LEGEND = (
    ("ours", "fastdiff is faster"),
    ("rival", "the other is faster"),
    ("unclear", "no clear difference, or doubtful"),
)


def of_comparisons(found: Sequence[Comparison], titles: Mapping[str, str]) -> Iterator[tuple[str, RowChart]]:
    """Yield each bench with a chart of its comparisons, all on one scale."""
    if not found:
        return
    on = row_charts.axis((end for one in found for end in (one.low, one.high)), "times as fast", reference=1.0)
    present = {_KINDS.get(one.verdict, "unclear") for one in found}
    legend = tuple(one for one in _LEGEND if one[0] in present)
    for bench in sorted({one.bench for one in found}, key=list(titles).index):
        groups: dict[str, list[ChartRow]] = {}
        for one in sorted((one for one in found if one.bench == bench), key=lambda one: -one.times):
            groups.setdefault(f"{one.case}: {one.what}", []).append(_row(one, on))
        cases = tuple((case, tuple(groups[case])) for case in sorted(groups))
        yield bench, RowChart(titles[bench], "", on, cases, legend)


def _row(one: Comparison, on: Axis) -> ChartRow:
    point = row_charts.point(on, one.times, one.low, one.high, _KINDS.get(one.verdict, "unclear"))
    note = f"{one.verdict}: {one.warning}" if one.warning else one.verdict
    return ChartRow(f"{one.ours} over {one.rival}", point, (), number(one.times), one.interval, note)


def of_bench(bench: str, measurements: Sequence[Measurement]) -> Iterator[RowChart]:
    """Yield the row charts of one bench."""
    if bench in ("step", "peer"):
        caption = "Time of the phases of a step; each bar is as long as its step, and other is what no phase covers."
        if (bars := row_charts.stacks("Where the time of a step goes", caption, by_provider(measurements))) is not None:
            yield bars
    for quantity, caption in _QUANTITIES.get(bench, {}).items():
        yield from _of_quantity(quantity, measurements, caption)
    if bench == "op":
        limits = {m.quantity: m for m in measurements if m.case == "limits"}
        for op in dict.fromkeys(m.case.split()[0] for m in measurements if m.case != "limits"):
            own = [m for m in measurements if m.case.split()[0] == op]
            quantity, limit = _bound(own)
            caption = f"{quantity.capitalize()} of {op} by implementation"
            yield from _of_quantity(quantity, own, caption, limits.get(limit))


_QUANTITIES = {
    "data": {"throughput": "Throughput of each reader"},
    "step": {
        "throughput": "Throughput of each configuration",
        "peak allocated": "Largest memory of tensors on the GPU",
        "peak resident": "Largest memory of the process",
    },
    "scale": {"predicted efficiency": "Time of the measured step over the predicted one"},
}
"""Drawn quantities of a bench, with what they are."""


def _bound(own: Sequence[Measurement]) -> tuple[str, str]:
    """Return the rate of an op that is closest to its limit, as in a roofline, and the name of this limit."""
    copy, matmul = (max((m for m in own if m.quantity == of), key=lambda m: m.value, default=None) for of in _SHARES)
    if matmul is None or (copy is not None and copy.value >= matmul.value):
        return "bandwidth", "copy bandwidth"
    return "rate", f"matmul rate {matmul.facts.get('arithmetic')}"


_SHARES = ("of copy", "of matmul")


def _of_quantity(
    quantity: str, measurements: Sequence[Measurement], caption: str, limit: Measurement | None = None
) -> Iterator[RowChart]:
    """Yield a chart of one quantity that at least two have, in the order of its table."""
    for title, group in parts(measurements):
        shown = {
            case: [(name, of_one[quantity]) for name, of_one in providers if quantity in of_one]
            for case, providers in ordered(title, group).items()
        }
        shown = {case: rows for case, rows in shown.items() if rows}
        every = [m for rows in shown.values() for _, m in rows]
        if len(every) < 2:
            continue
        bound = sum(m.facts.get("launch bound") is True for m in every)
        text = f"{caption}, median with p20 to p80" if any(m.p20 is not None for m in every) else caption
        text += f"; the line is the {limit.quantity}, {number(limit.value)} {limit.unit}." if limit else "."
        text += f" {bound} of {len(every)} points are launch bound." if bound else ""
        kinds: dict[str, Kind] = {
            name: "ours" if is_ours(name) or m.facts.get("default") == name else "rival"
            for rows in shown.values()
            for name, m in rows
        }
        line = None if limit is None else limit.value
        yield row_charts.points(quantity.capitalize(), text, shown, label(quantity, every[0].unit), kinds, line)
