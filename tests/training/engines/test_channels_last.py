"""Convolution weights in the flat engine: in the layout of the maps, and in checkpoints as everywhere else."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff.config.run import RunConfig
from fastdiff.models.build import build_model
from fastdiff.parallel.fragments import Fragment, assemble
from fastdiff.parallel.world import World
from fastdiff.training.buffers import move_into, places_of
from fastdiff.training.build import build
from fastdiff.training.loop import take_steps, train
from tests.gpu.cases import ADM, HYBRID
from tests.support.forked import forked_ranks, values
from tests.support.runs import launch, losses, newest, tiny
from tests.training.engines.test_flat_engine import apart, distance, trained


def unet(data: Path, folder: Path, engine: str = "flat", steps: int = 4, **options: Any) -> RunConfig:
    """A UNet with residual blocks, strided convolutions and a class."""
    own = {"model": ADM, "objective": HYBRID, "optim__lr": 1e-3, "optim__clip": 0.5, "performance__engine": engine}
    return tiny(data, folder, steps, **own | options)


def is_kernel(value: Tensor) -> bool:
    """Whether it is the weight of a convolution of several channels over several pixels."""
    return value.dim() == 4 and value.shape[2:].numel() > 1 and value.shape[1] > 1


class Sums(TorchDispatchMode):
    """Notes the strides of sums of gradients of convolutions, and of what is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_foreach_add_", "_foreach_copy_"):
            pairs = zip(args[0], args[1], strict=True)
            self.strides += [(mine.stride(), other.stride()) for mine, other in pairs if is_kernel(mine)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", True), ("adamw8bit", False)])
def test_weights_and_gradients_have_the_layout_of_the_maps(
    world: World, digits: Path, tmp_path: Path, optimizer: str, expected: bool
) -> None:
    """But not where scales belong to neighbours in the parameter; the copies of a rank hold the same numbers."""
    config = unet(digits, tmp_path, steps=2, optim__name=optimizer, performance__precision="bf16", batch__micro=8)
    with ExitStack() as stack:
        run = build(config, launch(0), world, stack)
        engine = run.state.engine
        with Sums() as sums:
            take_steps(run.state, run.batches, run.callbacks)
        weights = dict(engine.module.named_parameters())
        masters = assemble(world, engine.flats, [flat.master for flat in engine.flats], engine.shapes)
    kernels = [weight for weight in weights.values() if is_kernel(weight)]
    assert len(kernels) > 5
    assert all(w.is_contiguous(memory_format=torch.channels_last) == expected for w in kernels)
    assert len(sums.strides) == 2 * 2 * len(kernels)
    assert all(mine == other for mine, other in sums.strides)
    assert all(torch.equal(weights[name].float(), master.bfloat16().float()) for name, master in masters.items())


def test_frozen_weights_have_it_too() -> None:
    """As below a LoRA."""
    model = build_model(ADM, seed=0)
    kernels = [weight for weight in model.parameters() if is_kernel(weight)]
    before = [weight.clone() for weight in kernels]
    for weight in kernels:
        weight.requires_grad_(False)
    move_into(places_of(model), model, torch.float32, torch.device("cpu"))
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in kernels)
    assert all(map(torch.equal, kernels, before))


def test_its_checkpoints_are_those_of_the_other_engine(world: World, digits: Path, tmp_path: Path) -> None:
    """Names, shapes and places of all elements; the numbers differ by rounding."""
    for engine in ("flat", "deepspeed"):
        train(unet(digits, tmp_path / engine, engine), launch(0), world)
    ours, theirs = newest(tmp_path / "flat"), newest(tmp_path / "deepspeed")
    assert ours.manifest["parameters"] == theirs.manifest["parameters"]
    assert apart(losses(tmp_path / "flat"), losses(tmp_path / "deepspeed")) < 1e-5
    for kind in ("master", "ema/0.9", "exp_avg", "exp_avg_sq"):
        assert distance(ours.full(kind), theirs.full(kind)) < 1e-3, kind


@pytest.mark.nightly
def test_a_run_moves_between_engines_and_ranks(world: World, digits: Path, tmp_path: Path) -> None:
    order = [("flat", 0), ("deepspeed", 3), ("flat", 0), ("deepspeed", 1)]
    chain = [unet(digits, tmp_path / "chain", engine, n) for n, (engine, _) in enumerate(order, start=1)]
    values(forked_ranks(trained, chain, [stage for _, stage in order]))
    for folder in ("chain", "alone"):
        train(unet(digits, tmp_path / folder, steps=6), launch(0), world)
    assert apart(losses(tmp_path / "chain"), losses(tmp_path / "alone")) < 1e-5
    chained, alone = newest(tmp_path / "chain"), newest(tmp_path / "alone")
    for kind in ("master", "ema/0.9", "exp_avg", "exp_avg_sq"):
        assert distance(chained.full(kind), alone.full(kind)) < 1e-3, kind


@pytest.mark.parametrize("shape", [(3, 2, 3, 3), (1, 5, 1, 3)])
def test_a_fragment_has_the_elements_of_its_parameter_in_their_order(shape: Sequence[int]) -> None:
    weight = torch.randn(*shape)
    flat = torch.zeros(7 + weight.numel())
    fragment = Fragment("weight", 0, weight.numel(), 7, tuple(shape))
    fragment.write(flat, weight.flatten())
    assert torch.equal(fragment.of(flat), weight)
    assert torch.equal(flat[7:], weight.permute(0, 2, 3, 1).flatten())
