"""Conventions of SiT and REPA: against their transports in float64, and the names that their trainings record."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.command_line.config_file import from_mapping
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, FlowPath, ObjectiveConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.export.original_checkpoint import _arguments
from fastdiff.models.build import build_model
from fastdiff.models.dit.network import DiT
from fastdiff.models.load import build_network
from fastdiff.rng import Stream, normal
from fastdiff.sampling.solvers import sample

MODEL = DiTConfig(depth=2, hidden=16, heads=2, patch=2, size=8, channels=2, classes=3, learn_sigma=True)
SHAPE = (MODEL.channels, MODEL.size, MODEL.size)
SIT = FlowConfig(convention="sit")
REPA = FlowConfig(convention="repa")
LABELS = torch.tensor([0, 1, 2, 1])


def network(seed: int = 1) -> DiT:
    """A network that depends on all inputs: a fresh DiT returns 0."""
    model = build_model(MODEL, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    assert isinstance(model, DiT)
    return model.eval()


class Transport:
    """SiT's transport: ``x_t = alpha(t) x1 + sigma(t) x0`` with the data x1, the noise x0, and data at t = 1."""

    def __init__(self, path: FlowPath) -> None:
        self.path = path

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        if self.path == "linear":
            return t, 1 - t
        if self.path == "gvp":
            return (torch.pi / 2 * t).sin(), (torch.pi / 2 * t).cos()
        logs = -0.25 * (1 - t) ** 2 * (20.0 - 0.1) - 0.5 * (1 - t) * 0.1
        return logs.exp(), (1 - (2 * logs).exp()).sqrt()

    def point_and_velocity(self, t: Tensor, noise: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        """``[B]`` times, ``[B, C, H, W]`` float64 noise and data -> x_t and its derivative by t."""
        return torch.func.jvp(lambda s: self._point(s, noise, data), (t,), (torch.ones_like(t),))

    def _point(self, t: Tensor, noise: Tensor, data: Tensor) -> Tensor:
        alpha, sigma = (value.view(-1, 1, 1, 1) for value in self.coefficients(t))
        return alpha * data + sigma * noise


@pytest.mark.parametrize("prediction", ["flow", "epsilon", "score"])
@pytest.mark.parametrize("path", get_args(FlowPath))
def test_input_time_and_loss_of_training_are_those_of_its_transport(path: FlowPath, prediction: Any) -> None:
    config = FlowConfig(path=path, convention="sit", prediction=prediction, condition_dropout=0.0)
    ours = Objective(config, seed=3, null={}, device="cpu")
    data = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(2))
    batch = Batch(data, torch.arange(5), {"label": LABELS[torch.arange(5) % 4]})
    corruption = ours.add_noise(batch, native=torch.tensor([0.95, 0.7, 0.5, 0.2, 0.03]))

    t = torch.tensor([0.05, 0.3, 0.5, 0.8, 0.97], dtype=torch.float64)
    torch.testing.assert_close(corruption.time.double(), t, rtol=0, atol=1e-7)
    assert corruption.time.dtype == torch.float32
    transport, noise = Transport(path), normal(3, Stream.NOISE, batch.position, SHAPE).double()
    point, velocity = transport.point_and_velocity(t, noise, data.double())
    torch.testing.assert_close(corruption.noisy.double(), point, rtol=0, atol=3e-6)
    with torch.no_grad():
        output = network()(corruption.noisy, corruption.time, **corruption.condition)[:, : SHAPE[0]]
    _, sigma = (value.view(-1, 1, 1, 1) for value in transport.coefficients(t))
    error = {
        "flow": output - velocity,
        "epsilon": output - noise,
        "score": output * sigma + noise,
    }[prediction]
    expected = error.square().mean(dim=(1, 2, 3)).float()
    torch.testing.assert_close(ours.loss(output, batch, corruption), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", ["linear", "gvp"])
def test_repa_has_the_time_and_the_velocity_of_noise(path: FlowPath) -> None:
    """Unscaled t, 1 is noise, v = d(alpha x + sigma e) / dt; on the linear path noise - data."""
    config = FlowConfig(path=path, convention="repa", condition_dropout=0.0)
    ours = Objective(config, seed=3, null={}, device="cpu")
    data = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(2))
    batch = Batch(data, torch.arange(5), {"label": LABELS[torch.arange(5) % 4]})
    t = torch.tensor([0.05, 0.3, 0.5, 0.8, 0.97], dtype=torch.float64)
    corruption = ours.add_noise(batch, native=t.float())
    torch.testing.assert_close(corruption.time, t.float(), rtol=0, atol=0)

    x, e, at = data.double(), normal(3, Stream.NOISE, batch.position, SHAPE).double(), t.view(-1, 1, 1, 1)
    angle = torch.pi / 2 * at
    if path == "linear":
        point, velocity = (1 - at) * x + at * e, e - x
    else:
        point = angle.cos() * x + angle.sin() * e
        velocity = torch.pi / 2 * (angle.cos() * e - angle.sin() * x)
    torch.testing.assert_close(corruption.noisy.double(), point, rtol=0, atol=3e-6)
    with torch.no_grad():
        output = network()(corruption.noisy, corruption.time, **corruption.condition)[:, : SHAPE[0]]
    output.requires_grad_()
    found = ours.loss(output, batch, corruption)
    expected = (output.detach().double() - velocity).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), output)
    slope = 2 * (output.detach().double() - velocity) / velocity[0].numel()
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-5 * float(slope.abs().max()))


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_sampling_a_predicted_image_follows_the_clamped_velocity(steps: int) -> None:
    """JiT's Euler steps: the last of 50 starts at sigma 0.02 and goes 0.02 / 0.05 of the way to the prediction."""
    model, starts = network(), []

    def observed(noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        starts.append(noisy)
        found: Tensor = model(noisy, time, label)
        return found

    images = drawn(observed, FlowConfig(convention="sit", prediction="x0"), steps)
    z = starts[0].double()
    for number in range(steps):
        t = number / steps
        with torch.no_grad():
            x = model(z.float(), torch.full((len(z),), t), LABELS)[:, : SHAPE[0]].double()
        z = z + (x - z) / max(1 - t, 0.05) / steps
    assert float((z - starts[0]).abs().max()) > 0.1
    torch.testing.assert_close(images, z.float(), rtol=1e-4, atol=1e-4)
    assert (steps == 50) == (not torch.allclose(images, x.float(), rtol=1e-3, atol=1e-3))


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_sampling_is_an_euler_integration_in_its_own_time(steps: int) -> None:
    """On the linear path a step of DDIM is a step of Euler."""
    model, starts = network(), []

    def observed(noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        starts.append(noisy)
        found: Tensor = model(noisy, time, label)
        return found

    images = drawn(observed, SIT, steps)
    x = starts[0].double()
    for number in range(steps):
        t = torch.full((len(x),), number / steps)
        with torch.no_grad():
            x += model(x.float(), t, LABELS)[:, : SHAPE[0]].double() / steps
    assert float((x - starts[0]).abs().max()) > 0.1
    torch.testing.assert_close(images, x.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheduler", ["ddim", "dpmsolver++", "ddpm"])
def test_a_network_of_one_convention_serves_the_other_with_its_time_and_sign_changed(scheduler: Any) -> None:
    model = network()

    def as_sd3(noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        return -model(noisy, 1 - time / 1000, label)

    def as_repa(noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        return -model(noisy, 1 - time, label)

    one, two = drawn(model, SIT, 6, scheduler), drawn(as_sd3, FlowConfig(), 6, scheduler)
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one, drawn(as_repa, REPA, 6, scheduler), rtol=1e-3, atol=1e-3)


def drawn(model: Any, objective: ObjectiveConfig, steps: int, scheduler: Any = "ddim") -> Tensor:
    """``[4, *SHAPE]`` images without guidance."""
    sampler = SamplerConfig(scheduler=scheduler, steps=steps, seed=7)
    null = {"label": torch.tensor(MODEL.classes)}
    return sample(model, objective, {"label": LABELS}, sampler, shape=SHAPE, null=null)


def test_an_exported_training_names_its_transport() -> None:
    arguments = _arguments(preset("sit-xl-2-256"))
    assert (arguments.model, arguments.path_type, arguments.prediction) == ("SiT-XL/2", "Linear", "velocity")
    assert "path_type" not in vars(_arguments(preset("dit-xl-2-256")))
    arguments = _arguments(replace(preset("sit-xl-2-256"), objective=FlowConfig(path="gvp", convention="repa")))
    assert (arguments.model, arguments.path_type, arguments.prediction) == ("SiT-XL/2", "cosine", "v")
    for predicted in (replace(REPA, prediction="epsilon"), replace(SIT, prediction="x0")):
        assert "path_type" not in vars(_arguments(replace(preset("sit-xl-2-256"), objective=predicted)))


# ---- records and files ---------------------------------------------------------------------------------


def test_a_record_without_the_field_means_the_time_of_sd3() -> None:
    config = RunConfig(model=MODEL, objective=FlowConfig(prediction="flow"))
    record = as_json(config)
    assert record["objective"].pop("convention") == "sd3"
    assert from_mapping(record, "an old checkpoint") == config
    changed = as_json(replace(config, objective=replace(config.objective, convention="sit")))
    assert config_changes(record, as_json(config), ()) == {}
    assert config_changes(record, changed, ()) == {"objective.convention": '"sd3" -> "sit"'}


LINEAR = {"path_type": "Linear", "prediction": "velocity"}
OF_REPA = {"path_type": "linear", "prediction": "v"}
SET = "set --objective.process flow --objective.convention sit"


@pytest.mark.parametrize("name", ["0400000.pt", "sit.pt"])
@pytest.mark.parametrize(
    ("arguments", "objective", "message"),
    [
        (LINEAR, DdpmConfig(), f"given --objective.process ddpm --objective.prediction epsilon; {SET} "
         "--objective.path linear --objective.prediction flow"),
        (LINEAR, FlowConfig(), "--objective.convention sd3 --objective.path linear; "),
        (LINEAR | {"path_type": "GVP"}, SIT, "trained by SiT with path_type GVP and prediction velocity, given "),
        (LINEAR | {"prediction": "noise"}, SIT, f"{SET} --objective.path linear --objective.prediction epsilon"),
        ({"prediction": "score"}, SIT, f"{SET} --objective.prediction score"),
        (LINEAR | {"path_type": "Cubic"}, SIT, "SiT has the path types Linear, GVP, VP"),
        (LINEAR, SIT, None),
        ({"path_type": "VP", "prediction": "score"}, FlowConfig(path="vp", prediction="score", convention="sit"), None),
        ({"model": "DiT-XL/2"}, DdpmConfig(), None),
        ({"model": "DiT-XL/2"}, SIT, None),
        (LINEAR, preset("sit-xl-2-256").objective, None),
        (OF_REPA, REPA, None),
        (OF_REPA | {"path_type": "cosine"}, replace(REPA, path="gvp"), None),
        (OF_REPA, SIT, "trained by REPA with path_type linear and prediction v, given --objective.process flow "
         "--objective.prediction flow --objective.convention sit --objective.path linear; set --objective.process flow "
         "--objective.convention repa --objective.path linear --objective.prediction flow"),
        (LINEAR, REPA, f"trained by SiT with path_type Linear and prediction velocity, given --objective.process flow "
         f"--objective.prediction flow --objective.convention repa --objective.path linear; {SET}"),
        (LINEAR, replace(SIT, prediction="x0"), "given --objective.process flow --objective.prediction x0"),
    ],
)  # fmt: skip
def test_a_training_that_names_its_transport_is_compared_with_the_objective(
    tmp_path: Path, name: str, arguments: dict[str, str], objective: ObjectiveConfig, message: str | None
) -> None:
    state = network().state_dict()
    raw = {key: value.clone() for key, value in state.items()}
    torch.save({"model": raw, "ema": state, "args": Namespace(**arguments)}, tmp_path / name)
    start = PretrainedConfig(path=str(tmp_path / name), weights=True, training=name == "0400000.pt")
    config = RunConfig(model=MODEL, objective=objective, pretrained=start, output=OutputConfig(sample_every=0))
    if message is None:
        found = build_network(config).state_dict()
        assert all(torch.equal(value, state[key]) for key, value in found.items())
        return
    with pytest.raises(ConfigError) as refused:
        build_network(config)
    assert message in str(refused.value)
