"""How good generated digits are, measured against the 1,797 real scans that scikit-learn carries.

No download, no network of unknown version: a support vector machine judges whether a digit shows its class,
and the Fréchet distance whether the set as a whole is distributed like the real one. Both take a second on a
CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.fidelity import frechet_distance

Array = npt.NDArray[np.float64]

CLASSES = 10
"""The digits 0 to 9."""


def evaluation_labels(per_class: int = 50) -> Tensor:
    """``[10 * per_class]`` int64 labels, 0 ... 9 repeated, for ``evaluate_digits``; 500 is the usual number.

    The classes alternate, so that any part of the list is balanced.
    """
    return torch.arange(CLASSES).repeat(per_class)


def evaluate_digits(images: Tensor, labels: Tensor) -> dict[str, float | int]:
    """Judges generated 8 x 8 digits.

    Args:
        images: ``[N, 1, 8, 8]`` floating point in [-1, 1] (white ink is 1); values outside are clipped.
        labels: ``[N]`` int64 class that each image was asked to show.

    Returns:
        ``accuracy``: share of the images in which the SVM, trained on all real scans, sees the label;
        ``frechet_distance``: ``fidelity.frechet_distance`` between the 64 pixels in [0, 1] of the images and of all
        real scans; ``samples``: N. For scale: 500 real scans drawn at random score 0.04 to 0.06.

    Raises:
        ConfigError: The images are not ``[N, 1, 8, 8]``, N is below 2, or a value is not finite.
    """
    if images.shape[1:] != (1, 8, 8) or len(images) < 2 or labels.shape != images.shape[:1]:
        raise ConfigError(
            f"images {tuple(images.shape)} with labels {tuple(labels.shape)} are not digits; "
            "expected [N, 1, 8, 8] with [N], N at least 2"
        )
    if not bool(images.isfinite().all()):
        raise ConfigError("the images hold values that are not finite; the model has diverged")
    pixels = to_pixels(images)
    real, _ = real_digits()
    return {
        "accuracy": float(np.mean(_classifier().predict(pixels) == labels.cpu().numpy())),
        "frechet_distance": frechet_distance(pixels, real),
        "samples": len(images),
    }


def to_pixels(images: Tensor) -> Array:
    """``[N, ...]`` in [-1, 1] (clipped) ``-> [N, D]`` float64 in [0, 1]."""
    unit = (images.detach().double().cpu().flatten(1) + 1) / 2
    return np.asarray(unit.clamp(0, 1).numpy(), dtype=np.float64)


@cache
def real_digits() -> tuple[Array, npt.NDArray[np.int64]]:
    """All real scans: pixels ``[1797, 64]`` float64 in [0, 1] and classes ``[1797]`` int64.

    Source: the test part of "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998, UCI), which
    scikit-learn installs; its pixels are whole numbers from 0 to 16.
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return np.asarray(pixels, dtype=np.float64) / 16, np.asarray(classes, dtype=np.int64)


@cache
def _classifier() -> Any:
    """An SVM with an RBF kernel, fitted to all real scans; of held-out scans it gets 98.9 % right."""
    from sklearn.svm import SVC

    pixels, classes = real_digits()
    return SVC(kernel="rbf", C=10.0, gamma="scale").fit(pixels, classes)
