"""Compiled blocks: equal blocks share a graph whatever they drop, and compute the same as uncompiled ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fastdiff.config.deepspeed import resolve
from fastdiff.models.adm.blocks import ResBlock
from fastdiff.models.adm.network import AdmUNet
from fastdiff.models.blockwise import BlockwiseModel, run_block
from fastdiff.parallel.world import World
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff_kernels import dispatch
from fastdiff_kernels.names import Backend
from tests.support.references.adm_networks import SMALL, built, inputs
from tests.support.references.unet_reference import gradients
from tests.support.runs import launch, tiny

POSITION = torch.tensor([5, 2**40, 7])


def graphs(res_blocks: int, dropout: float, *, recompute: bool = False, compare: bool = False) -> int:
    """Graphs of a training step of an ADM UNet; ``compare``: its numbers are to be those of eager, exactly."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("eager")
    config = replace(SMALL["iddpm"], res_blocks=res_blocks, dropout=dropout)
    eager, model = built(config), built(config, recompute=recompute).compile_blocks(backend=counter)
    assert sum(isinstance(module, ResBlock) for module in model.modules()) == 4 * res_blocks + 4
    arguments = {**inputs(config), "position": POSITION}
    got = model(**arguments)
    slopes = gradients(model, got)
    if compare:
        expected = eager(**arguments)
        assert torch.equal(got, expected)
        assert all(torch.equal(slopes[name], slope) for name, slope in gradients(eager, expected).items())
    assert model.state_dict().keys() == eager.state_dict().keys()
    assert not torch._dynamo.utils.counters["graph_break"]
    return counter.frame_count


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_equal_blocks_share_a_graph_whatever_they_drop(backend: Backend) -> None:
    """And have the numbers of each block."""
    with dispatch.forced(dropout=backend):
        few, many = graphs(2, 0.3, compare=True), graphs(4, 0.3)
    assert few == many < 12, "12 and 20 residual blocks, each with a stream of its own"


def test_blocks_that_drop_nothing_or_are_recomputed_share_as_many() -> None:
    without, recomputed = graphs(2, 0.0), graphs(2, 0.3, recompute=True, compare=True)
    assert without == recomputed < 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()  # type: ignore[no-any-return]


class Network(BlockwiseModel):
    block_classes = (Block,)

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return run_block(self.block, x, recompute=True)  # type: ignore[no-any-return]


def test_the_limit_of_graphs_holds_in_every_thread() -> None:
    """Autograd recomputes blocks in a thread of its own; torch's limit is 8 graphs."""
    torch._dynamo.reset()
    network = Network().compile_blocks(backend="eager", dynamic=False)

    def backward(count: int) -> None:
        network(torch.ones(count, 3)).sum().backward()

    with ThreadPoolExecutor(1) as thread:
        for count in range(1, 11):
            thread.submit(backward, count).result()
        for count in range(11, 13):
            thread.submit(network(torch.ones(count, 3)).sum().backward).result()
    assert network.block.inner.bias.grad is not None


def learn(world: World, stage: int, *, changed: bool) -> list[float]:
    """Losses of a few steps of a network that drops; ``changed``: compiled and recomputed."""
    config = replace(SMALL["iddpm"], res_blocks=1, dropout=0.3)
    model = built(config, recompute=changed)
    if changed:
        torch._dynamo.reset()
        model.compile_blocks(backend="aot_eager")
    run = tiny(Path(), Path(), model=config)
    resolved = resolve(launch(stage).deepspeed, run, world.size)
    engine = DeepSpeedEngine(model, run, resolved, world, AdmUNet.block_classes)
    losses = []
    for step in range(3):
        arguments = {**inputs(config), "position": POSITION + step}
        loss = engine(arguments.pop("noisy"), arguments.pop("time"), **arguments).square().mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(float(loss.detach()))
    return losses


def test_compiled_recomputed_and_cut_by_zero3_they_drop_the_same(world: World) -> None:
    whole = learn(world, 0, changed=False)
    assert learn(world, 3, changed=True) == pytest.approx(whole, rel=1e-5)
    assert whole[0] != whole[-1]
