"""Compiled blocks: equal blocks share a graph whatever they drop, and compute the same as uncompiled ones."""

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
from tests.support.nights import by_day
from tests.support.references.adm_networks import SMALL, built, inputs
from tests.support.references.unet_reference import gradients
from tests.support.runs import launch, tiny

POSITION = torch.tensor([5, 2**40, 7])


def step(counter: CompileCounterWithBackend, res_blocks: int, dropout: float, *, stored: int | None = None) -> None:
    """Check that a training step of a compiled ADM UNet has the output and the gradients of eager, exactly."""
    config = replace(SMALL["iddpm"], res_blocks=res_blocks, dropout=dropout)
    eager, model = built(config), built(config, recompute=stored is not None).store_blocks(stored or 0)
    model.compile_blocks(backend=counter)
    assert sum(isinstance(module, ResBlock) for module in model.modules()) == 4 * res_blocks + 4
    arguments = {**inputs(config), "position": POSITION}

    def results(network: AdmUNet) -> dict[str, Tensor]:
        output = network(**arguments)
        return {"output": output, **gradients(network, output)}

    expected, got = results(eager), results(model)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert got.keys() == expected.keys()
    assert model.state_dict().keys() == eager.state_dict().keys()


def new_counter() -> CompileCounterWithBackend:
    """A compiler that counts its graphs, after all others are forgotten."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return CompileCounterWithBackend("eager")


@pytest.mark.parametrize("backend", by_day(["triton"], "reference"))
def test_equal_blocks_share_a_graph_whatever_they_drop(backend: Backend) -> None:
    """And have the numbers of each block."""
    counter = new_counter()
    with dispatch.forced(dropout=backend):
        step(counter, 2, 0.3)
        few = counter.frame_count
        step(counter, 3, 0.3)
    assert 0 < few == counter.frame_count < 12, "12 and 16 residual blocks, each with a stream of its own"
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.nightly
def test_blocks_that_drop_nothing_or_are_recomputed_share_as_many() -> None:
    without = new_counter()
    step(without, 2, 0.0)
    assert not torch._dynamo.utils.counters["graph_break"]
    for stored in (0, 5):
        recomputed = new_counter()
        step(recomputed, 2, 0.3, stored=stored)
        assert 0 < without.frame_count == recomputed.frame_count < 12
        assert not torch._dynamo.utils.counters["graph_break"]


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
    config = replace(SMALL["iddpm"], channel_mult=(1,), attention_resolutions=(8,), res_blocks=1, dropout=0.3)
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


@pytest.mark.nightly
def test_compiled_recomputed_and_cut_by_zero3_they_drop_the_same(world: World) -> None:
    whole = learn(world, 0, changed=False)
    assert learn(world, 3, changed=True) == pytest.approx(whole, rel=1e-5)
    assert whole[0] != whole[-1]
