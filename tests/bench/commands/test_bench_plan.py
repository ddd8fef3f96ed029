"""``bench plan``: it measures, predicts each size from every other one, and records the errors."""

from pathlib import Path

import pytest

from fastdiff_bench.__main__ import main
from fastdiff_bench.records import record


@pytest.mark.nightly
def test_sizes_are_measured_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = record.read(tmp_path / "plan.jsonl").measurements
    assert [row.provider for row in rows if row.quantity == "step time"] == ["micro-batch 4", "micro-batch 8"]
    errors = {(row.provider, row.quantity): row.value for row in rows if row.unit == "1"}
    assert set(errors) == {
        ("micro-batch 4", "prediction error from micro-batch 8"),
        ("micro-batch 8", "prediction error from micro-batch 4"),
    }
    assert "from 4, ms" in capsys.readouterr().out


def test_one_size_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--micro", "8", "8"]) == 2
    assert "--micro 8 8: expected at least two different sizes" in capsys.readouterr().err
