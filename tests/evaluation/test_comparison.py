"""Comparisons of two runs: the arithmetic on arrays with known answers, the refusals, the command on real runs."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastdiff.buffered_writes import WholeFiles
from fastdiff.cli.main import main
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.errors import ConfigError, StorageError
from fastdiff.evaluation.comparison import Comparison, MeasuredRun, compare, draw, in_words, read_both
from fastdiff.evaluation.validation_files import Validated, encode, path_of, read
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.injected.tiny_disk import fill, tiny_disk
from tests.support.runs import held_out, launch, tiny

COUNT = 320
ABOUT = {
    "data": "d" * 64, "seed": 1, "objective": {"prediction": "v"}, "unit": "squared error of v", "precision": "fp32",
    "weights": "EMA of rate 0.9", "step": 7,
}  # fmt: skip
LOG_SNR = np.linspace(9.9, -9.9, COUNT).astype(np.float32)
NOISE = np.random.default_rng(0).standard_normal((2, COUNT))


def run(name: str, loss: np.ndarray[Any, Any], log_snr: np.ndarray[Any, Any] = LOG_SNR, **about: Any) -> MeasuredRun:
    return MeasuredRun(Path(name), Validated(np.arange(len(loss)), log_snr, loss, loss**2, ABOUT | about))


def error_of(values: np.ndarray[Any, Any]) -> float:
    """Of samples in the order of their noise level, half the mean square of the steps between neighbours."""
    steps = [(after - before) ** 2 for before, after in pairwise(values)]
    return math.sqrt(sum(steps) / (2 * len(steps)) / len(values))


def inside(number: int) -> np.ndarray[Any, Any]:
    return np.flatnonzero(np.clip(np.floor((LOG_SNR + 10) / 1.25), 0, 15) == number)


def test_paired_differences_are_those_of_the_samples() -> None:
    """Samples that are hard for both runs cancel: a hundredth of the spread of the losses is seen."""
    a = 1 + np.abs(NOISE[0])
    b = a + 0.004 * NOISE[1]
    b[inside(5)] += 0.01
    shuffled = np.random.default_rng(1).permutation(COUNT)
    found = compare(run("a", a[shuffled], LOG_SNR[shuffled]), run("b", b[shuffled], LOG_SNR[shuffled]))
    assert found.paired
    assert found.unit == "loss (squared error of v)"
    for number, row in enumerate(found.bins):
        rows = inside(number)
        assert (row.a.count, row.b.count) == (len(rows), len(rows))
        assert row.a.mean == pytest.approx(a[rows].mean())
        assert row.difference == pytest.approx((b - a)[rows].mean())
        assert row.error == pytest.approx(error_of((b - a)[rows]))
        assert row.significant == (abs((b - a)[rows].mean()) > 2 * error_of((b - a)[rows]))
    assert found.bins[5].significant
    assert sum(row.significant for row in found.bins) < 4
    assert found.total.difference == pytest.approx((b - a).mean())
    assert found.total.error == pytest.approx(error_of(b - a))
    assert found.total.relative == pytest.approx((b - a).mean() / a.mean())


def test_losses_of_another_kind_are_compared_as_errors_of_x0() -> None:
    a, b = 1 + np.abs(NOISE)
    found = compare(run("a", a), run("b", b, objective={"prediction": "epsilon"}))
    assert found.unit.startswith("squared error of x0")
    assert found.paired
    assert found.total.difference == pytest.approx((b**2 - a**2).mean())


def test_losses_of_both_conventions_and_of_older_records_are_of_one_kind() -> None:
    a, b = 1 + np.abs(NOISE)
    for objective in ({"prediction": "v", "convention": "sit"}, {"prediction": "v", "convention": "sd3"}):
        assert compare(run("a", a), run("b", b, objective=objective)).unit == "loss (squared error of v)"


def test_other_noise_levels_are_compared_bin_by_bin() -> None:
    """As independent samples; the total is the mean of the bins that both have."""
    a, b = 1 + np.abs(NOISE)
    moved = LOG_SNR + np.float32(2.5)
    found = compare(run("a", a), run("b", b, moved, objective={"prediction": "flow"}))
    assert not found.paired
    rows = [(a[inside(n)] ** 2, b[inside(n - 2)] ** 2) for n in range(2, 15)]
    for row, (first, second) in zip(found.bins[2:15], rows, strict=True):
        assert row.difference == pytest.approx(second.mean() - first.mean())
        assert row.error == pytest.approx(math.hypot(error_of(first), error_of(second)))
    assert found.bins[0].b.count == 0
    assert math.isnan(found.bins[0].difference)
    common = [row for row in found.bins if min(row.a.count, row.b.count) >= 8]
    assert found.total.difference == pytest.approx(np.mean([row.difference for row in common]))
    assert found.total.error == pytest.approx(math.sqrt(sum(row.error**2 for row in common)) / len(common))
    assert "unpaired, as their noise levels differ: each bin has the samples that fall into it" in in_words(found)
    assert "mean of bins: over the bins with at least 8 samples of each run." in in_words(found)


def test_a_bin_that_one_run_hardly_has_is_not_in_the_mean_of_bins() -> None:
    """At the border of what both have, where one has less than 8 samples: at chance, with an unknown error."""
    a, b = np.ones(COUNT), np.ones(COUNT)
    moved = LOG_SNR + np.float32(2.5 - 0.2)
    b[np.argsort(-moved)[-2:]] = 1e6
    found = compare(run("a", a), run("b", b, moved, objective={"prediction": "flow"}))
    few = [row for row in found.bins if 0 < min(row.a.count, row.b.count) < 8]
    assert [row.b.count for row in few] == [2]
    assert few[0].difference > 1e5
    assert (found.total.difference, found.total.error) == (0, 0)
    nothing = compare(run("a", a[::40], LOG_SNR[::40]), run("b", b[::40], moved[::40], objective={}))
    assert math.isnan(nothing.total.difference)
    assert in_words(nothing)


def test_values_that_are_not_finite_are_left_out() -> None:
    a, b = 1 + np.abs(NOISE)
    a[3], b[4] = np.inf, np.nan
    found = compare(run("a", a), run("b", b))
    kept = np.delete(b - a, [3, 4])
    assert (found.left_out, found.total.difference) == (2, pytest.approx(kept.mean()))
    assert "Left out: 2 samples" in in_words(found)


def test_few_samples_are_not_marked() -> None:
    a = np.ones(16)
    found = compare(run("a", a, LOG_SNR[::20]), run("b", a + 1, LOG_SNR[::20]))
    assert not any(row.significant for row in found.bins)
    assert found.total.significant


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "e" * 64}, "different data sets"),
        ({"seed": 2}, "different noise"),
    ],
)
def test_other_samples_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(run("a", NOISE[0]), run("b", NOISE[1], **change))


def test_another_number_of_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"numbers of samples \(320 and 300\).*--validation.samples"):
        compare(run("a", NOISE[0]), run("b", NOISE[0, :300], LOG_SNR[:300]))


def test_the_newest_common_step_is_read(tmp_path: Path) -> None:
    for name, steps in (("a", (10, 20, 30)), ("b", (10, 20, 25)), ("c", (5,)), ("never", ())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        for step in steps:
            WholeFiles().write(path_of(tmp_path / name, step), encode(run(name, NOISE[0] + step, step=step).found))
    a, b = read_both(tmp_path / "a", tmp_path / "b")
    assert (a.found.about["step"], b.found.about["step"]) == (20, 20)
    np.testing.assert_array_equal(a.found.loss, NOISE[0] + 20)
    assert read_both(tmp_path / "a", tmp_path / "b", 10)[0].found.about["step"] == 10
    with pytest.raises(ConfigError, match="no validation at step 30; there are steps 10, 20, 25"):
        read_both(tmp_path / "a", tmp_path / "b", 30)
    with pytest.raises(ConfigError, match="never validated at the same step"):
        read_both(tmp_path / "a", tmp_path / "c")
    with pytest.raises(ConfigError, match=r"train with --validation\.data"):
        read_both(tmp_path / "a", tmp_path / "never")
    with pytest.raises(ConfigError, match=r"d: no run \(no run\.json\); runs there: a, b, c, never$"):
        read_both(tmp_path / "a", tmp_path / "d")
    (tmp_path / "c" / "validation" / "step-00000005.npz").write_bytes(b"PK\3\4 torn")
    with pytest.raises(StorageError, match="not a file of losses"):
        read(tmp_path / "c", 5)


def test_the_picture_shows_far_and_missing_values(tmp_path: Path) -> None:
    """Errors of x0 over six decades, and bins that one run has not."""
    a = np.exp(-LOG_SNR.astype(float)) + 1e-6
    first, second = run("a", a), run("b", 40 * a, LOG_SNR + np.float32(2.5), objective={})
    found = compare(first, second)
    _assert_drawn(found, tmp_path / "deep" / "far.png")
    same = compare(first, replace(first, folder=Path("elsewhere/a")))
    assert same.total.difference == 0
    assert not same.total.significant
    _assert_drawn(same, tmp_path / "same.png")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("suffix", "begin"), [(".PNG", b"\x89PNG"), (".jpg", b"\xff\xd8"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_suffix_chooses_the_format_and_an_earlier_picture_stays_without_room(
    tmp_path: Path, suffix: str, begin: bytes
) -> None:
    first = run("a", np.exp(-LOG_SNR.astype(float)) + 1e-6)
    found = compare(first, replace(first, folder=Path("elsewhere/a")))
    with tiny_disk(tmp_path / "disk", 2) as disk:
        path = disk / f"same{suffix}"
        draw(found, path)
        earlier = path.read_bytes()
        assert earlier.startswith(begin)
        fill(disk)
        with pytest.raises(OSError, match="same"):
            draw(found, path)
        assert path.read_bytes() == earlier


def _assert_drawn(found: Comparison, path: Path) -> None:
    draw(found, path)
    with Image.open(path) as image:
        colours = {colour[:3] for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {(0, 114, 178), (213, 94, 0)} <= colours, "both runs"


def test_the_command_compares_real_runs(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of the table are those of the files."""
    for name, lr in (("slow", 1e-3), ("fast", 1e-2)):
        checked = ValidationConfig(data=str(held_out(digits)), every=5, samples=200)
        train(tiny(digits, tmp_path / name, 10, optim__lr=lr, validation=checked), launch(0), world)
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "slow"), str(tmp_path / "fast")]) == 0
    printed, told = capsys.readouterr()
    assert f"the picture goes into RUN_B, {tmp_path / 'fast' / 'compare-slow.png'}; --png names another" in told
    total = next(line.split() for line in printed.splitlines() if "all samples" in line)
    a, b = (read(tmp_path / name, 10).loss for name in ("slow", "fast"))
    assert [float(cell) for cell in total[2:6]] == [
        200, pytest.approx(a.mean(), rel=1e-3), pytest.approx(b.mean(), rel=1e-3),
        pytest.approx((b - a).mean(), rel=1e-3),
    ]  # fmt: skip
    assert total[-1] == "*"
    picture = tmp_path / "fast" / "compare-slow.png"
    assert printed.splitlines()[-1] == f"drawn: {picture}"
    assert picture.stat().st_size > 10_000
    assert main(["compare", str(tmp_path / "slow"), str(tmp_path / "fast"), "--png", str(picture)]) == 0
    told = capsys.readouterr().err
    assert f"{picture} exists and will be replaced" in told
    assert "RUN_B" not in told
    assert main(["compare", str(tmp_path / "slow"), str(tmp_path / "fast"), "--step", "7"]) == 2
    assert "there are steps 5, 10" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", str(tmp_path / "slow"), str(tmp_path / "fast"), "--step", "5"]) == 2
    said = capsys.readouterr()
    assert "all samples" in said.out
    assert "pip install 'matplotlib>=" in said.err
