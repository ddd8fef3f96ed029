"""Two records are compared measurement by measurement, and noise is told from change."""

import json
from pathlib import Path

import pytest

from fastdiff_bench import BenchError
from fastdiff_bench.__main__ import main
from fastdiff_bench.commands.compare import Change, compare, differences
from fastdiff_bench.measure import roofline as limits
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Failure, Log, Measurement, Record


def row(value: float, low: float | None = None, high: float | None = None, **other: object) -> Measurement:
    given = {
        "bench": "step", "case": "dit-s-2-256", "provider": "fastdiff", "quantity": "step time", "unit": "ms",
        "better": "lower", **other,
    }  # fmt: skip
    return Measurement(value=value, p20=low, p80=high, n=1 if low is None else 20, **given)


def write(path: Path, *rows: Measurement | Failure, **fingerprint: object) -> Record:
    with Log(path) as log:
        for one in rows:
            log.write(one)
    head, *rest = path.read_text().splitlines(keepends=True)
    fields = json.loads(head)["fingerprint"] | {"git": "0123456789ab"} | fingerprint
    path.write_text(json.dumps({"fingerprint": fields}) + "\n" + "".join(rest))
    return record.read(path)


@pytest.mark.parametrize(
    ("a", "b", "better", "verdict"),
    [
        ((100, 98, 103), (100, 98, 103), "lower", "same"),
        # Beyond the tolerance of 3 %, but the intervals overlap, or touch.
        ((100, 95, 115), (110, 104, 120), "lower", "same"),
        ((100, 98, 105), (110, 105, 120), "lower", "same"),
        # Apart, but within the tolerance.
        ((100, 99.9, 100.1), (102.9, 102.8, 103), "lower", "same"),
        ((100, 98, 103), (110, 104, 120), "lower", "worse"),
        ((100, 98, 103), (110, 104, 120), "higher", "better"),
        ((100, 98, 103), (110, 104, 120), "neither", "changed"),
        ((100, 98, 103), (90, 85, 97), "lower", "better"),
        ((100, 98, 103), (90, 85, 97), "higher", "worse"),
        # What was not repeated is its own interval.
        ((100,), (102,), "lower", "same"),
        ((100,), (104,), "lower", "worse"),
        ((100, 98, 103), (104,), "lower", "worse"),
        ((100, 98, 105), (104,), "lower", "same"),
        ((0,), (0,), "lower", "same"),
        ((0,), (1,), "lower", "worse"),
        ((1,), (0,), "lower", "better"),
    ],
)
def test_what_counts_as_a_change(a: tuple[float, ...], b: tuple[float, ...], better: str, verdict: str) -> None:
    assert Change(row(*a, better=better), row(*b, better=better), 0.03).verdict == verdict


def test_measurements_are_joined_by_name(tmp_path: Path) -> None:
    gone = row(7, quantity="launches")  # of an older record
    a = write(tmp_path / "a.jsonl", row(1), row(5, case="x"), row(7, quantity="phase data"), gone)
    b = write(tmp_path / "b.jsonl", row(9, provider="plain"), row(5, case="x"), row(2))
    found = compare([a], [b], tolerance=0.03)
    assert {change.a.case: change.ratio for change in found.changes} == {"dit-s-2-256": 2.0, "x": 1.0}
    assert [m.quantity for m in found.only_a] == ["phase data"]
    assert [m.provider for m in found.only_b] == ["plain"]


def test_nothing_in_common_and_other_units_are_errors(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", row(1))
    with pytest.raises(BenchError, match="no measurement in common: 1 of step against 1 of data"):
        compare([a], [write(tmp_path / "b.jsonl", row(1, bench="data"))], tolerance=0.03)
    with pytest.raises(BenchError, match="step time: ms in one, s in the other"):
        compare([a], [write(tmp_path / "b.jsonl", row(1, unit="s"))], tolerance=0.03)


def test_a_new_failure_is_worse(tmp_path: Path) -> None:
    forward, other = "adaln dit bf16 forward", row(1)
    a = write(tmp_path / "a.jsonl", row(1, bench="op", case=forward, provider="triton"), other)

    def worse(failure: Failure) -> bool:
        return compare([a], [write(tmp_path / "b.jsonl", other, failure)], tolerance=0.03, partial=True).worse

    for provider in ("triton", "every"):
        assert worse(Failure(bench="op", case="adaln dit bf16", provider=provider, reason="wrong"))
    assert not worse(Failure(bench="op", case="adaln dit bf16", provider="liger", reason="not installed"))
    assert not worse(Failure(bench="op", case="adaln unet bf16", provider="every", reason="wrong"))
    old = write(tmp_path / "c.jsonl", other, Failure(bench="op", case="adaln", provider="triton", reason="wrong"))
    assert not compare([old], [old], tolerance=0.03).worse


def test_missing_measurements_are_worse_unless_only_a_part_was_measured(tmp_path: Path) -> None:
    a = [write(tmp_path / "a.jsonl", row(1), row(1, case="later"))]
    stopped = [write(tmp_path / "b.jsonl", row(1))]
    found = compare(a, stopped, tolerance=0.03)
    assert [m.case for m in found.missing] == ["later"]
    assert found.worse
    assert not compare(a, stopped, tolerance=0.03, partial=True).worse
    assert not compare(stopped, a, tolerance=0.03).worse
    failed = Failure(bench="step", case="later", provider="fastdiff", reason="killed")
    assert compare(a, [write(tmp_path / "c.jsonl", row(1), failed)], tolerance=0.03, partial=True).worse


def test_the_limits_of_the_machine_and_shares_of_them_do_not_count(tmp_path: Path) -> None:
    slow = limits.Limits(Timing(1e12, 1e12, 1e12, 20), {"bf16": Timing(1e14, 1e14, 1e14, 20)})
    fast = limits.Limits(slow.copy.times(2), {"bf16": slow.matmul["bf16"].times(2)})

    def rows(machine: limits.Limits) -> list[Measurement]:
        shares = [
            row(1e12 / machine.copy_bytes_per_s, quantity="of copy", unit="1", better="higher"),
            row(1e14 / machine.matmul_flops_per_s["bf16"], quantity="of matmul", unit="1", better="higher"),
        ]
        return [row(1), *machine.measurements("step"), *shares]

    a, b = (write(tmp_path / f"{name}.jsonl", *rows(one)) for name, one in (("a", slow), ("b", fast)))
    for before, after in ((a, b), (b, a)):
        found = compare([before], [after], tolerance=0.03)
        assert {change.a.quantity: change.verdict for change in found.changes} == {
            "step time": "same", "copy bandwidth": "changed", "matmul rate bf16": "changed", "of copy": "changed",
            "of matmul": "changed",
        }  # fmt: skip
        assert not found.worse
    assert compare([a], [write(tmp_path / "c.jsonl", row(1))], tolerance=0.03).missing == ()


def test_other_machines_and_uncommitted_files_are_named(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", row(1), device="NVIDIA H200", driver="570.1", git="aaaaaaaaaaaa")
    b = write(tmp_path / "b.jsonl", row(1), device="NVIDIA H100", driver="570.1", git="bbbbbbbbbbbb-dirty", date="2027")
    first, second = differences([a], [b])
    assert first == "device: NVIDIA H200 against NVIDIA H100"
    assert "b.jsonl was measured on files that differ from commit bbbbbbbbbbbb" in second
    assert differences([a], [a]) == []
    unknown = write(tmp_path / "c.jsonl", row(1), device="NVIDIA H200", driver="570.1", git="unknown")
    assert differences([a], [unknown]) == [f"{unknown.path}: its commit is not known"]


def test_exit_code_and_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a" / "step.jsonl", row(100, 98, 103), row(8, case="gone"))
    write(tmp_path / "b" / "step.jsonl", row(110, 104, 120), row(8, case="new"), torch="9.9")
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *folders]) == 1
    shown = capsys.readouterr()
    assert "100  98 to 103  110  104 to 120  1.100  worse" in shown.out
    assert "only in A: step | gone | fastdiff | step time" in shown.out
    assert "only in B: step | new | fastdiff | step time" in shown.out
    assert shown.out.endswith("1 worse, 0 better, 0 changed, 0 same, 1 missing\n")
    assert "warning: torch: " in shown.err
    assert main(["compare", *folders[::-1]]) == 1
    assert main(["compare", *folders[::-1], "--partial"]) == 0
    assert main(["compare", *folders, "--tolerance", "11"]) == 1
    assert main(["compare", *folders, "--tolerance", "11", "--partial"]) == 0


@pytest.mark.parametrize("flags", [["missing.jsonl"], ["b.jsonl", "--tolerance", "-1"], ["damaged.jsonl"]])
def test_bad_input_is_exit_code_2(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, row(1))
    (tmp_path / "damaged.jsonl").write_text("{")
    assert main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / flags[0]), *flags[1:]]) == 2
    assert "Traceback" not in capsys.readouterr().err
