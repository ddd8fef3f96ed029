"""How alike two sets of images are, by their features: Fréchet and kernel distance, precision and recall.

All of it in float64, and in blocks: 50,000 features of 2,048 numbers need no matrix of 50,000 x 50,000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

Features = npt.NDArray[np.floating[Any]]
"""``[N, D]``: one row per image."""

NEIGHBOURS = 3
"""Of precision and recall, as in the paper."""
SUBSETS, SUBSET_SIZE = 100, 1000
"""Of the kernel distance, as in the paper."""
MOST_FEATURES = 2**14
"""D of the Fréchet distance: a covariance has 2 GiB then."""
_ROWS = 2048
"""Features in a block."""
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Mean and covariance of a set of features, which is all that the Fréchet distance looks at.

    Attributes:
        mean: ``[D]`` float64.
        covariance: ``[D, D]`` float64, with the divisor N - 1.
    """

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
        """``[D, R]`` F with F Fᵀ = covariance, R its rank; eigenvalues that are rounding errors alone are left out."""
        values, vectors = np.linalg.eigh(self.covariance)
        kept = values > values[-1] * len(values) * _EPSILON
        return np.asarray(vectors[:, kept] * np.sqrt(values[kept]), dtype=np.float64)


def frechet_distance(first: Features, second: Features) -> float:
    """Fréchet distance between the Gaussians fitted to two sets (Dowson & Landau 1982).

    ``|m1 - m2|² + tr(C1) + tr(C2) - 2 tr((C1^(1/2) C2 C1^(1/2))^(1/2))``; of features of Inception it is the FID
    (Heusel et al. 2017, arXiv:1706.08500, eq. 6). With C1 = F1 F1ᵀ and C2 = F2 F2ᵀ the last trace is the sum of the
    singular values of F1ᵀ F2. Roots of the eigenvalues of a product would turn rounding errors of 1e-16 into ones of
    1e-8 for every direction in which a covariance is singular; singular values keep them as they are.

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
    """Squared maximum mean discrepancy under the kernel ``(x·y / D + 1)³``, without bias.

    Of features of Inception it is the KID (Bińkowski et al. 2018, arXiv:1801.01401, section 4).

    Args:
        first: ``[N, D]``, N at least 2.
        second: ``[M, D]``, M at least 2.
        seed: of the subsets; each is a function of the seed and its number.
        subsets: how many are drawn, without replacement within each.
        size: of a subset of either set; all of the smaller set, where that has fewer.

    Returns:
        Mean and standard deviation over the subsets. The mean can be below 0. The deviation is None where every subset
        would be the whole of both sets, of which one is measured then.
    """
    size = min(size, len(first), len(second))
    if len(first) == len(second) == size:
        return _discrepancy(first, second), None
    found = []
    for number in tqdm(range(subsets), desc="kernel distance", unit="subset", leave=False):
        random = np.random.default_rng([seed, number])
        rows = [random.choice(len(features), size, replace=False) for features in (first, second)]
        found.append(_discrepancy(first[rows[0]], second[rows[1]]))
    return float(np.mean(found)), float(np.std(found))


def _discrepancy(first: Features, second: Features) -> float:
    """Equation 4 of the paper, for two sets of equal size n: terms of a feature with itself do not count."""
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
    """Improved precision and recall (Kynkäänniemi et al. 2019, arXiv:1904.06991, section 2).

    A set covers a point that is at most as far from one of its features as that one's k-th nearest neighbour within the
    set, itself left out. Precision is the share of the samples that the reference covers, recall the share of the
    reference that the samples cover.

    Args:
        samples: ``[N, D]``, N above ``neighbours``.
        reference: ``[M, D]``, M above ``neighbours``.
        neighbours: k.
        rows: features in a block; memory goes with its square. It does not change the result, but for rounding.
        device: where the distances are computed.

    Returns:
        Precision and recall, each in [0, 1].
    """
    center = reference.mean(axis=0, dtype=np.float64)  # squares of what is far from 0 would cancel
    drawn, real = _Points(samples, center, rows, device), _Points(reference, center, rows, device)
    tiles = drawn.blocks**2 + real.blocks**2 + drawn.blocks * real.blocks
    with tqdm(total=tiles, desc="precision and recall", unit="block", leave=False) as bar:
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
    """Features as points around a center, given out in blocks of float64."""

    def __init__(self, features: Features, center: Features, rows: int, device: torch.device | str) -> None:
        self._features, self._center, self._device = features, center, device
        self._rows = list(_blocks(len(features), rows))
        self.blocks = len(self._rows)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for rows in self._rows:
            yield rows, torch.from_numpy(self._features[rows] - self._center).to(self._device)

    def squared_radii(self, neighbours: int, bar: tqdm[Any]) -> Tensor:
        """``[N]``: squared distance of each point to its k-th nearest neighbour."""
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
    """``[A, D]``, ``[B, D]`` float64 ``-> [A, B]``; what may be a rounding error is 0, so that copies are at 0."""
    scale = x.square().sum(dim=1)[:, None] + y.square().sum(dim=1)
    squared = torch.addmm(scale, x, y.T, alpha=-2)
    return squared.masked_fill_(squared < scale * ((x.shape[1] + 8) * _EPSILON), 0)


def _blocks(count: int, rows: int) -> Iterator[slice]:
    for first in range(0, count, rows):
        yield slice(first, min(first + rows, count))
