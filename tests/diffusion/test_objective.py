"""Corruption and loss: against fp64 oracles and closed forms; no operation waits for the device."""

from types import SimpleNamespace

import pytest
import torch

from fastdiff.batch import Batch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.diffusion.levels import loss_weights
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.schedules import Schedule, betas
from fastdiff.errors import ConfigError
from fastdiff.models.dit.network import DiT
from fastdiff.plugins.promises import HostSyncError, NoHostSync
from fastdiff.rng import Stream, normal
from fastdiff.training.metrics import Meters
from fastdiff_kernels import dispatch
from tests.support.inputs.objectives import objective_of

PREDICTIONS = ("epsilon", "v", "x0")
CLASSES = 10
NULL = {"label": torch.tensor(CLASSES)}
EPS = 2.0**-24
"""Rounding error of fp32."""


def _objective(seed=0, device="cpu", posterior=False, **values):
    return Objective(objective_of(**values), seed=seed, null=NULL, device=device, posterior=posterior)


def _batch(size=16, dtype=torch.float32, position=None, posterior=False):
    generator = torch.Generator().manual_seed(size)
    position = torch.arange(100, 100 + size) if position is None else position
    size = len(position)
    latents = torch.randn(size, 4, 8, 8, generator=generator)
    if posterior:
        latents = torch.cat([latents, 0.5 * torch.rand(size, 4, 8, 8, generator=generator)], dim=1)
    return Batch(latents.to(dtype), position, {"label": torch.randint(CLASSES, (size,), generator=generator)})


def _on(batch, device):
    condition = {name: value.to(device) for name, value in batch.condition.items()}
    return Batch(batch.latents.to(device), batch.position.to(device), condition)


def _exact(config, time):
    """alpha and sigma in fp64, straight from the betas."""
    abar = torch.cumprod(1 - betas(config), 0)[time].view(-1, 1, 1, 1)
    return abar.sqrt(), (1 - abar).sqrt()


def _clean(objective, batch):
    """x0 in fp64, and a bound of the error that a fp32 sample of the posterior has."""
    clean = batch.latents.double()
    if not objective.posterior:
        return clean, torch.zeros_like(clean)
    mean, std = clean.chunk(2, dim=1)
    spread = std * normal(objective.seed, Stream.POSTERIOR, batch.position, mean.shape[1:]).double()
    return mean + spread, 2.01 * EPS * (mean.abs() + spread.abs())


def _noise(objective, batch):
    """Noise of the target, in fp64."""
    shape = _clean(objective, batch)[0].shape[1:]
    offset = normal(objective.seed, Stream.OFFSET, batch.position, (shape[0], 1, 1)).double()
    noise = normal(objective.seed, Stream.NOISE, batch.position, shape).double()
    return noise + objective.config.noise_offset * offset


def _exact_target(objective, batch, corruption):
    alpha, sigma = _exact(objective.config, corruption.time)
    (clean, _), noise = _clean(objective, batch), _noise(objective, batch)
    return {"epsilon": noise, "v": alpha * noise - sigma * clean, "x0": clean}[objective.config.prediction]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_terminal", [False, True])
@pytest.mark.parametrize("posterior", [False, True])
def test_noisy_latents_are_within_rounding_of_fp64(dtype, zero_terminal, posterior):
    objective = _objective(zero_terminal_snr=zero_terminal, schedule="scaled_linear", posterior=posterior)
    batch = _batch(256, dtype, posterior=posterior)
    corruption = objective.add_noise(batch)
    alpha, sigma = _exact(objective.config, corruption.time)
    exact, of_sample = _clean(objective, batch)
    clean, added = alpha * exact, sigma * _noise(objective, batch)
    # A factor, its product and the sum are rounded: 3 roundings of each term.
    bound = 3.01 * EPS * (clean.abs() + added.abs()) + 1.01 * alpha * of_sample
    assert corruption.noisy.shape == (256, 4, 8, 8)
    assert ((corruption.noisy.double() - clean - added).abs() <= bound).all()


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("zero_terminal", [False, True])
@pytest.mark.parametrize("posterior", [False, True])
def test_a_perfect_prediction_has_no_loss(prediction, zero_terminal, posterior):
    """The target has the noise offset and the sample of the posterior, and not the input perturbation."""
    objective = _objective(
        prediction=prediction, zero_terminal_snr=zero_terminal, input_perturbation=0.1, noise_offset=0.125,
        posterior=posterior,
    )  # fmt: skip
    batch = _batch(64, posterior=posterior)
    corruption = objective.add_noise(batch)
    perfect = _exact_target(objective, batch, corruption).float()
    losses = objective.loss(perfect, batch, corruption)
    assert losses.shape == (64,)
    assert losses.dtype == torch.float32
    # The target of x0 is not computed unless it is sampled; the others are, with few roundings of numbers below 8.
    assert losses.max() <= (0.0 if prediction == "x0" and not posterior else (4 * 8 * EPS) ** 2)


@pytest.mark.parametrize("zero_terminal", [False, True])
@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("posterior", [False, True])
def test_the_loss_and_its_gradient_agree_with_fp64(prediction, gamma, zero_terminal, posterior):
    options = {"prediction": prediction, "min_snr_gamma": gamma, "zero_terminal_snr": zero_terminal}
    objective, batch = _objective(posterior=posterior, **options), _batch(32, posterior=posterior)
    corruption = objective.add_noise(batch, native=torch.linspace(0, 999, 32).long())
    guess = torch.randn(corruption.noisy.shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
    losses = objective.loss(guess, batch, corruption)
    (gradient,) = torch.autograd.grad(losses.sum(), guess)
    snr = Schedule.build(objective.config, "cpu", torch.float64).snr
    noise_per_error = {"epsilon": torch.ones_like(snr), "v": snr / (snr + 1), "x0": snr}[prediction]
    weight = loss_weights("none" if gamma is None else "min_snr", snr, noise_per_error, gamma)[corruption.time]
    error = guess.detach().double() - _exact_target(objective, batch, corruption)
    expected = weight * error.square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(losses.double(), expected, rtol=16 * EPS, atol=0)
    slope = 2 * weight.view(-1, 1, 1, 1) * error / error[0].numel()
    torch.testing.assert_close(gradient.double(), slope, rtol=8 * EPS, atol=slope.abs().max() * 8 * EPS)


@pytest.mark.parametrize(
    "options",
    [
        *({"prediction": prediction} for prediction in PREDICTIONS),
        {"process": "flow", "cosine_weight": 0.5, "multires_noise_iterations": 2},
        {"process": "edm"},
    ],
)
def test_a_training_step_with_kernels_equals_that_of_the_references(options):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    objective = _objective(device=device, weighting="soft_min_snr", noise_offset=0.1, input_perturbation=0.1, **options)
    batch = _on(_batch(2), device)
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=1, hidden=16, heads=2, patch=2, size=8, channels=4, classes=CLASSES)).to(device)
    for parameter in model.parameters():  # the layers that start at zero, too
        torch.nn.init.normal_(parameter, std=0.1)
    losses, gradients = {}, {}
    for backend in ("triton", "reference"):
        with dispatch.forced(noising=backend, loss=backend, philox=backend):
            corruption = objective.add_noise(batch)
            prediction = model(corruption.noisy, corruption.time, **corruption.condition)
            losses[backend] = objective.loss(prediction, batch, corruption)
        gradients[backend] = torch.autograd.grad(losses[backend].mean(), model.parameters())
    torch.testing.assert_close(losses["triton"], losses["reference"], rtol=4 * EPS, atol=0)
    for kernel, reference in zip(gradients["triton"], gradients["reference"], strict=True):
        torch.testing.assert_close(kernel, reference, rtol=0, atol=16 * EPS * reference.abs().max().item())


def test_the_variance_half_of_a_prediction_is_not_trained():
    objective, batch = _objective(), _batch()
    corruption = objective.add_noise(batch)
    double = torch.randn(16, 8, 8, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
    losses = objective.loss(double, batch, corruption)
    assert torch.equal(losses, objective.loss(double[:, :4], batch, corruption))
    (gradient,) = torch.autograd.grad(losses.sum(), double)
    assert gradient[:, :4].abs().min() > 0
    assert gradient[:, 4:].abs().max() == 0


def test_a_bf16_prediction_is_compared_in_fp32():
    objective, batch = _objective(), _batch(dtype=torch.bfloat16)
    corruption = objective.add_noise(batch)
    guess = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    losses = objective.loss(guess, batch, corruption)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, objective.loss(guess.float(), batch, corruption))


@pytest.mark.parametrize("posterior", [False, True])
def test_a_prediction_of_another_shape_is_refused(posterior):
    objective, batch = _objective(posterior=posterior), _batch(posterior=posterior)
    corruption = objective.add_noise(batch)
    for shape in ((16, 4, 4, 8), (16, 3, 8, 8), (1, 4, 8, 8)):
        with pytest.raises(ValueError, match=r"has shape .* expected \(16, 4, 8, 8\) or twice the channels"):
            objective.loss(torch.zeros(shape), batch, corruption)


def test_a_seed_out_of_range_is_refused():
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match=f"--seed {seed}: expected 0 or above"):
            _objective(seed=seed)


def _step(objective, batch, guess):
    """The part of a step besides model and optimizer."""
    corruption = objective.add_noise(batch, lambda noisy, time, label: guess)
    return objective.loss(guess, batch, corruption), corruption.levels


EVERYTHING = [
    {"prediction": "epsilon", "dream": True, "dream_detail_preservation": 10.0, "min_snr_gamma": 5.0},
    {"prediction": "epsilon", "posterior": True, "dream": True, "multires_noise_iterations": 2},
    {"prediction": "v", "posterior": True, "min_snr_gamma": 5.0},
    {"prediction": "x0", "min_snr_gamma": 5.0},
    {"prediction": "previous_x"},
    {"process": "flow", "cosine_weight": 1.0, "weighting": "cosmap", "multires_noise_iterations": 2},
    {"process": "flow", "path": "gvp", "prediction": "score", "weighting": "likelihood"},
    {"process": "flow", "path": "vp", "prediction": "epsilon", "posterior": True, "min_snr_gamma": 5.0},
    {"process": "edm", "posterior": True, "weighting": "soft_min_snr"},
]


def _everything(options, device="cpu"):
    """An objective with all that goes with ``options``, a batch, and a guess of twice the channels."""
    objective = _objective(device=device, noise_offset=0.1, input_perturbation=0.1, condition_dropout=0.5, **options)
    batch = _on(_batch(dtype=torch.bfloat16, posterior=objective.posterior), device)
    return objective, batch, torch.zeros(16, 8, 8, 8, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("options", EVERYTHING)
def test_no_part_of_the_objective_waits_for_the_device(options, monkeypatch):
    """On a CPU, so only what the torch reference of each op does; the kernels' launches are seen on a GPU, below."""
    objective, batch, guess = _everything(options)
    calls = []
    names = ("item", "cpu", "tolist", "numpy", "cuda", "__bool__", "__int__", "__float__", "__index__")
    for name in names:
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *a, _of=original, _as=name, **k: (calls.append(_as), _of(*a, **k))[1]
        )
    with NoHostSync():
        losses, _ = _step(objective, batch, guess)
    assert calls == []
    # The counters and the mode work: otherwise the lines above prove nothing.
    assert losses.sum().item() > 0
    assert calls == ["item"]
    with pytest.raises(HostSyncError, match="reads a number from the device"), NoHostSync():
        losses[0].item()


@pytest.mark.gpu
@pytest.mark.parametrize("options", EVERYTHING)
def test_no_step_on_a_gpu_waits_for_it(options):
    """CUDA itself reports every synchronising call, in the kernels as well."""
    device = torch.device("cuda", torch.cuda.current_device())
    objective, batch, guess = _everything(options, device)
    meters = Meters(SimpleNamespace(device=device))

    def step():
        losses, levels = _step(objective, batch, guess)
        meters.add(losses, batch.position, levels)
        return losses

    step()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            losses = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            losses[0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert losses.isfinite().all()
