"""ZeRO-3 without needless work: the bias within the product, and gradients that are not joined in new memory."""

import inspect
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn

from fastdiff.config.deepspeed import resolve
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.parallel.fragments import assemble
from fastdiff.parallel.world import World
from fastdiff.training.engines.build import build_engine
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.runs import hexes, launch, tiny, train_losses
from tests.training.forward_backward.test_step_costs import WIDE, costs_of


def test_the_linear_layer_of_zero3_is_torchs_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 96), (64, 96), (64,), (3, 5, 64)]
    x, weight, bias, upstream = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    found = []
    for layer in (zero3_linear_wrap, torch._C._nn.linear):
        inputs = [value.clone().requires_grad_() for value in (x, weight, bias)]
        out = layer(*inputs)
        found.append([out, *torch.autograd.grad(out, inputs, upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_zero3_has_the_losses_of_zero1_in_bf16(world: World, digits: Path, tmp_path: Path) -> None:
    config = {"batch__micro": 8, "performance__precision": "bf16"}
    first, third = (
        train_losses(world, tiny(digits, tmp_path / str(stage), 3, **config), launch(stage)) for stage in (1, 3)
    )
    assert hexes(third) == hexes(first)


def test_a_single_rank_copies_a_gradient_once(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(digits, tmp_path, 2, model=WIDE, performance__precision="fp32", optim__clip=0.0)
    backward = costs_of(monkeypatch, DeepSpeedEngine, "backward", lambda: train(config, launch(3), world))[-1]
    update = costs_of(
        monkeypatch, DeepSpeedEngine, "optimizer_step", lambda: train(replace(config, samples=64), launch(3), world)
    )[-1]
    assert not backward.operations["div_"] + backward.operations["_reduce_scatter_base_"] + update.operations["cat"]
    assert backward.operations["_foreach_copy_"] == 1


class _Two(BlockwiseModel):
    """Two layers, of which a forward pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unit = nn.Identity()  # ZeRO-3 gathers it as one
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, *, both: Tensor) -> Tensor:
        x = self.unit(self.first(x))
        return self.second(x) if both.any() else x


def calls_of_steps(world: World) -> list[Counter[str]]:
    """Calls of the last two of five steps on two layers, by name."""
    taken: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> Any:
        own = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            taken[name] += 1
            return own(*arguments, **named)

        return mock.patch.object(owner, name, call)

    config = tiny(Path(), Path(), batch__samples=world.size, batch__micro=1, performance__engine="deepspeed")
    steps = []
    settings = resolve(launch(3).deepspeed, config, world.size)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 100_000  # DeepSpeed's
    with (
        counted(inspect, "signature"),
        counted(torch.distributed.ProcessGroup, "all_gather_single"),
        counted(partition_parameters, "free_param"),
        counted(PartitionedParameterCoordinator, "fetch_sub_module"),
    ):
        trained = build_engine(_Two(), config, settings, world, (nn.Identity,))
        for _ in range(5):
            taken.clear()
            trained.backward(trained(torch.ones(1, 4), both=torch.tensor(True)).square().sum())
            taken["all_gather_single"] = 0  # of the update alone
            assert trained.step()
            steps.append(taken.copy())
    return steps[-2:]


def test_a_step_of_two_ranks_gathers_small_parameters_at_once_and_reads_no_signatures() -> None:
    for steps in values(forked_ranks(calls_of_steps)):
        assert [step["signature"] for step in steps] == [0, 0]
        assert [step["all_gather_single"] for step in steps] == [1, 1]


def test_a_single_rank_gathers_and_releases_nothing() -> None:
    [steps] = values(forked_ranks(calls_of_steps, ranks=1))
    assert [+step for step in steps] == [Counter(), Counter()]


def weights_of(world: World, engine: str, stage: int, clip: float) -> Tensor:
    """The second layer after steps of two micro-batches; it is used in both, in none, in the second, and in none."""
    config = tiny(
        Path(), Path(), batch__samples=2 * world.size, batch__micro=1, optim__clip=clip, performance__engine=engine
    )
    settings = resolve(launch(stage).deepspeed, config, world.size)
    trained = build_engine(_Two(), config, settings, world, (nn.Identity,))
    generator = torch.Generator().manual_seed(world.rank)
    for first, second in ((True, True), (False, False), (False, True), (False, False)):
        for both in (first, second):
            x = torch.randn(1, 4, generator=generator)
            trained.backward(trained(x, both=torch.tensor(both)).square().sum())
        assert trained.step()
    return assemble(world, trained.flats, [flat.master for flat in trained.flats], trained.shapes)["second.weight"]


def weights_of_all(world: World, clip: float) -> list[Tensor]:
    runs = [("flat", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 3)]
    return [weights_of(world, engine, stage, clip) for engine, stage in runs]


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_parameter_without_a_gradient_has_a_gradient_of_zero(clip: float) -> None:
    """Under every engine, for a whole step or a micro-batch; ZeRO-3 of DeepSpeed would apply the last one again."""
    for flat, *others in values(forked_ranks(weights_of_all, clip)):
        for other in others:
            torch.testing.assert_close(other, flat, rtol=1e-5, atol=1e-7)
