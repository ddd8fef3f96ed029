"""Records: written and read back, damage is found, and the schema agrees with the types."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff_bench import BenchError
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Failure, Log, Measurement
from tests.support.benches import bench_records

ROOT = Path(__file__).parents[3]
ROW = Measurement(
    bench="op", case="adaln", provider="triton", quantity="time", unit="us", value=2.5, p20=2.0, p80=3.0, n=20,
    better="lower", facts={"bytes": 3, "dtype": "bf16", "share": 0.5, "default": True, "shape": None},
)  # fmt: skip
FAILURE = Failure(bench="op", case="adaln", provider="liger", reason="not installed")


def written(folder: Path) -> Path:
    path = folder / "op.jsonl"
    with Log(path) as log:
        log.write(ROW)
        log.write(FAILURE)
    return path


def test_records_are_read_as_written(tmp_path: Path) -> None:
    read = record.read(written(tmp_path / "new" / "folder"))
    assert read.measurements == (ROW,)
    assert read.failures == (FAILURE,)
    assert read.fingerprint.torch
    assert ROW.interval == (2.0, 3.0)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = Log(tmp_path / "op.jsonl")
    log.write(ROW)
    assert record.read(log.path).measurements == (ROW,)


@pytest.mark.parametrize(
    "row",
    [
        {"value": float("nan")}, {"value": float("inf")}, {"value": "2.5"}, {"p20": float("nan")}, {"better": "more"},
        {"n": 1.5}, {"case": None}, {"facts": {"rate": float("nan")}}, {"facts": {"shape": [1, 2]}},
    ],
)  # fmt: skip
def test_unreadable_values_are_not_written(tmp_path: Path, row: dict[str, object]) -> None:
    fields = {name: getattr(ROW, name) for name in ROW.__slots__}
    with Log(tmp_path / "op.jsonl") as log:
        with pytest.raises(ValueError, match=next(iter(row))):
            log.write(Measurement(**{**fields, **row}))
        log.write(FAILURE)
    assert record.read(log.path).measurements == ()


DAMAGES = {
    "truncated": (lambda text: text[:-20], "line 3: .*EOF"),
    "cut within the first line": (lambda text: text[:40], "line 1: .*EOF"),
    "no fingerprint": (lambda text: text.split("\n", 1)[1], "fingerprint, in the first line"),
    "two records in one": (lambda text: text + text, "one fingerprint"),
    "empty": (lambda text: "", "fingerprint, in the first line"),
    "more fields": (lambda text: text.replace('"facts"', '"host": "a", "facts"'), "line 2: .*measurement.host"),
    "a field less": (lambda text: text.replace('"unit": "us", ', ""), "line 2: .*measurement.unit"),
    "another type": (
        lambda text: text.replace('"value": 2.5', '"value": "2.5"'),
        "line 2: .*measurement.value: .*number",
    ),
    "NaN": (lambda text: text.replace('"value": 2.5', '"value": NaN'), "line 2: .*measurement.value: .*finite"),
    "unknown kind": (lambda text: text.replace('{"failure"', '{"error"'), "line 3: .*expected a fingerprint"),
    "two kinds": (lambda text: text.replace('{"failure"', '{"measurement": 3, "failure"'), "line 3: .*measurement"),
    "no object": (lambda text: text + "[3]\n", "line 4: .*expected a fingerprint"),
    "no text": (lambda text: text.replace("adaln", "\udcff"), "line 2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path)
    change, message = DAMAGES[damage]
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(BenchError, match=message) as error:
        record.read_all([tmp_path])
    assert str(path) in str(error.value)


def test_only_the_metrics_of_runs_are_no_records(tmp_path: Path) -> None:
    path = written(tmp_path / "results")
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "samples": 1280, "loss": 0.91}\n{"step": 40}\n')
    assert record.files(tmp_path) == [path]
    (tmp_path / "other.jsonl").write_text('{"case": "philox", "kernel": "normal"}\n')
    with pytest.raises(BenchError, match=r"other\.jsonl, line 1: not a record"):
        record.read_all([tmp_path])


@pytest.mark.parametrize("name", ["empty", "missing", "missing.jsonl"])
def test_no_record_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BenchError, match=f"{name}: no record"):
        record.read_all([tmp_path / name])


def test_the_last_of_repeated_measurements_counts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("b.jsonl", "a.jsonl")]
    for value, path in enumerate(paths, 1):
        with Log(path) as log:
            log.write(replace(ROW, value=float(value)))
        lines = path.read_text().split("\n")
        head = json.loads(lines[0])
        head["fingerprint"]["date"] = f"2026-01-0{value}T00:00:00+00:00"
        path.write_text("\n".join([json.dumps(head), *lines[1:]]))
    read = record.read_all([tmp_path])
    assert [one.path for one in read] == paths
    assert record.by_provider(m for one in read for m in one.measurements)["adaln", "triton"]["time"].value == 2


def test_a_timing_becomes_a_measurement_in_another_unit() -> None:
    found = Measurement.of("step", "case", "ours", "step time", "ms", Timing(0.5, 0.25, 1.0, 7), "lower", scale=1e3)
    assert (found.value, found.p20, found.p80, found.n) == (500.0, 250.0, 1000.0, 7)
    alone = Measurement.of("step", "case", "ours", "launches", "1", 3, "lower", facts={"batch": 8})
    assert (alone.value, alone.p20, alone.n, alone.facts) == (3, None, 1, {"batch": 8})


def test_the_records_of_this_repository_are_records() -> None:
    for one in record.read_all(record.kept()):
        assert one.measurements, one.path


def test_the_records_of_the_other_tests_are_records(tmp_path: Path) -> None:
    read = record.read_all([bench_records.write(tmp_path)])
    assert {m.bench for one in read for m in one.measurements} == set(bench_records.BENCHES)
    assert all(m.interval[0] <= m.value <= m.interval[1] for one in read for m in one.measurements)
