"""Figures of the report; each is drawn only if its measurements exist."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fastdiff_bench.page import charts
from fastdiff_bench.page.charts import NARROW, WIDE, Layout
from fastdiff_bench.records.number_format import number
from fastdiff_bench.records.record import Fact, Measurement, by_provider

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw: TypeAlias = Callable[[Sequence[Measurement], Layout], Iterator[tuple["Figure", str]]]
"""Yields figures of one bench with their captions, in a layout; none without the required measurements."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of the report."""

    svg: str
    narrow: str
    """The same for a narrow screen, with letters of the same size."""
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
            pairs = zip(draw(measurements, WIDE), draw(measurements, NARROW), strict=True)
            for (figure, caption), (narrow, _) in pairs:
                caption_id = f"{prefix}-{len(plots)}"
                svg, small = charts.svg(figure, caption_id, WIDE), charts.svg(narrow, caption_id, NARROW)
                plots.append(Plot(svg, small, caption, caption_id))
    return plots


def _over_batch(measurements: Sequence[Measurement], layout: Layout) -> Iterator[tuple[Figure, str]]:
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
        figure, panels = charts.canvas(layout, 3.2, panels=2)
        looks = charts.looks(swept)
        memory = "peak allocated" if "peak allocated" in measured else "peak resident"
        for axes, quantity in zip(panels, ("throughput", memory), strict=True):
            charts.curves(axes, swept, quantity, looks)
            axes.set_xlabel("batch, samples (logarithmic)")
        panels[0].set_title(model)
        charts.legend(figure, layout, looks)
        yield figure, f"Throughput and {memory} memory against the batch: {model}."


def _roofline(measurements: Sequence[Measurement], layout: Layout) -> Iterator[tuple[Figure, str]]:
    """Draw the roofline of compute-bound ops: rate against arithmetic intensity, with the limits of the machine."""
    cases: dict[str, dict[str, Measurement]] = {}
    for (case, provider), of_one in by_provider(measurements).items():
        if "rate" in of_one and _intensity(of_one["rate"]):
            cases.setdefault(case, {})[provider] = of_one["rate"]
    if not cases:
        return
    providers = list(dict.fromkeys(provider for points in cases.values() for provider in points))
    ops = list(dict.fromkeys(_op(case) for case in cases))
    figure, (axes,) = charts.canvas(layout, 4.6)
    looks = charts.looks(providers)
    for case, points in cases.items():
        for provider, m in points.items():
            charts.mark(axes, _intensity(m), m, looks[provider])
        best = max(points.values(), key=lambda m: m.value)
        at, name = (_intensity(best), best.value), str(1 + ops.index(_op(case)))
        axes.annotate(name, at, (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xscale="log", yscale="log")
    _roof(axes, measurements, [m for points in cases.values() for m in points.values()])
    charts.legend(figure, layout, looks)
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
    axes.set_xlabel("operations per byte that must be moved (logarithmic)")
    axes.set_ylabel("TFLOP/s (logarithmic)")


def _efficiency(measurements: Sequence[Measurement], layout: Layout) -> Iterator[tuple[Figure, str]]:
    """Draw the predicted efficiency against the number of GPUs, one figure per case."""
    cases: dict[str, dict[str, dict[int, dict[str, Measurement]]]] = {}
    for (case, provider), of_one in by_provider(measurements).items():
        gpus = of_one["predicted efficiency"].facts.get("gpus") if "predicted efficiency" in of_one else None
        if isinstance(gpus, int):
            series = re.sub(rf",? *\b{gpus} (GPU|gpu|rank)s?\b", "", provider)
            cases.setdefault(case, {}).setdefault(series, {})[gpus] = of_one
    for case, curves in cases.items():
        figure, (axes,) = charts.canvas(layout, 3.4)
        looks = charts.looks(curves)
        charts.curves(axes, curves, "predicted efficiency", looks)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("GPUs (logarithmic)")
        axes.set_title(case)
        charts.legend(figure, layout, looks)
        points = [of_one["predicted efficiency"] for points in curves.values() for of_one in points.values()]
        assumed = "; ".join(f"{name} {value}" for name, value in _common_facts(points).items())
        yield figure, f"Predicted efficiency against the number of GPUs: {case}. Assumed: {assumed}."


def _common_facts(measurements: Sequence[Measurement]) -> dict[str, Fact]:
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


_PLOTS: dict[str, tuple[Draw, ...]] = {"op": (_roofline,), "step": (_over_batch,), "scale": (_efficiency,)}
