"""LoRA under DeepSpeed: every ZeRO stage trains what plain torch trains, and nothing else."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fastdiff.config.deepspeed import resolve
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.models.build import Model, build_model
from fastdiff.models.lora import add_lora
from fastdiff.models.pretrained.tiny_pipeline import UNETS
from fastdiff.models.quantized import QuantizedLinear
from fastdiff.parallel.fragments import assemble
from fastdiff.parallel.world import World
from fastdiff.training.engines.build import build_engine
from tests.support.processes import run_ranks
from tests.support.runs import launch, tiny

STEPS = 3
CLIP = 1e-3
MODELS: dict[str, ModelConfig] = {
    "dit": DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10),
    "unet": UNETS["sd15"],
}
RUNS = [
    ("dit", "none", "fp32", "lora"),
    ("dit", "8bit", "fp32", "dora"),
    ("dit", "8bit", "fp32", "lora"),
    ("unet", "4bit", "fp32", "dora"),
    ("unet", "4bit", "fp32", "lora"),
    ("dit", "4bit", "bf16", "dora"),
    ("dit", "4bit", "bf16", "lora"),
    ("unet", "4bit", "fp32", "lokr"),
]
"""Network, quantisation, precision and kind of adapter; with 4 bits and recomputation."""
OPTIONS: dict[str, dict[str, Any]] = {"lokr": {"factor": 4, "targets": ("to_q", "proj_in", "conv1")}}


Values = dict[str, NDArray[np.float32]]


@dataclass
class Trained:
    """Results of a few steps."""

    losses: list[float]
    norms: list[float]
    weights: Values
    moments: Values
    frozen: list[str]
    packed: str


def config_of(kind: str, quantize: Any, precision: str, adapter: Any = "lora") -> RunConfig:
    performance = {"performance__precision": precision, "performance__recompute": quantize == "4bit"}
    config = tiny(Path(), Path(), model=MODELS[kind], performance__engine="deepspeed", **performance)
    lora = LoraConfig(kind=adapter, rank=2, alpha=3.0, quantize=quantize, **OPTIONS.get(adapter, {}))
    optim = AdamWConfig(lr=1e-2, schedule="constant", clip=CLIP)
    start = PretrainedConfig(path="somewhere", weights=True)
    return replace(config, pretrained=start, lora=lora, batch=BatchConfig(samples=8), optim=optim)


def network(config: RunConfig) -> Model:
    """Random weights also where a fresh network has zeros, so that every layer matters."""
    model = build_model(config.model, recompute=config.performance.recompute, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    add_lora(model, config.lora, seed=3)
    return model


def inputs(config: RunConfig, step: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's part of 8 samples."""
    generator = torch.Generator().manual_seed(step)
    everything = {
        "noisy": torch.randn(8, config.model.channels, 8, 8, generator=generator),
        "time": torch.randint(1000, (8,), generator=generator),
        "label": torch.randint(10, (8,), generator=generator),
        "context": torch.randn(8, 5, 32, generator=generator),
    }
    del everything["context" if config.model.kind == "dit" else "label"]
    return {name: value.chunk(ranks)[rank] for name, value in everything.items()}


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def frozen_digest(model: nn.Module) -> str:
    """Of every frozen parameter, partitioned or not, and of every buffer."""
    import deepspeed

    frozen = [p for p in model.parameters() if not p.requires_grad]
    partitioned = [p for p in frozen if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        return digest([*frozen, *model.buffers()])


def packed_digest(model: nn.Module) -> str:
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return digest(tensor for layer in layers for tensor in (layer.packed, layer.scale))


def values(tensors: Mapping[str, Tensor]) -> Values:
    """Return copies that outlive this process."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def train_with_engine(world: World, config: RunConfig, stage: int) -> Trained:
    model = network(config)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    settings = resolve(launch(stage).deepspeed, config, world.size)
    engine = build_engine(model, config, settings, world, type(model).block_classes)
    frozen, losses, norms = [frozen_digest(model)], [], []
    for step in range(STEPS):
        given = inputs(config, step, world.rank, world.size)
        loss = (engine(**given).float() - given["noisy"]).square().mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(math.fsum(world.gather(loss.item())) / world.size)
        norms.append(float(engine.grad_norm() or 0.0))
    frozen.append(frozen_digest(model))
    mine = {fragment.name for flat in engine.flats for fragment in flat.fragments}
    assert set().union(*world.gather(mine)) == set(engine.shapes) == trainable
    masters = [flat.master for flat in engine.flats]
    averages = [flat.state["exp_avg"].view(-1) for flat in engine.flats]
    weights, moments = (values(assemble(world, engine.flats, each, engine.shapes)) for each in (masters, averages))
    return Trained(losses, norms, weights, moments, frozen, packed_digest(model))


def every_stage(world: World) -> list[list[Trained]]:
    return [[train_with_engine(world, config_of(*run), stage) for stage in range(4)] for run in RUNS]


def train_with_torch(config: RunConfig) -> Trained:
    """Of the added matrices, by name, in fp32."""
    model = network(config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=config.optim.weight_decay)
    losses, norms = [], []
    for step in range(STEPS):
        given = inputs(config, step, 0, 1)
        loss = (model(**given) - given["noisy"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    moments = values({name: optimizer.state[p]["exp_avg"] for name, p in trained.items()})
    return Trained(losses, norms, values(trained), moments, [frozen_digest(model)], packed_digest(model))


@pytest.fixture(scope="module")
def stages() -> dict[tuple[str, ...], list[Trained]]:
    """Results of two ranks at each stage."""
    first, second = run_ranks(every_stage, ranks=2)
    for of_first, of_second in zip(first, second, strict=True):
        assert [t.frozen for t in of_first] == [t.frozen for t in of_second]
    return dict(zip(RUNS, first, strict=True))


def distance(found: Values, expected: Values) -> float:
    """Of all elements together, relative to the expected ones."""
    assert found.keys() == expected.keys()
    a, b = (np.concatenate([arrays[name].ravel() for name in expected]) for arrays in (found, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_every_stage_trains_the_adapter_as_plain_torch(
    run: tuple[str, ...], stages: dict[tuple[str, ...], list[Trained]]
) -> None:
    """Losses, clipped gradients (Adam's first moments) and weights; the norm is that of the adapter's gradient."""
    exact = run[2] == "fp32"
    expected = train_with_torch(config_of(*run))
    assert min(expected.norms) > 10 * CLIP, "the clip acts in every step"
    for found in stages[run]:
        assert found.losses == pytest.approx(expected.losses, rel=1e-5 if exact else 0.02)
        assert found.norms == pytest.approx(expected.norms, rel=1e-4 if exact else 0.1)
        assert distance(found.moments, expected.moments) < (1e-4 if exact else 0.1)
        assert distance(found.weights, expected.weights) < (1e-4 if exact else 0.05)


def test_the_flat_engine_trains_two_matrices_on_four_ranks() -> None:
    """At least two ranks own none of them, and have an average and a checkpoint of none."""
    config = config_of("dit", "none", "fp32")
    lora = replace(config.lora, targets=("blocks.0.attn.qkv",))
    config = replace(config, lora=lora, performance=replace(config.performance, engine="flat"))
    expected = train_with_torch(config)
    assert len(expected.weights) == 2
    for found in run_ranks(train_with_engine, config, 0, ranks=4):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert distance(found.weights, expected.weights) < 1e-4
        assert distance(found.moments, expected.moments) < 1e-4


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_nothing_frozen_moves(run: tuple[str, ...], stages: dict[tuple[str, ...], list[Trained]]) -> None:
    """No bit of it; and DeepSpeed's cast to bf16 leaves packed weights and their scales alone."""
    plain = network(config_of(*run))
    for found in stages[run]:
        before, after = found.frozen
        assert before == after
        assert found.packed == packed_digest(plain)
        if run[2] == "fp32":
            assert before == frozen_digest(plain)
