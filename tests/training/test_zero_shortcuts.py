"""ZeRO-3 without needless work: the bias within the product, and gradients that are not joined in new memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from fastdiff.parallel.world import World
from fastdiff.train import train
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from tests.support.runs import hexes, launch, tiny, train_losses
from tests.training.test_step_costs import WIDE, costs_of


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
        monkeypatch, DeepSpeedEngine, "update", lambda: train(replace(config, samples=64), launch(3), world)
    )[-1]
    assert not backward.operations["div_"] + backward.operations["_reduce_scatter_base_"] + update.operations["cat"]
