"""Metrics between the features of two image sets: Fréchet and kernel distance, precision and recall.

All are computed in float64 and in blocks: 50,000 features of 2,048 numbers need no matrix of 50,000 x 50,000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.progress_bar import Bar

Features = npt.NDArray[np.floating[Any]]
"""``[N, D]``: one row per image."""

NEIGHBOURS = 3
"""k of precision and recall, as in the paper."""
SUBSETS, SUBSET_SIZE = 100, 1000
"""Number and size of the subsets of the kernel distance, as in the paper."""
MOST_FEATURES = 2**14
"""Largest D of the Fréchet distance: its covariance has 2 GiB."""
_ROWS = 2048
"""Features per block."""
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Mean ``[D]`` and covariance ``[D, D]`` (divisor N - 1) of features, float64: input of the Fréchet distance."""

    mean: npt.NDArray[np.float64]
    covariance: npt.NDArray[np.float64]

    @classmethod
    def of(cls, features: Features) -> Gaussian:
        """Fit to ``[N, D]`` features, N at least 2."""
        mean = features.mean(axis=0, dtype=np.float64)
        scatter = np.zeros((len(mean), len(mean)))
        for rows in _blocks(len(features), _ROWS):
            centred = features[rows] - mean
            scatter += centred.T @ centred
        return cls(mean, scatter / (len(features) - 1))

    def distance(self, other: Gaussian) -> float:
        """See ``frechet_distance``."""
        mean = float(np.sum((self.mean - other.mean) ** 2))
        overlap = np.linalg.svd(self._factor().T @ other._factor(), compute_uv=False)
        spread = float(np.trace(self.covariance) + np.trace(other.covariance) - 2 * overlap.sum())
        return mean + max(0.0, spread)

    def _factor(self) -> npt.NDArray[np.float64]:
        """Return F ``[D, R]`` with F Fᵀ = covariance, R its rank; eigenvalues within rounding errors are dropped."""
        values, vectors = np.linalg.eigh(self.covariance)
        kept = values > values[-1] * len(values) * _EPSILON
        return np.asarray(vectors[:, kept] * np.sqrt(values[kept]), dtype=np.float64)


def frechet_distance(first: Features, second: Features) -> float:
    """Compute the Fréchet distance between the Gaussians fitted to two sets (Dowson & Landau 1982).

    ``|m1 - m2|² + tr(C1) + tr(C2) - 2 tr((C1^(1/2) C2 C1^(1/2))^(1/2))``; for Inception features it is the FID
    (Heusel et al. 2017, arXiv:1706.08500, eq. 6). With C1 = F1 F1ᵀ and C2 = F2 F2ᵀ the last trace is the sum of the
    singular values of F1ᵀ F2. Square roots of the eigenvalues of a product would turn rounding errors of 1e-16 into
    1e-8 for every direction in which a covariance is singular; singular values do not amplify them.

    Args:
        first: ``[N, D]``, N at least 2.
        second: ``[M, D]``, M at least 2.

    Returns:
        The squared distance, in squared units of the features; 0 or above.
    """
    return Gaussian.of(first).distance(Gaussian.of(second))


def kernel_distance(
    first: Features, second: Features, *, seed: int = 0, subsets: int = SUBSETS, size: int = SUBSET_SIZE
) -> tuple[float, float | None]:
    """Compute the unbiased squared maximum mean discrepancy under the kernel ``(x·y / D + 1)³``.

    For Inception features it is the KID (Bińkowski et al. 2018, arXiv:1801.01401, section 4).

    Args:
        first: ``[N, D]``, N at least 2.
        second: ``[M, D]``, M at least 2.
        seed: of the subsets; each is a function of the seed and its number.
        subsets: number of subsets, each drawn without replacement.
        size: features per subset of either set; at most the size of the smaller set.

    Returns:
        Mean and standard deviation over the subsets. The mean can be below 0. The deviation is None if every subset
        would be the whole of both sets; the discrepancy is then computed once.
    """
    size = min(size, len(first), len(second))
    if len(first) == len(second) == size:
        return _discrepancy(first, second), None
    found = []
    with Bar("kernel distance", subsets, "subsets") as bar:
        for number in bar.over(range(subsets)):
            random = np.random.default_rng([seed, number])
            rows = [random.choice(len(features), size, replace=False) for features in (first, second)]
            found.append(_discrepancy(first[rows[0]], second[rows[1]]))
    return float(np.mean(found)), float(np.std(found))


def _discrepancy(first: Features, second: Features) -> float:
    """Compute equation 4 of the paper for two sets of equal size n, without the terms of a feature with itself."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    n = len(first)
    within = sum(float(kernel.sum() - np.trace(kernel)) for kernel in (_kernel(first, first), _kernel(second, second)))
    return within / (n * (n - 1)) - 2 * float(_kernel(first, second).mean())


def _kernel(first: Features, second: Features) -> Features:
    root: Features = first @ second.T / first.shape[1] + 1
    return root * root * root


def precision_recall(
    samples: Features,
    reference: Features,
    *,
    neighbours: int = NEIGHBOURS,
    rows: int = _ROWS,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """Compute improved precision and recall (Kynkäänniemi et al. 2019, arXiv:1904.06991, section 2).

    A set covers a point if one of its features is at least as near to the point as to the feature's own k-th nearest
    neighbour in the set. Precision is the share of the samples that the reference covers, recall the share of the
    reference that the samples cover.

    Args:
        samples: ``[N, D]``, N above ``neighbours``.
        reference: ``[M, D]``, M above ``neighbours``.
        neighbours: k.
        rows: features per block; memory grows with its square, the result changes only by rounding.
        device: of the distance computation.

    Returns:
        Precision and recall, each in [0, 1].
    """
    center = reference.mean(axis=0, dtype=np.float64)  # far from 0, differences of squares would cancel
    drawn, real = _Points(samples, center, rows, device), _Points(reference, center, rows, device)
    tiles = drawn.blocks**2 + real.blocks**2 + drawn.blocks * real.blocks
    with Bar("precision and recall", tiles, "blocks") as bar:
        radius_of_drawn, radius_of_real = (points.squared_radii(neighbours, bar) for points in (drawn, real))
        is_precise = torch.zeros(len(samples), dtype=torch.bool, device=device)
        is_recalled = torch.zeros(len(reference), dtype=torch.bool, device=device)
        for of_drawn, x in drawn:
            for of_real, y in real:
                squared = _squared_distances(x, y)
                is_precise[of_drawn] |= (squared <= radius_of_real[of_real]).any(dim=1)
                is_recalled[of_real] |= (squared <= radius_of_drawn[of_drawn, None]).any(dim=0)
                bar.update()
    return float(is_precise.double().mean()), float(is_recalled.double().mean())


class _Points:
    """Features as points around a center, iterated in blocks of float64."""

    def __init__(self, features: Features, center: Features, rows: int, device: torch.device | str) -> None:
        self._features, self._center, self._device = features, center, device
        self._rows = list(_blocks(len(features), rows))
        self.blocks = len(self._rows)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for rows in self._rows:
            yield rows, torch.from_numpy(self._features[rows] - self._center).to(self._device)

    def squared_radii(self, neighbours: int, bar: Bar) -> Tensor:
        """Return the squared distance of each point to its k-th nearest neighbour, ``[N]``."""
        found = []
        for _, x in self:
            nearest = x.new_empty(len(x), 0)
            for _, y in self:
                near = torch.cat([nearest, _squared_distances(x, y)], dim=1)
                # One more than k, because the nearest is the point itself.
                nearest = near.topk(min(neighbours + 1, near.shape[1]), largest=False, sorted=True).values
                bar.update()
            found.append(nearest[:, -1])
        return torch.cat(found)


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Compute ``[A, D]``, ``[B, D]`` float64 ``-> [A, B]``; values within rounding errors are 0, as for copies."""
    scale = x.square().sum(dim=1)[:, None] + y.square().sum(dim=1)
    squared = torch.addmm(scale, x, y.T, alpha=-2)
    return squared.masked_fill_(squared < scale * ((x.shape[1] + 8) * _EPSILON), 0)


def _blocks(count: int, rows: int) -> Iterator[slice]:
    for first in range(0, count, rows):
        yield slice(first, min(first + rows, count))
