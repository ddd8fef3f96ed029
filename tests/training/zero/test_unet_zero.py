"""The UNet on two ranks: recomputation, compilation and ZeRO-3 change nothing in what it learns."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastdiff.config.deepspeed import resolve
from fastdiff.models.unet.blocks import Attention, ResBlock, TransformerBlock
from fastdiff.models.unet.network import UNet
from fastdiff.parallel.fragments import assemble
from fastdiff.parallel.world import World
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff_kernels import dispatch
from tests.support.forked import forked_ranks, values
from tests.support.references.unet_reference import SMALL, built, inputs
from tests.support.runs import launch, tiny

_STEPS = 2
_UNETS = {
    # One level, with attention, and maps that change their channels and that do not: few graphs.
    "sd15": replace(
        SMALL["sd15"],
        layers_per_block=1,
        block_out_channels=(16,),
        attention_heads=(2,),
        transformer_layers=(1,),
    ),
    # A level with attention and one without.
    "sdxl": replace(
        SMALL["sdxl"],
        layers_per_block=1,
        block_out_channels=(16, 32),
        attention_heads=(2, 4),
        transformer_layers=(0, 2),
    ),
}


@dataclass(frozen=True)
class Learned:
    """Results of a run of a few steps."""

    losses: list[float]
    weights: dict[str, Any]
    """Arrays, which pass between processes as they are."""


def learn(
    world: World, kind: str, stage: int, blocks: Iterable[type[nn.Module]], *, recompute: bool = False,
    compiled: bool = False,
) -> Learned:  # fmt: skip
    """A few steps towards targets that differ between the ranks and the steps."""
    config = tiny(Path(), Path(), model=_UNETS[kind])
    model = built(_UNETS[kind], recompute=recompute)
    if compiled:
        torch._dynamo.reset()
        model.compile_blocks(backend="aot_eager")
    engine = DeepSpeedEngine(model, config, resolve(launch(stage).deepspeed, config, world.size), world, blocks)
    losses = []
    for step in range(_STEPS):
        arguments = inputs(_UNETS[kind], batch=2)
        target = torch.randn(arguments["noisy"].shape, generator=torch.Generator().manual_seed(10 * step + world.rank))
        loss = (engine(arguments.pop("noisy"), arguments.pop("time"), **arguments) - target).square().mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(float(loss.detach()))
    if stage == 3:
        released = {name: p.numel() for name, p in model.named_parameters() if p.numel()}
        assert not released, f"still gathered after a step: {list(released)[:5]}"
    weights = assemble(world, engine.flats, [flat.master for flat in engine.flats], engine.shapes)
    return Learned(losses, {name: value.numpy() for name, value in weights.items()})


def _every_way(world: World, kind: str, *, long: bool) -> dict[str, Learned]:
    """Train in every way; ``long``: also compiled, and by the kernels."""
    blocks = UNet.block_classes
    found = {
        "whole": learn(world, kind, 0, blocks),
        "cut": learn(world, kind, 3, blocks),
        "recomputed": learn(world, kind, 3, blocks, recompute=True),
    }
    if kind == "sd15":
        found["other leaves"] = learn(world, kind, 3, [Attention], recompute=True)
    if kind == "sd15" and long:
        torch._dynamo.utils.counters.clear()
        found["compiled"] = learn(world, kind, 3, blocks, recompute=True, compiled=True)
        # Blocks read weights and biases of their convolutions, and pass biases on to the next block.
        with dispatch.forced(group_norm="triton"):
            found["kernels"] = learn(world, kind, 3, blocks)
            found["kernels compiled"] = learn(world, kind, 3, blocks, recompute=True, compiled=True)
        assert not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    return found


@pytest.fixture(scope="module", params=["sd15", pytest.param("sdxl", marks=pytest.mark.nightly)])
def learned(request: pytest.FixtureRequest, nightly: bool) -> list[dict[str, Learned]]:
    return values(forked_ranks(partial(_every_way, long=nightly), request.param, timeout_s=600))


def test_recomputation_under_zero3_changes_no_bit(learned: list[dict[str, Learned]]) -> None:
    for found in learned:
        kept = found["cut"]
        for way in {"recomputed", "other leaves"} & found.keys():
            assert found[way].losses == kept.losses, way
            assert all(np.array_equal(found[way].weights[name], kept.weights[name]) for name in kept.weights), way


def test_zero3_learns_what_zero0_learns(learned: list[dict[str, Learned]]) -> None:
    for found in learned:
        whole = found["whole"]
        assert whole.losses[0] != whole.losses[-1]
        for way in {"cut", "compiled"} & found.keys():
            assert found[way].losses == pytest.approx(whole.losses, rel=1e-5), way
            for name, value in whole.weights.items():
                np.testing.assert_allclose(found[way].weights[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.nightly
def test_zero3_by_the_kernels_learns_what_zero0_learns(learned: list[dict[str, Learned]]) -> None:
    for found in learned:
        whole = found["whole"]
        for way in {"kernels", "kernels compiled"} & found.keys():
            assert found[way].losses == pytest.approx(whole.losses, rel=1e-5), way
            for name, value in whole.weights.items():
                # Adam makes steps of single gradients that are rounding.
                near = np.isclose(found[way].weights[name], value, rtol=1e-3, atol=1e-4)
                assert near.mean() > 0.999, f"{way} {name}: {near.mean()}"


def test_the_ranks_end_with_the_same_weights(learned: list[dict[str, Learned]]) -> None:
    first, second = learned
    for way, run in first.items():
        assert all(np.array_equal(value, second[way].weights[name]) for name, value in run.weights.items()), way


def test_blocks_are_what_zero3_gathers(world: World) -> None:
    from deepspeed.utils import get_z3_leaf_modules

    config = tiny(Path(), Path(), model=SMALL["sd15"])
    model = built(SMALL["sd15"])
    DeepSpeedEngine(model, config, resolve(launch(3).deepspeed, config, 1), world, model.block_classes)
    assert {type(module) for module in get_z3_leaf_modules(model)} == {ResBlock, TransformerBlock}


@pytest.mark.parametrize(("kind", "leaves"), [("sd15", UNet.block_classes), ("sdxl", (Attention,))])
def test_one_sample_stays_channels_last(world: World, kind: str, leaves: tuple[type[nn.Module], ...]) -> None:
    """DeepSpeed's hooks change the stride of the axis of a single sample, and with it what torch makes of a map."""
    config = tiny(Path(), Path(), model=SMALL[kind])
    expected = built(SMALL[kind])(**inputs(SMALL[kind], batch=1)).detach()
    model = built(SMALL[kind], recompute=True)
    engine = DeepSpeedEngine(model, config, resolve(launch(3).deepspeed, config, 1), world, leaves)
    orders: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda *call: orders.append(call[2].permute(0, 2, 3, 1).is_contiguous()))
    arguments = inputs(SMALL[kind], batch=1)
    prediction = engine(arguments.pop("noisy"), arguments.pop("time"), **arguments)
    torch.testing.assert_close(prediction.detach(), expected, rtol=1e-4, atol=1e-5)
    engine.backward(prediction.square().mean())
    assert engine.step()
    assert len(orders) > 20
    assert all(orders)
