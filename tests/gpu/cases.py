"""Tiny runs that cover what a GPU computes: family, ZeRO stage, precision, recomputation, optimizer, LoRA, offload."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import save_file

from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.models.build import build_model
from fastdiff.models.pretrained.tiny_pipeline import Kind
from fastdiff_kernels.names import AttentionBackend
from tests.support.inputs.text_runs import text_run
from tests.support.runs import tiny

Stage = Literal["0", "1", "2", "3", "offload"]

DIT = DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10)
ADM = AdmConfig(
    channels=1, size=8, width=16, channel_mult=(1, 2), res_blocks=1, attention_resolutions=(4,), heads=2,
    norm_num_groups=8, classes=10, learn_sigma=True, dropout=0.1,
)  # fmt: skip
HYBRID = DdpmConfig(
    schedule="cosine", timesteps=400, rescale_timesteps=True, variance="learned_range", loss="rescaled_mse"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run; the same on every device."""

    family: Literal["dit", "adm", "sd15", "sdxl"]
    stage: Stage
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: Literal["adamw", "adamw8bit", "adamw8bit-bnb"] = "adamw"
    recompute: bool = False
    adapter: Literal["", "none", "8bit", "4bit"] = ""
    """Quantisation of the weights below a LoRA; empty: all weights are trained."""
    compile: bool | None = None
    """None: with CUDA."""
    attention: AttentionBackend = "auto"
    """``short``: with heads that it takes."""

    def __str__(self) -> str:
        """Id of the test."""
        parts = [self.family, f"zero{self.stage}", self.precision, self.optimizer]
        parts += ["recompute"] * self.recompute + [f"lora-{self.adapter}"] * bool(self.adapter)
        return "-".join([*parts, *[self.attention] * (self.attention != "auto"), *["compiled"] * bool(self.compile)])


CASES = [
    Case(family="dit", stage="1", precision="bf16"),
    Case(family="dit", stage="3", precision="bf16", optimizer="adamw8bit", recompute=True),
    Case(family="dit", stage="0", precision="fp32", optimizer="adamw8bit"),
    Case(family="dit", stage="2", precision="fp16", optimizer="adamw8bit-bnb"),
    Case(family="dit", stage="offload", precision="bf16", recompute=True),
    Case(family="adm", stage="1", precision="fp16", recompute=True),
    Case(family="adm", stage="3", precision="fp32"),
    Case(family="adm", stage="0", precision="bf16", optimizer="adamw8bit"),
    Case(family="adm", stage="2", precision="bf16", optimizer="adamw8bit-bnb"),
    Case(family="adm", stage="offload", precision="fp16"),
    Case(family="sd15", stage="0", precision="bf16"),
    Case(family="sd15", stage="1", precision="fp32", optimizer="adamw8bit-bnb"),
    Case(family="sd15", stage="2", precision="bf16", optimizer="adamw8bit", recompute=True),
    Case(family="sd15", stage="3", precision="fp16"),
    Case(family="sd15", stage="offload", precision="fp32", optimizer="adamw8bit"),
    Case(family="sdxl", stage="3", precision="bf16", recompute=True),
    Case(family="dit", stage="1", precision="bf16", adapter="4bit"),
    Case(family="dit", stage="3", precision="fp16", adapter="8bit"),
    Case(family="sd15", stage="3", precision="bf16", adapter="4bit", recompute=True),
    Case(family="sd15", stage="2", precision="fp32", adapter="none"),
    Case(family="dit", stage="1", precision="bf16", attention="short"),
]
"""Every family meets every stage (sdxl one of them), and every stage every precision that it has."""

ON_CPU = [
    replace(CASES[0], compile=True),
    CASES[1],
    replace(CASES[4], precision="fp32", optimizer="adamw8bit"),
    CASES[5],
    CASES[16],
    CASES[18],
]
"""What ``make test`` takes, on a CPU."""

BRIEFLY = [CASES[n] for n in (3, 7, 10, 15, 17, 19, 20)]
"""What ``make test`` takes for one step, on a CPU: what ``ON_CPU`` lacks of the values of each field."""


def each(on_gpu: list[Case], on_cpu: list[Case], by_day: list[Case] | None = None) -> list[Any]:
    """Parameters of a test: the device and the case; on a CPU some ``by_day``, or all, and the others by night."""
    marks = {case: () if by_day is None or case in by_day else (pytest.mark.nightly,) for case in on_cpu}
    return [
        *(pytest.param("cpu", case, id=f"cpu-{case}", marks=marks[case]) for case in on_cpu),
        *(pytest.param("cuda", case, id=f"cuda-{case}", marks=pytest.mark.gpu) for case in on_gpu),
    ]


@dataclass(frozen=True)
class Inputs:
    """Data of the families."""

    digits: Path
    text: Callable[[Kind], tuple[Path, Path]]
    """Returns captioned latents, and the pipeline whose UNet is trained."""
    weights: Path
    """Of the DiT, below its adapter."""

    def run(self, case: Case, folder: Path, steps: int = 4, **changes: Any) -> RunConfig:
        """Return the configuration of a case; ``changes`` replace fields of the parts by dotted name."""
        own: dict[str, Any] = {
            "optim__lr": 1e-3, "optim__name": case.optimizer, "performance__precision": case.precision,
            "performance__recompute": case.recompute, "performance__compile": case.compile,
            "performance__attention": case.attention,
        }  # fmt: skip
        adapter = {"lora": LoraConfig(rank=2, quantize=case.adapter)} if case.adapter else {}
        if case.family in ("sd15", "sdxl"):
            own |= adapter
            return text_run(*self.text(case.family), folder, steps=steps, kind=case.family, **own | changes)
        own["model"] = DIT if case.attention == "auto" else replace(DIT, hidden=128)  # heads of 64 channels
        if adapter:  # needs weights below
            own |= {"pretrained": PretrainedConfig(path=str(self.weights), weights=True), **adapter}
        if case.family == "adm":
            own |= {"model": ADM, "objective": HYBRID, "timesteps": TimestepConfig(density="importance")}
        return tiny(self.digits, folder, steps=steps, **own | changes)


def write_weights(path: Path) -> Path:
    """Write weights of the DiT that are nowhere zero, as those of a trained network."""
    save_file({name: value.detach() + 0.02 for name, value in build_model(DIT, seed=1).named_parameters()}, path)
    return path


def launch_of(stage: Stage) -> Launch:
    """ZeRO of this stage, every parameter really partitioned; ``offload``: ZeRO-3 with the optimizer on the host."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if stage == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    elif stage != "3":
        zero = {"stage": int(stage)}
    return Launch(deepspeed={"zero_optimization": zero, "fp16": {"initial_scale_power": 8}})


def deterministic() -> dict[str, Any]:
    """Changes of a run that make it equal to the bit to its repetition."""
    if "deterministic" in {field.name for field in fields(PerformanceConfig)}:
        return {"performance__deterministic": True}
    return {"performance__attention": "reference", "performance__kernels": "reference"}
