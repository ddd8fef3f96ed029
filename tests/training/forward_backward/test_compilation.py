"""Compilation before the first step: every latent size once, off the clock, and no bit of the run differs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters

from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.models import kernel_choice
from fastdiff.models.build import build_model
from fastdiff.models.pretrained.tiny_pipeline import UNETS
from fastdiff.parallel.world import World
from fastdiff.training import build as building
from fastdiff.training.loop import train
from fastdiff.training.metrics import Meters
from tests.support.inputs.text_runs import text_run
from tests.support.runs import assert_same_checkpoint, hexes, launch, losses, records, tiny

SIZES = ((8, 8), (4, 8), (8, 12))
"""The last has fewer samples than a batch."""
SAMPLES = (24, 16, 4)
WIDTH = 32
MODEL = replace(
    UNETS["sd15"],
    block_out_channels=(16,),
    attention_heads=(4,),
    transformer_layers=(1,),
    norm_num_groups=4,
)
"""One level: residual and transformer blocks with and without a skip connection, and so few graphs of each size."""


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random latents of three sizes with embeddings."""
    folder = tmp_path_factory.mktemp("data") / "buckets"
    columns = {
        "latent": Column(dtype="float16", shape=(4, *SIZES[0])),
        "context": Column(dtype="float16", shape=(5, WIDTH)),
    }
    info = DatasetInfo(
        columns=columns,
        normalisation=Normalisation(shift=(0.0,) * 4, scale=(1.0,) * 4),
        provenance=Provenance(source="test", transform="none"),
        buckets=SIZES,
    )
    generator = np.random.default_rng(0)
    null = {"context": np.zeros((5, WIDTH), np.float16)}
    with ShardWriter(folder, info, samples_per_shard=8, null=null) as writer:
        for bucket, count in enumerate(SAMPLES):
            for number in range(count):
                arrays = {
                    "latent": generator.standard_normal((4, *SIZES[bucket])).astype(np.float16),
                    "context": generator.standard_normal((5, WIDTH)).astype(np.float16),
                }
                writer.add(f"{bucket}{number:08d}", arrays, bucket=bucket)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are found, split and counted as always, and run without generated code."""
    monkeypatch.setattr(kernel_choice, "compile_options", lambda config: {"backend": "aot_eager"})
    torch._dynamo.reset()
    counters.clear()


def config_of(data: Path, folder: Path, **changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": MODEL,
        "pretrained": PretrainedConfig(),
        "objective": DdpmConfig(condition_dropout=0.1),
        "performance__compile": True,
        **changes,
    }
    return text_run(data, Path(), folder, 6, **given)


def assert_sizes_counted(output: str) -> None:
    said = [line for line in output.splitlines() if "compil" in line]
    for number, (height, width) in enumerate(SIZES[:2], 1):
        assert any(f"compiling the blocks for latents of {height}x{width}, size {number} of 2" in s for s in said)
    assert any("graphs in " in line and "latent sizes: 2" in line for line in said)


def noting(name: str, action: Callable[..., Any], order: list[str]) -> Callable[..., Any]:
    """``action``, each call of which adds ``name`` to ``order``."""

    def noted(*arguments: Any) -> Any:
        order.append(name)
        return action(*arguments)

    return noted


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        pytest.param(
            launch(0),
            {"timesteps__density": "importance", "performance__precision": "bf16", "batch__micro": 4},
            marks=pytest.mark.nightly,
        ),
        pytest.param(launch(1), {"performance__precision": "bf16", "batch__micro": 4}, marks=pytest.mark.nightly),
        pytest.param(launch(3), {"performance__recompute": True}, marks=pytest.mark.nightly),
        pytest.param(
            Launch(deepspeed={"zero_optimization": {"stage": 3}}),
            {"objective": DdpmConfig(condition_dropout=0.1, dream=True)},
            marks=pytest.mark.nightly,
        ),
        pytest.param(launch(1), {"model": UNETS["sd15"]}, marks=pytest.mark.nightly),
    ],
    ids=[
        "0-importance-bf16-accumulated",
        "1-bf16-accumulated",
        "3-recomputed",
        "3-dream-never-released",
        "1-levels-of-other-graphs",
    ],
)
def test_a_visit_of_every_size_changes_no_bit_and_leaves_nothing_to_compile(
    world: World,
    buckets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start: Launch,
    changes: dict[str, Any],
) -> None:
    order: list[str] = []
    with monkeypatch.context() as patches:
        for owner, name in ((building, "rehearse"), (Meters, "restart_clock"), (Meters, "start_step")):
            patches.setattr(owner, name, noting(name, getattr(owner, name), order))
        train(config_of(buckets, tmp_path / "visited", **changes), start, world)
    assert order[:3] == ["rehearse", "restart_clock", "start_step"], "the time is off the clock"
    visited = counters["stats"]["unique_graphs"]
    assert_sizes_counted(capsys.readouterr().err)
    monkeypatch.setattr(building, "rehearse", lambda state, callbacks: None)
    torch._dynamo.reset()
    counters.clear()
    train(config_of(buckets, tmp_path / "met", **changes), start, world)
    assert hexes(losses(tmp_path / "visited")) == hexes(losses(tmp_path / "met"))
    assert_same_checkpoint(tmp_path / "visited", tmp_path / "met")
    assert visited == counters["stats"]["unique_graphs"], "the graphs of the visit are those of the training"
    first, *others = [record["compile_s"] for record in records(tmp_path / "visited")]
    assert first > 0
    assert others == [0.0] * 5
    met = [record["compile_s"] for record in records(tmp_path / "met")]
    assert sum(seconds > 0 for seconds in met) == 2, "at the first step of either size"


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(("stage", "graphs"), [(1, 2), (3, 1)])
def test_the_first_blocks_of_an_adapted_network_are_compiled_as_they_are_trained(
    world: World, digits: Path, tmp_path: Path, stage: int, graphs: int, kind: Any
) -> None:
    """Without a gradient of their input, as a graph of its own; ZeRO-3 gives the input of every block one."""
    base = tmp_path / "base.safetensors"
    config = tiny(digits, tmp_path / "run", performance__compile=True)
    save_file({name: p.detach() for name, p in build_model(config.model).named_parameters()}, base)
    adapted = {"pretrained": PretrainedConfig(path=str(base), weights=True), "lora": LoraConfig(kind=kind, rank=2)}
    config = replace(config, **adapted)  # type: ignore[arg-type]
    train(config, launch(stage), world)
    first, *others = [record["compile_s"] for record in records(tmp_path / "run")]
    assert first > 0
    assert others == [0.0] * 5
    assert counters["stats"]["unique_graphs"] == graphs


def test_an_uncompiled_run_has_no_time_of_compilation(world: World, buckets: Path, tmp_path: Path) -> None:
    train(config_of(buckets, tmp_path / "run", performance__compile=False), launch(1), world)
    assert not any("compile_s" in record for record in records(tmp_path / "run"))
