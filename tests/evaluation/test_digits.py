"""The classifier and the distance that judge generated digits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastdiff.errors import ConfigError
from fastdiff.evaluation.digits import (
    evaluate_digits,
    evaluate_enlarged,
    evaluation_labels,
    real_digits,
    scans,
    to_pixels,
)
from fastdiff.evaluation.image_metrics import frechet_distance


def real_images() -> tuple[torch.Tensor, torch.Tensor]:
    return scans("all")


def test_real_scans_are_real() -> None:
    images, labels = real_images()
    result = evaluate_digits(images, labels)
    assert result["samples"] == len(images) == 1797
    assert result["accuracy"] > 0.995
    assert result["frechet_distance"] < 1e-9


def test_wrong_labels_lower_the_accuracy_alone() -> None:
    images, labels = real_images()
    wrong = labels.clone()
    wrong[:300] = (wrong[:300] + 1) % 10
    result = evaluate_digits(images, wrong)
    assert result["accuracy"] == pytest.approx(1 - 300 / 1797, abs=0.005)
    assert result["frechet_distance"] < 1e-9


def test_classifier_holds_on_scans_it_has_not_seen() -> None:
    from sklearn.svm import SVC

    pixels, classes = real_digits()
    order = np.random.default_rng(0).permutation(len(pixels))
    seen, unseen = order[:1300], order[1300:]
    classifier = SVC(kernel="rbf", C=10.0, gamma="scale").fit(pixels[seen], classes[seen])
    assert classifier.score(pixels[unseen], classes[unseen]) > 0.98


def test_noise_and_missing_classes_are_far() -> None:
    images, labels = real_images()
    noise = torch.rand(500, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    result = evaluate_digits(noise, evaluation_labels())
    assert result["accuracy"] < 0.3
    assert result["frechet_distance"] > 5
    assert evaluate_digits(images[labels == 3], labels[labels == 3])["frechet_distance"] > 1


def test_distance_of_known_gaussians() -> None:
    # In one dimension (m1 - m2)^2 + (s1 - s2)^2, and independent dimensions add up.
    first = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, -2.0], [0.0, 2.0]])
    scale, shift = np.array([3.0, 0.5]), np.array([1.0, -2.0])
    deviation = first.std(axis=0, ddof=1)
    expected = float((shift**2).sum() + ((deviation * scale - deviation) ** 2).sum())
    assert frechet_distance(first, first * scale + shift) == pytest.approx(expected, rel=1e-12)


def test_distance_survives_constant_pixels() -> None:
    constant = np.zeros((10, 3))
    assert frechet_distance(constant, constant) == 0
    assert frechet_distance(constant, constant + 2) == pytest.approx(12)
    assert math.isfinite(frechet_distance(np.ones((10, 1)), np.arange(10.0)[:, None]))


def test_pixels_are_mapped_and_clipped() -> None:
    assert to_pixels(torch.tensor([[-9.0, -1.0, 0.0, 1.0, 2.0]])).tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0]]


def test_labels_are_balanced() -> None:
    assert evaluation_labels().bincount().tolist() == [50] * 10
    assert evaluation_labels(3)[:20].bincount().tolist() == [2] * 10


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 3, 8, 8), (1, 1, 8, 8)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        evaluate_digits(torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64))


def test_diverged_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="diverged"):
        evaluate_digits(torch.full((4, 1, 8, 8), float("nan")), torch.zeros(4, dtype=torch.int64))


def test_enlarged_digits_are_judged_beside_bicubic_ones() -> None:
    real, labels = scans("test")
    small = F.interpolate(real, size=4, mode="area")
    drawn = torch.stack([0.8 * real + 0.1, 0.8 * real - 0.1], 1)
    result = evaluate_enlarged(drawn, real, small, labels)
    # Pixels in [0, 1] are half as far apart as those in [-1, 1].
    assert result["psnr_of_mean"] == pytest.approx(-20 * math.log10(0.2 * real.square().mean().sqrt() / 2), rel=1e-5)
    assert 13 < result["psnr_of_bicubic"] < 14
    assert 0.7 < result["accuracy_of_bicubic"] < 0.8 < result["accuracy"] <= result["accuracy_of_real"] < 0.97
    assert (result["images"], result["draws"]) == (382, 2)
    with pytest.raises(ConfigError, match=r"expected \[N, K, 1, 8, 8\] of \[N, 1, h, w\]"):
        evaluate_enlarged(drawn[:, 0], real, small, labels)
    wrong = evaluate_enlarged(drawn, real, small, (labels + 1) % 10)
    assert wrong["accuracy"] < 0.1
    assert wrong["psnr_of_mean"] == result["psnr_of_mean"]
