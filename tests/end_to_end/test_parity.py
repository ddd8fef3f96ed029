"""One training step against the same step built from diffusers' parts, as its text-to-image script does it.

Given the same weights, latents, captions, timesteps and noise, loss and gradients are those of the script, in fp32: it
casts the noise schedule to the dtype of the latents, and in bf16 loses the noise of the first steps.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.batch import Batch, Condition
from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.models.build import load_model
from fastdiff.models.pretrained.tiny_pipeline import UNETS, Kind, build
from fastdiff.rng import Stream, normal
from tests.support.references.timesteps import uniform_timesteps

SEED = 11
POSITION = torch.arange(1144, 1152)
"""Their timesteps are 996, 5, 688, 745, 21, 517, 326 and 55: on both sides of the clamp of Min-SNR."""
SHAPE = (4, 16, 16)
TOLERANCE = 1e-5
NOISES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offset": {"noise_offset": 0.1},
    "perturbation": {"input_perturbation": 0.1},
    "offset-perturbation": {"noise_offset": 0.1, "input_perturbation": 0.1},
    "dream-1": {"dream": True},
    "dream-10": {"dream": True, "dream_detail_preservation": 10.0},
    "dream-offset": {"dream": True, "noise_offset": 0.1, "input_perturbation": 0.1},
}


@dataclass(frozen=True)
class Step:
    """The loss of a step and the gradient of every parameter."""

    loss: Tensor
    gradients: dict[str, Tensor]


def step_of(loss: Tensor, model: Any) -> Step:
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return Step(loss.detach(), dict(zip(names, gradients, strict=True)))


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    kinds: tuple[Kind, ...] = ("sd15", "sd2", "sdxl")
    return {kind: build(folder / kind, kind=kind) for kind in kinds}


def theirs(
    unet: Any, scheduler: Any, config: ObjectiveConfig, latents: Tensor, text: Tensor, added: Any = None
) -> Tensor:
    """The loss of the script, where the random numbers are those of our streams."""
    from diffusers.training_utils import compute_dream_and_update_latents, compute_snr

    time = uniform_timesteps(SEED, POSITION, scheduler.config.num_train_timesteps)
    noise = normal(SEED, Stream.NOISE, POSITION, SHAPE)
    if config.noise_offset:
        noise = noise + config.noise_offset * normal(SEED, Stream.OFFSET, POSITION, (SHAPE[0], 1, 1))
    mixed_in = noise
    if config.input_perturbation:
        mixed_in = noise + config.input_perturbation * normal(SEED, Stream.PERTURBATION, POSITION, SHAPE)
    noisy = scheduler.add_noise(latents, mixed_in, time)
    of_velocity = scheduler.config.prediction_type == "v_prediction"
    target = scheduler.get_velocity(latents, noise, time) if of_velocity else noise
    if config.dream:
        detail = config.dream_detail_preservation
        noisy, target = compute_dream_and_update_latents(unet, scheduler, time, noise, noisy, target, text, detail)
    prediction = unet(noisy, time, text, added_cond_kwargs=added).sample
    losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
    if config.min_snr_gamma is not None:
        snr = compute_snr(scheduler, time)
        losses = losses * snr.clamp(max=config.min_snr_gamma) / (snr + 1 if of_velocity else snr)
    return losses.mean()


def ours(model: Any, config: ObjectiveConfig, latents: Tensor, condition: Condition, posterior: bool = False) -> Tensor:
    """The loss of the training loop."""
    objective = Objective(config, seed=SEED, null={}, device="cpu", posterior=posterior)
    batch = Batch(latents, POSITION, condition)
    corruption = objective.add_noise(batch, model)
    prediction = model(corruption.noisy, corruption.time, **corruption.condition)
    return objective.loss(prediction, batch, corruption).mean()


def networks(folder: Path, kind: Kind) -> tuple[Any, Any, Any]:
    """Network and scheduler as the script loads them, and our network with the same weights."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    weights = {name: value.clone() for name, value in unet.state_dict().items()}
    model = load_model(UNETS[kind], weights)
    return unet.train(), DDPMScheduler.from_pretrained(folder, subfolder="scheduler"), model.train()


def captions(kind: Kind) -> Tensor:
    """``[8, 77, D]`` embeddings of unit size; those of an untrained text encoder are all alike."""
    width = UNETS[kind].cross_attention_dim
    return torch.randn(len(POSITION), 77, width, generator=torch.Generator().manual_seed(6))


def clean_latents() -> Tensor:
    return torch.randn(len(POSITION), *SHAPE, generator=torch.Generator().manual_seed(7))


def config_of(kind: Kind, **options: Any) -> ObjectiveConfig:
    prediction: Any = "v" if kind == "sd2" else "epsilon"
    return DdpmConfig(schedule="scaled_linear", prediction=prediction, condition_dropout=0.0, **options)


def assert_same(found: Step, expected: Step) -> None:
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=TOLERANCE)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        largest = gradient.abs().max().item()
        assert largest > 0, f"{name} is trained"
        error = (found.gradients[name] - gradient).abs().max().item()
        assert error <= TOLERANCE * largest, f"gradient of {name}: off by {error / largest:.1e} of its maximum"


def combinations_of_options() -> list[Any]:
    """Network, noise and weighting; by day those of each network alternate in the weighting."""
    found = []
    for kind, first in (("sd15", 0), ("sd2", 1)):
        noises = [name for name, options in NOISES.items() if kind == "sd15" or not options.get("dream")]
        for number, noise in enumerate(noises):
            for other, gamma in enumerate((None, 5.0)):
                by_night = (number + other + first) % 2
                found.append(pytest.param(kind, noise, gamma, marks=pytest.mark.nightly if by_night else ()))
    return found


@pytest.mark.parametrize(("kind", "noise", "gamma"), combinations_of_options())
def test_a_step_equals_that_of_diffusers(
    pipelines: dict[Kind, Path], kind: Kind, noise: str, gamma: float | None
) -> None:
    unet, scheduler, model = networks(pipelines[kind], kind)
    config, latents, text = (
        config_of(kind, min_snr_gamma=gamma, **NOISES[noise]),
        clean_latents(),
        captions(kind),
    )
    expected = step_of(theirs(unet, scheduler, config, latents, text), unet)
    assert_same(step_of(ours(model, config, latents, {"context": text}), model), expected)


@pytest.mark.nightly
def test_the_steps_of_the_matrix_differ(pipelines: dict[Kind, Path]) -> None:
    """So that an option that both sides ignored would be seen."""
    unet, scheduler, _ = networks(pipelines["sd15"], "sd15")
    found = []
    for options in NOISES.values():
        for gamma in (None, 5.0):
            config = config_of("sd15", min_snr_gamma=gamma, **options)
            step = step_of(theirs(unet, scheduler, config, clean_latents(), captions("sd15")), unet)
            found.append(step.gradients["conv_in.weight"])
    for first, second in combinations(found, 2):
        assert (first - second).abs().max() > 1000 * TOLERANCE * first.abs().max()


def test_a_step_of_sdxl_equals_that_of_diffusers(pipelines: dict[Kind, Path]) -> None:
    unet, scheduler, model = networks(pipelines["sdxl"], "sdxl")
    generator = torch.Generator().manual_seed(8)
    text = captions("sdxl")
    pooled = torch.randn(len(POSITION), UNETS["sdxl"].pooled_dim, generator=generator)
    sizes = torch.tensor([[480.0, 640.0, 0.0, 80.0, 512.0, 512.0]]).repeat(len(POSITION), 1)
    sizes[::2] = torch.tensor([1024.0, 768.0, 128.0, 0.0, 512.0, 512.0])
    config, latents = config_of("sdxl", min_snr_gamma=5.0, noise_offset=0.1), clean_latents()
    added = {"text_embeds": pooled, "time_ids": sizes}
    expected = step_of(theirs(unet, scheduler, config, latents, text, added), unet)
    condition = {"context": text, "pooled": pooled, "time_ids": sizes}
    assert_same(step_of(ours(model, config, latents, condition), model), expected)


@pytest.mark.parametrize("noise", ["plain", "dream-offset"])
def test_a_step_on_a_posterior_equals_that_on_a_sample_of_it(pipelines: dict[Kind, Path], noise: str) -> None:
    """The script draws from the autoencoder's posterior in every step; we keep its mean and std, scaled."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(pipelines["sd15"], subfolder="vae")
    images = torch.rand(len(POSITION), 3, 64, 64, generator=torch.Generator().manual_seed(9)) * 2 - 1
    with torch.no_grad():
        posterior = vae.encode(images).latent_dist
    sampled = (
        posterior.mean + posterior.std * normal(SEED, Stream.POSTERIOR, POSITION, SHAPE)
    ) * vae.config.scaling_factor
    kept = (torch.cat([posterior.mean, posterior.std], dim=1) * vae.config.scaling_factor).contiguous()
    unet, scheduler, model = networks(pipelines["sd15"], "sd15")
    config, text = config_of("sd15", **NOISES[noise]), captions("sd15")
    expected = step_of(theirs(unet, scheduler, config, sampled, text), unet)
    assert_same(step_of(ours(model, config, kept, {"context": text}, posterior=True), model), expected)
