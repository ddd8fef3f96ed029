"""The UNet on two ranks: recomputed, compiled and cut by ZeRO-3 it learns what it learns whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastdiff.deepspeed_config import resolve
from fastdiff.dist import World
from fastdiff.engine import Engine
from fastdiff.fragments import assemble
from fastdiff.models.unet import UNet
from fastdiff.models.unet_blocks import Attention, ResBlock, TransformerBlock
from tests.processes import run_ranks
from tests.runs import launch, tiny
from tests.unet_reference import SMALL, built, inputs

Learned = tuple[list[str], dict[str, Tensor]]
"""Losses to the last bit, and weights at the end."""
_STEPS = 3


def learn(
    world: World, kind: str, stage: int, blocks: Iterable[type[nn.Module]], *, recompute: bool = False,
    compiled: bool = False,
) -> Learned:  # fmt: skip
    """A few steps towards targets that differ between the ranks and the steps."""
    config = tiny(Path(), Path(), model=SMALL[kind])
    model = built(SMALL[kind], recompute=recompute)
    if compiled:
        torch._dynamo.reset()
        model.compile_blocks(backend="aot_eager")
    engine = Engine(model, config, resolve(launch(stage).deepspeed, config, world.size), world, blocks)
    losses = []
    for step in range(_STEPS):
        arguments = inputs(SMALL[kind], batch=4)
        target = torch.randn(arguments["noisy"].shape, generator=torch.Generator().manual_seed(10 * step + world.rank))
        loss = (engine(arguments.pop("noisy"), arguments.pop("time"), **arguments) - target).square().mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(float(loss).hex())
    if stage == 3:
        released = {name: p.numel() for name, p in model.named_parameters() if p.numel()}
        assert not released, f"still gathered after a step: {list(released)[:5]}"
    return losses, assemble(world, engine.flats, [flat.master for flat in engine.flats], engine.shapes)


def _every_way(world: World, kind: str) -> dict[str, Learned]:
    blocks = UNet.block_classes
    torch._dynamo.utils.counters.clear()
    found = {
        "whole": learn(world, kind, 0, blocks),
        "cut": learn(world, kind, 3, blocks),
        "recomputed": learn(world, kind, 3, blocks, recompute=True),
        "without leaves": learn(world, kind, 3, [Attention], recompute=True),
        "compiled": learn(world, kind, 3, blocks, recompute=True, compiled=True),
    }
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    return found


@pytest.fixture(scope="module", params=["sd15", "sdxl"])
def learned(request: pytest.FixtureRequest, torch_extensions: Path) -> list[dict[str, Learned]]:
    return run_ranks(_every_way, request.param, ranks=2)


def test_recomputation_under_zero3_changes_no_bit(learned: list[dict[str, Learned]]) -> None:
    for found in learned:
        losses, weights = found["cut"]
        for way in ("recomputed", "without leaves"):
            assert found[way][0] == losses, way
            assert all(torch.equal(found[way][1][name], weights[name]) for name in weights), way


@pytest.mark.parametrize("way", ["cut", "compiled"])
def test_zero3_learns_what_zero0_learns(learned: list[dict[str, Learned]], way: str) -> None:
    for found in learned:
        expected, weights = found["whole"]
        losses, got = found[way]
        assert [float.fromhex(x) for x in losses] == pytest.approx([float.fromhex(x) for x in expected], rel=1e-5)
        assert losses[0] != losses[-1]
        for name in weights:
            torch.testing.assert_close(got[name], weights[name], rtol=1e-3, atol=1e-4)


def test_the_ranks_end_with_the_same_weights(learned: list[dict[str, Learned]]) -> None:
    first, second = learned
    for way, (_, weights) in first.items():
        assert all(torch.equal(weights[name], second[way][1][name]) for name in weights), way


def test_blocks_are_what_zero3_gathers(world: World) -> None:
    from deepspeed.utils import get_z3_leaf_modules

    config = tiny(Path(), Path(), model=SMALL["sd15"])
    model = built(SMALL["sd15"])
    Engine(model, config, resolve(launch(3).deepspeed, config, 1), world, model.block_classes)
    assert {type(module) for module in get_z3_leaf_modules(model)} == {ResBlock, TransformerBlock}
