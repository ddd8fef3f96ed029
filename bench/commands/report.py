"""``bench report``: records as one HTML page, and as the tables in the documentation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import BenchError
from bench.arguments import Commands
from bench.records import plots, readme, record
from bench.records.number_format import interval, machine, number
from bench.records.plots import Plot
from bench.records.record import Failure, Measurement, Record
from fastdiff.files import write_output

_TITLES = {
    "op": "Ops: each by every implementation",
    "step": "Training step",
    "peer": "Training step against other trainers",
    "scripts": "Training step beside published scripts",
    "data": "Reading data",
    "scale": "Many GPUs",
    "checkpoint": "Cost of checkpoints",
    "startup": "Time to the first step",
    "aot": "Compiled kernels",
    "emit": "Code of the compiled blocks",
    "objectives": "The digits with each objective",
}
_RANKED = {"op", "peer", "data"}
"""Benches whose providers do the same work: the best comes first."""


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one provider."""

    provider: str
    cells: tuple[tuple[str, str], ...]
    """Value and interval per column; empty if not measured."""
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


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench of one record."""

    name: str
    file: str
    title: str
    plots: tuple[Plot, ...]
    tables: tuple[Table, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Records of one folder."""

    anchor: str
    title: str
    machine: str
    doubts: tuple[str, ...]
    """Reservations about the commit, as sentences."""
    fingerprint: tuple[tuple[str, str], ...]
    """Fingerprint fields of its files, with all their values."""
    files: tuple[tuple[str, str, str], ...]
    """Name, date and command line of each file."""
    benches: tuple[Bench, ...]


def page(records: Sequence[Record]) -> str:
    """Return the self-contained page.

    Raises:
        BenchError: a required library is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise BenchError("a report needs Jinja2; pip install 'fastdiff[bench]'") from None
    folders: dict[Path, list[Record]] = {}
    for one in records:
        folders.setdefault(one.path.parent, []).append(one)
    sections = [_section(f"r{place}", path, folders[path]) for place, path in enumerate(sorted(folders))]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(sections=sections)


def tables(measurements: Sequence[Measurement]) -> list[Table]:
    """Return the tables of one bench: phases, speed-ups, predictions and limits are separate from the rest."""
    parts: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        parts.setdefault(_part(measurement), []).append(measurement)
    return [_table(title, group) for title in _PARTS if title in parts for group in _alike(parts[title])]


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


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report", help="write records as a page with tables and plots, or into the documentation"
    )
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.html", help="the page to write")
    parser.add_argument(
        "records", nargs="*", type=Path, metavar="RECORDS", help="files and folders; default: all of bench/results"
    )
    parser.add_argument(
        "--readme", action="store_true", help="rewrite the tables in docs/ and in README files from their records"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out is None and not arguments.readme:
        raise BenchError(
            "report: expected OUT.html to write a page, --readme to write the tables of the documentation, or both"
        )
    if arguments.out is not None:
        if arguments.out.suffix != ".html":
            raise BenchError(f"report: {arguments.out}: expected a file to write that ends in .html, then the records")
        text = page(record.read_all(arguments.records or record.kept()))
        write_output(arguments.out, text.encode())
        print(arguments.out)
    if arguments.readme:
        for file in readme.FILES:
            print(f"{file}: {'rewritten' if readme.rewrite(file) else 'up to date'}")
    return 0


def _section(anchor: str, folder: Path, records: Sequence[Record]) -> Section:
    fields = [asdict(one.fingerprint) for one in records]
    benches = [bench for place, one in enumerate(records) for bench in _benches(one, f"{anchor}-{place}")]
    order = [*_TITLES, *(bench.name for bench in benches)]
    return Section(
        anchor=anchor,
        title=f"{folder.parent.name} / {folder.name}",
        machine="; ".join(dict.fromkeys(machine(one.fingerprint) for one in records)),
        doubts=tuple(_doubts([one.fingerprint.git for one in records])),
        fingerprint=tuple(
            (name.replace("_", " "), "; ".join(dict.fromkeys(str(of_one[name]) for of_one in fields)))
            for name in fields[0]
            if name not in ("date", "command")
        ),
        files=tuple((one.path.name, one.fingerprint.date, one.fingerprint.command) for one in records),
        benches=tuple(sorted(benches, key=lambda bench: order.index(bench.name))),
    )


def _doubts(commits: Sequence[str]) -> Iterator[str]:
    if any(commit.endswith("-dirty") for commit in commits):
        yield "Measured on files that differ from that commit."
    if "unknown" in commits:
        yield "Measured on files of a commit that is not known."


def _benches(one: Record, prefix: str) -> Iterator[Bench]:
    """Yield the benches of a file; separate runs stay separate, since the machine may have changed in between."""
    for name in dict.fromkeys([*(m.bench for m in one.measurements), *(f.bench for f in one.failures)]):
        measurements = [m for m in one.measurements if m.bench == name]
        yield Bench(
            name=name,
            file=one.path.name,
            title=_TITLES.get(name, name),
            plots=tuple(plots.of_bench(name, measurements, f"{prefix}-{name}")),
            tables=tuple(tables(measurements)),
            failures=tuple(failure for failure in one.failures if failure.bench == name),
        )


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
    cases: dict[str, list[tuple[str, dict[str, Measurement]]]] = {}
    for (case, provider), of_one in record.by_provider(measurements).items():
        cases.setdefault(case, []).append((provider, of_one))
    first = next(iter(quantities.values()))
    ranked = first.bench in _RANKED and title in ("Measured", "Times as fast")
    groups = tuple(
        (
            case,
            tuple(
                _row(provider, of_one, quantities)
                for provider, of_one in (_best_first(providers, first) if ranked else providers)
            ),
        )
        for case, providers in cases.items()
    )
    columns = tuple(
        (quantity.removeprefix("phase "), "" if m.unit == "1" else m.unit) for quantity, m in quantities.items()
    )
    return Table(title, columns, groups)


def _best_first(
    providers: Iterable[tuple[str, dict[str, Measurement]]], first: Measurement
) -> list[tuple[str, dict[str, Measurement]]]:
    """Sort by the first quantity of the table."""
    sign = {"lower": 1, "higher": -1, "neither": 0}[first.better]

    def place(provider: tuple[str, dict[str, Measurement]]) -> float:
        found = provider[1].get(first.quantity)
        return sign * found.value if found else float("inf")

    return sorted(providers, key=place)


def _row(provider: str, of_one: dict[str, Measurement], quantities: Iterable[str]) -> Row:
    found = [of_one.get(quantity) for quantity in quantities]
    repetitions = sorted({m.n for m in found if m and m.p20 is not None})
    return Row(
        provider,
        tuple((number(m.value), interval(m)) if m else ("", "") for m in found),
        any(m.facts.get("launch bound") is True for m in found if m),
        "" if not repetitions else "–".join(dict.fromkeys(map(str, (repetitions[0], repetitions[-1])))),
    )
