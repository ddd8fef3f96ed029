"""Evaluation of runs on the digits: generated digits against scans, enlarged ones against bicubic interpolation."""

import json
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.encoding.builtin import DIGITS_SOURCE, DIGITS_SPLITS, digits_source
from fastdiff.data.joined.reading import read_info
from fastdiff.diffusion.noise_shaping import small_images
from fastdiff.errors import ConfigError
from fastdiff.evaluation.image_metrics import frechet_distance
from fastdiff.files import publish
from fastdiff.models.load import null_label
from fastdiff.outputs import require_output
from fastdiff.sampling.image_grid import image_grid, save_picture
from fastdiff.sampling.run import Run

_DRAWS = 8
"""Images drawn for each small one."""
_COLUMNS = 16
_USUAL = SamplerConfig(scheduler="dpmsolver++", steps=20)
"""Sampler of a run whose ``--sampling.*`` names none."""


def evaluate_run(run: Run) -> dict[str, Any]:
    """Draw images with the averaged weights, measure them, and write ``evaluation.json`` into the run folder.

    A run with classes draws 500 digits (``evaluate_digits``). A super-resolution run draws 8 enlargements of each of
    the 382 scans of the split ``test`` (``evaluate_enlarged``) and writes some of them to ``enlarged.png``.
    ConfigError: the run was trained on other data, or has no measure.
    """
    source = read_info(run.config.data).provenance.source
    if not source.startswith(DIGITS_SOURCE):
        raise ConfigError(
            f"{run.folder}: there is no built-in evaluation for data from {source!r}, only for digits; draw images "
            f"with `fastdiff sample {run.folder} --num 10000 --npz drawn.npz` and measure them with `fastdiff evaluate "
            "drawn.npz --reference REAL`, where REAL is a folder or an npz file of real images of the same size"
        )
    require_output(run.folder / "evaluation.json")
    result = _evaluate_enlarged(run, source) if run.config.model.low_res_size else _evaluate_drawn(run)
    publish(run.folder / "evaluation.json", json.dumps(result, indent=2).encode() + b"\n")
    return result


def _evaluate_drawn(run: Run) -> dict[str, Any]:
    if not run.known_classes:
        raise ConfigError(
            f"{run.folder}: a model without classes cannot draw a given digit; measure its samples with `fastdiff "
            "evaluate SAMPLES --reference REAL`"
        )
    labels = evaluation_labels()
    images = run.draw(labels, run.sampler(_USUAL), progress=True)
    return evaluate_digits(images, labels)


def _evaluate_enlarged(run: Run, source: str) -> dict[str, Any]:
    if source != digits_source("train"):
        raise ConfigError(
            f"{run.folder} was trained on {source!r}, which includes the scans of the evaluation; encode "
            "the others for training: fastdiff encode digits FOLDER --split train"
        )
    real, labels = scans("test")
    small = small_images(real, run.config.model.low_res_size, noise=0.0, seed=0, position=torch.arange(len(real)))
    condition, null = {"low_res": small.repeat_interleave(_DRAWS, 0)}, {}
    if run.known_classes:
        condition["label"] = labels.repeat_interleave(_DRAWS)
        null = {"label": null_label(run.config.model)}
    drawn = run.sample(condition, null, run.sampler(_USUAL, cfg=1.0)).view(len(small), _DRAWS, *real.shape[1:])
    result = evaluate_enlarged(drawn, real, small, labels)
    save_picture(run.folder / "enlarged.png", _picture(small, drawn, real))
    return result


def _picture(small: Tensor, drawn: Tensor, real: Tensor) -> Any:
    """Arrange rows: small images, bicubic interpolation, one drawn image, the mean of all drawn ones, scans."""
    rows = [F.interpolate(small, size=8), enlarged_bicubic(small), drawn[:, 0], drawn.mean(1), real]
    return image_grid(torch.cat([row[:_COLUMNS] for row in rows]), rows=len(rows))


Array = npt.NDArray[np.float64]

CLASSES = 10
"""The digits 0 to 9."""


def evaluation_labels(per_class: int = 50) -> Tensor:
    """Return ``[10 * per_class]`` int64 labels, 0 ... 9 repeated, for ``evaluate_digits``; 500 is the usual number.

    The classes alternate, so that any part of the list is balanced.
    """
    return torch.arange(CLASSES).repeat(per_class)


def evaluate_digits(images: Tensor, labels: Tensor) -> dict[str, float | int]:
    """Measure generated 8 x 8 digits.

    Args:
        images: ``[N, 1, 8, 8]`` floating point in [-1, 1] (white ink is 1); values outside are clipped.
        labels: ``[N]`` int64 class that each image was asked to show.

    Returns:
        ``accuracy``: share of the images that an SVM trained on all real scans assigns to their label;
        ``frechet_distance``: ``image_metrics.frechet_distance`` between the 64 pixels in [0, 1] of the images and of
        all real scans; ``samples``: N. For scale: 500 real scans drawn at random score 0.04 to 0.06.

    Raises:
        ConfigError: The images are not ``[N, 1, 8, 8]``, N is below 2, or a value is not finite.
    """
    if images.shape[1:] != (1, 8, 8) or len(images) < 2 or labels.shape != images.shape[:1]:
        raise ConfigError(
            f"images {tuple(images.shape)} with labels {tuple(labels.shape)} are not digits; "
            "expected [N, 1, 8, 8] with [N], N at least 2"
        )
    _require_finite(images)
    pixels = to_pixels(images)
    real, _ = real_digits()
    return {
        "accuracy": float(np.mean(_classifier("all").predict(pixels) == labels.cpu().numpy())),
        "frechet_distance": frechet_distance(pixels, real),
        "samples": len(images),
    }


def _require_finite(images: Tensor) -> None:
    if not bool(images.isfinite().all()):
        raise ConfigError("the images hold values that are not finite; the model has diverged")


def to_pixels(images: Tensor) -> Array:
    """Convert ``[N, ...]`` in [-1, 1] (clipped) ``-> [N, D]`` float64 in [0, 1]."""
    unit = (images.detach().double().cpu().flatten(1) + 1) / 2
    return np.asarray(unit.clamp(0, 1).numpy(), dtype=np.float64)


def evaluate_enlarged(drawn: Tensor, real: Tensor, small: Tensor, labels: Tensor) -> dict[str, float | int]:
    """Measure digits enlarged by a model next to bicubic interpolation of the same small images.

    Args:
        drawn: ``[N, K, 1, 8, 8]`` fp32 in [-1, 1], clipped: K images drawn for each small one.
        real: ``[N, 1, 8, 8]`` fp32 in [-1, 1]: the scans of the split ``test``, unseen by the model and the
            classifier.
        small: ``[N, 1, h, w]`` fp32 inputs of the enlargement.
        labels: ``[N]`` int64 classes.

    Returns:
        ``psnr_of_mean``, ``psnr_of_bicubic``: decibels, 10 log10(1 / mean squared error) of the mean of the K images,
        and of the interpolation, for pixels in [0, 1]; ``accuracy``, ``accuracy_of_bicubic``, ``accuracy_of_real``:
        share of the drawn images, the interpolations and the scans that an SVM fitted to the split ``train``
        classifies correctly; ``images``: N; ``draws``: K.

    Raises:
        ConfigError: a shape is wrong, or a value is not finite.
    """
    digits = len(labels), 1, 8, 8
    if (*drawn.shape[:1], *drawn.shape[2:]) != digits or real.shape != digits or small.shape[:2] != digits[:2]:
        raise ConfigError(
            f"drawn {tuple(drawn.shape)} of small {tuple(small.shape)}, real {tuple(real.shape)}, labels "
            f"{tuple(labels.shape)}: expected [N, K, 1, 8, 8] of [N, 1, h, w], [N, 1, 8, 8] and [N]"
        )
    _require_finite(drawn)
    bicubic = enlarged_bicubic(small)
    judge, classes = _classifier("train"), labels.cpu().numpy()

    def accuracy(images: Tensor) -> float:
        return float(np.mean(judge.predict(to_pixels(images)) == classes))

    return {
        "psnr_of_mean": _psnr(drawn.clamp(-1, 1).mean(1), real),
        "psnr_of_bicubic": _psnr(bicubic, real),
        "accuracy": float(np.mean([accuracy(images) for images in drawn.unbind(1)])),
        "accuracy_of_bicubic": accuracy(bicubic),
        "accuracy_of_real": accuracy(real),
        "images": len(real),
        "draws": drawn.shape[1],
    }


def enlarged_bicubic(small: Tensor) -> Tensor:
    """Interpolate ``[N, 1, h, w] -> [N, 1, 8, 8]``: the baseline of super-resolution."""
    return F.interpolate(small, size=8, mode="bicubic")


def scans(split: str) -> tuple[Tensor, Tensor]:
    """Return real scans ``[N, 1, 8, 8]`` fp32 in [-1, 1], and their classes ``[N]`` int64."""
    pixels, classes = real_digits(split)
    return torch.from_numpy(pixels).float().view(-1, 1, 8, 8) * 2 - 1, torch.from_numpy(classes)


def _psnr(images: Tensor, real: Tensor) -> float:
    return float(-10 * np.log10(np.mean((to_pixels(images) - to_pixels(real)) ** 2)))


@cache
def real_digits(split: str = "all") -> tuple[Array, npt.NDArray[np.int64]]:
    """Return real scans: pixels ``[N, 64]`` float64 in [0, 1] and classes ``[N]`` int64; N is 1,797 for all.

    Source: the test part of "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998, UCI), which
    scikit-learn installs; its pixels are whole numbers from 0 to 16.
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    chosen = DIGITS_SPLITS[split]
    return np.asarray(pixels[chosen], dtype=np.float64) / 16, np.asarray(classes[chosen], dtype=np.int64)


@cache
def _classifier(split: str) -> Any:
    """Fit an SVM with an RBF kernel to real scans; fitted to ``train`` it classifies 96.1 % of ``test`` correctly."""
    from sklearn.svm import SVC

    pixels, classes = real_digits(split)
    return SVC(kernel="rbf", C=10.0, gamma="scale").fit(pixels, classes)
