"""Everything that decides the result of a run, as frozen dataclasses.

The string below a field is its ``--help`` text. Cross-field checks raise ``ConfigError`` with the remedy. This module
imports no torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from fastdiff.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]
KernelBackend = Literal["triton", "reference", "compile"]
KERNEL_OPS = ("philox", "noising", "loss", "group_norm", "adaln", "adamw8bit")
"""The ops of ``fastdiff_kernels.dispatch``, without its torch."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTConfig:
    """A diffusion transformer (Peebles & Xie 2023, arXiv:2212.09748)."""

    depth: int = 28
    """Number of transformer blocks."""
    hidden: int = 1152
    """Width of a token."""
    heads: int = 16
    """Attention heads."""
    patch: int = 2
    """Side of a patch, in latent pixels."""
    channels: int = 4
    """Channels of the latents."""
    size: int = 32
    """Height and width of the latents."""
    classes: int = 1000
    """Number of classes; the null class of classifier-free guidance comes on top."""
    mlp_ratio: float = 4.0
    """Width of the MLP over the width of a token."""
    learn_sigma: bool = False
    """Twice the output channels, the second half for the variance, as in the published checkpoints."""

    def __post_init__(self) -> None:
        for name in ("depth", "hidden", "heads", "patch", "channels", "size", "classes"):
            _require(getattr(self, name) >= 1, f"--model.{name} {getattr(self, name)}: at least 1")
        _require(
            self.hidden % self.heads == 0,
            f"--model.hidden {self.hidden} is not divisible by --model.heads {self.heads}; "
            f"choose a multiple, for example {self.hidden // self.heads * self.heads or self.heads}",
        )
        _require(
            self.hidden % 4 == 0,
            f"--model.hidden {self.hidden} must be divisible by 4 (the sin-cos position embedding)",
        )
        _require(
            self.size % self.patch == 0,
            f"--model.size {self.size} is not divisible by --model.patch {self.patch}",
        )


DIT_SIZES: dict[str, tuple[int, int, int]] = {
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 16),
}
"""Depth, hidden width and heads of the published sizes (table 1 of Peebles & Xie 2023)."""

DIT_PATCHES = (2, 4, 8)
"""Patch sides of the published models."""


def dit_config(
    name: str,
    *,
    size: int = 32,
    channels: int = 4,
    classes: int = 1000,
    learn_sigma: bool = False,
) -> DiTConfig:
    """Configuration of a published size.

    Args:
        name: ``"DiT-S/2"`` ... ``"DiT-XL/8"``.
        size: Height and width of the latents: 32 for images of 256 px, 64 for 512 px.
        channels: Channels of the latents.
        classes: Number of classes without the null class.
        learn_sigma: Twice the output channels, as the published checkpoints have.

    Raises:
        ConfigError: ``name`` is none of the twelve.
    """
    names = {f"DiT-{letter}/{patch}": (letter, patch) for letter in DIT_SIZES for patch in DIT_PATCHES}
    if name not in names:
        raise ConfigError(f"model {name!r} is unknown; choose one of {', '.join(names)}")
    letter, patch = names[name]
    depth, hidden, heads = DIT_SIZES[letter]
    return DiTConfig(
        depth=depth, hidden=hidden, heads=heads, patch=patch,
        size=size, channels=channels, classes=classes, learn_sigma=learn_sigma,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """What the model predicts from which noise (DDPM with a discrete time)."""

    schedule: Literal["linear", "scaled_linear", "cosine"] = "linear"
    """Noise schedule: linear (DDPM, DiT), scaled_linear (Stable Diffusion), cosine (IDDPM)."""
    timesteps: int = 1000
    """Number of noise levels T."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that the last step is pure noise (Lin et al. 2023, arXiv:2305.08891)."""
    prediction: Literal["epsilon", "v", "x0"] = "epsilon"
    """What the model predicts."""
    weighting: Literal["auto", "none", "min_snr", "soft_min_snr", "p2", "debiased", "snr"] = "auto"
    """Weight of the loss by timestep: none (plain MSE), min_snr, soft_min_snr, p2 (gamma 1, k 1), debiased, or snr
    (plain MSE of the noise, whatever is predicted). auto: min_snr if its gamma is given, else none."""
    min_snr_gamma: float | None = None
    """Clamp of Min-SNR (Hang et al. 2023, arXiv:2303.09556) and of its soft form. None: 5, as is usual, if one of them
    is the weighting."""
    noise_offset: float = 0.0
    """Size of a noise constant over each channel, added to the noise; 0.05-0.1 is usual."""
    input_perturbation: float = 0.0
    """Extra noise on the input only (Ning et al. 2023, arXiv:2301.11706); 0.1 is usual."""
    label_dropout: float = 0.1
    """Share of the samples whose class is replaced by the null class (classifier-free guidance)."""

    def __post_init__(self) -> None:
        _require(self.timesteps >= 2, f"--objective.timesteps {self.timesteps}: at least 2")
        _require(
            self.schedule != "linear" or self.timesteps > 20,
            f"--objective.timesteps {self.timesteps}: the linear schedule needs more than 20; "
            "use --objective.schedule cosine",
        )
        for name in ("noise_offset", "input_perturbation"):
            value = getattr(self, name)
            _require(0.0 <= value < math.inf, f"--objective.{name} {value}: 0 (none) or a finite number above")
        _require(
            0.0 <= self.label_dropout <= 1.0,
            f"--objective.label_dropout {self.label_dropout}: a share from 0 to 1",
        )
        _require(
            self.min_snr_gamma is None or 0 < self.min_snr_gamma < math.inf,
            f"--objective.min_snr_gamma {self.min_snr_gamma}: above 0, or None",
        )
        _require(
            self.min_snr_gamma is None or self.weighting in ("auto", "min_snr", "soft_min_snr"),
            f"--objective.min_snr_gamma {self.min_snr_gamma}: --objective.weighting {self.weighting} has no such "
            "clamp; leave one of them out, or use min_snr or soft_min_snr",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the latents come from and in which order they are seen."""

    path: str = ""
    """Folder of latent shards, as written by `fastdiff encode`."""
    shuffle_shards: int = 16
    """Samples are shuffled inside windows of this many (shuffled) shards."""
    loader: Literal["auto", "dali", "prefetch"] = "auto"
    """auto: DALI where it is installed, else the plain pinned-memory prefetcher; the batches are the same."""
    prefetch: int = 4
    """Micro-batches that are read ahead."""

    def __post_init__(self) -> None:
        _require(self.shuffle_shards >= 1, f"--data.shuffle_shards {self.shuffle_shards}: at least 1")
        _require(self.prefetch >= 1, f"--data.prefetch {self.prefetch}: at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How many samples make one optimizer step."""

    samples: int = 256
    """Samples per optimizer step, over all ranks."""
    micro: int | None = None
    """Samples per rank per forward pass. None: samples / ranks, without accumulation."""

    def __post_init__(self) -> None:
        _require(self.samples >= 1, f"--batch.samples {self.samples}: at least 1")
        _require(self.micro is None or self.micro >= 1, f"--batch.micro {self.micro}: at least 1, or None")

    def per_rank(self, ranks: int) -> int:
        """Samples per rank per forward pass with ``ranks`` ranks."""
        return self.micro if self.micro is not None else max(1, self.samples // ranks)

    def accumulation(self, ranks: int) -> int:
        """Forward passes per optimizer step with ``ranks`` ranks; ConfigError if the batch does not divide."""
        micro = self.per_rank(ranks)
        together = micro * ranks
        if self.samples % together:
            below = self.samples // together * together
            near = [str(n) for n in (below, below + together) if n > 0]
            given = f"{micro} (--batch.micro) x {ranks} ranks" if self.micro is not None else f"{ranks} ranks"
            raise ConfigError(
                f"--batch.samples {self.samples} does not divide by {together} = {given}; "
                f"nearest values: {', '.join(near)}"
            )
        return self.samples // together


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning rate."""

    name: Literal["adamw", "adamw8bit", "adamw8bit-bnb"] = "adamw"
    """adamw: torch, 8 bytes of state per parameter; adamw8bit: fastdiff's own, 2 bytes, whose losses and checkpoints
    do not depend on ranks and ZeRO stage; adamw8bit-bnb: bitsandbytes, 2 bytes, tied to both."""
    lr: float = 1e-4
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient over all parameters; 0: no clipping."""
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        "constant"
    )
    """Learning-rate schedule of transformers.get_scheduler, counted in optimizer steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""

    def __post_init__(self) -> None:
        _require(0 < self.lr < math.inf, f"--optim.lr {self.lr}: above 0")
        _require(all(0 <= b < 1 for b in self.betas), f"--optim.betas {self.betas}: each from 0 to below 1")
        for name in ("eps", "weight_decay", "clip", "warmup_steps"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"--optim.{name} {value}: 0 or above")
        _require(self.eps > 0 or self.name != "adamw8bit", "--optim.eps 0: above 0 with --optim.name adamw8bit")
        _require(
            self.warmup_steps == 0 or self.schedule != "constant",
            "--optim.warmup_steps has no effect with --optim.schedule constant; "
            "use --optim.schedule constant_with_warmup",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """Exponential moving averages of the weights."""

    rates: tuple[float, ...] = (0.9999,)
    """One average per rate; the first is the one that samples and evaluations use. Empty: none."""

    def __post_init__(self) -> None:
        _require(
            all(0.0 < rate < 1.0 for rate in self.rates) and len(set(self.rates)) == len(self.rates),
            f"--ema.rates {self.rates}: different values between 0 and 1, for example 0.999 0.9999",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceConfig:
    """How the same numbers are computed."""

    precision: Precision = "bf16"
    """Weights and activations of the forward and backward pass; master weights are fp32 always."""
    compile: bool | None = None
    """torch.compile of each block. None: on with CUDA, off on a CPU."""
    recompute: bool = False
    """Activation checkpointing: recompute each block in the backward pass, for memory."""
    kernels: str = "auto"
    """Who computes fastdiff's own ops: auto (Triton on a GPU, else plain torch), triton, reference (plain torch) or
    compile (plain torch by torch.compile), then exceptions: auto,adaln=compile,loss=reference."""
    attention: Literal["auto", "sdpa", "cudnn", "flash", "xformers", "reference"] = "auto"
    """Who computes attention: auto (the fastest known for the GPU), sdpa (torch's choice), cudnn, flash, xformers, or
    reference (matrix products and a softmax)."""

    def __post_init__(self) -> None:
        self.kernel_backends()

    def kernel_backends(self) -> dict[str, KernelBackend]:
        """What ``kernels`` forces, by op; an op that is not named has its default.

        Raises:
            ConfigError: an op or an implementation that does not exist, or an op that is named twice.
        """
        default, *exceptions = [part.strip() for part in self.kernels.split(",")]
        if "=" in default:
            default, exceptions = "auto", [default, *exceptions]
        named = [part.partition("=")[::2] for part in exceptions]
        for op, _ in named:
            _require(op in KERNEL_OPS, f"{self._given()}: {op!r} is none of the ops {', '.join(KERNEL_OPS)}")
            _require([o for o, _ in named].count(op) == 1, f"{self._given()}: {op} is named twice")
        chosen = dict.fromkeys(KERNEL_OPS, default) | dict(named)
        for backend in (default, *chosen.values()):
            _require(
                backend in ("auto", *get_args(KernelBackend)),
                f"{self._given()}: {backend!r} is none of auto, {', '.join(get_args(KernelBackend))}; "
                "write for example auto,adaln=compile",
            )
        return {op: cast(KernelBackend, backend) for op, backend in chosen.items() if backend != "auto"}

    def _given(self) -> str:
        return f"--performance.kernels {self.kernels}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """What the run writes, where and how often (in optimizer steps; 0: never)."""

    folder: str = ""
    """Run folder; default: runs/<preset>."""
    log_every: int = 50
    """Steps between two lines of metrics.jsonl and TensorBoard."""
    checkpoint_every: int = 1000
    """Steps between two checkpoints; one is always written at the end."""
    keep: int = 2
    """Checkpoints that are kept, newest first; at least 2."""
    sample_every: int = 1000
    """Steps between two grids of generated samples."""
    sample_steps: int = 20
    """Denoising steps of a grid (DPM-Solver++)."""
    sample_cfg: float = 1.5
    """Classifier-free guidance scale of a grid; 1: none."""

    def __post_init__(self) -> None:
        _require(self.keep >= 2, f"--output.keep {self.keep}: at least 2, so that one verified checkpoint is left")
        for name, least in (("log_every", 1), ("checkpoint_every", 0), ("sample_every", 0), ("sample_steps", 1)):
            _require(getattr(self, name) >= least, f"--output.{name} {getattr(self, name)}: at least {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run."""

    samples: int = 1_024_000
    """Length of the run, in training samples."""
    seed: int = 0
    """Key of every random number: initial weights, order, noise, timesteps, drops."""
    model: DiTConfig = field(default_factory=DiTConfig)
    objective: DiffusionConfig = field(default_factory=DiffusionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**64, f"--seed {self.seed}: from 0 to 2**64 - 1")
        if self.output.sample_every:
            self._check_sampling()
        if self.samples < 1 or self.samples % self.batch.samples:
            steps = max(1, round(self.samples / self.batch.samples))
            raise ConfigError(
                f"--samples {self.samples} does not divide by --batch.samples {self.batch.samples}; "
                f"nearest value: {steps * self.batch.samples} ({steps} steps)"
            )

    def _check_sampling(self) -> None:
        """Refuse now what would otherwise fail at the first grid, hours later."""
        _require(
            self.output.sample_steps <= self.objective.timesteps,
            f"--output.sample_steps {self.output.sample_steps}: at most --objective.timesteps "
            f"{self.objective.timesteps}",
        )
        _require(
            not self.objective.zero_terminal_snr or self.objective.prediction != "epsilon",
            "no image can be drawn from pure noise by predicting it: with --objective.zero_terminal_snr use "
            "--objective.prediction v or x0, or draw no grids with --output.sample_every 0",
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.samples // self.batch.samples
