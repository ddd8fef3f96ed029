"""Flow matching: against the equations of SiT, SD3 and JiT in float64, and against diffusers where it has them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.deepspeed import resolve
from fastdiff.config.sections.objective import FlowConfig, FlowPath
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.diffusion.flow import Flow
from fastdiff.diffusion.levels import clean_per_error
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.models.dit.network import DiT
from fastdiff.models.embeddings import TimestepEmbedder, timestep_sinusoids
from fastdiff.models.unet.blocks import TimestepEmbedding
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, normal
from fastdiff.sampling.run import Run
from tests.support.runs import launch, losses, tiny, train_losses

SEED = 3
SHAPE = (4, 6, 6)
TOLERANCE = 1e-5
PATHS: tuple[FlowPath, ...] = get_args(FlowPath)
SIT = [
    (path, prediction, weighting)
    for path in PATHS
    for prediction in ("flow", "epsilon", "score")
    for weighting in ("none", "velocity", "likelihood")
    if prediction != "flow" or weighting == "none"
]
CLEAN = [(path, "x0", weighting) for path in PATHS for weighting in ("velocity", "none", "min_snr", "soft_min_snr")]
EVERY = [
    *SIT,
    *CLEAN,
    *(
        (path, prediction, kind)
        for path, prediction, weighting in SIT
        for kind in ("min_snr", "soft_min_snr")
        if weighting == "none"
    ),
    ("linear", "flow", "sigma_sqrt"),
    ("linear", "flow", "cosmap"),
    *((path, "flow", "x0") for path in PATHS),
]


def objective(**options: Any) -> Objective:
    return Objective(FlowConfig(condition_dropout=0, **options), seed=SEED, null={}, device="cpu")


def batch_of(size: int, scale: float = 1.0) -> Batch:
    latents = scale * torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(size))
    return Batch(latents, torch.arange(70, 70 + size), {})


def times(flow: Flow) -> Tensor:
    """Both ends, what is close to them, and between."""
    low, high = flow.interval
    inner = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    near = torch.tensor([0.0, 1e-4, 1 - 1e-4, 1.0], dtype=torch.float64)
    return (low + (high - low) * torch.cat([near, inner])).float().clamp(low, high)


def plan(path: str, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """alpha, its slope, sigma, its slope, in SiT's time, which runs from noise at 0 to data at 1."""
    s = 1.0 - t
    if path == "linear":
        return s, np.ones_like(s), 1 - s, -np.ones_like(s)
    if path == "gvp":
        half = np.pi / 2
        return np.sin(half * s), half * np.cos(half * s), np.cos(half * s), -half * np.sin(half * s)
    logs = -0.25 * (1 - s) ** 2 * (20.0 - 0.1) - 0.5 * (1 - s) * 0.1
    slope = 0.5 * (1 - s) * (20.0 - 0.1) + 0.5 * 0.1
    alpha, sigma = np.exp(logs), np.sqrt(-np.expm1(2 * logs))
    return alpha, alpha * slope, sigma, np.exp(2 * logs) * 2 * slope / (-2 * sigma)


def squared(error: np.ndarray) -> np.ndarray:
    out: np.ndarray = (error**2).mean(axis=(1, 2, 3))
    return out


def sit_losses(
    path: str, prediction: str, weighting: str, t: np.ndarray, clean: np.ndarray, noise: np.ndarray, guess: np.ndarray
) -> np.ndarray:
    """Loss of SiT's transport for a model that predicts ``guess`` (its velocity points to the data: reversed)."""
    alpha, alpha_slope, sigma, sigma_slope = plan(path, t[:, None, None, None])
    if prediction == "flow":
        return squared(-guess - (alpha_slope * clean + sigma_slope * noise))
    diffusion = alpha_slope / alpha * sigma**2 - sigma * sigma_slope
    weight = {"none": 1.0, "velocity": (diffusion / sigma) ** 2, "likelihood": diffusion / sigma**2}[weighting]
    error = guess - noise if prediction == "epsilon" else guess * sigma + noise
    return squared(np.sqrt(weight) * error)


def weighted_losses(
    path: str, prediction: str, weighting: str, t: np.ndarray, clean: np.ndarray, noise: np.ndarray, guess: np.ndarray
) -> np.ndarray:
    """The remaining weightings: of the error of the noise that the guess and the input tell, or of the velocity."""
    alpha, alpha_slope, sigma, sigma_slope = plan(path, t[:, None, None, None])
    if weighting in ("sigma_sqrt", "cosmap"):
        weight = sigma**-2 if weighting == "sigma_sqrt" else 2 / (np.pi * (1 - 2 * sigma + 2 * sigma**2))
        return squared(np.sqrt(weight) * (guess - (noise - clean)))
    noisy = alpha * clean + sigma * noise
    if weighting == "x0":  # of alpha x + sigma n = noisy and alpha' x + sigma' n = -guess
        return squared((sigma_slope * noisy + sigma * guess) / (alpha * sigma_slope - alpha_slope * sigma) - clean)
    if prediction == "x0":
        return clean_losses(path, weighting, t, clean, noisy, guess)
    if prediction == "flow":  # of alpha x + sigma n = noisy and alpha' x + sigma' n = -guess
        told = (-guess * alpha - alpha_slope * noisy) / (alpha * sigma_slope - alpha_slope * sigma)
    else:
        told = guess if prediction == "epsilon" else -sigma * guess
    with np.errstate(divide="ignore"):
        snr, gamma = (alpha / sigma) ** 2, 5.0
        weight = np.minimum(1, gamma / snr) if weighting == "min_snr" else gamma / (snr + gamma)
    return squared(np.sqrt(weight) * (told - noise))


def clean_losses(
    path: str,
    weighting: str,
    t: np.ndarray,
    clean: np.ndarray,
    noisy: np.ndarray,
    guess: np.ndarray,
    floor: float = 0.05,
) -> np.ndarray:
    """Loss of a model that predicts x0: of the velocities of both, each divided by at least ``floor``, as in JiT."""
    alpha, alpha_slope, sigma, sigma_slope = plan(path, t[:, None, None, None])
    if weighting == "velocity":
        turn = alpha_slope * sigma - alpha * sigma_slope  # 1 on the linear path
        true, told = ((turn * x + sigma_slope * noisy) / np.maximum(sigma, 0.05) for x in (clean, guess))
        if path == "linear":
            np.testing.assert_allclose(true, (clean - noisy) / np.maximum(1 - alpha, 0.05), rtol=0, atol=1e-12)
        return squared(told - true)
    snr = (alpha / sigma) ** 2
    weight = {"none": 1.0, "min_snr": np.minimum(snr, 5.0), "soft_min_snr": 5 * snr / (snr + 5)}[weighting]
    return squared(np.sqrt(weight) * (guess - clean))


@pytest.mark.parametrize(("path", "prediction", "weighting"), EVERY)
def test_input_and_loss_are_those_of_the_equations(path: Any, prediction: Any, weighting: Any) -> None:
    ours = objective(path=path, prediction=prediction, weighting=weighting)
    assert isinstance(ours.process, Flow)
    t = times(ours.process)
    batch = batch_of(len(t))
    corruption = ours.add_noise(batch, native=t)
    guess = torch.randn(len(t), *SHAPE, generator=torch.Generator().manual_seed(1))
    found = ours.loss(guess, batch, corruption).double().numpy()

    exact, clean = t.double().numpy(), batch.latents.double().numpy()
    noise = normal(SEED, Stream.NOISE, batch.position, SHAPE).double().numpy()
    alpha, _, sigma, _ = plan(path, exact[:, None, None, None])
    np.testing.assert_allclose(corruption.noisy, alpha * clean + sigma * noise, rtol=0, atol=3e-6)
    by_sit = prediction != "x0" and weighting in ("none", "velocity", "likelihood")
    oracle = sit_losses if by_sit else weighted_losses
    expected = oracle(path, prediction, weighting, exact, clean, noise, guess.double().numpy())
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * 1e-3)


@pytest.mark.parametrize("path", PATHS)
def test_log_snr_and_depth(path: FlowPath) -> None:
    process = objective(path=path).process
    t = times(process)  # type: ignore[arg-type]
    levels = process.levels(t)
    assert torch.equal(levels.depth, t)
    assert torch.equal(levels.time, 1000 * t)
    assert levels.time.dtype == torch.float32
    alpha, _, sigma, _ = plan(path, t.double().numpy())
    with np.errstate(divide="ignore"):
        expected = 2 * np.log(alpha / sigma)
    inner = np.isfinite(expected) & (np.abs(expected) < 60)
    np.testing.assert_allclose(levels.log_snr[torch.from_numpy(inner)], expected[inner], rtol=1e-5, atol=1e-5)
    if path != "vp":
        assert levels.log_snr[0] == math.inf
        assert levels.log_snr[3] < -60, "pure noise"


@pytest.mark.parametrize(("path", "prediction", "weighting"), EVERY)
def test_nothing_that_is_drawn_is_infinite(path: Any, prediction: Any, weighting: Any) -> None:
    process = objective(path=path, prediction=prediction, weighting=weighting).process
    ends = torch.tensor([0.0, 2.0**-32, 1 - 2.0**-24, 1.0])
    levels = process.levels(process.draw(ends))
    assert levels.table.isfinite().all()
    assert levels.weights.isfinite().all()
    assert (levels.weights >= 0).all()
    assert not levels.log_snr.isnan().any()
    evenly = process.draw(torch.linspace(0, 1, 101))
    assert (evenly.diff() > 0).all()
    torch.testing.assert_close(evenly.diff(), evenly.diff().mean().expand(100), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "interval"),
    [
        ({}, (0.0, 1.0)),
        ({"path": "gvp"}, (0.0, 1.0)),
        ({"prediction": "epsilon"}, (1e-3, 1 - 1e-3)),
        ({"path": "gvp", "prediction": "score"}, (1e-3, 1 - 1e-3)),
        ({"path": "vp"}, (1e-5, 1.0)),
        ({"path": "vp", "prediction": "score"}, (1e-5, 1.0)),
        ({"weighting": "sigma_sqrt"}, (1e-3, 1.0)),
        ({"prediction": "x0"}, (0.0, 1.0)),
        ({"prediction": "x0", "weighting": "none"}, (1e-3, 1 - 1e-3)),
    ],
)
def test_the_ends_are_those_of_sit(options: dict[str, Any], interval: tuple[float, float]) -> None:
    """Its check_interval with the train_eps of its create_transport, in our direction of time."""
    process = objective(**options).process
    assert process.draw(torch.tensor([0.0, 1.0])).tolist() == pytest.approx(interval, rel=1e-6)


@pytest.mark.parametrize("floor", [0.05, 0.3])
def test_a_predicted_image_is_trained_as_by_jit(floor: float) -> None:
    """Time, input, loss and gradient, in its own time; two of the levels are below the floor."""
    ours = objective(prediction="x0", convention="sit", velocity_floor=floor)
    t = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.96, 0.995, 1.0], dtype=torch.float64)
    batch = batch_of(len(t))
    corruption = ours.add_noise(batch, native=(1 - t).float())
    torch.testing.assert_close(corruption.time.double(), t, rtol=0, atol=1e-7)
    guess = torch.randn(len(t), *SHAPE, generator=torch.Generator().manual_seed(5)).requires_grad_()
    found = ours.loss(guess, batch, corruption)
    (gradient,) = torch.autograd.grad(found.sum(), guess)

    x, e = batch.latents.double(), normal(SEED, Stream.NOISE, batch.position, SHAPE).double()
    told, at = guess.detach().double().requires_grad_(), t.view(-1, 1, 1, 1)
    z = at * x + (1 - at) * e
    torch.testing.assert_close(corruption.noisy.double(), z, rtol=0, atol=3e-6)
    rate = (1 - at).clamp(min=floor)
    expected = ((told - z) / rate - (x - z) / rate).square().mean(dim=(1, 2, 3))
    (slope,) = torch.autograd.grad(expected.sum(), told)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(gradient.double(), slope, rtol=TOLERANCE, atol=TOLERANCE * float(slope.abs().max()))
    assert ours.process.levels((1 - t).float()).weights.max() == pytest.approx(floor**-2)


def test_the_error_of_a_predicted_image_is_its_own_at_every_level() -> None:
    """Validation reports it, also for clean data."""
    levels = objective(prediction="x0").process.levels(torch.tensor([0.0, 1e-6, 0.5, 1.0]))
    assert torch.equal(clean_per_error(levels.table), torch.ones(4))


def test_the_linear_path_is_that_of_diffusers() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    from fastdiff.diffusion.densities import shift

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    t = shift(torch.arange(1000, 0, -1, dtype=torch.float32) / 1000, 3.0)
    torch.testing.assert_close(t, scheduler.sigmas, rtol=1e-6, atol=0)
    torch.testing.assert_close(1000 * t, scheduler.timesteps, rtol=1e-6, atol=0)
    chosen = torch.tensor([0, 3, 500, 871, 999])
    batch = batch_of(len(chosen))
    noise = normal(SEED, Stream.NOISE, batch.position, SHAPE)
    noisy = scheduler.scale_noise(batch.latents, scheduler.timesteps[chosen], noise)
    guess = torch.randn(len(chosen), *SHAPE, generator=torch.Generator().manual_seed(2))
    for weighting in ("none", "sigma_sqrt", "cosmap"):
        ours = objective(weighting=weighting)
        corruption = ours.add_noise(batch, native=t[chosen])
        torch.testing.assert_close(corruption.noisy, noisy, rtol=1e-6, atol=1e-6)
        weight = compute_loss_weighting_for_sd3(weighting, scheduler.sigmas[chosen])
        expected = weight * (guess - (noise - batch.latents)).square().mean(dim=(1, 2, 3))
        torch.testing.assert_close(ours.loss(guess, batch, corruption), expected, rtol=TOLERANCE, atol=0)
    # Its script's --precondition_outputs 1, its default: the error of x0, for which sigma_sqrt is no weighting of ours.
    sigmas = scheduler.sigmas[chosen]
    of_x0 = (noisy - sigmas[:, None, None, None] * guess - batch.latents).square().mean(dim=(1, 2, 3))
    for theirs, weighting in (("sigma_sqrt", "none"), ("none", "x0")):
        expected = compute_loss_weighting_for_sd3(theirs, sigmas) * of_x0
        ours = objective(weighting=weighting)
        found = ours.loss(guess, batch, ours.add_noise(batch, native=t[chosen]))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("path", PATHS)
def test_the_cosine_term_is_that_of_lightningdit(path: FlowPath, weight: float) -> None:
    ours, batch = objective(path=path, cosine_weight=weight, multires_noise_iterations=2), batch_of(5)
    t = torch.tensor([0.05, 0.3, 0.5, 0.8, 0.97])
    guess = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(4))
    found = ours.loss(guess, batch, ours.add_noise(batch, native=t)).double().numpy()
    _, alpha_slope, _, sigma_slope = plan(path, t.double().numpy()[:, None, None, None])
    noise = ours._noise(batch, torch.Size(SHAPE)).double().numpy()
    velocity = -(alpha_slope * batch.latents.double().numpy() + sigma_slope * noise)
    given = guess.double().numpy()
    lengths = np.linalg.norm(given, axis=1) * np.linalg.norm(velocity, axis=1)
    cosine = (given * velocity).sum(axis=1) / lengths
    expected = squared(given - velocity) + weight * (1 - cosine).mean(axis=(1, 2))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


def test_a_network_that_predicts_nothing_yet_gets_a_small_gradient() -> None:
    """A fresh DiT outputs exactly 0, where the angle has no gradient of its own."""
    ours, batch = objective(cosine_weight=1.0), batch_of(2)
    guess = torch.zeros(2, *SHAPE, requires_grad=True)
    values = ours.loss(guess, batch, ours.add_noise(batch))
    (gradient,) = torch.autograd.grad(values.sum(), guess)
    assert 0 < gradient.abs().max() < 100


@pytest.mark.parametrize("stage", [1, 3])
def test_a_bf16_network_gets_the_exact_time(world: World, digits: Path, tmp_path: Path, stage: int) -> None:
    """bf16 knows 128 times between 500 and 1000; DeepSpeed casts the weights, and must not cast this."""
    given: list[Tensor] = []
    told: list[tuple[Tensor, Tensor]] = []
    forward, embed, add_noise = DiT.forward, TimestepEmbedder.forward, Objective.add_noise

    def spied_add_noise(self: Objective, *arguments: Any) -> Any:
        corruption = add_noise(self, *arguments)
        given.append(corruption.time.clone())
        return corruption

    def spied_forward(self: DiT, noisy: Tensor, time: Tensor, label: Tensor | None = None) -> Tensor:
        assert next(self.parameters()).dtype == torch.bfloat16
        told.append((time.clone(), time.new_empty(0)))
        return forward(self, noisy, time, label)

    def spied_embed(self: TimestepEmbedder, time: Tensor, dtype: torch.dtype) -> Tensor:
        told[-1] = (told[-1][0], time.clone())
        return embed(self, time, dtype)

    objective = FlowConfig()
    config = tiny(digits, tmp_path / "run", steps=2, objective=objective, performance__precision="bf16")
    with (
        mock.patch.object(Objective, "add_noise", spied_add_noise),
        mock.patch.object(DiT, "forward", spied_forward),
        mock.patch.object(TimestepEmbedder, "forward", spied_embed),
    ):
        train_losses(world, config, launch(stage))
    assert len(given) == len(told) >= 2
    for drawn, (of_model, of_embedder) in zip(given, told, strict=True):
        assert drawn.dtype == torch.float32
        assert not torch.equal(drawn, drawn.bfloat16().float())
        assert torch.equal(of_model, drawn)
        assert torch.equal(of_embedder, drawn)
    assert all(math.isfinite(value) for value in losses(tmp_path / "run"))


def test_a_shift_by_the_latents_is_that_number_in_training_and_sampling(
    world: World, digits: Path, tmp_path: Path
) -> None:
    """The digits have 1 x 8 x 8 elements: sqrt(64 / 4096) is 1/8."""
    found = {}
    for shift in ("latent", 0.125, 1.0):
        folder = tmp_path / str(shift)
        config = tiny(digits, folder, steps=2, objective=FlowConfig(), timesteps__shift=shift)
        train_losses(world, replace(config, output=replace(config.output, checkpoint_every=2)), launch(1))
        found[shift] = losses(folder), Run(folder).decided(SamplerConfig()).shift
    assert found["latent"] == found[0.125]
    assert found["latent"][1] == 0.125
    assert found[1.0][0] != found[0.125][0]


def test_the_cast_of_the_time_is_refused(digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", performance__precision="fp16")
    assert resolve({}, config, 1)["fp16"]["auto_cast"] is False
    with pytest.raises(ConfigError, match=r'"fp16\.auto_cast": true, but fastdiff gives false'):
        resolve({"fp16": {"auto_cast": True}}, config, 1)


def test_a_bf16_unet_embeds_the_exact_time() -> None:
    from fastdiff.models.build import build_model
    from fastdiff.models.pretrained.tiny_pipeline import UNETS

    model = build_model(UNETS["sd15"], seed=0).bfloat16()
    found: list[Tensor] = []
    assert isinstance(model.time_embedding, TimestepEmbedding)
    model.time_embedding.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    time = torch.tensor([501.25])
    side = UNETS["sd15"].size
    with torch.no_grad():
        model(torch.zeros(1, 4, side, side), time, context=torch.zeros(1, 7, UNETS["sd15"].cross_attention_dim))
    exact = timestep_sinusoids(time, found[0].shape[1])
    torch.testing.assert_close(found[0].float(), exact, rtol=0, atol=2.0**-8)
    rounded = timestep_sinusoids(time.bfloat16(), found[0].shape[1])
    assert (rounded - exact).abs().max() > 0.5, "what a cast of the time would have done"
