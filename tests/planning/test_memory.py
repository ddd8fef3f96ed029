"""Memory that a plan predicts against the memory that real ranks need: within a tenth.

A CPU has the classes of a GPU, with the copies of a save and the temporaries of an update beside them. The peak is
that of the resident memory, above a run of a tiny network in the same process, which has loaded every library.
"""

import ctypes
import gc
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.qwen_image import QwenImageConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.sd3 import SD3Config
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.networks.z_image import ZImageConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.build import build_model
from fastdiff.models.cost.memory import Setup, buffer_bytes, frozen_bytes
from fastdiff.models.cost.traced import Traced
from fastdiff.models.lora import add_lora
from fastdiff.models.transformers.adapter import DiffusersTransformer
from fastdiff.parallel.world import World
from fastdiff.planning.memory import Memory, memory
from fastdiff.planning.network import read_network
from fastdiff.planning.options import setup_for
from fastdiff.training.loop import train
from fastdiff_bench.measure import synthetic
from tests.support.forked import forked_ranks, values
from tests.support.runs import launch

DIT = DiTConfig(depth=6, hidden=384, heads=6, channels=4, size=16, classes=10)
WIDE = replace(DIT, hidden=768, heads=12)
"""Whose weights are large beside its activations."""
UNET = UNetConfig(
    size=16, block_out_channels=(96, 192, 384), attention_heads=(2, 4, 8), transformer_layers=(1, 1, 0),
    layers_per_block=1, cross_attention_dim=128,
)  # fmt: skip
ADM = AdmConfig(size=32, width=96, channel_mult=(1, 2, 4), res_blocks=1, attention_resolutions=(8,), classes=10)
FLUX2 = Flux2Config(
    channels=16, size=16, num_layers=2, num_single_layers=4, attention_head_dim=64, num_attention_heads=6,
    joint_attention_dim=128, axes_dims_rope=(16, 16, 16, 16), caption_tokens=64,
)  # fmt: skip
Z_IMAGE = ZImageConfig(
    channels=16, size=32, dim=384, n_layers=6, n_refiner_layers=1, n_heads=6, n_kv_heads=6, cap_feat_dim=128,
    axes_dims=(16, 24, 24), axes_lens=(128, 64, 64), caption_tokens=64,
)  # fmt: skip
QWEN_IMAGE = QwenImageConfig(
    size=32, num_layers=4, attention_head_dim=64, num_attention_heads=6, joint_attention_dim=128,
    axes_dims_rope=(16, 24, 24), caption_tokens=64,
)  # fmt: skip
SD3 = SD3Config(
    size=32, num_layers=4, attention_head_dim=64, num_attention_heads=6, joint_attention_dim=128,
    caption_projection_dim=384, pooled_projection_dim=64, pos_embed_max_size=32, dual_attention_layers=(0, 1),
    caption_tokens=64,
)  # fmt: skip
FAMILIES = (FLUX2, Z_IMAGE, QWEN_IMAGE, SD3)
ADAPTER = LoraConfig(rank=8)
TINY: dict[str, ModelConfig] = {
    "dit": replace(DIT, depth=1, hidden=48),
    "unet": replace(UNET, block_out_channels=(32, 32, 32)),
    "adm": replace(ADM, width=32),
    "flux2": replace(FLUX2, num_layers=1, num_single_layers=1, num_attention_heads=1),
    "z-image": replace(Z_IMAGE, n_layers=1, dim=64, n_heads=1, n_kv_heads=1),
    "qwen-image": replace(QWEN_IMAGE, num_layers=1, num_attention_heads=1),
    "sd3": replace(SD3, num_layers=2, num_attention_heads=1, caption_projection_dim=64, dual_attention_layers=(0,)),
}
_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Case:
    model: ModelConfig
    stage: int
    ranks: int
    precision: str
    optimizer: str
    recompute: bool = False
    stored: int = 0
    accumulation: int = 1
    micro: int = 16
    lora: LoraConfig = field(default_factory=LoraConfig)
    in_order: bool = False

    @property
    def name(self) -> str:
        again = (", recomputed" if self.recompute else "") + (f" but {self.stored}" if self.stored else "")
        adapter = f", {kind_of(self.lora).title} on {self.lora.quantize}" if self.lora.rank else ""
        optimizer = f"{self.optimizer}{again}{adapter}{', in order' if self.in_order else ''}"
        return f"{self.model.kind}, ZeRO-{self.stage}, {self.ranks} ranks, {self.precision}, {optimizer}"

    def config(self, data: Path, folder: Path) -> RunConfig:
        samples, convention = self.micro * self.ranks * self.accumulation, self.model.flow_convention
        objective = DdpmConfig() if convention is None else FlowConfig(convention=convention)
        return RunConfig(
            samples=2 * samples,
            model=self.model,
            lora=self.lora,
            pretrained=PretrainedConfig(path=str(_place(data, self.model)), weights=True)
            if self.lora.rank
            else PretrainedConfig(),
            objective=objective,
            data=DataConfig(path=str(data), loader="prefetch"),
            batch=BatchConfig(samples=samples, micro=self.micro),
            optim=AdamWConfig(name=self.optimizer),  # type: ignore[arg-type]
            ema=EmaConfig(rates=(0.9,)),
            performance=PerformanceConfig(
                device="cpu",
                precision=self.precision,  # type: ignore[arg-type]
                recompute=self.recompute,
                stored_blocks=self.stored,
                grad_accum_order="micro_batches" if self.in_order else "ranks",
            ),
            output=OutputConfig(folder=str(folder), checkpoint_every=0, sample_every=0),
        )


OFTEN = (Case(DIT, 2, 2, "fp32", "adamw", recompute=True),)
CASES = (
    *OFTEN,
    Case(WIDE, 0, 1, "fp32", "adamw", micro=4, lora=LoraConfig(rank=8)),
    Case(WIDE, 0, 1, "fp32", "adamw", micro=4, lora=LoraConfig(kind="dora", rank=8)),
    *(Case(model, 0, 1, "fp32", "adamw", micro=4, lora=ADAPTER, recompute=True) for model in FAMILIES),
    *(Case(model, 3, 2, "bf16", "adamw", micro=4) for model in FAMILIES),
    *(Case(SD3, 0, 1, "fp32", "adamw", lora=ADAPTER, recompute=True, stored=stored) for stored in (1, 3)),
    *(Case(UNET, 0, 1, "fp32", "adamw", micro=48, recompute=True, stored=stored) for stored in (5, 12)),
    Case(DIT, 0, 1, "fp32", "adamw"),
    Case(UNET, 3, 2, "fp32", "adamw", micro=8),
    Case(DIT, 0, 2, "bf16", "adamw8bit", accumulation=2),
    Case(DIT, 1, 2, "bf16", "adamw"),
    Case(DIT, 3, 2, "bf16", "adamw8bit", accumulation=2),
    Case(UNET, 0, 1, "fp32", "adamw8bit", recompute=True),
    Case(UNET, 1, 1, "fp32", "adamw", accumulation=2),
    Case(UNET, 2, 2, "fp32", "adamw8bit"),
    Case(ADM, 0, 2, "fp32", "adamw"),
    Case(ADM, 1, 2, "fp32", "adamw8bit", recompute=True),
    Case(ADM, 3, 1, "bf16", "adamw"),
    Case(DIT, 0, 2, "bf16", "adamw", accumulation=2, in_order=True),
    Case(DIT, 1, 2, "fp32", "adamw", accumulation=2, in_order=True),
    Case(DIT, 2, 2, "bf16", "adamw8bit", in_order=True),
    Case(DIT, 3, 2, "bf16", "adamw", accumulation=2, in_order=True),
)


def predicted(case: Case) -> Memory:
    config = case.config(Path("data"), Path("run"))
    network = read_network(config, torch.device("cpu"))
    start = launch(case.stage).deepspeed
    assert start is not None
    setup = setup_for(config, start, network, case.ranks)
    return memory(setup, network.traced(config.performance), accumulates=case.accumulation > 1, on_cpu=True)


def test_only_state_in_blocks_is_updated_through_tables_of_blocks() -> None:
    case = Case(TINY["dit"], 2, 2, "fp32", "adamw")
    found = {name: predicted(replace(case, optimizer=name)).update for name in ("adamw", "adamw8bit", "adamw8bit-bnb")}
    assert found["adamw8bit"] > found["adamw"] == found["adamw8bit-bnb"]


def resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peak(world: World, config: RunConfig, stage: int) -> int:
    """Return the peak of a run in bytes above what the process has after a tiny one."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)  # what is freed goes back to the system at once
    folder = config.output.folder
    tiny = replace(
        config, model=TINY[config.model.kind], output=replace(config.output, folder=f"{folder}-tiny"),
        performance=replace(config.performance, stored_blocks=0),
    )  # fmt: skip
    if config.lora.rank:
        tiny = replace(tiny, pretrained=replace(config.pretrained, path=_base(Path(f"{folder}-base"), tiny.model)))
    train(tiny, launch(stage), world)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = resident("VmRSS")
    train(config, launch(stage), world)
    return resident("VmHWM") - before


def _base(folder: Path, model: ModelConfig) -> str:
    """Write weights for a LoRA to start from: those of a pipeline, or a file."""
    folder.mkdir(exist_ok=True)
    network, place = build_model(model), _place(folder, model)
    if isinstance(network, DiffusersTransformer):
        network.network.save_pretrained(place / "transformer")
    else:
        save_file(network.state_dict(), place)
    return str(place)


def _place(folder: Path, model: ModelConfig) -> Path:
    return folder / ("base" if isinstance(model, DiffusersTransformerConfig) else "base.safetensors")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case in OFTEN else pytest.mark.nightly) for case in CASES],
)
def test_predicted_memory_is_measured(case: Case, tmp_path: Path) -> None:
    data = synthetic.write(tmp_path / "data", case.model, 64)
    if case.lora.rank:
        _base(data, case.model)
    measured = max(values(forked_ranks(peak, case.config(data, tmp_path / "run"), case.stage, ranks=case.ranks)))
    found = predicted(case)
    assert found.peak / measured == pytest.approx(1, abs=0.1), f"{measured / 2**20:.0f} MiB measured, {found}"


NOTHING = Traced(
    matmul=0.0, convolution=0.0, attention=0.0, short_attention=0.0, bytes=0.0, launches=0, recomputed=0.0,
    saved=0.0, saved_again=0.0, peaks=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("quantize", "kind"), [("none", "lora"), ("8bit", "lora"), ("4bit", "lora"), ("none", "dora"), ("4bit", "dora")]
)
def test_the_weights_of_a_lora_are_those_of_its_network(quantize: Any, kind: Any) -> None:
    """Trained, frozen and quantised ones, against the network with values; the passes then need less."""
    model = replace(DIT, depth=1)
    config = Case(model, 0, 1, "bf16", "adamw", lora=LoraConfig(kind=kind, rank=4, quantize=quantize)).config(
        Path(), Path()
    )
    real = build_model(model)
    frozen = sum(parameter.numel() for parameter in real.parameters())
    whole = read_network(replace(config, lora=LoraConfig()), torch.device("cpu"))
    add_lora(real, config.lora, seed=0)
    found = read_network(config, torch.device("cpu"))
    assert found.parameters == tuple(p.numel() for p in real.parameters() if p.requires_grad)
    magnitudes = {"lora": 0, "dora": 384 * 3 + 384}[kind]
    assert (found.trained, found.frozen) == (2 * 4 * (384 + 384 * 3 + 384 + 384) // 2 + magnitudes, frozen)
    assert found.frozen_bytes == frozen_bytes(real, "bf16")
    assert found.buffer_bytes == buffer_bytes(real)
    passes = [network.traced(config.performance).matmul for network in (found, whole)]
    assert passes[0] < 0.8 * passes[1], "no gradients of frozen weights"


@pytest.mark.parametrize("ranks", [1, 2])
def test_graphs_keep_the_memory_of_the_passes_beside_a_validation(ranks: int) -> None:
    """By hand, as below: with gradients of weights in the pass, and no bucket on two ranks."""
    setup = Setup(
        trained=1000, frozen_bytes=0, buffer_bytes=0, ranks=ranks, stage=0, flat=True, offload=False, precision="bf16",
        sums="fp32", optimizer="adamw", averages=1, micro=4, recompute=False, several=True,
    )  # fmt: skip
    traced = replace(NOTHING, saved=10.0, peaks=((10.0, 2000.0),))
    eager = memory(setup, traced, validates=True)
    graph = memory(replace(setup, captured=True), traced, validates=True)
    assert (graph.graphs, graph.activations) == (4 * 10 + 2 * 1000, 0)
    assert (eager.graphs, eager.activations) == (0, 4 * 10 + (2 * 1000 if ranks == 1 else 0))
    assert (eager.buffers, graph.buffers) == ((ranks - 1) * 2 * 1000, 0)
    assert graph.peak - graph.held == graph.validation == 2 * 1000
    assert graph.held == eager.held - eager.buffers + graph.graphs


@pytest.mark.parametrize(("bucket", "in_bucket"), [(300, 300), (5000, 1000)])
def test_zero3_keeps_a_bucket_and_passes_gradients_through_it(bucket: int, in_bucket: int) -> None:
    """By hand: 1000 weights in bf16, sums of gradients in fp32; a bucket holds no more than there is."""
    setup = Setup(
        trained=1000, frozen_bytes=64, buffer_bytes=0, ranks=2, stage=3, flat=False, offload=False, precision="bf16",
        sums="fp32", optimizer="adamw", averages=1, micro=4, recompute=False, several=True,
    )  # fmt: skip
    traced = replace(NOTHING, saved=10.0, peaks=((10.0, 2000.0),))
    found = memory(setup, traced, bucket=bucket)
    assert found.buffers == 4 * in_bucket
    assert found.workspace == 2 * 1000 + 64, "all weights are gathered"
    came_and_joined, cut = 2 * 2 * in_bucket, 4 * in_bucket
    assert found.activations == pytest.approx(4 * 10 + came_and_joined + cut)
