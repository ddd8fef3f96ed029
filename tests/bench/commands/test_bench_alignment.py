"""``bench alignment``: real steps with features, head and teacher, and costs that compare the right ones."""

from pathlib import Path

import pytest

from fastdiff_bench.__main__ import main
from fastdiff_bench.commands.alignment import (
    ALIGNED,
    BENCH,
    COSTS,
    PLAIN,
    READ,
    TAUGHT,
    measurements,
    verdict,
    with_head,
)  # fmt: skip
from fastdiff_bench.measure.interleaved import Result
from fastdiff_bench.measure.session import Memory, Steps
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record

DIGITS = Workload(preset="digits", batch=8)


def test_all_four_runs_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([BENCH, "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = record.read(tmp_path / "alignment.jsonl").measurements
    facts = {row.provider: row.facts for row in rows}
    assert list(facts) == [PLAIN, READ, ALIGNED, TAUGHT]
    assert facts[PLAIN]["parameters"] == facts[READ]["parameters"] < facts[ALIGNED]["parameters"]
    assert facts[TAUGHT]["parameters"] == facts[ALIGNED]["parameters"], "the teacher is not trained"
    assert facts[TAUGHT]["pictures"] == 8 * (2 + 2 * 3), "one of each sample in every step"
    assert {row.provider for row in rows if row.quantity.startswith("cost of the")} == {*COSTS}
    assert "reading the features costs" in capsys.readouterr().out


def test_each_run_is_compared_with_the_one_before_it() -> None:
    found = {
        name: Result([Steps([second, second]), Steps([second, second])], {}, Memory(2**30))
        for name, second in ((PLAIN, 1.0), (READ, 1.03), (ALIGNED, 1.236), (TAUGHT, 2.472))
    }
    rows = list(measurements(DIGITS, found))
    costs = {row.quantity: row.value for row in rows if row.quantity.startswith("cost of the")}
    assert costs == {
        "cost of the reading: step time / no features": pytest.approx(1.03),
        "cost of the head: step time / features, unused": pytest.approx(1.2),
        "cost of the teacher: step time / aligned": pytest.approx(2.0),
    }
    assert [*verdict(rows)] == ["reading the features costs +3.00% of the step, above the limit of 2%"]
    found[READ].failure = "killed"
    rows = list(measurements(DIGITS, found))
    assert [row.provider for row in rows if row.quantity.startswith("cost of the")] == [TAUGHT]


def test_the_head_stands_at_a_third_of_the_depth() -> None:
    for preset, block in (("dit-s-2-256", 4), ("dit-xl-2-256", 8)):
        model = with_head(Workload(preset=preset)).config(Path(), Path()).model
        assert (model.aligned_width, model.aligned_block) == (64, block)  # type: ignore[attr-defined]


def test_a_network_without_a_head_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([BENCH, "--preset", "digits-t2i", "--out", str(tmp_path)]) == 2
    assert "digits-t2i is no DiT" in capsys.readouterr().err
