"""Sampling of every process, prediction and variance, against exact solutions."""

import math
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.sampler import SchedulerName
from fastdiff.errors import ConfigError
from tests.support.references.gaussian import MEANS, Gaussian, draw

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 2])
OBJECTIVES = [
    *(DdpmConfig(prediction=prediction) for prediction in ("epsilon", "v", "x0", "previous_x")),
    *(
        FlowConfig(path=path, prediction=prediction)
        for path, prediction in product(("linear", "gvp", "vp"), ("flow", "epsilon", "score"))
    ),
    *(
        FlowConfig(path=path, prediction=prediction, convention="sit")
        for path, prediction in (("linear", "flow"), ("gvp", "flow"), ("vp", "score"))
    ),
    # A floor below every level that is visited here: above it the clamped velocity is the velocity.
    *(FlowConfig(path=path, prediction="x0", velocity_floor=1e-3) for path in ("linear", "gvp", "vp")),
    FlowConfig(path="gvp", convention="repa"),
    EdmConfig(),
    EdmConfig(sigma_data=1.5),
]
PATHS = [FlowConfig(path=path) for path in ("linear", "gvp", "vp")]


def name(objective: Any) -> str | None:
    match objective:
        case DdpmConfig():
            kind = objective.schedule
        case FlowConfig():
            kind = f"{objective.convention}-{objective.path}"
        case EdmConfig():
            kind = str(objective.sigma_data)
        case _:
            return None
    return f"{objective.process}-{kind}-{objective.predicted}"


class Recorder(Gaussian):
    """Keeps what the model was given and what it returned."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        prediction = super().__call__(noisy, time, label)
        self.seen.append((noisy.double(), time, prediction))
        return prediction


def flow_error(objective: ObjectiveConfig, spread: float, **options: Any) -> float:
    """Largest difference of images from the probability flow, which is known for a Gaussian.

    It is linear there (Song et al. 2021): the distance from the mean, in standard deviations, stays the same.
    """
    oracle = Recorder(objective, spread)
    images = draw(oracle, objective, LABELS, seed=5, **options)
    noisy, time, _ = oracle.seen[0]
    alpha, sigma, *_ = (value.view(-1, 1, 1, 1) for value in oracle.row(time))
    mean = MEANS[LABELS].double().view(-1, 1, 1, 1)
    deviations = (noisy - alpha * mean) / (alpha**2 * spread**2 + sigma**2).sqrt()
    return float((images - (mean + spread * deviations)).abs().max())


def statistics(objective: ObjectiveConfig, spread: float, **options: Any) -> tuple[float, float]:
    """Mean and standard deviation of images of class 1."""
    labels = torch.ones(300, dtype=torch.int64)
    images = draw(Gaussian(objective, spread), objective, labels, batch=300, **options)
    return float(images.mean()), float(images.std())


# ---- every process and prediction ----------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name)
def test_dpmsolver_follows_the_probability_flow(objective: ObjectiveConfig) -> None:
    assert flow_error(objective, 0.4, scheduler="dpmsolver++", steps=20) < 0.15
    assert flow_error(objective, 0.4, scheduler="dpmsolver++", steps=80) < 0.006


@pytest.mark.parametrize("objective", [*OBJECTIVES[:3], *PATHS, OBJECTIVES[-1]], ids=name)
def test_ddim_follows_it_too(objective: ObjectiveConfig) -> None:
    assert flow_error(objective, 0.4, scheduler="ddim", steps=400) < 0.03


@pytest.mark.parametrize(
    "objective",
    [*OBJECTIVES, DdpmConfig(schedule="cosine"), DdpmConfig(schedule="scaled_linear", prediction="v")],
    ids=name,
)
@pytest.mark.parametrize("scheduler", ["ddim", "dpmsolver++", "ddpm"])
def test_one_point_is_recovered_in_any_number_of_steps(objective: ObjectiveConfig, scheduler: SchedulerName) -> None:
    # Of the mean of the step before x0 is a ten thousandth, in the noisiest ones.
    tolerance = 0.02 if objective.predicted == "previous_x" else 2e-3
    for steps in (1, 2, 9):
        images = draw(Gaussian(objective, 0.0), objective, LABELS, scheduler=scheduler, steps=steps)
        torch.testing.assert_close(images, MEANS[LABELS].view(-1, 1, 1, 1).expand_as(images), rtol=0, atol=tolerance)


@pytest.mark.parametrize("objective", [OBJECTIVES[0], OBJECTIVES[3], PATHS[0], OBJECTIVES[-2]], ids=name)
def test_ancestral_sampling_has_the_right_spread(objective: ObjectiveConfig) -> None:
    mean, spread = statistics(objective, 0.6, scheduler="ddpm", steps=150)
    assert mean == pytest.approx(float(MEANS[1]), abs=0.02)
    assert spread == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize(
    ("objective", "times"),
    [
        # Karras et al. 2022, eq. 5 and table 1.
        (EdmConfig(), [math.log(s) / 4 for s in (80.0, 9.72323, 0.469978, 0.002)]),
        (PATHS[0], [1000, 750, 500, 250]),
        (PATHS[2], [1000, 750.0025, 500.005, 250.0075]),
        (FlowConfig(prediction="epsilon"), [999, 749.5, 500, 250.5]),
    ],
)
def test_levels_that_are_visited(objective: ObjectiveConfig, times: list[float]) -> None:
    oracle = Gaussian(objective, 0.4)
    draw(oracle, objective, LABELS, steps=4)
    assert oracle.times == pytest.approx(times, rel=1e-5)


def test_shift_moves_the_levels_of_flow_to_the_noise() -> None:
    oracle = Gaussian(PATHS[0], 0.4)
    draw(oracle, PATHS[0], LABELS, steps=4, shift=3.0)
    assert oracle.times == pytest.approx([1000, 900, 750, 500])
    assert flow_error(PATHS[0], 0.4, scheduler="dpmsolver++", steps=80, shift=3.0) < 0.02


@pytest.mark.parametrize("objective", [PATHS[0], OBJECTIVES[-1]], ids=name)
def test_processes_without_timesteps_refuse_respacing(objective: ObjectiveConfig) -> None:
    with pytest.raises(ConfigError, match=r"--respacing 250 chooses from the timesteps of ddpm.*use --steps"):
        draw(Gaussian(objective, 0.4), objective, LABELS, respacing="250")
    with pytest.raises(ConfigError, match="0 sampling steps"):
        draw(Gaussian(objective, 0.4), objective, LABELS, steps=0)


# ---- ends in pure noise --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["ddim", "dpmsolver++", "ddpm"])
@pytest.mark.parametrize(
    "objective",
    [
        *(DdpmConfig(schedule="jsd", prediction=prediction) for prediction in ("v", "x0", "previous_x")),
        *(DdpmConfig(schedule="scaled_linear", zero_terminal_snr=True, prediction=each) for each in ("v", "x0")),
    ],
    ids=name,
)
def test_schedules_that_end_in_pure_noise(objective: DdpmConfig, scheduler: SchedulerName) -> None:
    mean, spread = statistics(objective, 0.6, scheduler=scheduler, steps=150)
    assert mean == pytest.approx(float(MEANS[1]), abs=0.02)
    assert spread == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize("prediction", ["v", "x0"])
@pytest.mark.parametrize("objective", [{"zero_terminal_snr": True}, {"schedule": "jsd"}], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_first_steps_from_pure_noise_are_of_first_order(steps: int, objective: Any, prediction: Any) -> None:
    """DPM-Solver++ is DDIM there (Lu et al. 2022), if what stands for no signal at all has none that counts."""
    config = DdpmConfig(prediction=prediction, **objective)
    first, second = (
        draw(Gaussian(config, 0.6), config, LABELS, scheduler=scheduler, steps=steps)
        for scheduler in ("ddim", "dpmsolver++")
    )
    torch.testing.assert_close(first, second, rtol=0, atol=2e-3)


def test_pure_noise_of_the_last_step_is_no_image() -> None:
    objective = DdpmConfig(schedule="jsd", prediction="epsilon")
    with pytest.raises(ConfigError, match=r"jsd schedule is pure noise.*--objective.prediction v or x0"):
        draw(Gaussian(objective, 0.4), objective, LABELS)
    with pytest.raises(ConfigError, match=r"--objective.prediction v or x0"):
        draw(Gaussian(objective, 0.4), DdpmConfig(prediction="epsilon", zero_terminal_snr=True), LABELS)


# ---- respacing and variances ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "times"), [("ddim4", [750, 500, 250, 0]), ("3", [999, 500, 0]), ("1,2", [999, 500, 0])]
)
def test_respacing_chooses_the_timesteps(text: str, times: list[int]) -> None:
    objective = DdpmConfig(prediction="v")
    oracle = Gaussian(objective, 0.4)
    draw(oracle, objective, LABELS, respacing=text, steps=10**9)
    assert oracle.times == times


TIMES = {None: [199, 399, 599, 799, 999], "ddim5": [0, 200, 400, 600, 800], "2,3": [0, 499, 500, 750, 999]}


@pytest.mark.parametrize("respacing", TIMES)
@pytest.mark.parametrize("prediction", ["epsilon", "x0", "previous_x"])
def test_ancestral_steps_have_the_mean_and_the_variance_of_the_objective(
    prediction: Any, respacing: str | None
) -> None:
    # The noise that explains each step must be the same for every variance, because its seed is.
    explained = {}
    for variance in ("fixed_small", "fixed_large", "learned", "learned_range"):
        objective = DdpmConfig(prediction=prediction, variance=variance)
        model = LearnsVariance(objective, 0.5)
        draw(model, objective, LABELS, scheduler="ddpm", steps=5, respacing=respacing, seed=7)
        assert model.times == TIMES[respacing][::-1]
        explained[variance] = model.noise(TIMES[respacing])
    expected, tolerance = explained["fixed_small"], 2e-2 if prediction == "previous_x" else 2e-3
    assert expected.mean() == pytest.approx(0, abs=0.1)
    assert expected.std() == pytest.approx(1, abs=0.1)
    for variance, noise in explained.items():
        torch.testing.assert_close(noise, expected, rtol=0, atol=tolerance, msg=lambda text, v=variance: f"{v}: {text}")


class LearnsVariance(Recorder):
    """Predicts a variance, too, another one for every element."""

    def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        return torch.cat([super().__call__(noisy, time, label), self.variance_channels(noisy.shape)], dim=1)

    def variance_channels(self, shape: torch.Size) -> Tensor:
        between = torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 2 - 1
        return between - 3 if self.objective.variance == "learned" else between

    def noise(self, times: list[int]) -> Tensor:
        """Return the noise added in each step, by Nichol & Dhariwal 2021, sections 2 and 4."""
        short = self.alpha_bar[times]
        parts = []
        for (noisy, time, prediction), (after, _, _) in pairwise(self.seen):
            i = times.index(int(time[0]))
            abar, before = short[i], short[i - 1]
            beta = 1 - abar / before
            smallest = beta * (1 - before) / (1 - abar)
            alpha, sigma, a, b = (value.view(-1, 1, 1, 1) for value in self.row(time))
            clean = (sigma * prediction - b * noisy) / (a * sigma - b * alpha)
            mean = (before.sqrt() * beta * clean + (1 - beta).sqrt() * (1 - before) * noisy) / (1 - abar)
            given = self.variance_channels(noisy.shape).double()
            fraction = (given + 1) / 2
            logarithm = {
                "fixed_small": smallest.log(),
                "fixed_large": beta.log(),
                "learned": given,
                "learned_range": fraction * beta.log() + (1 - fraction) * smallest.log(),
            }[self.objective.variance]
            parts.append((after - mean) / (0.5 * logarithm).exp())
        return torch.stack(parts)


@pytest.mark.parametrize("variance", ["learned", "learned_range"])
def test_guidance_leaves_the_variance_of_the_class(variance: Any) -> None:
    objective = DdpmConfig(variance=variance)
    options: Any = {"scheduler": "ddpm", "steps": 5, "cfg": 3.0, "seed": 2}
    found, by_class, by_null = (
        draw(VarianceOfClass(objective, 0.5, told), objective, LABELS, **options)
        for told in (
            lambda label: label,
            lambda label: label.chunk(2)[0].repeat(2),  # equal halves: of these the guided is the same
            lambda label: label.chunk(2)[1].repeat(2),
        )
    )
    assert torch.equal(found, by_class)
    assert (found - by_null).abs().amax(dim=(1, 2, 3)).min() > 0.02


class VarianceOfClass(Gaussian):
    """Predicts a variance of each class, which are those of ``told``."""

    def __init__(self, objective: ObjectiveConfig, spread: float, told: Callable[[Tensor], Tensor]) -> None:
        super().__init__(objective, spread)
        self.told = told

    def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        given = 0.5 * self.told(label) - (4.0 if self.objective.variance == "learned" else 0.8)
        mean = super().__call__(noisy, time, label)
        return torch.cat([mean, given.view(-1, 1, 1, 1).expand_as(mean)], dim=1)


@pytest.mark.parametrize("scheduler", ["ddim", "dpmsolver++"])
def test_other_solvers_leave_a_learned_variance_out(scheduler: SchedulerName) -> None:
    objective = DdpmConfig(variance="learned_range")
    options: Any = {"scheduler": scheduler, "steps": 5, "cfg": 1.5}
    plain = draw(Gaussian(objective, 0.2), objective, LABELS, **options)
    assert torch.equal(draw(LearnsVariance(objective, 0.2), objective, LABELS, **options), plain)
