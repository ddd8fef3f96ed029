"""DREAM: input and target follow the model's own estimate of the noise, at the cost of one forward pass."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.schedules import betas
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, normal
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from tests.support.processes import run_ranks
from tests.support.runs import launch, losses, tiny, train_losses

POSITION = torch.arange(40, 72)
SHAPE = (3, 4, 4)
EPS = 2.0**-24
DREAM = {"objective__prediction": "epsilon", "objective__dream": True}


def _objective(posterior: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Objective:
    config = DdpmConfig(**{"dream": True, **options})
    null = {"label": torch.tensor(9)}
    return Objective(config, seed=5, null=null, device="cpu", posterior=posterior, dtype=dtype)


def _batch(posterior: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(len(POSITION), *SHAPE, generator=generator)
    if posterior:
        latents = torch.cat([latents, torch.rand(len(POSITION), *SHAPE, generator=generator)], dim=1)
    return Batch(latents, POSITION, {"label": torch.arange(len(POSITION)) % 9})


class Halving(torch.nn.Module):
    """Predicts a trained share of its input, and has a second half of channels for the variance."""

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.nn.Parameter(torch.tensor(0.5))
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        self.calls.append((noisy, time, label))
        predicted = self.share * noisy.float() + 0.01 * label.view(-1, 1, 1, 1)
        return torch.cat([predicted, torch.full_like(predicted, 1e9)], dim=1)


def _noise(config: ObjectiveConfig) -> Tensor:
    offset = normal(5, Stream.OFFSET, POSITION, (SHAPE[0], 1, 1)).double()
    return normal(5, Stream.NOISE, POSITION, SHAPE).double() + config.noise_offset * offset


@pytest.mark.parametrize("posterior", [False, True])
@pytest.mark.parametrize("offset", [0.0, 0.2])
@pytest.mark.parametrize("detail", [0.0, 1.0, 10.0])
def test_input_and_target_are_those_of_the_paper(detail: float, offset: float, posterior: bool) -> None:
    objective = _objective(posterior, dream_detail_preservation=detail, noise_offset=offset, condition_dropout=0.5)
    batch, model = _batch(posterior), Halving()
    before = objective.add_noise(batch)
    after = objective.add_noise(batch, model)

    sigma = (1 - torch.cumprod(1 - betas(objective.config), 0))[before.time].sqrt().view(-1, 1, 1, 1)
    noise, first = _noise(objective.config), before.noisy.double()
    correction = sigma**detail * (noise - 0.5 * first - 0.01 * before.condition["label"].view(-1, 1, 1, 1))
    # The power multiplies the rounding of sigma, and the rest is a few sums of numbers below 8.
    bound = (detail + 8) * 2 * EPS * 8
    assert after.correction is not None
    assert (after.correction - correction).abs().max() < bound
    assert (after.noisy - first - sigma * correction).abs().max() < bound
    assert (after.noisy - before.noisy).abs().max() > (0.1 if detail <= 1 else 1e-3)

    prediction = torch.randn(len(POSITION), *SHAPE, generator=torch.Generator().manual_seed(1))
    found = objective.loss(prediction, batch, after)
    expected = (prediction - (noise + correction)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    double = torch.cat([prediction, torch.full_like(prediction, 1e9)], dim=1)
    assert torch.equal(objective.loss(double, batch, after), found)


def test_the_estimate_costs_one_call_with_what_the_step_has() -> None:
    objective, batch, model = _objective(condition_dropout=0.5), _batch(), Halving()
    before = objective.add_noise(batch)
    after = objective.add_noise(batch, model)
    ((noisy, time, label),) = model.calls
    assert torch.equal(noisy, before.noisy)
    assert torch.equal(time, before.time)
    assert torch.equal(label, before.condition["label"]), "after the drop"
    assert torch.equal(after.time, before.time)
    assert torch.equal(after.condition["label"], label)


def test_without_dream_there_is_no_call_and_nothing_changes() -> None:
    objective, batch, model = _objective(dream=False), _batch(), Halving()
    before = objective.add_noise(batch)
    after = objective.add_noise(batch, model)
    assert torch.equal(after.noisy, before.noisy)
    assert after.correction is None
    assert not model.calls


def test_no_gradient_flows_through_the_estimate() -> None:
    objective, batch, model = _objective(), _batch(), Halving()
    after = objective.add_noise(batch, model)
    assert after.correction is not None
    assert not after.correction.requires_grad
    assert not after.noisy.requires_grad
    assert torch.is_grad_enabled()
    prediction = model(after.noisy, after.time, **after.condition)
    (found,) = torch.autograd.grad(objective.loss(prediction, batch, after).mean(), model.share)
    error = prediction[:, : SHAPE[0]].double() - _noise(objective.config) - after.correction
    torch.testing.assert_close(found.double(), (2 * error * after.noisy).mean(), rtol=1e-5, atol=0)


def test_an_input_of_another_dtype_keeps_it_and_loses_no_more() -> None:
    """The estimate is of the rounded input; the correction stays fp32."""
    objective, batch, model = _objective(dtype=torch.bfloat16), _batch(), Halving()
    before = objective.add_noise(batch)
    after = objective.add_noise(batch, model)
    assert after.correction is not None
    assert before.noisy.dtype == after.noisy.dtype == torch.bfloat16
    assert after.correction.dtype == torch.float32
    sigma = before.levels.table[before.levels.row, 1].view(-1, 1, 1, 1)
    assert torch.equal(after.noisy, (before.noisy.float() + sigma * after.correction).bfloat16())


class Counting(DeepSpeedEngine):
    """Counts forward passes, with and without a gradient."""

    calls: tuple[int, int] = (0, 0)

    def __call__(self, *inputs: Tensor, **condition: Tensor) -> Tensor:
        plain, without = Counting.calls
        Counting.calls = (plain + torch.is_grad_enabled(), without + (not torch.is_grad_enabled()))
        return super().__call__(*inputs, **condition)


def test_the_trainer_takes_one_more_forward_pass_per_micro_batch(world: World, digits: Path, tmp_path: Path) -> None:
    found: dict[bool, list[float]] = {}
    for dream in (False, True):
        Counting.calls = (0, 0)
        changes = {"objective__prediction": "epsilon", "objective__dream": dream, "batch__micro": 8}
        config = tiny(digits, tmp_path / str(dream), steps=3, **changes, performance__recompute=True)
        with mock.patch("fastdiff.training.engines.deepspeed.DeepSpeedEngine", Counting):
            found[dream] = train_losses(world, config, launch(3))
        assert Counting.calls == (8, 8 if dream else 0), "in six micro-batches and the two of the rehearsal"
    assert all(b > 1.1 * a for a, b in zip(found[False], found[True], strict=True)), "a larger target, at the start"


@pytest.mark.nightly
def test_dream_is_the_same_sharded_and_resumed(world: World, digits: Path, tmp_path: Path) -> None:
    changes = {**DREAM, "objective__noise_offset": 0.1}
    plain = train_losses(world, tiny(digits, tmp_path / "0", steps=4, **changes), launch(0))
    assert train_losses(world, tiny(digits, tmp_path / "3", steps=4, **changes), launch(3)) == pytest.approx(
        plain, 1e-5
    )
    parallel = run_ranks(train_losses, tiny(digits, tmp_path / "two", steps=4, **changes), launch(3), ranks=2)[0]
    assert parallel == pytest.approx(plain, 1e-5)
    for steps in (2, 4):
        train_losses(world, tiny(digits, tmp_path / "parts", steps=steps, **changes), launch(3))
    assert losses(tmp_path / "parts") == losses(tmp_path / "3")


@pytest.mark.nightly
def test_zero3_keeps_its_plan_of_what_to_gather(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is compared between ranks, which waits for the device, when it is made; then never again."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    events: Counter[str] = Counter()
    for owner, name in (
        (coordinator, "assert_ints_same_as_other_ranks"),
        (coordinator.PartitionedParameterCoordinator, "_invalidate_trace"),
    ):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _as=name, _of=original: (events.update([_as]), _of(*a))[1])
    found = []
    for steps in (3, 6):
        events.clear()
        config = tiny(digits, tmp_path / str(steps), steps=steps, **DREAM, batch__micro=8)
        train_losses(world, config, launch(3))
        found.append(dict(events))
    assert found[0] == found[1]
    assert found[0]["assert_ints_same_as_other_ranks"] > 0, "the counter works"
