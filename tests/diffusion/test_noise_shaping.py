"""Multi-resolution noise: its distribution, its dependence on seed and position, its use in input and target."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.diffusion.noise_shaping import pyramid, unit_scale
from fastdiff.diffusion.objective import Objective
from fastdiff.rng import Stream, normal
from tests.support.inputs.objectives import objective_of

SEED = 6
SIZES = [(8, 8), (16, 4), (6, 10), (7, 5), (1, 1), (1, 9)]
OBJECTIVES: list[dict[str, Any]] = [
    {"multires_noise_iterations": 0},
    *({"prediction": prediction} for prediction in ("epsilon", "v", "x0", "previous_x")),
    *({"process": "flow", "path": path} for path in ("linear", "gvp", "vp")),
    {"process": "flow", "prediction": "score"},
    {"process": "edm"},
]


def halvings(height: int, width: int, iterations: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while len(found) < iterations and (height, width) != (1, 1):
        n = len(found) + 1
        if n > 1 and found[-1] == (1, 1):
            break
        found.append((max(1, height // 2**n), max(1, width // 2**n)))
    return found


def interpolation(coarse: int, fine: int) -> Any:
    """``[fine, coarse]``: hat functions around the centres of the cells, constant beyond the outermost."""
    centres = (np.arange(coarse) + 0.5) / coarse
    points = np.clip((np.arange(fine) + 0.5) / fine, centres[0], centres[-1])
    return np.maximum(0.0, 1 - np.abs(points[:, None] - centres[None]) * coarse)


def covariance(height: int, width: int, iterations: int, discount: float) -> np.ndarray:
    """Of the pixels of the scaled noise, all levels together: ``[H * W, H * W]``."""
    total = np.eye(height * width)
    for n, (rows, columns) in enumerate(halvings(height, width, iterations), start=1):
        both = np.kron(interpolation(rows, height), interpolation(columns, width))
        total += discount ** (2 * n) * both @ both.T
    return total * unit_scale((1, height, width), iterations, discount) ** 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 10])
def test_the_mean_variance_of_a_pixel_is_one(size: tuple[int, int], iterations: int) -> None:
    assert np.diag(covariance(*size, iterations, 0.7)).mean() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_the_levels_are_interpolated_normal_numbers(size: tuple[int, int], iterations: int) -> None:
    """Of one stream, one level after the other."""
    position = torch.arange(9, 14)
    found = pyramid(SEED, position, (3, *size), iterations, 0.4)
    assert found.shape == (5, 3, *size)
    assert found.dtype == torch.float32
    levels = halvings(*size, iterations)
    counts = [3 * rows * columns for rows, columns in levels]
    drawn = normal(SEED, Stream.MULTIRES, position, (sum(counts) or 1,)).double().numpy()
    expected, start = np.zeros(found.shape), 0
    for n, ((rows, columns), count) in enumerate(zip(levels, counts, strict=True), start=1):
        coarse = drawn[:, start : start + count].reshape(5, 3, rows, columns)
        expected += 0.4**n * interpolation(rows, size[0]) @ coarse @ interpolation(columns, size[1]).T
        start += count
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


def _objective(dtype: torch.dtype = torch.float32, posterior: bool = False, **options: Any) -> Objective:
    config = objective_of(
        **{"multires_noise_iterations": 3, "multires_noise_discount": 0.8, "condition_dropout": 0.0, **options}
    )
    return Objective(config, seed=SEED, null={}, device="cpu", dtype=dtype, posterior=posterior)


def _batch(size: int, posterior: bool = False, shape: tuple[int, ...] = (2, 8, 8)) -> Batch:
    generator = torch.Generator().manual_seed(size)
    latents = torch.randn(size, *shape, generator=generator)
    if posterior:
        latents = torch.cat([latents, torch.rand(size, *shape, generator=generator)], dim=1)
    return Batch(latents, torch.arange(5, 5 + size), {})


def _noise(objective: Objective, batch: Batch, shape: tuple[int, ...]) -> Tensor:
    """In float64: that of every pixel and of the coarser levels, of variance 1, and the offset as large as it says."""
    config, position = objective.config, batch.position
    together = normal(SEED, Stream.NOISE, position, shape).double()
    together += pyramid(SEED, position, shape, config.multires_noise_iterations, config.multires_noise_discount)
    offset = normal(SEED, Stream.OFFSET, position, (shape[0], 1, 1)).double()
    scale = unit_scale(shape, config.multires_noise_iterations, config.multires_noise_discount)
    return scale * together + config.noise_offset * offset


def test_the_noise_has_the_covariance_of_its_levels() -> None:
    objective, batch = _objective(prediction="epsilon"), _batch(20_000, shape=(1, 4, 4))
    noise = objective._noise(batch, torch.Size((1, 4, 4))).double().flatten(1).numpy()
    expected = covariance(4, 4, 3, 0.8)
    assert np.abs(noise.mean(axis=0)).max() < 5 * (expected.max() / 20_000) ** 0.5
    # 5 standard errors of a covariance.
    bound = 5 * ((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / 20_000) ** 0.5
    assert (np.abs(noise.T @ noise / 20_000 - expected) < bound).all()
    assert expected[0, 1] > 0.2, "neighbours are correlated"
    assert (noise**2).mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("posterior", [False, True])
def test_input_and_target_have_the_same_noise(options: dict[str, Any], posterior: bool) -> None:
    plain = {**options, "multires_noise_iterations": 0}
    objective = _objective(posterior=posterior, noise_offset=0.2, input_perturbation=0.3, **options)
    shape, batch = (2, 6, 10), _batch(6, posterior, shape=(2, 6, 10))
    corruption = objective.add_noise(batch)
    alpha, sigma, a, b = corruption.levels.table[corruption.levels.row, :, None, None, None].double().unbind(1)
    noise, clean = _noise(objective, batch, shape), objective.clean(batch).double()
    extra = 0.3 * normal(SEED, Stream.PERTURBATION, batch.position, shape).double()
    torch.testing.assert_close(corruption.noisy.double(), alpha * clean + sigma * (noise + extra), rtol=0, atol=3e-6)
    perfect = a * clean + b * noise
    losses = objective.loss(perfect.float(), batch, corruption)
    assert losses.max() < 1e-10 * perfect.square().mean()
    guess = torch.randn(perfect.shape, generator=torch.Generator().manual_seed(2))
    expected = (guess - perfect).square().mean(dim=(1, 2, 3)) * corruption.levels.weights[corruption.levels.row]
    torch.testing.assert_close(objective.loss(guess, batch, corruption).double(), expected, rtol=1e-5, atol=0)
    levels = _objective(**plain).add_noise(_batch(6, shape=shape)).levels
    assert torch.equal(levels.time, corruption.time), "the levels are those of the same run without it"


def test_dream_corrects_towards_all_of_the_noise() -> None:
    objective, batch = _objective(dream=True, noise_offset=0.1), _batch(6)
    before = objective.add_noise(batch)
    perfect = _noise(objective, batch, (2, 8, 8)).float()
    after = objective.add_noise(batch, lambda noisy, time: perfect)
    torch.testing.assert_close(after.noisy, before.noisy, rtol=0, atol=1e-5)
    assert objective.loss(perfect, batch, after).max() < 1e-10
    wrong = objective.add_noise(batch, lambda noisy, time: perfect - 1)
    sigma = before.levels.table[before.time, 1].view(-1, 1, 1, 1)
    torch.testing.assert_close(wrong.noisy, before.noisy + sigma**2, rtol=0, atol=1e-5)
    assert objective.loss(perfect + sigma, batch, wrong).max() < 1e-10


@pytest.mark.parametrize(
    "options", [{}, {"multires_noise_iterations": 0}, {"process": "flow"}, {"process": "edm"}], ids=str
)
def test_the_noise_depends_on_seed_and_position_alone(options: dict[str, Any]) -> None:
    options |= {"noise_offset": 0.1, "input_perturbation": 0.1}
    objective, whole = _objective(**options), _batch(9)
    expected = objective.add_noise(whole)
    parts = [
        objective.add_noise(Batch(whole.latents[rows], whole.position[rows], {}))
        for rows in (slice(0, 4), slice(4, 5), slice(5, 9))
    ]
    assert torch.equal(torch.cat([part.noisy for part in parts]), expected.noisy)
    rounded = _objective(dtype=torch.bfloat16, **options).add_noise(whole).noisy
    assert torch.equal(rounded, expected.noisy.bfloat16()), "rounded once"
