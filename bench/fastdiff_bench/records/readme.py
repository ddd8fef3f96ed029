"""Tables of measured numbers in the documentation, generated from records.

A file marks a table with two lines::

    <!-- bench: KIND FOLDER... -->
    <!-- end bench -->

The table of that kind, from the records in these folders (relative to the root of the repository), is written between
them. Kinds: ``peers``, ``readers``, ``reader-speed-ups``, ``kernels``, ``steps``, ``emission``,
``predictions``, ``predicted-shares``, ``objectives``, ``features``, ``features-by-level``,
``recipes``, ``recipes-by-level``, ``ranks``.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from fastdiff.outputs import write_output
from fastdiff_bench import BenchError
from fastdiff_bench.records import record
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.number_format import interval, label, machine, number
from fastdiff_bench.records.record import Measurement, Record

Row: TypeAlias = tuple[str, ...]

_DOCS = ROOT / "docs"
FILES = (
    _DOCS / "benchmarks.md", _DOCS / "objectives.md", _DOCS / "how-to" / "performance.md", ROOT / "kernels/README.md"
)  # fmt: skip

_BEGIN, _END = "<!-- bench:", "<!-- end bench -->"
_BLOCK = re.compile(rf"^({_BEGIN} (\S+) (.+?) -->)\n(.*?)^{_END}$", re.MULTILINE | re.DOTALL)
_OURS = ("triton", "auto")
"""Default implementations of fastdiff on a GPU."""
_SHARES = ("mfu", "of matmul")


def rewrite(path: Path, root: Path = ROOT) -> bool:
    """Update the tables of a file and return whether it changed.

    Raises:
        BenchError: a marker is wrong, or a record is missing.
    """
    before = path.read_text(encoding="utf-8")
    after = rendered(before, root, str(path))
    if after != before:
        write_output(path, after.encode())
    return after != before


def rendered(text: str, root: Path = ROOT, name: str = "README.md") -> str:
    """Return the text with its tables updated from the records.

    Raises:
        BenchError: a marker is wrong, or a record is missing.
    """
    blocks = list(_BLOCK.finditer(text))
    if not len(blocks) == text.count(_BEGIN) == text.count(_END) or any(_BEGIN in block[4] for block in blocks):
        raise BenchError(
            f"{name}: a marker is wrong or not closed; expected lines '{_BEGIN} KIND FOLDER -->' and '{_END}' in turn"
        )
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_block(block[2], block[3].split(), root, name)}\n{_END}", text)


def _block(kind: str, folders: Sequence[str], root: Path, name: str) -> str:
    if kind not in _KINDS:
        raise BenchError(f"{name}: '{_BEGIN} {kind}': there is no such table; expected one of {', '.join(_KINDS)}")
    bench, rows_of = _KINDS[kind]
    try:
        records = record.read_all([root / folder for folder in folders])
    except BenchError as error:
        raise BenchError(f"{name}: '{_BEGIN} {kind}': {error}") from None
    records = [one for one in records if any(m.bench == bench for m in one.measurements)]
    rows = rows_of([m for one in records for m in one.measurements if m.bench == bench])
    if not rows:
        raise BenchError(f"{name}: '{_BEGIN} {kind}': {', '.join(folders)} has no such measurement of bench {bench}")
    failures = [f for one in records for f in one.failures if f.bench == bench]
    sources = " ".join(f"`{folder}`" for folder in folders)
    return "\n".join(
        [
            *_markdown(rows),
            "",
            *(f"- {f.provider} ({f.case}): {f.reason}" for f in failures),
            *([""] if failures else []),
            f"({sources}: {_provenance(records)})",
        ]
    )


def _markdown(rows: Sequence[Row]) -> list[str]:
    """Format rows as a Markdown table: the first row is the heading, empty columns are dropped, numbers align right."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    sides = ["---:" if place and _numeric(column[1:]) else "---" for place, column in enumerate(columns)]
    head, *rest = zip(*columns, strict=True)
    return [f"| {' | '.join(row)} |" for row in (head, sides, *rest)]


def _numeric(cells: Sequence[str]) -> bool:
    return all(cell[:1].isdigit() for cell in cells if cell)


def _provenance(records: Sequence[Record]) -> str:
    return "; ".join(dict.fromkeys(machine(one.fingerprint) for one in records))


def _speed_ups(quantity: str) -> Callable[[Sequence[Measurement]], list[Row]]:
    """Return a table builder of speed-ups, with ``quantity`` of both sides."""

    def rows(measurements: Sequence[Measurement]) -> list[Row]:
        found = record.by_provider(measurements)
        body: list[Row] = []
        heading = quantity
        for (case, provider), of_pair in found.items():
            if "speed-up" in of_pair:
                names = provider.split(" over ")
                # fastdiff's own step always uses cached data, whatever the baseline does.
                cases = (case, f"{case.rpartition(', ')[0]}, cached")
                both = [next((of.get(quantity) for c in cases if (of := found.get((c, name)))), None) for name in names]
                heading = next((label(quantity, one.unit) for one in both if one), heading)
                values = [_value(one) for one in both]
                ratio = of_pair["speed-up"]
                body.append((case, *names, *values, number(ratio.value), _range(ratio)))
        sides = ("fastdiff", "baseline")
        head = ("run", *sides, *(f"{side}: {heading}" for side in sides), "times as fast", "p20 to p80")
        return [head, *body] if body else []

    return rows


def _providers(*quantities: str) -> Callable[[Sequence[Measurement]], list[Row]]:
    """Return a table builder of measurements by provider, with the spread of the first quantity."""

    def rows(measurements: Sequence[Measurement]) -> list[Row]:
        found = {
            names: of_one
            for names, of_one in record.by_provider(measurements).items()
            if any(quantity in of_one for quantity in quantities)
        }
        units = {m.quantity: m.unit for m in measurements}
        headings = [label(quantity, units.get(quantity, "1")) for quantity in quantities]
        head = ("run", "who", headings[0], "p20 to p80", *headings[1:])
        body: list[Row] = []
        for names, of_one in found.items():
            first, *rest = (of_one.get(quantity) for quantity in quantities)
            written = (_percent(m) if m and m.quantity in _SHARES else _value(m) for m in rest)
            body.append((*names, _value(first), _range(first), *written))
        return [head, *body] if body else []

    return rows


def _kernels(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate the kernel of each case against torch.compile, eager and the fastest other library."""
    cases: dict[str, dict[str, dict[str, Measurement]]] = {}
    for (case, provider), of_one in record.by_provider(measurements).items():
        if "time" in of_one:
            cases.setdefault(case, {})[provider] = of_one
    head = (
        "op", "kernel, us", "p20 to p80", "of copy bandwidth", "of matmul rate", "torch.compile, us", "eager, us",
        "best other, us", "kernel over compile",
    )  # fmt: skip
    body = [(case, *_kernel(of_case)) for case, of_case in cases.items() if of_case.keys() & set(_OURS)]
    return [head, *body] if body else []


def _kernel(providers: dict[str, dict[str, Measurement]]) -> Row:
    times = {provider: of_one["time"] for provider, of_one in providers.items()}
    ours = next(providers[name] for name in _OURS if name in providers)
    others = [name for name in times if name not in (*_OURS, "compile", "eager")]
    best = min(others, key=lambda name: times[name].value, default=None)
    ratio = ours.get("over compile")
    return (
        _value(ours.get("time")),
        _range(ours["time"]),
        _percent(ours.get("of copy")),
        _percent(ours.get("of matmul")),
        _value(times.get("compile")),
        _value(times.get("eager")),
        f"{number(times[best].value)} ({best})" if best else "",
        f"{ratio.value:.2f}" if ratio else "",
    )


def _objectives(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate the objectives with their flags; their time stays in the record, since the machine may be shared."""
    head = ("objective", "flags", "steps", "accuracy", "Fréchet distance")
    body: list[Row] = []
    for (_, provider), of_one in record.by_provider(measurements).items():
        accuracy, distance = (of_one[name] for name in ("accuracy", "frechet distance"))
        figures = (f"{accuracy.value:.3f}", f"{distance.value:.2f}")
        body.append((provider, f"`{accuracy.facts['flags']}`", str(accuracy.facts["steps"]), *figures))
    return [head, *body] if body else []


_DIFFERENCE = "difference from "
_AT_A_LEVEL = ", log SNR "


def _differences(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate mean differences of losses of pairs of runs, with the least p of their noise levels."""
    head = ("runs", "", "against", "seeds", "difference, %", "standard error", "p", "least p of a level")
    least: dict[tuple[str, str, str], float] = {}
    for m in measurements:
        quantity, level, _ = m.quantity.partition(_AT_A_LEVEL)
        if level:
            key = (m.case, m.provider, quantity)
            least[key] = min(least.get(key, 1.0), float(str(m.facts["p_corrected"])))
    body: list[Row] = []
    for m in measurements:
        if (key := (m.case, m.provider, m.quantity)) in least:
            error, p = (float(str(m.facts[name])) for name in ("standard_error", "p"))
            figures = (f"{m.value:+.3f}", f"{error:.3f}", _p(p), _p(least[key]))
            other = m.quantity.removeprefix(_DIFFERENCE)
            body.append((m.case, m.provider, other, str(m.facts["seeds"]), *figures))
    return [head, *body] if body else []


def _differences_by_level(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate differences between predictions by noise level, a column per case."""

    def case(m: Measurement, other: str) -> str | None:
        return m.case if m.provider.partition(",")[0] != other.partition(",")[0] else None

    return _by_level(measurements, case)


def _recipes_by_level(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate differences of the methods that are a gain from the first by noise level, a column per task and one."""
    gains = {(m.case, m.provider) for m in measurements if m.facts.get("verdict") == "gain"}

    def method(m: Measurement, other: str) -> str | None:
        task, name = m.case.partition(",")[0], m.provider.partition(", lr")[0]
        return f"{task}: {name}" if (m.case, m.provider) in gains else None

    return _by_level(measurements, method)


def _by_level(measurements: Sequence[Measurement], column: Callable[[Measurement, str], str | None]) -> list[Row]:
    """Tabulate differences in percent with standard errors.

    Args:
        measurements: of a record.
        column: returns the heading of a difference from this other one; None: it is left out.
    """
    cells: dict[str, dict[str, str]] = {}
    for m in measurements:
        quantity, _, level = m.quantity.partition(_AT_A_LEVEL)
        heading = column(m, quantity.removeprefix(_DIFFERENCE)) if level else None
        if heading is not None:
            cells.setdefault(level, {})[heading] = f"{m.value:+.1f} ± {float(str(m.facts['standard_error'])):.1f}"
    headings = list(dict.fromkeys(heading for row in cells.values() for heading in row))
    body = [(level, *(row.get(heading, "") for heading in headings)) for level, row in cells.items()]
    return [("log SNR", *headings), *body] if body else []


def _recipes(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate the speed-up of each method over the first, in steps and in time, and what it draws."""
    head = (
        "task", "method", "final loss", "speed-up in steps", "two standard errors", "least seed", "time of a step",
        "speed-up in time", "more memory, MiB", "accuracy", "Fréchet distance", "",
    )  # fmt: skip
    body: list[Row] = []
    for (case, name), of_one in record.by_provider(measurements).items():
        if (gain := of_one.get("speed-up in steps")) is None:
            continue
        low, high, least = (f"{float(str(gain.facts[key])):.2f}" for key in ("low", "high", "least"))
        ratios = [f"{of_one[key].value:.2f}" for key in ("time of a step over the baseline's", "speed-up in time")]
        more = of_one.get("peak memory beyond the baseline's")
        memory = f"{more.value:+.1f}" if more else ""
        drawn = [_value(of_one.get(key)) for key in ("accuracy", "frechet distance")]
        loss, is_compared = f"{of_one['validation loss'].value:.4f}", any(key.startswith(_DIFFERENCE) for key in of_one)
        verdict = str(gain.facts["verdict"]) if is_compared else ""
        body.append(
            (case, name, loss, f"{gain.value:.2f}", f"{low} to {high}", least, *ratios, memory, *drawn, verdict)
        )
    return [head, *body] if body else []


def _p(probability: float) -> str:
    return "< 0.001" if probability < 0.001 else f"{probability:.3f}"


def _emission(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate the code of the first block of each kind, forward and backward, and of all blocks of a network."""
    head = ("block", "", "blocks with this code", "kernels", "launches", "bytes", "copies", "saved, MB per sample")
    body: list[Row] = []
    shown: dict[tuple[str, str], str] = {}
    for (case, way), of_one in record.by_provider(measurements).items():
        preset, kind, *_ = case.split(", ")
        first = shown.setdefault((preset, kind.split()[0]), case)
        if "launches" not in of_one or case != first:
            continue
        total = way == "step"
        unit = "MB per sample" if total else "per element"
        saved = of_one.get("saved")
        kernels, launches, moved, copies = (of_one.get(name) for name in ("kernels", "launches", "bytes", "copies"))
        in_mb = (saved.value if total else saved.value / 1e6) if saved else None
        body.append(
            (
                case, "forward and backward" if total else way, str(of_one["launches"].facts["blocks"]),
                _value(kernels), _value(launches), f"{_value(moved)} {unit}", _value(copies),
                number(in_mb) if in_mb is not None else "",
            )
        )  # fmt: skip
    return [head, *body] if body else []


def _predictions(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate the predicted rates by engine."""
    levels = ("rate at low", "rate at mid", "rate at high")
    head = ("step", "optimizer step", *(f"samples/s {level.removeprefix('rate ')}" for level in levels))
    found = record.by_provider(measurements).items()
    body = [(*names, *(_value(of_one[level]) for level in levels)) for names, of_one in found if levels[0] in of_one]
    return [head, *body] if body else []


def _predicted_shares(measurements: Sequence[Measurement]) -> list[Row]:
    """Tabulate predicted rates and MFU of the flat engine, in the middle, and their shares of those of the first."""
    head = ("network", "samples/s", "of the first", "MFU", "of the first")
    found = {
        case: (of_one["rate at mid"].value, of_one["mfu at mid"].value)
        for (case, _), of_one in record.by_provider(measurements).items()
        if "mfu at mid" in of_one
    }
    body: list[Row] = []
    for case, (rate, mfu) in found.items():
        first_rate, first_mfu = next(iter(found.values()))
        shares = f"{rate / first_rate:.3f}", f"{mfu / first_mfu:.3f}"
        body.append((case.split(", ")[0], number(rate), shares[0], f"{100 * mfu:.1f} %", shares[1]))
    return [head, *body] if body else []


def _value(measurement: Measurement | None) -> str:
    return number(measurement.value) if measurement else ""


def _range(measurement: Measurement | None) -> str:
    return interval(measurement) if measurement else ""


def _percent(share: Measurement | None) -> str:
    return f"{100 * share.value:.0f} %" if share else ""


_KINDS: dict[str, tuple[str, Callable[[Sequence[Measurement]], list[Row]]]] = {
    "peers": ("peer", _speed_ups("step time")),
    "readers": ("data", _providers("throughput", "bandwidth", "cpu time", "peak resident")),
    "reader-speed-ups": ("data", _speed_ups("throughput")),
    "kernels": ("op", _kernels),
    "emission": ("emit", _emission),
    "predictions": ("emit", _predictions),
    "predicted-shares": ("emit", _predicted_shares),
    "objectives": ("objectives", _objectives),
    "features": ("features", _differences),
    "features-by-level": ("features", _differences_by_level),
    "recipes": ("recipes", _recipes),
    "recipes-by-level": ("recipes", _recipes_by_level),
    "ranks": ("scale", _providers("step time", "communication time", "collectives", "bytes sent")),
    "steps": ("step", _providers("step time", "throughput", "peak allocated", "peak resident", "mfu", "of matmul")),
}
