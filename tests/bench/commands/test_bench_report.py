"""``bench report``: one self-contained page of the records, and tables of the records in the documents."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench import BenchError
from bench.__main__ import main
from bench.commands import report
from bench.records import charts, plots, readme, record
from bench.records.fingerprint import ROOT
from bench.records.number_format import interval, number
from bench.records.record import Failure, Log, Measurement
from tests.support.benches import bench_records

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


def drawn(bench: str, measurements: Sequence[Measurement]) -> list[plots.Plot]:
    return plots.of_bench(bench, measurements, "p")


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
    assert all(link.startswith("#") for link in page.values("href") + page.values("xlink:href"))
    assert {"script", "link", "iframe", "object", "img"}.isdisjoint(tag for tag, _ in page.elements)
    assert not re.search(r"@import|url\((?!#)", written[1])
    assert "@media print" in written[1]


def test_everything_that_is_referred_to_is_there_once(written: tuple[Path, str]) -> None:
    page = Page(written[1])
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    links = [link.removeprefix("#") for link in page.values("href") + page.values("xlink:href")]
    assert {*links, *re.findall(r"url\(#([^)]+)\)", written[1]), *page.values("aria-labelledby")} <= set(ids)
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(pictures) == page.count("figcaption") == 13
    assert all(one["role"] == "img" and one["aria-labelledby"] for one in pictures)


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
    op = next(table for table in report.tables(rows("op")) if table.title == "Measured")
    times = [[float(row.cells[0][0].replace(",", "")) for row in group] for _, group in op.groups]
    assert all(case_values == sorted(case_values) for case_values in times)
    sweep = next(table for table in report.tables(rows("step")) if table.title == "Measured")
    assert [case.split(", ")[2] for case, _ in sweep.groups] == [f"batch {2**n}" for n in range(3, 9)]
    assert [row.provider for row in sweep.groups[0][1]] == ["fastdiff ddp", "fastdiff ddp compiled"]


def test_unrelated_measurements_are_in_tables_of_their_own() -> None:
    titles = {bench: [table.title for table in report.tables(rows(bench))] for bench in bench_records.BENCHES}
    assert titles == {
        "op": ["Limits of the machine", "Measured"],
        "step": ["Measured", "By phase"],
        "peer": ["Times as fast", "Measured", "By phase"],
        "data": ["Times as fast", "Measured"],
        "scale": ["Measured", "Predicted"],
    }


def test_cases_with_a_column_in_common_by_way_of_others_are_in_one_table() -> None:
    quantities = {"first": "ae", "second": "bd", "both": "ab", "apart": "c", "again": "a"}
    measured = [
        Measurement(
            bench="step", case=case, provider="p", quantity=quantity, unit="1", value=1.5 + place, better="lower"
        )
        for place, (case, case_values) in enumerate(quantities.items())
        for quantity in case_values
    ]
    found = report.tables(measured)
    assert [[quantity for quantity, _ in table.columns] for table in found] == [["a", "e", "b", "d"], ["c"]]
    assert [[case for case, _ in table.groups] for table in found] == [["first", "second", "both", "again"], ["apart"]]


@pytest.mark.parametrize(
    ("git", "doubt"),
    [
        ("0123456789ab", None),
        ("0123456789ab-dirty", "Measured on files that differ from that commit."),
        ("unknown", "Measured on files of a commit that is not known."),
    ],
)
def test_an_uncommitted_tree_is_pointed_out(tmp_path: Path, git: str, doubt: str | None) -> None:
    bench_records.write(tmp_path, "data")
    one = record.read(tmp_path / "data.jsonl")
    page = report.page([replace(one, fingerprint=replace(one.fingerprint, git=git))])
    assert re.findall(r'<span class="doubt">(.*?)</span>', page) == ([doubt] if doubt else [])


def test_launch_bound_times_are_marked(tmp_path: Path) -> None:
    measured = [m for m in rows("op") if m.case.startswith("adaln dit-xl-256 bfloat16")]
    for file, bound in (("a.jsonl", True), ("b.jsonl", False)):
        with Log(tmp_path / file) as log:
            for m in measured:
                log.write(replace(m, facts=m.facts | {"launch bound": bound and m.provider == "triton"}))
        texts = Page(report.page(record.read_all([tmp_path / file]))).texts
        assert texts.count("launch bound") == (2 if bound else 0)
        assert any("2 of 8 points are launch bound." in text for text in texts) == bound


def test_plots_are_drawn_only_of_what_is_there() -> None:
    step = rows("step")
    assert len(drawn("step", step)) == 2
    assert len(drawn("step", [m for m in step if not m.quantity.startswith("phase ")])) == 1
    assert len(drawn("step", [m for m in step if m.facts["batch"] == 8])) == 1
    assert len(drawn("op", [m for m in rows("op") if m.quantity == "bandwidth"])) == 3
    assert len(drawn("op", [m for m in rows("op") if m.quantity == "rate"])) == 1
    assert drawn("scale", [m for m in rows("scale") if not m.quantity.startswith("predicted")]) == []
    for bench in ("op", "step", "peer", "data", "scale", "aot", "unknown"):
        assert drawn(bench, []) == []


def test_the_breakdown_says_how_long_each_phase_takes() -> None:
    phases = [m for m in rows("step") if m.quantity.startswith("phase ") and "batch 256" in m.case]
    texts = Page(drawn("step", phases)[0].svg).texts
    long = [m for m in phases if m.quantity in ("phase forward", "phase backward", "phase optimizer")]
    assert {number(m.value) for m in long} <= set(texts)
    for provider in ("fastdiff ddp", "fastdiff ddp compiled"):
        assert number(sum(m.value for m in phases if m.provider == provider)) in texts
    assert {"data", "objective", "forward", "backward", "optimizer", "ema", "other"} <= set(texts)


def test_plots_have_the_values_of_the_measurements() -> None:
    sweep = [m for m in rows("step") if m.provider == "fastdiff ddp"]
    with charts.style():
        figure, _ = next(plots._over_batch(sweep))
    for axes, quantity in zip(figure.axes, ("throughput", "peak allocated"), strict=True):
        curve = axes.lines[0]
        values = {m.facts["batch"]: m.value for m in sweep if m.quantity == quantity}
        assert dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == values


def test_the_roofline_has_the_measured_limits() -> None:
    measured = rows("op")
    with charts.style():
        figure, caption = next(plots._roofline(measured))
    axes = figure.axes[0]
    slope = next(line for line in axes.lines if len(set(line.get_ydata())) == 2 and line.get_linestyle() == "-")
    assert slope.get_ydata()[1] / slope.get_xdata()[1] == pytest.approx(4100 / 1e3)
    assert slope.get_ydata()[1] == 760
    assert {760.0, 49.0} <= {line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"}
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1}
    for m in (m for m in measured if m.quantity == "rate"):
        assert (m.facts["operations"] / m.facts["bytes"], m.value) in points
    assert caption.endswith(": 1 attention.")
    limited_by_bandwidth = Page(drawn("op", measured)[-1].svg).texts
    assert "dit-xl-256 bfloat16 forward" in limited_by_bandwidth
    assert not any(text.startswith("sd-512") for text in limited_by_bandwidth)


def test_the_efficiency_has_a_curve_per_stage_and_says_what_it_assumes() -> None:
    predicted = [m for m in rows("scale") if m.quantity == "predicted efficiency"]
    with charts.style():
        figure, caption = next(plots._efficiency(predicted))
    curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 11]
    for stage, curve in enumerate(curves):
        values = {m.facts["gpus"]: m.value for m in predicted if m.facts["stage"] == stage}
        assert dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == values
    assert len(curves) == 4
    assert caption.endswith("Assumed: links h200.")


def test_markup_in_a_record_is_text(tmp_path: Path) -> None:
    with Log(tmp_path / "op.jsonl") as log:
        log.write(Failure(bench="op", case="<b>", provider="<script>alert(1)</script>", reason="a < b & c"))
        log.write(rows("peer")[0])
    page = Page(report.page(record.read_all([tmp_path])))
    assert page.count("script") == page.count("b") == 0
    assert any("<script>alert(1)</script> (<b>): a < b & c" in text for text in page.texts)


def test_smoke_runs_are_left_out_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for name in ("2026-11-21_peer", "2026-11-21_peer-smoke"):
        bench_records.write(tmp_path / "cpu-2-cores" / name, "peer")
    assert main(["report", str(tmp_path / "all.html")]) == 0
    assert "smoke" not in (tmp_path / "all.html").read_text()
    assert main(["report", str(tmp_path / "named.html"), str(tmp_path / "cpu-2-cores")]) == 0
    assert "peer-smoke" in (tmp_path / "named.html").read_text()


@pytest.mark.parametrize("arguments", [[], ["records"], ["out.html", "empty"], ["out.html", "missing.jsonl"]])
def test_bad_input_is_exit_code_2(tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as exit_code:
        main(["report", *arguments])
    assert exit_code.value.code == 2
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


def test_a_changed_number_is_put_right(tmp_path: Path) -> None:
    bench_records.write(tmp_path / "all")
    right = readme.rendered(TABLES, tmp_path)
    assert readme.rendered(right.replace("1.90", "2.90"), tmp_path) == right != right.replace("1.90", "2.90")


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
    assert readme.rendered(text) == text, "python -m bench report --readme"
