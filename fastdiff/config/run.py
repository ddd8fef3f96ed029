"""Configuration of a run: all options that affect its result, as frozen dataclasses.

The string below a field is its ``--help`` text. Cross-field checks raise ``ConfigError`` with the remedy. This module
imports no torch, so that ``--help`` is fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, cast

from fastdiff.config.argument_types import require_local
from fastdiff.config.data import DataConfig, ValidationConfig
from fastdiff.config.divergence import DivergenceConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig, networks
from fastdiff.config.objective import DdpmConfig, ObjectiveConfig
from fastdiff.config.timesteps import TimestepConfig
from fastdiff.errors import ConfigError, require
from fastdiff_kernels.names import BACKENDS, OPS, AttentionBackend, Backend

Precision = Literal["fp32", "bf16", "fp16"]
Device = Literal["auto", "cuda", "cpu"]
WIDEST = 12.0**-0.5
"""Relative width of the uniform mean of all weights so far. A wider power-function average would weight old weights
more than new ones."""
POLYNOMIAL_END = 1e-7
"""Learning rate at the end of --optim.schedule polynomial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch size per optimizer step and per forward pass."""

    samples: int = 256
    """Samples per optimizer step, over all ranks."""
    micro: int | None = None
    """Samples per rank per forward pass. None: samples / ranks, without accumulation."""

    def __post_init__(self) -> None:
        require(self.samples >= 1, f"--batch.samples {self.samples}: at least 1")
        require(self.micro is None or self.micro >= 1, f"--batch.micro {self.micro}: at least 1, or None")

    def per_rank(self, ranks: int) -> int:
        """Return the samples per rank per forward pass with ``ranks`` ranks."""
        return self.micro if self.micro is not None else max(1, self.samples // ranks)

    def accumulation(self, ranks: int) -> int:
        """Return the forward passes per optimizer step; ConfigError if the batch is not divisible."""
        micro = self.per_rank(ranks)
        together = micro * ranks
        if self.samples % together:
            below = self.samples // together * together
            near = [str(n) for n in (below, below + together) if n > 0]
            given = f"{micro} (--batch.micro) x {ranks} ranks" if self.micro is not None else f"{ranks} ranks"
            raise ConfigError(
                f"--batch.samples {self.samples} is not divisible by {together} = {given}; "
                f"nearest values: {', '.join(near)}"
            )
        return self.samples // together


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning rate."""

    name: Literal["adamw", "adamw8bit", "adamw8bit-bnb"] = "adamw"
    """adamw: torch, 8 bytes of state per parameter; adamw8bit: fastdiff's own, 2 bytes, with losses and checkpoints
    independent of the number of ranks and the ZeRO stage; adamw8bit-bnb: bitsandbytes, 2 bytes, requantised when these
    change."""
    lr: float = 1e-4
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Epsilon, added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip: float = 1.0
    """Maximum gradient norm over all parameters; 0: no clipping."""
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        "constant"
    )
    """Learning-rate schedule of diffusers.optimization.get_scheduler, counted in optimizer steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, f"--optim.lr {self.lr}: above 0")
        require(all(0 <= b < 1 for b in self.betas), f"--optim.betas {self.betas}: each from 0 to below 1")
        for name in ("eps", "weight_decay", "clip", "warmup_steps"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"--optim.{name} {value}: 0 or above")
        require(self.eps > 0 or self.name != "adamw8bit", "--optim.eps 0: above 0 with --optim.name adamw8bit")
        require(
            self.warmup_steps == 0 or self.schedule != "constant",
            "--optim.warmup_steps has no effect with --optim.schedule constant; "
            "use --optim.schedule constant_with_warmup",
        )
        require(
            self.schedule != "polynomial" or self.lr > POLYNOMIAL_END,
            f"--optim.lr {self.lr} with --optim.schedule polynomial: above {POLYNOMIAL_END}, at which it ends",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """Moving averages of the weights; samples and evaluations use the first."""

    rates: tuple[float, ...] = (0.9999,)
    """One exponential average per rate. Empty: none."""
    warmup: bool = False
    """Begin with lower rates, (1 + n) / (10 + n) at step n. For fine-tuning: otherwise its few steps hardly move an
    average that starts at the pretrained weights."""
    power_stds: tuple[float, ...] = ()
    """One power-function average (EDM2) per relative width, listed after those of --ema.rates; its time window grows
    with the training. With snapshots of 0.05 and 0.10, any width between and around them can be reconstructed after the
    training."""
    snapshot_every: int = 0
    """Optimizer steps between snapshots of the power-function averages; all are kept, in 16 bits. `fastdiff sample`,
    `evaluate` and `export` reconstruct the average of another --ema-std from them. 0: none."""

    def __post_init__(self) -> None:
        require(
            all(0.0 < std <= WIDEST for std in self.power_stds) and len(set(self.power_stds)) == len(self.power_stds),
            f"--ema.power_stds {self.power_stds}: different widths above 0 and at most {WIDEST:.4f} (the plain mean), "
            "for example 0.05 0.10",
        )
        require(self.snapshot_every >= 0, f"--ema.snapshot_every {self.snapshot_every}: at least 0")
        require(
            self.snapshot_every == 0 or len(self.power_stds) > 0,
            f"--ema.snapshot_every {self.snapshot_every} needs power-function averages: --ema.power_stds 0.05 0.10",
        )
        require(
            all(0.0 < rate < 1.0 for rate in self.rates) and len(set(self.rates)) == len(self.rates),
            f"--ema.rates {self.rates}: different values between 0 and 1, for example 0.999 0.9999",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceConfig:
    """Device, precision, compilation, memory and kernels."""

    device: Device = "auto"
    """auto: a GPU where there is one, otherwise the CPU; cuda: a GPU, as the presets made for GPUs ask; cpu: the CPU,
    even where there is a GPU. A GPU that torch cannot use is an error, not a run on the CPU."""
    precision: Precision = "bf16"
    """Dtype of weights and activations in the forward and backward pass; master weights are always fp32."""
    compile: bool | None = None
    """torch.compile of each block. None: on with CUDA, off on a CPU."""
    recompute: bool = False
    """Activation checkpointing: recompute each block in the backward pass to save memory."""
    grad_accum_dtype: Precision | None = None
    """Dtype in which the gradients of the micro-batches and ranks of a step are added up. None: fp32 in a new run, and
    in a resumed run the dtype that it has. The value of --performance.precision, bf16 or fp16, needs half the memory
    and traffic for them; bf16 sums of 256 micro-batches are 2 % off."""
    allow_tf32: bool = False
    """Let fp32 matrix products and convolutions round their inputs to TF32 (Ampere and newer)."""
    deterministic: bool = False
    """Add in a fixed order everywhere, so that also on a GPU a run and its resume on as many ranks are equal to the
    bit. Slower there; on a CPU it changes nothing. An operation without a fixed order ends the run."""
    kernels: str = "auto"
    """Backend of fastdiff's own ops: auto (Triton on a GPU, otherwise plain torch), triton, reference (plain torch) or
    compile (plain torch with torch.compile), then exceptions by op: auto,adaln=compile,loss=reference."""
    attention: AttentionBackend = "auto"
    """Backend of attention: auto (the fastest known for the GPU), sdpa (torch's choice), cudnn, flash, xformers, or
    reference (matrix products and a softmax)."""

    def __post_init__(self) -> None:
        self.kernel_backends()
        require(
            self.grad_accum_dtype in (None, "fp32", self.precision),
            f"--performance.grad_accum_dtype {self.grad_accum_dtype} with --performance.precision {self.precision}: "
            f"{' or '.join(dict.fromkeys(['fp32', self.precision]))}",
        )

    @property
    def sums(self) -> Precision:
        """Dtype in which gradients are added up."""
        return self.grad_accum_dtype or "fp32"

    def kernel_backends(self) -> dict[str, Backend]:
        """Return the backends that ``kernels`` forces, by op; other ops use their default.

        Raises:
            ConfigError: unknown op or backend, or an op that is named twice.
        """
        default, *exceptions = [part.strip() for part in self.kernels.split(",")]
        if "=" in default:
            default, exceptions = "auto", [default, *exceptions]
        named = [part.partition("=")[::2] for part in exceptions]
        for op, _ in named:
            require(op in OPS, f"{self._given()}: {op!r} is none of the ops {', '.join(OPS)}")
            require([o for o, _ in named].count(op) == 1, f"{self._given()}: {op} is named twice")
        chosen = dict.fromkeys(OPS, default) | dict(named)
        for backend in (default, *chosen.values()):
            require(
                backend in ("auto", *BACKENDS),
                f"{self._given()}: {backend!r} is none of auto, {', '.join(BACKENDS)}; "
                "write for example auto,adaln=compile",
            )
        return {op: cast(Backend, backend) for op, backend in chosen.items() if backend != "auto"}

    def _given(self) -> str:
        return f"--performance.kernels {self.kernels}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """Outputs of a run: folder, contents and intervals (in optimizer steps; 0: never)."""

    folder: str = ""
    """Run folder; default: runs/<preset>."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl and TensorBoard."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is always written at the end."""
    keep: int = 2
    """Number of newest checkpoints to keep. 1: none is left to fall back on if the newest is damaged."""
    failed_saves: int = 0
    """Consecutive checkpoints, or snapshots, that may fail before the run stops, for example because a disk is full.
    Above 0, all other files of the run wait in memory, too. The last checkpoint, at the end or on preemption, must
    succeed."""
    pinned_gib: float = 16.0
    """Limit, per rank, of the page-locked host memory through which a checkpoint leaves the GPU, in GiB; it stays
    locked for the whole run. A checkpoint has 16 bytes per parameter with AdamW and one average, shared by the ranks;
    what goes beyond the limit passes through ordinary memory, which is slower. Snapshots of the averages
    (--ema.snapshot_every) may lock as much again. 0: none."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Trackers of metrics and images, in addition to metrics.jsonl and samples/."""
    project: str = "fastdiff"
    """Name of the project in wandb."""
    sample_every: int = 1000
    """Steps between sample grids of a class-conditional model."""
    sample_steps: int = 20
    """Denoising steps of a grid (DPM-Solver++)."""
    sample_cfg: float = 1.5
    """Classifier-free guidance scale of a grid; 1: none."""

    def __post_init__(self) -> None:
        require_local("--output.folder", self.folder)
        least = {
            "keep": 1,
            "log_every": 1,
            "checkpoint_every": 0,
            "failed_saves": 0,
            "pinned_gib": 0,
            "sample_every": 0,
            "sample_steps": 1,
        }
        for name, value in least.items():
            require(getattr(self, name) >= value, f"--output.{name} {getattr(self, name)}: at least {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run."""

    samples: int = 1_024_000
    """Length of the run, in training samples."""
    seed: int = 0
    """Seed of all random numbers: initial weights, order, noise, timesteps, drops."""
    model: ModelConfig = field(default_factory=DiTConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    objective: ObjectiveConfig = field(default_factory=DdpmConfig)
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**64, f"--seed {self.seed}: from 0 to 2**64 - 1")
        if self.output.sample_every and not self.model.text_conditional:
            require(
                self.model.low_res_size == 0,
                "--output.sample_every: super-resolution models have no sample grids; set it to 0, and use "
                "`fastdiff sample --low-res`",
            )
            self._check_sampling("--output.sample_steps", self.output.sample_steps, "--output.sample_every 0")
        if self.validation.prompts and self.validation.every:
            self._check_sampling("--validation.steps", self.validation.steps, "--validation.every 0")
        require(
            self.divergence.policy != "rewind" or self.output.checkpoint_every > 0,
            "--divergence.policy rewind reloads a checkpoint, and --output.checkpoint_every 0 writes none; set it "
            "to the optimizer steps between two, for example 1000",
        )
        require(
            self.divergence.policy != "rewind" or self.output.keep > 1,
            "--divergence.policy rewind goes back behind a spike, and --output.keep 1 leaves only the newest "
            "checkpoint; set it to at least 2",
        )
        self._check_pretrained()
        self._check_objective()
        if self.samples < 1 or self.samples % self.batch.samples:
            steps = max(1, round(self.samples / self.batch.samples))
            raise ConfigError(
                f"--samples {self.samples} is not divisible by --batch.samples {self.batch.samples}; "
                f"nearest value: {steps * self.batch.samples} ({steps} steps)"
            )

    def _check_sampling(self, flag: str, steps: int, without: str) -> None:
        """Refuse settings that would fail at the first sample images, hours later."""
        most = self.objective.timesteps if isinstance(self.objective, DdpmConfig) else math.inf
        require(
            steps <= most,
            f"{flag} {steps}: at most --objective.timesteps {most}",
        )
        require(
            self.objective.determines_x0 or self._follows_pipeline(),
            "epsilon prediction cannot sample from zero terminal SNR (--objective.zero_terminal_snr, or schedule "
            f"jsd); use --objective.prediction v or x0, or turn the sampling off with {without}",
        )

    def _follows_pipeline(self) -> bool:
        """Whether a pipeline, which is read later, decides the prediction."""
        return self.objective.prediction == "auto" and bool(self.pretrained.path) and not self.pretrained.is_file

    def _check_objective(self) -> None:
        self.timesteps.check(self.objective)
        require(
            self.model.learn_sigma or not self.objective.learns_variance,
            f"--objective.variance {self.objective.step_variance} needs a model with twice the output channels: a DiT "
            "or an ADM UNet with --model.learn_sigma",
        )
        require(
            not self.objective.low_res_noise or self.model.low_res_size > 0,
            f"--objective.low_res_noise {self.objective.low_res_noise} is for super-resolution, an ADM UNet "
            "with --model.low_res_size; set it to 0",
        )

    def _check_pretrained(self) -> None:
        wants = {
            "--data.online": self.data.online,
            "--validation.prompts": bool(self.validation.prompts and self.validation.every),
        }
        for flag, wanted in wants.items():
            require(
                not wanted or (bool(self.pretrained.path) and not self.pretrained.is_file),
                f"{flag} needs --pretrained.path, a pipeline of diffusers; given {self.pretrained.path or 'none'}",
            )
        require(
            self.lora.rank == 0 or self.pretrained.weights,
            f"--lora.rank {self.lora.rank} needs --pretrained.weights and their --pretrained.path: an adapter is "
            "added to pretrained weights",
        )
        require(
            self.lora.rank == 0 or not self.pretrained.training,
            f"--lora.rank {self.lora.rank} with --pretrained.training: a published training has the state of the whole "
            "network, not of an adapter; leave out one of them",
        )
        require(
            not (self.pretrained.training and self.ema.power_stds),
            f"--ema.power_stds {' '.join(map(str, self.ema.power_stds))} with --pretrained.training: a "
            "power-function average needs the whole training history, and the published checkpoint has only its end; "
            "leave it out",
        )
        if self.lora.rank and not self.model.lora_targets:
            able = [network.title for network in networks().values() if network.lora_targets]
            raise ConfigError(
                f"--lora.rank {self.lora.rank} is for {' or '.join(able)}, not {self.model.title}; set it to 0"
            )
        # The network of a pipeline replaces --model.
        text = self.model.text_conditional or (self.pretrained.weights and not self.pretrained.is_file)
        require(
            not self.data.online or text,
            "--data.online is for text-conditional models; encode classes with `fastdiff encode`",
        )
        require(
            not self.validation.prompts or text,
            "--validation.prompts is for text-conditional models; others have sample grids (--output.sample_every)",
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.samples // self.batch.samples
