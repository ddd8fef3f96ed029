"""``fastdiff evaluate SAMPLES --reference REAL``: its inputs, refusals and results."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from fastdiff.cli.main import main
from fastdiff.errors import ConfigError, DataError
from fastdiff.evaluation.features import WEIGHTS_BYTES, features_of, open_extractor, published_weights
from fastdiff.evaluation.image_comparison import ImageComparisonOptions, evaluate_images
from fastdiff.evaluation.image_metrics import Gaussian, frechet_distance, kernel_distance, precision_recall
from fastdiff.evaluation.image_sets import open_images
from tests.support.injected.hostile_files import sparse
from tests.support.inputs.image_sets import Pixels, folder_of, npz, pictures

PIXELS = ImageComparisonOptions(features="pixels", batch=7)
MEAN_COLOR = """
import numpy as np


def mean_color(images):
    assert images.dtype == np.uint8 and images.ndim == 4
    return images.astype(np.float64).mean(axis=(1, 2))
"""


def unit(images: Pixels) -> npt.NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / 255


# --- results -------------------------------------------------------------------------------------------------------


def test_the_command_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn, real = pictures(60), pictures(50, 1)
    samples = npz(tmp_path / "samples.npz", drawn, np.arange(60))
    reference = folder_of(tmp_path / "real", real)
    (tmp_path / "extractors.py").write_text(MEAN_COLOR)
    out, features = tmp_path / "result.json", f"{tmp_path / 'extractors.py'}:mean_color"
    options = ["--features", features, "--batch", "16", "--seed", "5", "--out", str(out)]
    assert main(["evaluate", str(samples), "--reference", str(reference), *options]) == 0
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    first, second = (
        images.astype(np.float64).mean(axis=(1, 2)).astype(np.float32)
        for images in (drawn, np.concatenate([real[::2], real[1::2]]))
    )
    kid, kid_std = kernel_distance(first, second, seed=5)
    precision, recall = precision_recall(first, second)
    versions = result.pop("versions")
    assert result == {
        "fid": pytest.approx(frechet_distance(first, second), rel=1e-9),
        "kid": pytest.approx(kid, rel=1e-9), "kid_std": pytest.approx(kid_std, rel=1e-9),
        "precision": precision, "recall": recall,
        "samples": 60, "reference": 50, "fid_reference": "images",
        "extractor": features, "extractor_sha256": hashlib.sha256(MEAN_COLOR.encode()).hexdigest(), "seed": 5,
    }  # fmt: skip
    assert versions["torch"] == torch.__version__
    assert {"fastdiff", "numpy", "pillow"} <= versions.keys()


def test_pixels_of_npz_files(tmp_path: Path) -> None:
    drawn, real = pictures(45), pictures(64, 1)
    samples, reference = npz(tmp_path / "a.npz", drawn), npz(tmp_path / "b.npz", real)
    np.savez_compressed(tmp_path / "c.npz", arr_0=real)
    result = evaluate_images(samples, reference, PIXELS)
    assert result["fid"] == pytest.approx(frechet_distance(unit(drawn), unit(real)), rel=1e-12)
    assert (result["samples"], result["reference"], result["extractor_sha256"]) == (45, 64, None)
    assert evaluate_images(samples, tmp_path / "c.npz", ImageComparisonOptions(features="pixels")) == result
    assert evaluate_images(reference, reference, PIXELS)["fid"] < 1e-9
    swapped = evaluate_images(reference, samples, PIXELS)
    assert swapped["fid"] == pytest.approx(result["fid"], rel=1e-9)
    assert (swapped["precision"], swapped["recall"]) == (result["recall"], result["precision"])


def test_grey_images(tmp_path: Path) -> None:
    grey = npz(tmp_path / "grey.npz", pictures(20, channels=1))
    assert evaluate_images(grey, grey, PIXELS)["precision"] == 1


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_statistics_give_the_fid_alone(tmp_path: Path, save: Any) -> None:
    drawn, real = pictures(45), pictures(64, 1)
    found = Gaussian.of(unit(real))
    save(tmp_path / "stats.npz", mu=found.mean, sigma=found.covariance)
    result = evaluate_images(npz(tmp_path / "a.npz", drawn), tmp_path / "stats.npz", PIXELS)
    assert result["fid"] == pytest.approx(frechet_distance(unit(drawn), unit(real)), rel=1e-12)
    assert [result[name] for name in ("kid", "kid_std", "precision", "recall", "reference")] == [None] * 5
    assert result["fid_reference"] == "statistics"


def test_a_file_of_both_gives_fid_by_its_statistics(tmp_path: Path) -> None:
    """As ADM's reference files: statistics of all images, and some of the images."""
    drawn, real = pictures(45), pictures(64, 1)
    found = Gaussian.of(unit(real))
    both = npz(
        tmp_path / "both.npz",
        real[:40],
        mu=found.mean.astype(np.float32),
        sigma=found.covariance.astype(np.float32),
        mu_s=np.zeros(3),
    )
    result = evaluate_images(npz(tmp_path / "a.npz", drawn), both, PIXELS)
    assert result["fid"] == pytest.approx(frechet_distance(unit(drawn), unit(real)), rel=1e-4)
    assert result["precision"] == precision_recall(unit(drawn), unit(real[:40]))[0]
    assert (result["reference"], result["fid_reference"]) == (40, "statistics")


def test_folders_give_the_pixels_of_their_files(tmp_path: Path) -> None:
    images = pictures(9)
    folder = folder_of(tmp_path / "images", images)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(b"")
    opened = open_images(folder)
    assert (len(opened), opened.size) == (9, (4, 3))
    np.testing.assert_array_equal(np.concatenate(list(opened.batches(4))), np.concatenate([images[::2], images[1::2]]))
    assert opened.name_of(5) == str(folder / "class 1" / "001.png")


def test_pictures_are_chosen_as_an_encode_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = pictures(9)
    folder = folder_of(tmp_path / "images", images)
    Image.fromarray(images[0]).save(folder / "z.bmp")
    for name in ("@eaDir/a.png", "__MACOSX/a.png", "Thumbs.db", "photo.heic"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"-")
    assert len(open_images(folder)) == 10
    evaluate_images(npz(tmp_path / "a.npz", images), folder, PIXELS)
    assert f"{folder}: left out: 1 picture of kind HEIC, which is not read" in capsys.readouterr().err


def test_few_images_are_measured_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, many = npz(tmp_path / "few.npz", pictures(3)), npz(tmp_path / "many.npz", pictures(37, size=(4, 3)))
    result = evaluate_images(few, many, PIXELS)
    assert result["precision"] is None, "a third neighbour is not there"
    warned = capsys.readouterr().err
    assert f"{few}: the covariance of 3 images in 36 dimensions is singular" in warned
    assert str(many) not in warned


def test_other_sizes_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.py").write_text(MEAN_COLOR)
    small, large = npz(tmp_path / "s.npz", pictures(9)), npz(tmp_path / "l.npz", pictures(9, size=(8, 6)))
    evaluate_images(small, large, ImageComparisonOptions(features=f"{tmp_path / 'f.py'}:mean_color"))
    assert "images of 3x4 pixels" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"pixels gives 36 features of a sample and 144 of a reference image"):
        evaluate_images(small, large, PIXELS)


# --- refusals of the command ---------------------------------------------------------------------------------------


def test_a_result_that_cannot_be_written_is_refused_before_the_images_are_read(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    nothing = str(tmp_path / "nothing")
    assert main(["evaluate", nothing, "--reference", nothing, "--out", str(tmp_path / "file" / "r.json")]) == 74
    assert "file/r.json: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reference", "a.npz", "--nll"], "--nll evaluates a run and --reference images"),
        (["--reference", "a.npz", "--samples", "5"], "--samples needs --nll"),
        (["--reference", "a.npz", "--ema", "0.9"], "--ema applies to a network"),
        (["--reference", "a.npz", "--features", "dino"], "expected pixels, inception or PATH.py:FUNCTION"),
        (["--reference", "b.npz", "--features", "pixels"], "b.npz: there is no such file or folder; expected an npz"),
        (["--reference", "a.npz", "--features", "f.py:f"], "--features: f.py:1: ZeroDivisionError: division by zero"),
        (["--features", "pixels"], "--features needs --reference"),
        (["--out", "r.json"], "--out needs --reference"),
        (["--batch", "5"], "--batch needs --nll or --reference"),
        (["--seed", "5"], "--seed needs --nll or --reference"),
        ([], "a.npz: no run (no run.json)"),
        ([], "to measure images, give real ones with --reference"),
        (["--nll"], "to measure images, give real ones with --reference"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    npz(tmp_path / "a.npz", pictures(9))
    (tmp_path / "f.py").write_text("def f(images): 1 / 0")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "a.npz", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_result_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = npz(tmp_path / "a.npz", pictures(40))
    (tmp_path / "taken").mkdir()
    options = ["--reference", str(samples), "--features", "pixels", "--out", str(tmp_path / "taken")]
    assert main(["evaluate", str(samples), *options]) == 74
    assert "taken" in capsys.readouterr().err
    before = samples.read_bytes()
    assert main(["evaluate", str(samples), *options[:-1], str(samples)]) == 2
    assert "a.npz: it exists and is no JSON by its name" in capsys.readouterr().err
    assert samples.read_bytes() == before


# --- extractors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(images): ...", r"f\.py has no f"),
        ("f = 3", r"f\.py:f: expected a function of images"),
        ("import nowhere_at_all", r"f\.py:1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def f(images):\n    return 1 / 0", r"f\.py:2: ZeroDivisionError: division by zero"),
        ("def f(images): return images", r"returned uint8 \(4, 4, 3, 3\) for 4 images; expected numbers \[4, D\]"),
        ("def f(images): return [['a']] * len(images)", "expected numbers"),
        ("def f(images): return images[:1].reshape(1, -1)", "expected numbers"),
        ("def f(images): return images.reshape(len(images), -1)[:, :len(images)]", "gave 4 features, then 2"),
        ("import numpy\ndef f(images): return numpy.zeros((len(images), 20000))", "20000 features .* at most 16384"),
        ("import torch\ndef f(images): return torch.zeros(4, 2, requires_grad=True)", "Tensor, not an array"),
    ],
)
def test_wrong_extractors_are_explained(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "f.py").write_text(source)
    images = open_images(npz(tmp_path / "a.npz", pictures(6)))
    with pytest.raises(ConfigError, match=message):
        features_of(images, open_extractor(f"{tmp_path / 'f.py'}:f"), 4, "features")


@pytest.mark.parametrize("value", ["numpy.nan", "numpy.inf", "1e300"])
def test_features_that_are_not_finite_name_their_image(tmp_path: Path, value: str) -> None:
    source = f"import numpy\ndef f(images): return numpy.where(images[:, 0, :, 0] == 7, {value}, 1.0)"
    (tmp_path / "f.py").write_text(source)
    images = pictures(9, 1)
    images[6, 0, 1] = 7
    opened = open_images(npz(tmp_path / "a.npz", images))
    with pytest.raises(DataError, match=r"a\.npz, image 6: .*f\.py:f gives non-finite features"):
        features_of(opened, open_extractor(f"{tmp_path / 'f.py'}:f"), 4, "features")


@pytest.mark.parametrize("name", ["vgg", "f.py", "f.txt:f", "f.py:not a name", ":f", "missing.py:f"])
def test_unknown_extractors_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*PATH\.py:(FUNCTION|NAME)"):
        open_extractor(name)


def test_features_of_a_tensor_and_of_the_batch_size(tmp_path: Path) -> None:
    """Torch's tensors are taken, and every batch size gives the same features."""
    (tmp_path / "f.py").write_text("import torch\ndef f(images): return torch.from_numpy(images).half().mean((1, 2))")
    images = open_images(npz(tmp_path / "a.npz", pictures(9)))
    extractor = open_extractor(f"{tmp_path / 'f.py'}:f")
    found = [features_of(images, extractor, batch, "features") for batch in (1, 4, 100)]
    assert found[0].dtype == np.float32
    assert found[0].shape == (9, 3)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_missing_parts_of_inception_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its package is missing or its weights: where they come from, where they go to, and what goes without."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = tmp_path / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    for needed in (lambda: open_extractor("inception"), published_weights):
        with pytest.raises(ConfigError) as refused:
            needed()
        text = str(refused.value)
        assert f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{path.name}" in text
        assert str(path) in text
        assert "--features pixels and --features PATH.py:FUNCTION work without" in text


@pytest.mark.parametrize("size", [10, WEIGHTS_BYTES, WEIGHTS_BYTES + 1])
def test_another_inception_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = tmp_path / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    path.parent.mkdir(parents=True)
    sparse(path, size)
    with pytest.raises(ConfigError, match=r"is damaged or another file: its sha256 is not 6726825d.*download it again"):
        published_weights()
