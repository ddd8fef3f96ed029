"""``bench checkpoint``: real saves during real steps, and the figures of their times."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fastdiff_bench.__main__ import main
from fastdiff_bench.commands import checkpoint
from fastdiff_bench.measure.interleaved import Result
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record
from fastdiff_bench.trainers.saving import Cycle

QUANTITIES = {
    "step time",
    "step time beside a save",
    "step time with a save that it waits for",
    "pause",
    "save time",
    "step time beside a save / step time",
    "step time with a save that it waits for / step time",
    "cost of a save beside the training in steps",
    "checkpoint",
}


@pytest.mark.nightly
def test_everything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    given = ["--smoke", "--device", "cpu", "--ranks", "2", "--folder", str(storage), "--out", str(tmp_path / "out")]
    assert main(["checkpoint", *given]) == 0, capsys.readouterr().out
    found = record.read(tmp_path / "out" / "checkpoint.jsonl")
    assert {row.quantity for row in found.measurements} == QUANTITIES
    assert {(row.bench, row.provider) for row in found.measurements} == {("checkpoint", "fastdiff zero1")}
    values = {row.quantity: row for row in found.measurements}
    size = values["checkpoint"].value * 2**20
    assert size > 16 * int(str(values["checkpoint"].facts["parameters"])), "weights, two moments and an average"
    assert values["step time"].n == 2 * 3
    assert int(str(values["pause"].facts["steps beside a save"])) >= 2, "at least one per session"
    assert not list(storage.iterdir()), "the checkpoints are gone"


def test_a_program_that_fails_is_recorded(tmp_path: Path) -> None:
    given = ["--smoke", "--device", "cpu", "--folder", str(tmp_path / "missing"), "--out", str(tmp_path / "out")]
    assert main(["checkpoint", *given]) == 1
    (failure,) = record.read(tmp_path / "out" / "checkpoint.jsonl").failures
    assert "missing" in failure.reason


def test_the_figures_are_those_of_the_cycles() -> None:
    first = Cycle([9.0], [9.0], 9.0, 9.0, 9.0)
    cycles = [Cycle([1.0, 1.0, 3.0], [1.1], 0.5, 4.0, 6.0), Cycle([2.0], [2.0, 2.6, 9.0], 0.25, 5.0, 8.0)]
    facts = {"cycles": json.dumps([asdict(one) for one in [first, *cycles]]), "parameters": 7, "bytes": 3 * 2**20}
    found = {row.quantity: row for row in checkpoint.measurements(Workload(preset="digits"), Result(facts=facts), 2)}
    assert found.keys() == QUANTITIES
    assert found["step time"].value == 1500.0
    assert found["step time beside a save"].value == pytest.approx(2300.0)
    assert found["step time beside a save / step time"].value == pytest.approx((1.1 + 1.3) / 2)
    assert found["step time with a save that it waits for / step time"].value == 5.0
    assert (found["pause"].value, found["save time"].value) == (375.0, 4500.0)
    cost = found["cost of a save beside the training in steps"]
    assert cost.value == pytest.approx(((0.5 + 1.1 - 1.0) / 1.0 + (0.25 + 13.6 - 6.0) / 2.0) / 2)
    assert found["checkpoint"].value == 3.0
    assert found["pause"].facts["ranks"] == 2
    assert found["pause"].facts["steps beside a save"] == 4
