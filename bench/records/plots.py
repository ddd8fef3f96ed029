"""Figures of the report; each is drawn only if its measurements exist."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from bench.records import charts
from bench.records.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from bench.records.number_format import label, number
from bench.records.record import Fact, Measurement, by_provider

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw: TypeAlias = Callable[[Sequence[Measurement]], Iterator[tuple["Figure", str]]]
"""Yields figures of one bench with their captions; none without the required measurements."""

_PHASES = {
    "data": ORANGE, "objective": VERMILION, "forward": SKY, "backward": BLUE, "optimizer": GREEN, "ema": PURPLE,
    "other": GREY,
}  # fmt: skip
_LABELLED_SHARE = 0.06


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of the report."""

    svg: str
    caption: str
    caption_id: str
    """Id of the caption's element, which also describes the figure to screen readers."""


def of_bench(bench: str, measurements: Sequence[Measurement], prefix: str) -> list[Plot]:
    """Return the figures of one bench.

    Args:
        bench: the command.
        measurements: of that bench, each once.
        prefix: of the caption ids, which must be unique on a page.

    Raises:
        BenchError: matplotlib is not installed.
    """
    plots: list[Plot] = []
    with charts.style():
        for draw in _PLOTS.get(bench, ()):
            for figure, caption in draw(measurements):
                caption_id = f"{prefix}-{len(plots)}"
                plots.append(Plot(charts.svg(figure, caption_id), caption, caption_id))
    return plots


def _breakdown(measurements: Sequence[Measurement]) -> Iterator[tuple[Figure, str]]:
    """Draw the phases of a step, one bar per configuration."""
    found = {
        names: {q.removeprefix("phase "): m for q, m in of_one.items() if q.startswith("phase ")}
        for names, of_one in by_provider(measurements).items()
    }
    groups = charts.grouped({names: phases for names, phases in found.items() if phases})
    if not groups:
        return
    figure, axes = charts.rows(groups)
    longest = max(sum(m.value for m in phases.values()) for _, _, phases in charts.placed(groups))
    known = [phase for phase in _PHASES if any(phase in phases for _, _, phases in charts.placed(groups))]
    for y, _, phases in charts.placed(groups):
        left = 0.0
        for phase in known:
            width = phases[phase].value if phase in phases else 0.0
            axes.barh(y, width, left=left, color=_PHASES[phase], edgecolor="white", linewidth=0.6, height=0.7)
            if width > _LABELLED_SHARE * longest:
                tone = "white" if _PHASES[phase] == BLUE else "black"
                axes.text(left + width / 2, y, number(width), ha="center", va="center", color=tone, fontsize=8)
            left += width
        axes.annotate(number(left), (left, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(0, 1.1 * longest)
    axes.set_xlabel("ms per step (sum of the medians of the phases)")
    charts.legend(figure, known, _PHASES)
    yield figure, "Time of the phases of a step, in ms, for each configuration."


def _over_batch(measurements: Sequence[Measurement]) -> Iterator[tuple[Figure, str]]:
    """Draw throughput and memory against the batch, one figure per model."""
    sweeps: dict[str, dict[str, dict[int, dict[str, Measurement]]]] = {}
    for (case, provider), of_one in by_provider(measurements).items():
        batch = next(iter(of_one.values())).facts.get("batch")
        if isinstance(batch, int) and "throughput" in of_one:
            model = re.sub(rf", batch {batch}\b", "", case)
            sweeps.setdefault(model, {}).setdefault(provider, {})[batch] = of_one
    for model, providers in sweeps.items():
        swept = {name: batches for name, batches in providers.items() if len(batches) > 1}
        if not swept:
            continue
        measured = {quantity for batches in swept.values() for of_one in batches.values() for quantity in of_one}
        figure, panels = charts.canvas(3.2, columns=2)
        memory = "peak allocated" if "peak allocated" in measured else "peak resident"
        for axes, quantity in zip(panels, ("throughput", memory), strict=True):
            charts.curves(axes, swept, quantity)
            axes.set_xlabel("batch, samples")
        panels[0].set_title(model)
        charts.legend(figure, swept)
        yield figure, f"Throughput and {memory} memory against the batch: {model}."


def _roofline(measurements: Sequence[Measurement]) -> Iterator[tuple[Figure, str]]:
    """Draw the roofline of compute-bound ops: rate against arithmetic intensity, with the limits of the machine."""
    cases: dict[str, dict[str, Measurement]] = {}
    for (case, provider), of_one in by_provider(measurements).items():
        if "rate" in of_one and _intensity(of_one["rate"]):
            cases.setdefault(case, {})[provider] = of_one["rate"]
    if not cases:
        return
    providers = list(dict.fromkeys(provider for points in cases.values() for provider in points))
    ops = list(dict.fromkeys(_op(case) for case in cases))
    figure, (axes,) = charts.canvas(4.6)
    for case, points in cases.items():
        for provider, m in points.items():
            charts.mark(axes, _intensity(m), m, providers.index(provider))
        best = max(points.values(), key=lambda m: m.value)
        at, name = (_intensity(best), best.value), str(1 + ops.index(_op(case)))
        axes.annotate(name, at, (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xscale="log", yscale="log")
    _roof(axes, measurements, [m for points in cases.values() for m in points.values()])
    charts.legend(figure, providers)
    names = ", ".join(f"{place} {op}" for place, op in enumerate(ops, 1))
    caption = f"Rate of each op against its operations per byte, with the limits of the machine: {names}."
    yield figure, caption + _launch_bound(m for points in cases.values() for m in points.values())


def _roof(axes: Axes, measurements: Sequence[Measurement], points: Sequence[Measurement]) -> None:
    """Draw the limits of the machine: the slope of its bandwidth up to its highest rate, and every rate."""
    limits, rates = _limits(measurements), _matmul_rates(measurements)
    top = max(rates.values(), default=max(m.value for m in points))
    low, high = min(map(_intensity, points)) / 4, max(map(_intensity, points)) * 4
    if copy := limits.get("copy bandwidth"):
        ridge = top / (copy.value * 1e-3)
        low, high = min(low, ridge / 8), max(high, ridge * 2)
        axes.plot([low, ridge], [top * low / ridge, top], color="black", linewidth=1)
        middle = math.sqrt(low * ridge)
        axes.text(
            middle, top * middle / ridge, f"copy {number(copy.value)} GB/s", fontsize=8, ha="center", va="bottom",
            rotation=math.degrees(math.atan(top / ridge)), rotation_mode="anchor", transform_rotates_text=True,
        )  # fmt: skip
    for precision, rate in rates.items():
        axes.axhline(rate, color="black", linewidth=1, linestyle="--")
        axes.text(high, rate, f"{precision} {number(rate)} TFLOP/s", ha="right", va="bottom", fontsize=8)
    axes.set_xlim(low, high)
    axes.set_ylim(top=2 * max(top, *(m.value for m in points)))
    charts.plain(axes.xaxis)
    charts.plain(axes.yaxis)
    axes.set_xlabel("operations per byte that must be moved")
    axes.set_ylabel("TFLOP/s")


def _bandwidth(measurements: Sequence[Measurement]) -> Iterator[tuple[Figure, str]]:
    """Draw the bandwidth of memory-bound ops against that of a copy, one figure per op."""
    limit = _limits(measurements).get("copy bandwidth")
    fastest = max(_matmul_rates(measurements).values(), default=math.inf)
    ridge = fastest / (limit.value * 1e-3) if limit else math.inf
    ops: dict[str, dict[str, dict[str, Measurement]]] = {}
    for (case, provider), of_one in by_provider(measurements).items():
        if "bandwidth" in of_one and _intensity(of_one["bandwidth"]) < ridge:
            rest = case.removeprefix(_op(case)).strip()
            ops.setdefault(_op(case), {}).setdefault(rest, {})[provider] = of_one["bandwidth"]
    for op, cases in ops.items():
        figure, axes = charts.dots({op: cases}, label("bandwidth", "GB/s"), reference=limit.value if limit else None)
        if limit:
            axes.set_title(f"dashed: copy, {number(limit.value)} GB/s", loc="right", fontweight="normal", fontsize=8)
        caption = f"Bandwidth of {op} by implementation, median with p20 to p80, against that of a copy."
        yield figure, caption + _launch_bound(m for points in cases.values() for m in points.values())


def _speed_ups(measurements: Sequence[Measurement]) -> Iterator[tuple[Figure, str]]:
    """Draw the speed-ups over the baselines."""
    found = {names: {"": m["speed-up"]} for names, m in by_provider(measurements).items() if "speed-up" in m}
    if found:
        figure, _ = charts.dots(charts.grouped(found), "times as fast", reference=1.0, from_zero=False)
        yield figure, "Times as fast as the baseline, median with p20 to p80; right of the line fastdiff is faster."


def _readers(measurements: Sequence[Measurement]) -> Iterator[tuple[Figure, str]]:
    """Draw the throughput of the readers."""
    found = {names: {"": m["throughput"]} for names, m in by_provider(measurements).items() if "throughput" in m}
    if found:
        figure, _ = charts.dots(charts.grouped(found), label("throughput", "samples/s"))
        yield figure, "Throughput of each reader, median with p20 to p80."


def _efficiency(measurements: Sequence[Measurement]) -> Iterator[tuple[Figure, str]]:
    """Draw the predicted efficiency against the number of GPUs, one figure per case."""
    cases: dict[str, dict[str, dict[int, dict[str, Measurement]]]] = {}
    for (case, provider), of_one in by_provider(measurements).items():
        gpus = of_one["predicted efficiency"].facts.get("gpus") if "predicted efficiency" in of_one else None
        if isinstance(gpus, int):
            series = re.sub(rf",? *\b{gpus} (GPU|gpu|rank)s?\b", "", provider)
            cases.setdefault(case, {}).setdefault(series, {})[gpus] = of_one
    for case, curves in cases.items():
        figure, (axes,) = charts.canvas(3.4)
        charts.curves(axes, curves, "predicted efficiency")
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("GPUs")
        axes.set_title(case)
        charts.legend(figure, curves)
        points = [of_one["predicted efficiency"] for points in curves.values() for of_one in points.values()]
        assumed = "; ".join(f"{name} {value}" for name, value in _common_facts(points).items())
        yield figure, f"Predicted efficiency against the number of GPUs: {case}. Assumed: {assumed}."


def _common_facts(measurements: Sequence[Measurement]) -> dict[str, Fact]:
    """Return the facts that all measurements share."""
    first, *rest = (m.facts for m in measurements)
    return {name: value for name, value in first.items() if all(facts.get(name) == value for facts in rest)}


def _limits(measurements: Sequence[Measurement]) -> dict[str, Measurement]:
    return {m.quantity: m for m in measurements if m.case == "limits"}


def _matmul_rates(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Return TFLOP/s by precision."""
    prefix = "matmul rate "
    return {q.removeprefix(prefix): m.value for q, m in _limits(measurements).items() if q.startswith(prefix)}


def _launch_bound(measurements: Iterable[Measurement]) -> str:
    """Return a note on the number of launch-bound points; empty if there is none."""
    marked = [m.facts.get("launch bound") is True for m in measurements]
    return f" {sum(marked)} of {len(marked)} points are launch bound." if any(marked) else ""


def _op(case: str) -> str:
    return case.split(" ")[0]


def _intensity(measurement: Measurement) -> float:
    """Return the operations per byte; 0 if the facts lack them."""
    operations, moved = (measurement.facts.get(name) for name in ("operations", "bytes"))
    return operations / moved if isinstance(operations, int | float) and isinstance(moved, int | float) else 0.0


_PLOTS: dict[str, tuple[Draw, ...]] = {
    "op": (_roofline, _bandwidth),
    "step": (_breakdown, _over_batch),
    "peer": (_speed_ups, _breakdown),
    "data": (_speed_ups, _readers),
    "scale": (_efficiency,),
}
