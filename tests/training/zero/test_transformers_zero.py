"""diffusers' transformers on two ranks: ZeRO-3 with blocks as leaf modules learns what ZeRO-0 learns.

Weight decay moves no parameter that gets no gradient, and the time reaches the network in fp32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch

from fastdiff.config.deepspeed import resolve
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.parallel.fragments import assemble
from fastdiff.parallel.world import World
from fastdiff.training.engines.build import build_engine
from tests.support.forked import forked_ranks, values
from tests.support.references.transformer_families import FAMILIES, SIZES, built, conditions, noisy
from tests.support.runs import launch, tiny


@dataclass(frozen=True)
class Learned:
    """Results of a run of a few steps."""

    losses: list[float]
    weights: dict[str, Any]
    """Arrays, which pass between processes as they are."""


def learn(world: World, kind: str, stage: int, *, compiled: bool = False, **performance: Any) -> Learned:
    """One step for a square and one for a bucket, towards targets that differ between the ranks."""
    network = FAMILIES[kind].config
    assert network.flow_convention is not None
    options = {"optim__weight_decay": 0.1, **{f"performance__{name}": value for name, value in performance.items()}}
    objective = FlowConfig(convention=network.flow_convention)
    config = tiny(Path(), Path(), objective=objective, model=network, **options)
    model = built(network, recompute=config.performance.recompute)
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    times: set[torch.dtype] = set()
    model.register_forward_pre_hook(lambda _, given: times.add(given[1].dtype))
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.compile_blocks(backend="aot_eager")
    resolved = resolve(launch(stage).deepspeed, config, world.size)
    engine = build_engine(model, config, resolved, world, model.block_classes)
    losses = []
    for step, size in enumerate(SIZES):
        latents = noisy(network, size, batch=2)
        prediction = engine(latents, torch.tensor([0.2, 0.7]), **conditions(network, batch=2))
        target = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(10 * step + world.rank))
        loss = (prediction - target).square().mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(float(loss.detach()))
    if stage == 3:
        released = {name: p.numel() for name, p in model.named_parameters() if p.numel()}
        assert not released, f"still gathered after a step: {list(released)[:5]}"
    assert not compiled or not torch._dynamo.utils.counters["graph_break"]
    assert times == {torch.float32}
    assert engine.shapes.keys().isdisjoint(kept)
    for name, value in kept.items():
        parameter = model.get_parameter(name)
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            assert torch.equal(parameter, value.to(parameter.dtype)), name
    weights = assemble(world, engine.flats, [flat.master for flat in engine.flats], engine.shapes)
    return Learned(losses, {name: value.numpy() for name, value in weights.items()})


def _every_way(world: World) -> dict[str, dict[str, Learned]]:
    return {
        kind: {
            "whole": learn(world, kind, 0, engine="deepspeed"),
            "flat": learn(world, kind, 0, engine="flat"),
            "cut": learn(world, kind, 3),
            "recomputed": learn(world, kind, 3, recompute=True),
            "compiled": learn(world, kind, 3, compiled=True),
            "bf16": learn(world, kind, 3, precision="bf16"),
        }
        for kind in FAMILIES
    }


def test_zero3_learns_what_zero0_learns() -> None:
    ranks = values(forked_ranks(_every_way, timeout_s=900))
    for kind, found in ranks[0].items():
        whole, cut, rounded = found["whole"], found["cut"], found.pop("bf16")
        assert rounded.losses == pytest.approx(whole.losses, rel=0.1), kind
        assert found["recomputed"].losses == cut.losses, kind
        assert all(np.array_equal(found["recomputed"].weights[name], value) for name, value in cut.weights.items())
        for way in found.keys() - {"whole"}:
            assert found[way].losses == pytest.approx(whole.losses, rel=1e-5), (kind, way)
            for name, value in whole.weights.items():
                # Adam makes steps of single gradients that are rounding.
                near = np.isclose(found[way].weights[name], value, rtol=1e-3, atol=1e-4)
                assert near.mean() > 0.99, f"{kind} {way} {name}: {near.mean()}"
            other = ranks[1][kind][way].weights
            assert all(np.array_equal(value, other[name]) for name, value in found[way].weights.items())
