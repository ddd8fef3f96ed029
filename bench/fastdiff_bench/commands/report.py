"""``bench report``: records as one HTML page, and as the tables in the documentation."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fastdiff.optional_packages import pip_install
from fastdiff.outputs import require_output, write_output
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands
from fastdiff_bench.page import bench_charts, overview
from fastdiff_bench.page.row_charts import RowChart
from fastdiff_bench.page.tables import Table, tables
from fastdiff_bench.records import comparisons, readme, record, record_warnings
from fastdiff_bench.records.fingerprint import CLONE
from fastdiff_bench.records.record import Failure, Record

_TITLES = {
    "peer": "Training step against other trainers",
    "scripts": "Training step beside published scripts",
    "startup": "Time to the first step",
    "data": "Reading data",
    "op": "Ops: each by every implementation",
    "step": "Training step",
    "scale": "Many GPUs",
    "plan": "Predicted and measured steps",
    "checkpoint": "Cost of checkpoints",
    "alignment": "Cost of an alignment with a teacher",
    "objectives": "The digits with each objective",
    "emit": "Code of the compiled blocks",
    "aot": "Registers of the compiled kernels",
}
"""Titles of the benches in the order of the page: first what compares, last what describes code."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench of one record."""

    name: str
    file: str
    title: str
    is_smoke: bool
    charts: tuple[RowChart, ...]
    tables: tuple[Table, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Records of one folder."""

    title: str
    folder: str
    device: str
    is_smoke: bool
    warnings: tuple[str, ...]
    """Reservations about the commit and the machine, as sentences."""
    fingerprint: tuple[tuple[str, str], ...]
    """Fingerprint fields of its files that say something, with all their values."""
    files: tuple[tuple[str, str, str], ...]
    """Name, date and command line of each file."""
    benches: tuple[Bench, ...]


def page(records: Sequence[Record]) -> str:
    """Return the self-contained page; BenchError if a required library is not installed."""
    try:
        import jinja2
    except ImportError:
        raise BenchError(f"a report needs Jinja2; {pip_install('jinja2')}") from None
    folders: dict[Path, list[Record]] = {}
    for one in records:
        folders.setdefault(one.path.parent, []).append(one)
    sections = [_section(path, folders[path]) for path in sorted(folders)]
    found = [compared for one in records for compared in comparisons.of_record(one)]
    loader = jinja2.PackageLoader("fastdiff_bench.page", "")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        sections=sorted(sections, key=lambda section: _place(section.benches)),
        verdict=comparisons.words(found),
        devices=list(overview.devices(records, _TITLES)),
        steps=overview.fastest_steps(records),
        comparisons=list(overview.by_bench(found, _TITLES)),
        smoke=record_warnings.SMOKE,
    )


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("report")
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
        require_output(arguments.out)
        text = page(record.read_all(arguments.records or record.kept()))
        write_output(arguments.out, text.encode())
        print(arguments.out)
    if arguments.readme:
        if CLONE is None:
            raise BenchError("report --readme rewrites the documentation of the repository; run it in a clone")
        for file in readme.FILES:
            print(f"{file}: {'rewritten' if readme.rewrite(file) else 'up to date'}")
    return 0


def _place(benches: Sequence[Bench]) -> tuple[int, str]:
    order = [*_TITLES, *(bench.name for bench in benches)]
    return min((order.index(bench.name) for bench in benches), default=len(order)), benches[0].title if benches else ""


def _section(folder: Path, records: Sequence[Record]) -> Section:
    fields = [asdict(one.fingerprint) for one in records]
    benches = [bench for one in records for bench in _benches(one)]
    said = {
        name.replace("_", " "): "; ".join(dict.fromkeys(str(of_one[name]) for of_one in fields)) for name in fields[0]
    }
    return Section(
        title=_title(folder.name, records),
        folder=f"{folder.parent.name} / {folder.name}",
        device="; ".join(dict.fromkeys(overview.device(one.fingerprint) for one in records)),
        is_smoke=any(map(record_warnings.is_smoke, records)),
        warnings=tuple(_warnings(records)),
        fingerprint=tuple(
            (name, value)
            for name, value in said.items()
            if name not in ("date", "command", "smoke") and value.lower() != "none"
        ),
        files=tuple((one.path.name, one.fingerprint.date, one.fingerprint.command) for one in records),
        benches=tuple(sorted(benches, key=lambda bench: _place([bench]))),
    )


def _title(folder: str, records: Sequence[Record]) -> str:
    """Return a title in words: the benches, and the one network that they measure or else the name of the folder."""
    names = {bench for one in records for bench in one.benches}
    cases = {m.case.split(",")[0] for one in records for m in one.measurements if m.case != "limits"}
    what = cases.pop() if len(cases) == 1 else folder.partition("_")[2].replace("-", " ")
    title = "; ".join(_TITLES.get(name, name) for name in [*_TITLES, *sorted(names - _TITLES.keys())] if name in names)
    return title if what in names or not what else f"{title}: {what}"


def _warnings(records: Sequence[Record]) -> Iterator[str]:
    commits = [one.fingerprint.git for one in records]
    if any(commit.endswith("-dirty") for commit in commits):
        yield "Measured on files that differ from that commit."
    if "unknown" in commits:
        yield "Measured on files of a commit that is not known."
    for one in records:
        if reason := record_warnings.busy(one.fingerprint):
            yield f"Doubtful: {reason} ({one.path.name})."


def _benches(one: Record) -> Iterator[Bench]:
    """Yield the benches of a file; separate runs stay separate, since the machine may have changed in between."""
    smoke = record_warnings.is_smoke(one)
    for name in one.benches:
        measurements = [m for m in one.measurements if m.bench == name and not (smoke and record_warnings.is_ratio(m))]
        yield Bench(
            name=name,
            file=one.path.name,
            title=_TITLES.get(name, name),
            is_smoke=smoke,
            charts=tuple(bench_charts.of_bench(name, measurements)),
            tables=tuple(tables(measurements)),
            failures=tuple(failure for failure in one.failures if failure.bench == name),
        )
