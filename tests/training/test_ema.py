"""EMA: its rates, and fp32 masters equal to the given weights in 16-bit runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.config.deepspeed import resolve
from fastdiff.models.build import build_model
from fastdiff.parallel.fragments import Flat, Fragment, assemble
from fastdiff.parallel.world import World
from fastdiff.training.ema import Ema
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from tests.support.processes import run_ranks
from tests.support.runs import launch, tiny


def flat_of(weights: torch.Tensor) -> Flat:
    return Flat(weights, {}, (Fragment("weight", 0, weights.numel(), 0),), owned=True)


def averaged(rate: float, steps: int, warmup: bool) -> torch.Tensor:
    """The average after some steps in which the weights are 1, 2, 3, ..."""
    weights = torch.zeros(3)
    ema = Ema([flat_of(weights)], (rate,), warmup=warmup)
    for step in range(1, steps + 1):
        weights.fill_(step)
        ema.update(step)
    found = ema.averages[str(rate)][0]
    assert found is not None
    return found


def test_a_constant_rate() -> None:
    expected = 0.0
    for step in range(1, 6):
        expected = 0.9 * expected + 0.1 * step
    torch.testing.assert_close(averaged(0.9, 5, warmup=False), torch.full((3,), expected))


def test_an_average_draws_no_graph_behind_it() -> None:
    """Even where it was copied from a parameter: one more node in every step would fill the memory."""
    ema = Ema([flat_of(torch.zeros(3))], (0.9,))
    [average] = ema.averages["0.9"]
    assert average is not None
    average.copy_(torch.nn.Parameter(torch.ones(3)))
    last = average.grad_fn
    assert last is not None
    ema.update(1)
    assert average.grad_fn is last


def test_the_warm_up_is_that_of_diffusers() -> None:
    from diffusers.training_utils import EMAModel

    for steps in (1, 2, 5, 40):
        parameter = torch.nn.Parameter(torch.zeros(3))
        theirs: Any = EMAModel([parameter], decay=0.8)
        for step in range(1, steps + 1):
            parameter.data.fill_(step)
            theirs.step([parameter])
        torch.testing.assert_close(averaged(0.8, steps, warmup=True), theirs.shadow_params[0].data)


def _masters(world: World, folder: Path, precision: str, stage: int) -> bool:
    config = tiny(folder, folder, performance__precision=precision)
    model = build_model(config.model, seed=3)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)  # numbers that 16 bits do not have
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = DeepSpeedEngine(
        model, config, resolve(launch(stage).deepspeed, config, world.size), world, model.block_classes
    )
    found = assemble(world, engine.flats, [flat.master for flat in engine.flats], engine.shapes)
    return all(torch.equal(found[name], given[name]) for name in given)


def _every_stage(world: World, folder: Path) -> list[bool]:
    return [_masters(world, folder, precision, stage) for precision in ("bf16", "fp32") for stage in range(4)]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_masters_are_the_given_weights_and_not_their_roundings(tmp_path: Path, ranks: int) -> None:
    for found in run_ranks(_every_stage, tmp_path, ranks=ranks):
        assert found == [True] * 8
