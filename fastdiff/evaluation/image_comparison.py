"""Comparison of samples with real images: ``fastdiff evaluate SAMPLES --reference REAL``."""

import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdiff.console import log
from fastdiff.errors import ConfigError, require
from fastdiff.evaluation.features import Extractor, features_of, features_of_batch, open_extractor
from fastdiff.evaluation.image_metrics import NEIGHBOURS, Features, Gaussian, kernel_distance, precision_recall
from fastdiff.evaluation.image_sets import ImageSet, Reference, open_images, open_reference
from fastdiff.evaluation.user_metrics import open_metrics
from fastdiff.parallel.devices import select_device
from fastdiff.version import __version__

_PACKAGES = ("numpy", "torch", "pillow", "torch-fidelity")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageComparisonOptions:
    """Options of the comparison of image sets."""

    features: str = "inception"
    """Name of the extractor, see ``features.open_extractor``."""
    metrics: tuple[str, ...] = ()
    """Further metrics, see ``user_metrics``."""
    batch: int = 64
    """Images per call of the extractor."""
    seed: int = 0
    """Seed of the subsets of the kernel distance."""


class Comparison:
    """A reference that sets of samples are measured against; its features are computed once.

    Args:
        path: npz file or folder of images, or npz file of statistics.
        options: extractor, batch and seed.

    Raises:
        ConfigError: The reference is of another kind, or the extractor is not usable.
        DataError: The reference is damaged.
        OSError: The reference cannot be read.
    """

    def __init__(self, path: Path, options: ImageComparisonOptions) -> None:
        require(0 <= options.seed < 2**64, f"--seed {options.seed}: from 0 to 2**64 - 1")
        self._metrics = open_metrics(options.metrics)  # fails before images are read
        self._path, self._options = path, options
        self._real = real = open_reference(path)
        if real.images is not None:
            _check_set(path, real.images)
        require(
            not self._metrics or real.images is not None,
            f"--metric needs real images, and {path} holds their statistics; give the images",
        )
        self._extractor = open_extractor(options.features)
        self._features: Features | None = None
        self._statistics = real.statistics

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the figures besides the images, as JSON values."""
        real = self._real
        return {
            "reference": None if real.images is None else len(real.images),
            "fid_reference": "images" if real.statistics is None else "statistics",
            "extractor": self._extractor.name,
            "extractor_sha256": self._extractor.sha256,
            **({"metrics": {each.name: each.plugin.identity for each in self._metrics}} if self._metrics else {}),
            "seed": self._options.seed,
        }

    def check(self, shape: tuple[int, int, int]) -> None:
        """Raise ConfigError if images of ``shape`` (H, W, C) cannot be measured; one is tried, before any is drawn."""
        features = features_of_batch(np.zeros((1, *shape), np.uint8), self._extractor)
        _check_dimension(features, self._features, self._real, self._extractor)

    def measure(self, path: Path, drawn: ImageSet, *, only_fid: bool = False) -> dict[str, Any]:
        """Measure samples, see ``evaluate_images``; ``path`` names them in messages. ``only_fid``: the FID alone."""
        _check_set(path, drawn)
        real = self._real
        if real.images is not None and drawn.size != real.images.size:
            log.warning(f"{path} has images of {_size(drawn)} pixels, {self._path} of {_size(real.images)}")
        of_samples = features_of(drawn, self._extractor, self._options.batch, "features of samples")
        if real.images is not None and self._features is None and (not only_fid or self._statistics is None):
            self._features = features_of(real.images, self._extractor, self._options.batch, "features of reference")
            _warn_of_few(self._path, self._features)
        _check_dimension(of_samples, self._features, real, self._extractor)
        _warn_of_few(path, of_samples)
        if self._statistics is None:
            assert self._features is not None, "a reference has images or statistics"
            self._statistics = Gaussian.of(self._features)
        if only_fid:
            return {"fid": _fid(of_samples, self._statistics)}
        figures = _measures(of_samples, self._features, self._statistics, self._options.seed)
        for metric in self._metrics:
            assert self._features is not None
            figures.update(metric(of_samples, self._features))
        return figures


def evaluate_images(samples: Path, reference: Path, options: ImageComparisonOptions) -> dict[str, Any]:
    """Measure samples against real images; warnings and progress go to stderr.

    Args:
        samples: npz file or folder of images.
        reference: npz file or folder of images, or npz file of statistics.
        options: extractor, batch and seed.

    Returns:
        ``fid``, ``kid``, ``kid_std``, ``precision``, ``recall``, and the figures of the user's metrics; the number of
        images of both sets; the extractor with its digest, the seed and versions. An undefined figure is None:
        statistics give only the FID, fewer than 4 images no precision and recall, KID without subsets no deviation.

    Raises:
        ConfigError: The inputs are of another kind or do not fit each other, or the extractor is not usable.
        DataError: An input is damaged, or a feature is not finite.
        OSError: An input cannot be read.
    """
    drawn = open_images(samples)
    comparison = Comparison(reference, options)
    figures = comparison.measure(samples, drawn)
    return figures | {"samples": len(drawn)} | comparison.identity | {"versions": versions()}


def _check_set(path: Path, images: ImageSet) -> None:
    for left_out in images.left_out:
        log.warning(f"{path}: left out: {left_out.of_pictures}")
    if len(images) < 2:
        raise ConfigError(f"{path} holds {len(images)} image; a distribution needs at least 2")


def _warn_of_few(path: Path, features: Features) -> None:
    if len(features) <= features.shape[1]:
        log.warning(
            f"{path}: the covariance of {len(features)} images in {features.shape[1]} dimensions is singular, and "
            "its FID is far too high; compare it only with the FID of equally many images"
        )


def _fid(samples: Features, statistics: Gaussian) -> float:
    found = Gaussian.of(samples).distance(statistics)
    assert math.isfinite(found), "features are finite in float32"
    return found


def _measures(
    samples: Features, reference: Features | None, statistics: Gaussian, seed: int
) -> dict[str, float | None]:
    """Compute the figures from the features of both, where the reference has images, and its statistics."""
    kid = kid_std = precision = recall = None
    if reference is not None:
        kid, kid_std = kernel_distance(samples, reference, seed=seed)
        if min(len(samples), len(reference)) > NEIGHBOURS:
            precision, recall = precision_recall(samples, reference, device=select_device())
    return {"fid": _fid(samples, statistics), "kid": kid, "kid_std": kid_std, "precision": precision, "recall": recall}


def _check_dimension(samples: Features, reference: Features | None, real: Reference, extractor: Extractor) -> None:
    """Raise ConfigError if samples and reference have different numbers of features."""
    mine = samples.shape[1]
    if reference is not None and reference.shape[1] != mine:
        raise ConfigError(
            f"{extractor.name} gives {mine} features of a sample and {reference.shape[1]} of a reference image; "
            "give both the same size and number of channels"
        )
    if real.statistics is not None and len(real.statistics.mean) != mine:
        raise ConfigError(
            f"the statistics of the reference are of {len(real.statistics.mean)} features, {extractor.name} gives "
            f"{mine}: they were computed with another extractor; use that one, or give images instead"
        )


def _size(images: ImageSet) -> str:
    height, width = images.size
    return f"{width}x{height}"


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the figures."""
    found = {"fastdiff": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
