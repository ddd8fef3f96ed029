"""``bench widths``: real runs at two widths, and a sweep that finds the best rate and goes on beyond its end."""

import math
from pathlib import Path

import pytest
from PIL import Image

from fastdiff_bench.__main__ import main
from fastdiff_bench.commands.widths import report
from fastdiff_bench.measure.best_rate import best_rate, beyond
from fastdiff_bench.measure.coordinates import slopes
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Log
from fastdiff_bench.trainers.widths import Trained, Trial

RATES = tuple(2.0**exponent for exponent in range(-9, -4))


def valley(best: float) -> dict[float, float]:
    """Losses of a sweep, a parabola over the logarithm of the rate."""
    return {rate: 1 + 0.1 * math.log2(rate / best) ** 2 for rate in RATES}


def test_the_best_rate_lies_between_those_of_the_sweep() -> None:
    assert best_rate(valley(2**-7.3)) == pytest.approx(2**-7.3)
    assert best_rate(valley(2**-6) | {2**-5: math.inf}) == 2**-6, "the neighbour of a run that failed"
    assert best_rate(valley(2**-12)) is None


def test_a_sweep_goes_on_while_an_end_is_best() -> None:
    assert beyond(valley(2**-7.3)) == set()
    assert beyond(valley(2**-12)) == {2**-10}
    assert beyond(valley(2**-2)) == {2**-4}
    assert beyond({2**-6: 2.0, 2**-5: math.inf}) == {2**-7}, "a run that failed is not best"
    assert beyond({2**-6: math.inf, 2**-5: math.inf}) == {2**-7}, "all failed: lower"


def test_an_exponent_is_that_of_the_width() -> None:
    found = slopes({width: {"part": [9.0, 0.5 * width**1.5]} for width in (64, 128, 512)})
    assert found["part"] == pytest.approx(1.5)


def test_the_record_has_the_ratio_of_the_best_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bests = {("muP", 64): 2**-7.0, ("muP", 256): 2**-7.2, ("one rate", 64): 2**-6.5, ("one rate", 256): 2**-8.0}
    done = [
        Trained(Trial(width, 64 if method == "muP" else 0, rate, 0, 100), loss, None)
        for (method, width), best in bests.items()
        for rate, loss in valley(best).items()
    ]
    with Log(tmp_path / "widths.jsonl") as log:
        report(done, [64, 256], log)
    rows = {(m.provider, m.quantity): m.value for m in record.read(tmp_path / "widths.jsonl").measurements}
    assert rows["muP, width 64", "best rate over that of the widest"] == pytest.approx(2**0.2)
    assert rows["one rate, width 64", "best rate over that of the widest"] == pytest.approx(2**1.5)
    assert "1.15" in capsys.readouterr().out
    with Image.open(tmp_path / "widths.png") as picture:
        assert picture.width > picture.height


@pytest.mark.nightly
def test_every_width_is_trained_and_not_anew_at_a_second_start(tmp_path: Path) -> None:
    flags = ("widths", "--smoke", "--folder", str(tmp_path / "runs"), "--out", str(tmp_path))
    assert main(flags) == 0
    rows = record.read(tmp_path / "widths.jsonl").measurements
    losses = [m for m in rows if m.quantity == "validation loss, seed 0"]
    assert len({m.value for m in losses}) == 8, "two methods, widths and rates"
    exponents = {m.provider: m.value for m in rows if m.quantity == "exponent of the width in the change, MLP"}
    assert abs(exponents["muP"]) < 0.5 < exponents["one rate"]
    files = sorted(tmp_path.glob("runs/runs/*/*/*/metrics.jsonl"))
    written = [file.stat().st_mtime_ns for file in files]
    assert main(flags) == 0
    assert [file.stat().st_mtime_ns for file in files] == written
    assert (tmp_path / "widths-coordinates.png").is_file()


def test_widths_of_no_whole_heads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("--widths", "64", "80"), "multiples of 32"),
        (("--widths", "64"), "two or more"),
        (("--steps", "3"), "--steps 3: at least"),
    ):
        assert main(("widths", *words)) == 2
        assert message in capsys.readouterr().err
