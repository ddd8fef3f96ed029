"""Distances between sets of features, against the equations of the papers."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.linalg import sqrtm

from fastdiff.evaluation.image_metrics import (
    Gaussian,
    _squared_distances,
    frechet_distance,
    kernel_distance,
    precision_recall,
)

Array = npt.NDArray[np.float64]


def features(rows: int, columns: int, seed: int = 0, shift: float = 0.0) -> Array:
    """Correlated, of unequal spread, not at the origin."""
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(rows, columns)) @ np.random.default_rng(99).normal(size=(columns, columns))
    return mixed * np.linspace(0.1, 2, columns) + shift


# --- Fréchet distance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(50, 1), (400, 24), (5000, 48)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_frechet_distance_is_that_of_the_textbook(rows: int, columns: int, dtype: type) -> None:
    first, second = features(rows, columns, 0).astype(dtype), features(rows + 37, columns, 1, 0.3).astype(dtype)
    means = [part.astype(np.float64).mean(axis=0) for part in (first, second)]
    c1, c2 = (np.atleast_2d(np.cov(part.astype(np.float64), rowvar=False)) for part in (first, second))
    shift = means[0] - means[1]
    expected = shift @ shift + np.trace(c1) + np.trace(c2) - 2 * np.trace(sqrtm(c1 @ c2)).real
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-6)
    assert Gaussian(means[0], c1).distance(Gaussian(means[1], c2)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rows", [2, 20, 400])
def test_frechet_distance_is_symmetric_also_where_covariances_are_singular(rows: int) -> None:
    first, second = features(rows, 64), features(rows + 5, 64, 1)
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), rel=1e-9)


@pytest.mark.parametrize("rows", [2, 20, 400])
def test_a_set_is_at_no_distance_from_itself_in_any_order(rows: int) -> None:
    mine, other = features(rows, 64), features(300, 64, 1)
    scale = float(np.trace(Gaussian.of(mine).covariance))
    shuffled = np.random.default_rng(2).permutation(mine)
    assert 0 <= frechet_distance(mine, mine) < 1e-12 * scale
    assert frechet_distance(mine, shuffled) < 1e-12 * scale
    assert frechet_distance(shuffled, other) == pytest.approx(frechet_distance(mine, other), rel=1e-12)


def test_frechet_distance_of_singular_covariances_is_exact() -> None:
    """Sets that vary in directions of their own have no overlap: the distance is the sum of both traces."""
    first, second = np.zeros((30, 64)), np.zeros((40, 64))
    first[:, :10], second[:, 20:35] = features(30, 10), features(40, 15, 1)
    traces = sum(float(part.var(axis=0, ddof=1).sum()) for part in (first, second))
    shift = float(np.sum((first.mean(axis=0) - second.mean(axis=0)) ** 2))
    assert frechet_distance(first, second) == pytest.approx(shift + traces, rel=1e-12)
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(64, 64)))[0]
    assert frechet_distance(first @ turn, second @ turn) == pytest.approx(shift + traces, rel=1e-12)


def test_the_covariance_of_several_blocks_is_that_of_numpy() -> None:
    mine = features(5000, 7, shift=100.0).astype(np.float32)
    found = Gaussian.of(mine)
    np.testing.assert_allclose(found.mean, mine.astype(np.float64).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(mine.astype(np.float64), rowvar=False), rtol=1e-10, atol=1e-12)


# --- kernel distance -----------------------------------------------------------------------------------------------


def mmd_by_hand(x: Array, y: Array) -> float:
    """Equation 4 of the paper, term by term."""
    n, dimension = x.shape

    def kernel(a: Array, b: Array) -> float:
        return float((np.dot(a, b) / dimension + 1) ** 3)

    within = sum(kernel(z[i], z[j]) for z in (x, y) for i in range(n) for j in range(n) if i != j)
    return within / (n * (n - 1)) - 2 * sum(kernel(a, b) for a, b in itertools.product(x, y)) / n**2


def test_kernel_distance_of_whole_sets() -> None:
    x, y = features(23, 5), features(23, 5, 1, 0.5)
    mean, deviation = kernel_distance(x, y)
    assert mean == pytest.approx(mmd_by_hand(x, y), rel=1e-10)
    assert deviation is None, "there is one way only to take all of them"


def test_kernel_distance_of_subsets() -> None:
    """Each is drawn from the seed and its own number, without replacement."""
    x, y = features(30, 5), features(19, 5, 1, 0.5)
    expected = []
    for number in range(4):
        random = np.random.default_rng([7, number])
        rows = random.choice(30, 11, replace=False), random.choice(19, 11, replace=False)
        expected.append(mmd_by_hand(x[rows[0]], y[rows[1]]))
    mean, deviation = kernel_distance(x, y, seed=7, subsets=4, size=11)
    assert mean == pytest.approx(np.mean(expected), rel=1e-10)
    assert deviation == pytest.approx(np.std(expected), rel=1e-10)
    assert kernel_distance(x, y, seed=7, subsets=4, size=11) == (mean, deviation)
    assert kernel_distance(x, y, seed=8, subsets=4, size=11)[0] != mean


def test_a_subset_is_at_most_the_smaller_set() -> None:
    x, y = features(30, 5), features(19, 5, 1, 0.5)
    assert kernel_distance(x, y, subsets=3) == kernel_distance(x, y, subsets=3, size=19)


def test_kernel_distance_has_no_bias() -> None:
    """Of two sets from one distribution it is 0 on average, whatever their size; the Fréchet distance is not."""
    sets = [features(12, 4, seed) for seed in range(600)]
    found = [kernel_distance(x, y)[0] for x, y in itertools.pairwise(sets)]
    assert abs(np.mean(found)) < 4 * np.std(found) / np.sqrt(len(found) / 2)
    assert min(found) < 0


# --- precision and recall ------------------------------------------------------------------------------------------


def coverage_by_hand(points: Array, manifold: Array, k: int) -> float:
    """Share of the points that lie within the ball of any point of the manifold."""
    covered = []
    for point in points:
        inside = False
        for number, center in enumerate(manifold):
            others = np.delete(manifold, number, axis=0)
            radius = np.sort([np.linalg.norm(center - other) for other in others])[k - 1]
            inside = inside or bool(np.linalg.norm(point - center) <= radius)
        covered.append(inside)
    return float(np.mean(covered))


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall_are_those_of_brute_force(k: int) -> None:
    samples, reference = features(31, 6, shift=50.0), features(43, 6, 1, 50.8)
    expected = coverage_by_hand(samples, reference, k), coverage_by_hand(reference, samples, k)
    assert 0 < expected[0] < 1
    assert 0 < expected[1] < 1
    assert expected[0] != expected[1]
    for rows in (1, 2, 7, 43, 1000):
        assert precision_recall(samples, reference, neighbours=k, rows=rows) == pytest.approx(expected, rel=1e-12)
    swapped = precision_recall(reference, samples, neighbours=k)
    assert swapped == pytest.approx(expected[::-1], rel=1e-12)


def test_known_manifolds() -> None:
    line = np.arange(10.0)[:, None]
    assert precision_recall(line, line) == (1, 1)
    assert precision_recall(line, line + 100) == (0, 0)
    # 4 samples at one place are precise, and cover that place alone.
    assert precision_recall(np.full((4, 1), 3.0), line) == (1, 0.1)


def test_copies_are_at_no_distance() -> None:
    """In spite of rounding errors; or whether the ball of a feature with copies covers another copy would be chance."""
    points = torch.from_numpy(features(60, 300, shift=7.0))
    near = points + 1e-6 * points.norm(dim=1, keepdim=True) / 300**0.5
    assert (_squared_distances(points, points.clone()).diagonal() == 0).all()
    assert (_squared_distances(points, near).diagonal() > 0).all()
    samples, reference = points.repeat(4, 1).numpy(), np.concatenate([points, points[:40] - 50])
    assert precision_recall(samples, reference)[1] == pytest.approx(0.6)


def test_features_may_be_far_from_the_origin() -> None:
    samples, reference = features(60, 20), features(70, 20, 1, 0.5)
    far = precision_recall(samples + 1e9, reference + 1e9)
    assert far == precision_recall(samples, reference)
    assert 0 < min(far) < 1
