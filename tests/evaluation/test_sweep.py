"""``fastdiff evaluate RUN --reference REAL``: the sweep over averages, guidance scales and intervals."""

import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastdiff.cli.main import main
from fastdiff.config.sections.sampler import SamplingConfig
from fastdiff.errors import ConfigError, StorageError
from fastdiff.evaluation.digits import real_digits
from fastdiff.evaluation.image_comparison import Comparison, ImageComparisonOptions
from fastdiff.evaluation.image_metrics import Gaussian, frechet_distance
from fastdiff.evaluation.sweep import Candidate, Row, Sweep, SweepOptions, candidates
from fastdiff.parallel.launcher import Place
from fastdiff.parallel.world import World
from fastdiff.sampling.conditions import SampleRequest
from fastdiff.sampling.run import Run
from fastdiff.sampling.sample_set import draw_in_memory
from fastdiff.training.loop import train
from tests.support.runs import launch, tiny

WIDTHS, SCALES = (0.08, 0.12), (1.0, 3.0)
OPTIONS: dict[str, Any] = {"widths": WIDTHS, "scales": SCALES, "few": 40, "num": 100, "batch": 16}
FEW = 48
"""40 images in whole batches."""
PIXELS = ImageComparisonOptions(features="pixels")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "digits.npz"
    pixels, _ = real_digits()
    np.savez(path, arr_0=(pixels.reshape(-1, 8, 8, 1) * 255).round().astype(np.uint8))
    return path


@pytest.fixture
def run(world: World, digits: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    sampling = SamplingConfig(scheduler="dpmsolver++", steps=4, labels="balanced", protocol="adm")
    config = tiny(digits, folder, steps=8, ema__power_stds=(0.05, 0.1), ema__snapshot_every=1, sampling=sampling)
    train(config, launch(0), world)
    return folder


def sweep(run: Path, reference: Path, **options: Any) -> Sweep:
    return Sweep(run, reference, Comparison(reference, PIXELS), SweepOptions(**{**OPTIONS, **options}), Place())


def drawn(run: Path, width: float, scale: float, count: int) -> npt.NDArray[np.uint8]:
    """The first images of 100, by the section of the run."""
    opened = Run(run, ema_std=width)
    sampler = opened.sampler(cfg=scale)
    return draw_in_memory(opened, SampleRequest(num=100), sampler, batch=16, progress=False)[:count]


def fid(images: npt.NDArray[np.uint8]) -> float:
    real, _ = real_digits()
    real = (real * 255).round() / 255
    return frechet_distance((images.reshape(len(images), -1) / np.float32(255)), real.astype(np.float32))


def test_few_images_choose_what_all_are_drawn_with(run: Path, reference: Path) -> None:
    *few, best = found = list(sweep(run, reference).rows())
    assert [(row["width"], row["cfg"], row["images"]) for row in few] == [
        (width, scale, FEW) for width in WIDTHS for scale in SCALES
    ]
    for row in few:
        assert row["fid"] == pytest.approx(fid(drawn(run, row["width"], row["cfg"], FEW)), rel=1e-5)
    assert len({round(row["fid"], 6) for row in few}) == len(few), "the combinations draw other images"
    chosen = min(few, key=lambda row: float(row["fid"]))
    assert (best["width"], best["cfg"], best["images"]) == (chosen["width"], chosen["cfg"], 100)
    images = drawn(run, best["width"], best["cfg"], 100)
    assert best["fid"] == pytest.approx(fid(images), rel=1e-5)
    assert {"kid", "precision", "recall"} <= best.keys()

    (kept,) = (run / "sweep").iterdir()
    with np.load(kept) as file:
        assert np.array_equal(file["arr_0"], images)
        assert np.array_equal(file["arr_1"], np.arange(100) % 10), "balanced labels"
    assert json.loads((run / "sweep.json").read_text())["rows"] == found


def test_a_figure_says_how_it_was_made(run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = next(sweep(run, reference, scales=(3.0,), intervals=((0.1, 0.6), (0.0, 1.0)), widths=()).rows())
    assert {name: row[name] for name in ("width", "cfg", "cfg_interval", "labels", "protocol")} == {
        "width": None, "cfg": 3.0, "cfg_interval": [0.1, 0.6], "labels": "balanced", "protocol": "adm",
    }  # fmt: skip
    plan = row["samples"]
    assert (plan["scheduler"], plan["steps"], plan["classes"]) == ("dpmsolver++", 4, "in turn from all 10")
    assert row["reference"] == str(reference)
    assert row["comparison"]["extractor"] == "pixels"
    assert {"reference_sha256", "versions"} <= row.keys()
    assert "is not the reference of ADM's evaluation" in " ".join(capsys.readouterr().err.split())


def test_guided_channels_do_not_keep_a_scale_without_guidance_out(run: Path, reference: Path) -> None:
    options: dict[str, Any] = {"widths": (), "few": 2, "batch": 2, "sampler": {"cfg_channels": 1}}
    rows = list(islice(sweep(run, reference, **options).rows(), 2))
    assert [(row["cfg"], row["samples"]["cfg_channels"]) for row in rows] == [(1.0, None), (3.0, 1)]


def test_what_has_been_drawn_and_measured_is_not_drawn_again(run: Path, reference: Path) -> None:
    earlier = list(islice(sweep(run, reference).rows(), 3))
    before = (run / "sweep.json").read_bytes()
    found = list(sweep(run, reference).rows())
    assert found[:3] == earlier
    assert (run / "sweep.json").read_bytes().startswith(before.rstrip().removesuffix(b"]\n}").rstrip())
    (kept,) = (run / "sweep").iterdir()
    drawn_at = kept.stat().st_mtime_ns
    assert list(sweep(run, reference).rows()) == found
    assert kept.stat().st_mtime_ns == drawn_at
    assert len(json.loads((run / "sweep.json").read_text())["rows"]) == len(found)


def test_the_command_prints_a_table_and_draws_a_picture(
    run: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, out = tmp_path / "fid.svg", tmp_path / "best.json"
    command = f"evaluate {run} --reference {reference} --features pixels --widths 0.08 0.12 --scales 1 3"
    options = f"--few 32 --num 64 --batch 16 --labels random --seed 5 --png {picture} --out {out}"
    assert main([*command.split(), *options.split()]) == 0
    shown = capsys.readouterr().out
    head, *lines = shown.splitlines()
    assert head.split() == ["EMA", "std", "cfg", "images", "FID", "KID", "precision", "recall"]
    best: Row = json.loads(out.read_text())
    assert (best["labels"], best["samples"]["seed"], best["comparison"]["seed"]) == ("random", 5, 5)
    assert lines[4].split()[:4] == [f"{best['width']:g}", f"{best['cfg']:g}", "64", f"{best['fid']:.2f}"]
    assert max(map(len, lines[:5])) <= 80
    assert picture.read_text().count("EMA std") >= 2
    assert str(run / "sweep.json") in shown


def test_many_processes_draw_one_sweep(run: Path, reference: Path, tmp_path: Path) -> None:
    """Rank 0 measures; the other one draws, and waits for its figures."""
    shutil.copytree(run, tmp_path / "alone")
    alone = list(sweep(tmp_path / "alone", reference, widths=(0.08,)).rows())
    command = f"evaluate {run} --reference {reference} --features pixels --widths 0.08 --scales 1 3 --few 40"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "fastdiff", *command.split(), "--num", "100", "--batch", "16"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=200)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "EMA std" in first
    assert second == "", "only rank 0 tells the result"
    rows = json.loads((run / "sweep.json").read_text())["rows"]
    assert [row["fid"] for row in rows] == [row["fid"] for row in alone]


def test_statistics_serve_as_the_reference(run: Path, reference: Path, tmp_path: Path) -> None:
    pixels, _ = real_digits()
    fitted = Gaussian.of(((pixels * 255).round() / 255).astype(np.float32))
    np.savez(tmp_path / "statistics.npz", mu=fitted.mean, sigma=fitted.covariance)
    (by_images,), (by_statistics,) = (
        list(sweep(run, path, widths=(0.08,), scales=(3.0,), num=64).rows())
        for path in (reference, tmp_path / "statistics.npz")
    )
    assert by_statistics["fid"] == pytest.approx(by_images["fid"], rel=1e-5)
    assert by_statistics["kid"] is None


def test_refusals(run: Path, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--few 1: at least 2 images"):
        sweep(run, reference, few=1)
    with pytest.raises(ConfigError, match=r"--num 30: at least --few 40"):
        sweep(run, reference, num=30)
    with pytest.raises(ConfigError, match=r"--scales: a value is given twice"):
        candidates(SweepOptions(scales=(2.0, 2.0)))
    assert candidates(SweepOptions(scales=(1.0, 2.0), intervals=((0.0, 0.5), (0.0, 0.9)))) == [
        Candidate(None, None, 1.0),
        Candidate(None, (0.0, 0.5), 2.0),
        Candidate(None, (0.0, 0.9), 2.0),
    ]
    np.savez(tmp_path / "other.npz", mu=np.zeros(3), sigma=np.eye(3))
    with pytest.raises(ConfigError, match=r"the statistics of the reference are of 3 features, pixels gives 64"):
        list(sweep(run, tmp_path / "other.npz").rows())
    assert not (run / "sweep").exists(), "nothing was drawn"
    (run / "sweep.json").write_text("[]")
    with pytest.raises(StorageError, match=r"is no record of a sweep; rename it"):
        list(sweep(run, reference).rows())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{real} --reference {real} --scales 2", "--scales needs a run and --reference"),
        ("{run} --scales 2", "--scales needs a run and --reference"),
        ("{run} --reference {real} --samples 3", "--samples needs --nll"),
        ("{run} --reference {real} --intervals 0.9:0.1", "0.9:0.1: expected LOW:HIGH from 0"),
        ("{run} --reference {real} --widths 0.1 --ema-std 0.1", "--ema-std 0.1 with --widths, which are the averages"),
        ("{run} --reference {real} --out {real}", "it exists and is no JSON by its name"),
        ("{run} --reference {real} --widths 0", "0: expected a number above 0"),
    ],
)
def test_the_command_refuses_what_does_not_fit(
    run: Path, reference: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *words.format(run=run, real=reference).split()]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
