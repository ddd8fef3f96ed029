"""Configuration of a run: all options that affect its result, as frozen dataclasses.

The string below a field is its ``--help`` text. Cross-field checks raise ``ConfigError`` with the remedy. This module
imports no torch, so that ``--help`` is fast.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from fastdiff.conditions import require_shapes, require_sources
from fastdiff.config.cuda_graph import require_static_config
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig, networks
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.optimizers.registry import AnyOptimizer, family_of
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.divergence import DivergenceConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.sampler import SamplerConfig, SamplingConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError, require, require_utf8


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
    optim: Annotated[OptimConfig, AnyOptimizer()] = field(default_factory=AdamWConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        for name, text in texts(asdict(self)):
            require_utf8(f"--{name}", text)
        require_shapes(self.model.conditions, self.model.title)
        require_sources(self.model.conditions, self.model.title)
        require(0 <= self.seed < 2**64, f"--seed {self.seed}: from 0 to 2**64 - 1")
        if self.output.sample_every and not self.model.text_conditional:
            require(
                self.model.low_res_size == 0,
                "--output.sample_every: super-resolution models have no sample grids; set it to 0, and use "
                "`fastdiff sample --low-res`",
            )
            self._check_sampling("--output.sample_steps", self.output.sample_steps, "--output.sample_every 0")
        if self.validation.draws_prompts:
            self._check_sampling("--validation.steps", self.validation.steps or 1, "--validation.every 0")
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
        self._check_base_width()
        self._check_objective()
        require_static_config(self)
        require(
            isinstance(self.batch.micro, int) or not self.performance.in_order,
            "--performance.grad_accum_order micro_batches needs a micro-batch that is the same on any number of ranks; "
            f"given --batch.micro {self.batch.micro}: set it to a number that, multiplied by each number of ranks, "
            "divides --batch.samples, for example 1",
        )
        if self.samples < 1 or self.samples % self.batch.samples:
            steps = max(1, round(self.samples / self.batch.samples))
            raise ConfigError(
                f"--samples {self.samples} is not divisible by --batch.samples {self.batch.samples}; "
                f"nearest value: {steps * self.batch.samples} ({steps} steps)"
            )
        last = self.performance.profiled.stop
        require(
            last <= self.steps,
            f"--performance.profile {self.performance.profile}: the run has {self.steps} steps (--samples "
            f"{self.samples} / --batch.samples {self.batch.samples}); end the profile at {self.steps} or earlier",
        )

    def _check_sampling(self, flag: str, steps: int, without: str) -> None:
        """Refuse settings that would fail at the first sample images, hours later."""
        most = self.objective.timesteps if isinstance(self.objective, DdpmConfig) else math.inf
        require(steps <= most, f"{flag} {steps}: at most --objective.timesteps {most}")
        require(
            self.objective.determines_x0 or self._follows_pipeline(),
            "epsilon prediction cannot sample from zero terminal SNR (--objective.zero_terminal_snr, or schedule "
            f"jsd); use --objective.prediction v or x0, or turn the sampling off with {without}",
        )

    def _follows_pipeline(self) -> bool:
        """Whether a pipeline, which is read later, decides the prediction."""
        return self.objective.prediction == "auto" and bool(self.pretrained.path) and not self.pretrained.is_file

    def _check_objective(self) -> None:
        self._check_convention()
        self.timesteps.check(self.objective)
        self.sampling.check(self.objective.process)
        require(
            self.model.learn_sigma or not self.objective.learns_variance,
            f"--objective.variance {self.objective.step_variance} needs a model with twice the output channels: a DiT, "
            "a PixArt or an ADM UNet with --model.learn_sigma",
        )
        require(
            not self.objective.low_res_noise or self.model.low_res_size > 0,
            f"--objective.low_res_noise {self.objective.low_res_noise} is for super-resolution, an ADM UNet "
            "with --model.low_res_size; set it to 0",
        )

        self._check_class_token()
        self._check_alignment()

    def _check_convention(self) -> None:
        require(
            self.timesteps.shift != "pipeline" or (bool(self.pretrained.path) and not self.pretrained.is_file),
            "--timesteps.shift pipeline is that of the scheduler of --pretrained.path, which names no pipeline; give "
            "a number",
        )
        expected, objective = self.model.flow_convention, self.objective
        if expected is not None:
            convention = objective.convention if isinstance(objective, FlowConfig) else "none"
            require(
                convention == expected,
                f"{self.model.title} is trained by flow matching with the time and velocity of {expected}; given "
                f"--objective.process {objective.process} and convention {convention}; set --objective.process flow "
                f"--objective.convention {expected}",
            )

    def _check_class_token(self) -> None:
        require(
            not self.sampling.coupled_noise or self.model.teacher_width == self.model.channels,
            f"--sampling.coupled_noise needs --model.teacher_width {self.model.channels}, the channels of the latents: "
            f"the class token of a teacher begins at the mean of their noise; given {self.model.teacher_width}",
        )
        weight = self.objective.teacher_weight if isinstance(self.objective, FlowConfig) else 0.0
        require(
            not self.model.teacher_width or weight > 0,
            f"--model.teacher_width {self.model.teacher_width} needs --objective.process flow and a weight of the loss "
            "of the class token, --objective.teacher_weight (0.2 in RiT, 0.03 in SR-DiT); given "
            f"{self.objective.process} and {weight:g}",
        )
        require(
            not weight or self.model.teacher_width > 0,
            f"--objective.teacher_weight {weight:g} needs --model.teacher_width, the width of the column teacher_token "
            "of the data: the network predicts no class token of a teacher",
        )

    def _check_base_width(self) -> None:
        require(
            not self.model.base_width or family_of(self.optim).of_adam_size,
            f"--model.base_width {self.model.base_width} with --optim.name {self.optim.name}: the rates of muP are "
            "known for updates as large as Adam's; use --optim.name adamw or adamw8bit, or --model.base_width 0",
        )
        require(
            not (self.model.base_width and self.pretrained.weights) or self.pretrained.is_file,
            f"--model.base_width {self.model.base_width} with --pretrained.weights: the network of the pipeline "
            "replaces --model, and it has no base width; train from random weights, or leave --model.base_width out",
        )

    def _check_alignment(self) -> None:
        weight, width = self.objective.alignment_weight, self.model.aligned_width
        require(
            (weight > 0) == (width > 0),
            f"--objective.alignment_weight {weight:g} and --model.aligned_width {width} belong together: the loss and "
            "the head that it trains; the width is that of the features in the data (`fastdiff encode --teacher`), "
            "and a weight of 0.5 is usual",
        )
        require(
            not (width and self.pretrained.weights),
            f"--model.aligned_width {width} with --pretrained.weights: published and exported weights have no head for "
            "the features of a teacher; align a training from random weights, or leave the alignment out",
        )

    def _check_pretrained(self) -> None:
        wants = {"--data.online": self.data.online, "--validation.prompts": self.validation.draws_prompts}
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
            self.lora.rank == 0 or family_of(self.optim).matrix_step is None,
            f"--optim.name {self.optim.name} is for networks that are trained whole, and --lora.rank {self.lora.rank} "
            "trains an adapter; use --optim.name adamw",
        )
        require(
            self.lora.rank == 0 or not self.performance.fp8,
            f"--lora.rank {self.lora.rank} with --performance.fp8: the adapted layers are frozen, and --lora.quantize "
            "is what makes them smaller; leave out --performance.fp8",
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
            self.data.autoencoder is None or not self.pretrained.path or self.pretrained.is_file,
            f"--data.autoencoder {self.data.autoencoder}: the run decodes by the pipeline of --pretrained.path "
            f"{self.pretrained.path}; leave it out",
        )
        require(
            not (self.validation.prompts or self.validation.captions) or text,
            "--validation.prompts is for text-conditional models; others have sample grids (--output.sample_every)",
        )
        require(
            not self.validation.references or self.model.takes_references,
            f"--validation.references needs an edit model; {self.model.title} takes no references",
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.samples // self.batch.samples

    @property
    def drops_conditions(self) -> bool:
        """Whether conditions are dropped, of some data set at least, so that the network learns to do without."""
        of_run = self.objective.condition_dropout
        own = [each.condition_dropout for each in self.data.entries]
        return any(of_run if share is None else share for share in own or [None])

    @property
    def dense_from(self) -> int:
        """Samples after which all tokens pass all blocks, whole steps; the length of the run if the last step is none.

        ``ModelConfig.route`` has their share.
        """
        route = self.model.route
        dense = 0 if route is None else round(route.dense_share * self.steps)
        return (self.steps - dense) * self.batch.samples

    @property
    def drawn_levels(self) -> TimestepConfig:
        """Distribution of the noise levels, with the time shift as a number."""
        return replace(self.timesteps, shift=self.time_shift)

    @property
    def time_shift(self) -> float:
        """Time shift of the training, and of sampling unless that is given another."""
        return self.timesteps.time_shift(self.model.channels * self.model.size**2)

    def sampler(self, usual: SamplerConfig | None = None, *, guided: bool = True, **given: Any) -> SamplerConfig:
        """Return the sampler of ``--sampling.*``, with the options ``given`` before it and the shift as a number.

        Args:
            usual: values of what neither says; None: the defaults of ``SamplerConfig``.
            guided: whether the model can be guided; otherwise the guidance of ``--sampling.*`` is left out.
            given: fields of a ``SamplerConfig``; None: not given.

        Raises:
            ConfigError: a wrong value.
        """
        found = self.sampling.sampler(usual, guided=guided, **given)
        return replace(found, shift=self.sampling_shift(found.shift))

    def sampling_shift(self, shift: float | Literal["latent"] | None) -> float:
        """Return the time shift of a sampler as a number; None: that of the training."""
        if shift is None:
            return self.time_shift
        return TimestepConfig(shift=shift).time_shift(self.model.channels * self.model.size**2)


def texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in nested values, with the dotted names of their fields."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts(inner, name)
