"""Tables of the report: the quantities of one bench, grouped by case."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastdiff_bench.records import record, record_warnings
from fastdiff_bench.records.number_format import interval, number
from fastdiff_bench.records.record import Measurement

Cases = dict[str, list[tuple[str, dict[str, Measurement]]]]
"""Provider and its measurements by quantity, by case, in the order of the page."""

_RANKED = {"op", "peer", "data"}
"""Benches whose providers do the same work: the best comes first."""


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one provider."""

    provider: str
    cells: tuple[tuple[str, str, str], ...]
    """Value, interval and warning per column; empty if not measured."""
    launch_bound: bool
    """Whether a part of the time may be that of the launch."""
    n: str
    """Repetitions."""


@dataclass(frozen=True, slots=True)
class Table:
    """Quantities of one bench, grouped by case."""

    title: str
    columns: tuple[tuple[str, str], ...]
    """Quantity and unit."""
    groups: tuple[tuple[str, tuple[Row, ...]], ...]

    @property
    def rows(self) -> int:
        """Number of rows in all groups."""
        return sum(len(rows) for _, rows in self.groups)

    @property
    def is_repeated(self) -> bool:
        """Whether a row has a number of repetitions."""
        return any(row.n for _, rows in self.groups for row in rows)


def tables(measurements: Sequence[Measurement]) -> list[Table]:
    """Return the tables of one bench: phases, speed-ups, predictions and limits are separate from the rest."""
    return [_table(title, group) for title, group in parts(measurements)]


def parts(measurements: Sequence[Measurement]) -> list[tuple[str, list[Measurement]]]:
    """Return the measurements of each table with its title."""
    found: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        found.setdefault(_part(measurement), []).append(measurement)
    return [(title, group) for title in _PARTS if title in found for group in _alike(found[title])]


def ordered(title: str, measurements: Sequence[Measurement]) -> Cases:
    """Return the providers of each case in the order of the table, which is that of its chart, too."""
    cases: Cases = {}
    for (case, provider), of_one in record.by_provider(measurements).items():
        cases.setdefault(case, []).append((provider, of_one))
    first = measurements[0]
    if first.bench in _RANKED and title in ("Measured", "Times as fast"):
        return {case: _best_first(providers, first) for case, providers in cases.items()}
    return cases


def _alike(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Group cases that share quantities, directly or through other cases; two groups have no column in common."""
    quantities: dict[str, set[str]] = {}
    for m in measurements:
        quantities.setdefault(m.case, set()).add(m.quantity)
    groups: list[set[str]] = []
    for own in quantities.values():
        linked = [group for group in groups if group & own]
        groups = [own.union(*linked), *(group for group in groups if group not in linked)]
    order = list(dict.fromkeys(m.quantity for m in measurements))
    groups.sort(key=lambda group: min(map(order.index, group)))
    return [[m for m in measurements if m.quantity in group] for group in groups]


_PARTS: dict[str, Callable[[Measurement], bool]] = {
    "Limits of the machine": lambda m: m.case == "limits",
    "Times as fast": lambda m: m.quantity == "speed-up",
    "Measured": lambda m: True,
    "By phase": lambda m: m.quantity.startswith("phase "),
    "Predicted": lambda m: m.quantity.startswith("predict"),
}
"""Tables of a bench by title, in their order on the page, with their content; ``Measured`` has the rest."""


def _part(measurement: Measurement) -> str:
    own = (title for title, belongs in _PARTS.items() if title != "Measured" and belongs(measurement))
    return next(own, "Measured")


def _table(title: str, measurements: Sequence[Measurement]) -> Table:
    quantities = {m.quantity: m for m in measurements}
    groups = tuple(
        (case, tuple(_row(provider, of_one, quantities) for provider, of_one in providers))
        for case, providers in ordered(title, measurements).items()
    )
    columns = tuple(
        (quantity.removeprefix("phase "), "" if m.unit == "1" else m.unit) for quantity, m in quantities.items()
    )
    return Table(title, columns, groups)


def _best_first(
    providers: Iterable[tuple[str, dict[str, Measurement]]], first: Measurement
) -> list[tuple[str, dict[str, Measurement]]]:
    sign = {"lower": 1, "higher": -1, "neither": 0}[first.better]

    def place(provider: tuple[str, dict[str, Measurement]]) -> float:
        found = provider[1].get(first.quantity)
        return sign * found.value if found else float("inf")

    return sorted(providers, key=place)


def _row(provider: str, of_one: Mapping[str, Measurement], quantities: Iterable[str]) -> Row:
    found = [of_one.get(quantity) for quantity in quantities]
    repetitions = sorted({m.n for m in found if m and m.p20 is not None})
    return Row(
        provider,
        tuple((number(m.value), interval(m), record_warnings.unsteady(m)) if m else ("", "", "") for m in found),
        any(m.facts.get("launch bound") is True for m in found if m),
        "" if not repetitions else "–".join(dict.fromkeys(map(str, (repetitions[0], repetitions[-1])))),
    )
