"""Comparison of samples with real images: ``fastdiff evaluate SAMPLES --reference REAL``."""

import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.console import log
from fastdiff.errors import ConfigError, require
from fastdiff.evaluation.features import Extractor, features_of, open_extractor
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
    require(0 <= options.seed < 2**64, f"--seed {options.seed}: from 0 to 2**64 - 1")
    metrics = open_metrics(options.metrics)  # fails before images are read
    drawn, real = open_images(samples), open_reference(reference)
    for path, images in ((samples, drawn), (reference, real.images)):
        for left_out in images.left_out if images is not None else ():
            log.warning(f"{path}: left out: {left_out.of_pictures}")
        if images is not None and len(images) < 2:
            raise ConfigError(f"{path} holds {len(images)} image; a distribution needs at least 2")
    if real.images is not None and drawn.size != real.images.size:
        log.warning(f"{samples} has images of {_size(drawn)} pixels, {reference} of {_size(real.images)}")
    require(
        not metrics or real.images is not None,
        f"--metric needs real images, and {reference} holds their statistics; give the images",
    )
    extractor = open_extractor(options.features)
    of_samples = features_of(drawn, extractor, options.batch, "features of samples")
    of_reference = None
    if real.images is not None:
        of_reference = features_of(real.images, extractor, options.batch, "features of reference")
    _check_dimension(of_samples, of_reference, real, extractor)
    for path, features in ((samples, of_samples), (reference, of_reference)):
        if features is not None and len(features) <= features.shape[1]:
            log.warning(
                f"{path}: the covariance of {len(features)} images in {features.shape[1]} dimensions is singular, and "
                "its FID is far too high; compare it only with the FID of equally many images"
            )
    figures = _measures(of_samples, of_reference, real.statistics, options.seed)
    for metric in metrics:
        assert of_reference is not None
        figures.update(metric(of_samples, of_reference))
    return figures | {
        "samples": len(drawn),
        "reference": None if real.images is None else len(real.images),
        "fid_reference": "images" if real.statistics is None else "statistics",
        "extractor": extractor.name,
        "extractor_sha256": extractor.sha256,
        **({"metrics": {metric.name: metric.plugin.identity for metric in metrics}} if metrics else {}),
        "seed": options.seed,
        "versions": _versions(),
    }


def _measures(
    samples: Features, reference: Features | None, statistics: Gaussian | None, seed: int
) -> dict[str, float | None]:
    """Compute the figures from features, statistics or both of the reference; for FID statistics take precedence."""
    kid = kid_std = precision = recall = None
    if reference is not None:
        kid, kid_std = kernel_distance(samples, reference, seed=seed)
        if min(len(samples), len(reference)) > NEIGHBOURS:
            precision, recall = precision_recall(samples, reference, device=select_device())
        statistics = statistics or Gaussian.of(reference)
    assert statistics is not None, "a reference has images or statistics"
    fid = Gaussian.of(samples).distance(statistics)
    assert math.isfinite(fid), "features are finite in float32"
    return {"fid": fid, "kid": kid, "kid_std": kid_std, "precision": precision, "recall": recall}


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


def _versions() -> dict[str, str]:
    """Return the versions of the packages that affect the figures."""
    found = {"fastdiff": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
