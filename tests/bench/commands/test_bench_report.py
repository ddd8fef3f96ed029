"""``bench report``: one self-contained page of the records, and tables of the records in the documents."""

import argparse
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fastdiff_bench import BenchError
from fastdiff_bench.__main__ import main
from fastdiff_bench.arguments import open_log
from fastdiff_bench.commands import report
from fastdiff_bench.page import bench_charts, overview, row_charts, tables
from fastdiff_bench.records import comparisons, readme, record, record_warnings
from fastdiff_bench.records.fingerprint import ROOT, Fingerprint
from fastdiff_bench.records.number_format import interval, number
from fastdiff_bench.records.record import Better, Failure, Log, Measurement
from tests.support.benches import bench_records


@pytest.fixture(autouse=True, scope="module")
def _idle() -> Iterator[None]:
    """Records of a machine that does nothing else; another load would be a warning about all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        yield


VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use"}


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of each cell; refuses what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements for key, value in attributes.items() if key == name and value]

    def count(self, tag: str) -> int:
        return [name for name, _ in self.elements].count(tag)


def charted(bench: str, measurements: Sequence[Measurement]) -> list[row_charts.RowChart]:
    return list(bench_charts.of_bench(bench, measurements))


def rows(bench: str) -> list[Measurement]:
    return list(bench_records.BENCHES[bench](random.Random(0)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("results")
    bench_records.write(folder / "nvidia-h200" / "2026-11-21_all")
    bench_records.write(folder / "cpu-2-cores" / "2026-11-21_peer", "peer", seed=1)
    out = folder / "new" / "out.html"
    assert main(["report", str(out), str(folder)]) == 0
    return folder, out.read_text()


def test_the_page_needs_nothing_but_itself(written: tuple[Path, str]) -> None:
    page = Page(written[1])
    assert not page.values("src")
    assert not page.values("href")
    assert {"script", "link", "iframe", "object", "img"}.isdisjoint(tag for tag, _ in page.elements)
    assert not re.search(r"@import|url\(", written[1])
    assert "@media print" in written[1]


def test_every_value_is_in_a_table(written: tuple[Path, str]) -> None:
    folder, text = written
    texts = set(Page(text).texts)
    for one in record.read_all([folder]):
        for m in one.measurements:
            assert {m.case, m.provider, number(m.value), m.quantity.removeprefix("phase ")} <= texts, m
            assert interval(m) in {*texts, ""}, m
        assert one.fingerprint.cpu in texts
        assert one.fingerprint.command in texts
    assert "apex (adaln dit-xl-256 bfloat16): not installed:" in texts


def test_providers_come_best_first_and_a_sweep_in_its_order() -> None:
    op = next(table for table in tables.tables(rows("op")) if table.title == "Measured")
    times = [[float(row.cells[0][0].replace(",", "")) for row in group] for _, group in op.groups]
    assert all(case_values == sorted(case_values) for case_values in times)
    sweep = next(table for table in tables.tables(rows("step")) if table.title == "Measured")
    assert [case.split(", ")[2] for case, _ in sweep.groups] == [f"batch {2**n}" for n in range(3, 9)]
    assert [row.provider for row in sweep.groups[0][1]] == ["fastdiff ddp", "fastdiff ddp compiled"]


def test_unrelated_measurements_are_in_tables_of_their_own() -> None:
    titles = {bench: [table.title for table in tables.tables(rows(bench))] for bench in bench_records.BENCHES}
    assert titles == {
        "op": ["Limits of the machine", "Measured"],
        "step": ["Measured", "By phase"],
        "peer": ["Times as fast", "Measured", "By phase"],
        "data": ["Times as fast", "Measured"],
        "scale": ["Measured", "Predicted"],
    }


@pytest.mark.parametrize(
    ("git", "warning"),
    [
        ("0123456789ab", None),
        ("0123456789ab-dirty", "Measured on files that differ from that commit."),
        ("unknown", "Measured on files of a commit that is not known."),
    ],
)
def test_an_uncommitted_tree_is_pointed_out(tmp_path: Path, git: str, warning: str | None) -> None:
    bench_records.write(tmp_path, "data")
    one = record.read(tmp_path / "data.jsonl")
    page = report.page([replace(one, fingerprint=replace(one.fingerprint, git=git, command="fastdiff bench data"))])
    assert re.findall(r'<span class="warning">(.*?)</span>', page) == ([warning] if warning else [])


def test_launch_bound_times_are_marked(tmp_path: Path) -> None:
    measured = [m for m in rows("op") if m.case.startswith("adaln dit-xl-256 bfloat16")]
    for file, bound in (("a.jsonl", True), ("b.jsonl", False)):
        with Log(tmp_path / file) as log:
            for m in measured:
                log.write(replace(m, facts=m.facts | {"launch bound": bound and m.provider == "triton"}))
        texts = Page(report.page(record.read_all([tmp_path / file]))).texts
        assert texts.count("launch bound") == (2 if bound else 0)
        assert any("2 of 8 points are launch bound." in text for text in texts) == bound, texts


def test_plots_are_drawn_only_of_what_is_there() -> None:
    step = rows("step")
    phases = "Where the time of a step goes"
    assert [chart.title for chart in charted("step", step)] == [phases, "Throughput", "Peak allocated"]
    assert [chart.title for chart in charted("step", [m for m in step if m.quantity == "throughput"])] == ["Throughput"]
    assert charted("step", [m for m in step if m.quantity == "throughput"][:1]) == []
    assert len(charted("op", [m for m in rows("op") if m.quantity == "bandwidth"])) == 3
    assert charted("scale", [m for m in rows("scale") if not m.quantity.startswith("predicted")]) == []
    for bench in ("op", "step", "peer", "data", "scale", "aot", "unknown"):
        assert charted(bench, []) == []


def test_an_op_is_drawn_beside_the_limit_that_it_is_closest_to() -> None:
    measured = [replace(m, facts=m.facts | {"arithmetic": "bf16"}) for m in rows("op")]
    found = {chart.caption.split()[2]: chart for chart in charted("op", measured)}
    assert {op: (chart.title, chart.axis.reference) for op, chart in found.items()} == {
        "adaln": ("Bandwidth", 4100.0),
        "group_norm": ("Bandwidth", 4100.0),
        "attention": ("Rate", 760.0),
    }
    assert "the line is the matmul rate bf16, 760 TFLOP/s." in found["attention"].caption


def test_the_bar_of_a_step_has_all_its_phases() -> None:
    """Also phases without a colour of their own; what none covers is drawn as other."""
    given = {"data": 30.0, "encode": 89.7, "never seen before": 10.0}
    of_one = [*(("phase " + name, ms) for name, ms in given.items()), ("step time", 244.0)]
    measured = [
        Measurement(
            bench="peer", case="c", provider="diffusers", quantity=quantity, unit="ms", value=ms, better="lower"
        )
        for quantity, ms in of_one
    ]
    (chart,) = charted("peer", measured)
    ((_, (row,)),) = chart.groups
    shown = {segment.name: segment.text for segment in row.segments}
    assert shown == {name: number(ms) for name, ms in given.items()} | {"other": "114"}
    assert row.value == "244"
    assert sum(segment.width for segment in row.segments) == pytest.approx(chart.axis.place(244), abs=0.05)
    assert [segment.colour for segment in row.segments] == ["p-data", "p-encode", "p-other", "p-other"]
    assert {name for _, name in chart.legend} == {*given, "other"}


def test_a_chart_has_the_order_and_the_numbers_of_its_table() -> None:
    for bench in ("data", "op"):
        found = next(table for table in tables.tables(rows(bench)) if table.title == "Measured")
        columns = [quantity for quantity, _ in found.columns]
        for chart in charted(bench, rows(bench)):
            column = columns.index(chart.title.lower())
            in_table = {case: [(row.provider, row.cells[column][0]) for row in group] for case, group in found.groups}
            for case, group in chart.groups:
                assert [(row.name, row.value) for row in group] == in_table[case]


def test_markup_in_a_record_is_text(tmp_path: Path) -> None:
    with Log(tmp_path / "op.jsonl") as log:
        log.write(Failure(bench="op", case="<b>", provider="<script>alert(1)</script>", reason="a < b & c"))
        log.write(rows("peer")[0])
    page = Page(report.page(record.read_all([tmp_path])))
    assert page.count("script") == page.count("b") == 0
    assert any("<script>alert(1)</script> (<b>): a < b & c" in text for text in page.texts)


def test_smoke_runs_are_left_out_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "PUBLISHED", tmp_path)
    for name in ("2026-11-21_peer", "2026-11-21_peer-smoke"):
        bench_records.write(tmp_path / "cpu-2-cores" / name, "peer")
    assert main(["report", str(tmp_path / "all.html")]) == 0
    assert "peer-smoke" not in (tmp_path / "all.html").read_text()
    assert main(["report", str(tmp_path / "named.html"), str(tmp_path / "cpu-2-cores")]) == 0
    assert "peer-smoke" in (tmp_path / "named.html").read_text()


@pytest.mark.parametrize("how", ["fingerprint", "command", "folder"])
def test_a_smoke_run_is_marked_and_has_no_ratio(tmp_path: Path, how: str) -> None:
    folder = tmp_path / ("peer-smoke" if how == "folder" else "peer")
    bench_records.write(folder, "peer")
    one = record.read(folder / "peer.jsonl")
    if how != "folder":
        said = {"smoke": True} if how == "fingerprint" else {"command": "python -m bench step --peer plain --smoke"}
        one = replace(one, fingerprint=replace(one.fingerprint, **said))
    texts = Page(report.page([one])).texts
    assert any(text.startswith(record_warnings.SMOKE) for text in texts)
    assert "speed-up" not in texts
    assert not any(" over " in text or "faster" in text for text in texts if not text.startswith(("Values", "A comp")))
    assert "No record compares fastdiff with another program." in texts


def comparison(ratio: float, low: float, high: float, **said: object) -> comparisons.Comparison:
    """The comparison of a record with one speed-up, whose sides have steady times, unless ``said`` says otherwise."""
    made = [
        Measurement(
            bench="peer", case="c", provider=provider, quantity="step time", unit="ms", value=ms, p20=ms, p80=ms * wide,
            n=9, better="lower",
        )
        for provider, ms, wide in (("fastdiff ddp", 100.0, said.get("spread", 1.0)), ("plain", 200.0, 1.0))
    ]  # fmt: skip
    made.append(
        Measurement(
            bench="peer", case="c", provider="fastdiff ddp over plain", quantity="speed-up", unit="1", value=ratio,
            p20=low, p80=high, n=9, better="higher",
        )
    )  # fmt: skip
    load = said.get("load")
    (found,) = comparisons.of_record(record.Record(Path("a/b.jsonl"), fingerprint(load=load), tuple(made), ()))
    return found


def fingerprint(**said: object) -> Fingerprint:
    return replace(Fingerprint.here(), **{"load": None, "command": "fastdiff bench step"} | said)


def test_a_verdict_needs_the_whole_range_on_one_side_and_steady_sides() -> None:
    assert comparison(1.9, 1.8, 2.0).verdict == "faster"
    assert comparison(0.9, 0.8, 0.95).verdict == "slower"
    assert comparison(1.1, 0.9, 1.2).verdict == "no clear difference"
    assert comparison(39.4, 15.0, 46.5).verdict == "doubtful"
    unsteady = comparison(1.9, 1.8, 2.0, spread=2.24)
    assert (unsteady.verdict, unsteady.warning) == ("doubtful", "fastdiff ddp, step time: p80 is 2.24 times p20")
    busy = comparison(1.9, 1.8, 2.0, load=1.6)
    assert (busy.verdict, busy.warning) == ("doubtful", "load average 1.60 per processor before it began")


def test_a_ratio_of_times_counts_as_its_inverse() -> None:
    row = Measurement(
        bench="scripts", case="t2i", provider="fastdiff over script", quantity="ratio of the time of a step", unit="1",
        value=0.5, p20=0.4, p80=0.8, n=9, better="lower",
    )  # fmt: skip
    (found,) = comparisons.of_record(record.Record(Path("a/b.jsonl"), fingerprint(), (row,), ()))
    assert (found.times, found.low, found.high) == (2.0, 1.25, 2.5)
    assert (found.ours, found.rival, found.what, found.verdict) == ("fastdiff", "script", "time of a step", "faster")


def test_no_race_is_between_two_parts_of_fastdiff() -> None:
    record_of = record.Record(Path("a/b.jsonl"), fingerprint(), tuple(rows("data")), ())
    assert {found.rival for found in comparisons.of_record(record_of)} == {
        "dali webdataset", "webdataset", "webdataset 2 workers", "npy dataloader", "npy dataloader 2 workers",
    }  # fmt: skip


def test_the_page_names_every_device_with_a_measurement_also_without_comparisons(tmp_path: Path) -> None:
    for bench in ("peer", "step"):
        bench_records.write(tmp_path / bench, bench)
    peer, step = record.read_all([tmp_path])
    gpu = replace(step, fingerprint=replace(step.fingerprint, device="NVIDIA H200", date="2026-11-26T03:53:17"))
    smoke = replace(step, fingerprint=replace(step.fingerprint, device="NVIDIA L4", smoke=True))
    first, second = overview.devices([peer, gpu, smoke], {"step": "Training step"})
    assert first == ("NVIDIA H200", "none yet", "Training step", "2026-11-26")
    assert second[0] == overview.device(peer.fingerprint)
    assert second[1].endswith(" of 4")
    assert "NVIDIA H200" in Page(report.page([peer, gpu])).texts


def test_the_page_shows_the_fastest_step_of_each_network_and_device() -> None:
    def of(batch: int, rate: float, network: str = "dit") -> list[Measurement]:
        case = f"{network}, 4x8x8, batch {batch}, fp32"
        figures: dict[str, tuple[str, Better, float]] = {
            "step time": ("ms", "lower", 1000 * batch / rate),
            "throughput": ("samples/s", "higher", rate),
        }
        return [
            Measurement(
                bench="step", case=case, provider=provider, quantity=name, unit=unit, value=value, better=better
            )
            for provider in ("fastdiff ddp", "plain")
            for name, (unit, better, value) in figures.items()
        ]

    records = [
        record.Record(Path("a/b.jsonl"), fingerprint(device=device, load=load), tuple(measured), ())
        for device, load, measured in (
            ("cpu", None, [*of(8, 10.0), *of(16, 12.0), *of(32, 11.0), *of(8, 3.0, "unet")]),
            ("NVIDIA H200", 0.8, of(256, 600.0)),
        )
    ]
    (table,) = overview.fastest_steps(records)
    rows = [(row.provider, row.cells[0][0]) for _, group in table.groups for row in group]
    assert rows == [
        (
            "dit, 4x8x8, batch 256, fp32; fastdiff ddp; doubtful: load average 0.800 per processor before it began",
            "600",
        ),
        ("dit, 4x8x8, batch 16, fp32; fastdiff ddp", "12"),
        ("unet, 4x8x8, batch 8, fp32; fastdiff ddp", "3"),
    ]
    assert table.groups[0][0] == "NVIDIA H200"


def test_the_terminal_ends_with_what_its_numbers_are_not_good_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = argparse.Namespace(out=tmp_path, smoke=True)
    steady, wide = (
        Measurement(
            bench="op", case="c", provider=name, quantity="time", unit="us", value=15.0, p20=10.0, p80=p80, n=3,
            better="lower",
        )
        for name, p80 in (("steady", 19.0), ("wide", 22.4))
    )  # fmt: skip
    with open_log(given, "op") as log:
        log.write(steady)
        log.write(wide)
        log.write(replace(wide, provider="ours over theirs", quantity="speed-up"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"record: {log.path}"
    assert lines[1].startswith("smoke: not a measurement")
    assert [line for line in lines if "times p20" in line] == ["doubtful: wide, time (c): p80 is 2.24 times p20"]
    assert record.read(log.path).fingerprint.smoke


@pytest.mark.parametrize("arguments", [[], ["records"], ["out.html", "empty"], ["out.html", "missing.jsonl"]])
def test_bad_input_is_exit_code_2(tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["report", *arguments]) == 2
    assert not (tmp_path / "out.html").exists()


def test_numbers_have_three_digits() -> None:
    values = (0, 1, 8.0, 0.012345, 0.9996, 1.5, 99.96, 115.4, 12345.6, 1801, -2.5, 0.0)
    written = ["0", "1", "8", "0.0123", "1.00", "1.50", "100", "115", "12,300", "1,801", "-2.50", "0"]
    assert [number(value) for value in values] == written


TABLES = """# Speed

<!-- bench: peers all -->
<!-- end bench -->

between

<!-- bench: readers all -->
| old |
<!-- end bench -->
<!-- bench: steps all/step.jsonl -->
<!-- end bench -->
<!-- bench: kernels all -->
<!-- end bench -->
<!-- bench: reader-speed-ups all -->
<!-- end bench -->
end
"""


def test_the_tables_of_a_readme_are_rewritten(tmp_path: Path) -> None:
    bench_records.write(tmp_path / "all")
    file = tmp_path / "README.md"
    file.write_text(TABLES)
    assert readme.rewrite(file, tmp_path)
    text = file.read_text()
    assert not readme.rewrite(file, tmp_path)
    assert [line for line in text.splitlines() if line.startswith(("#", "<!--", "between", "end"))] == [
        line for line in TABLES.splitlines() if line and line != "| old |"
    ]
    assert "| old |" not in text
    found = record.by_provider(m for one in record.read_all([tmp_path]) for m in one.measurements)
    case = "digits-t2i, 4x8x8, batch 8, fp32, online"
    ratio = found[case, "fastdiff ddp over diffusers"]["speed-up"]
    ours, theirs = (found[case, name]["step time"] for name in ("fastdiff ddp", "diffusers"))
    cells = [case, "fastdiff ddp", "diffusers", *(number(m.value) for m in (ours, theirs, ratio)), interval(ratio)]
    assert f"| {' | '.join(cells)} |" in text
    reader = found["151 KB samples, batch 64, cold", "webdataset"]
    cells = [number(reader["throughput"].value), interval(reader["throughput"]), number(reader["bandwidth"].value)]
    assert f"| 151 KB samples, batch 64, cold | webdataset | {' | '.join(cells)} |" in text
    kernel = found["adaln dit-xl-256 bfloat16 forward", "triton"]
    time, share = kernel["time"], f"{100 * kernel['of copy'].value:.0f} %"
    assert f"| adaln dit-xl-256 bfloat16 forward | {number(time.value)} | {interval(time)} | {share} |" in text
    assert "- apex (adaln dit-xl-256 bfloat16): not installed" in text
    assert "(`all/step.jsonl`: " in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench: peers missing -->\n<!-- end bench -->\n", "missing: no record"),
        ("<!-- bench: peers all/step.jsonl -->\n<!-- end bench -->\n", "no such measurement of bench peer"),
        ("<!-- bench: speed all -->\n<!-- end bench -->\n", "no such table; expected one of peers"),
        ("<!-- bench: peers all -->\n", "not closed"),
        ("<!-- bench: peers -->\n<!-- end bench -->\n", "marker is wrong"),
        ("<!-- end bench -->\n", "marker is wrong"),
        ("<!-- bench: peers all -->\n<!-- bench: peers all -->\n<!-- end bench -->\n", "marker is wrong"),
    ],
)
def test_a_wrong_marker_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    bench_records.write(tmp_path / "all", "step", "peer")
    with pytest.raises(BenchError, match=message) as error:
        readme.rendered(text, tmp_path)
    assert str(error.value).startswith("README.md: ")


def test_the_benchmarks_page_shows_what_was_measured() -> None:
    kinds = re.findall(r"^<!-- bench: (\S+) ", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert {"peers", "steps", "readers"} <= set(kinds)


@pytest.mark.parametrize("file", readme.FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_readme_has_the_numbers_of_the_records(file: Path) -> None:
    text = file.read_text()
    assert readme.rendered(text) == text, "fastdiff bench report --readme"
