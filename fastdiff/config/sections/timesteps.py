"""Distribution of the training's noise levels, as a frozen dataclass. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, Literal

from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig, Process
from fastdiff.errors import require

Density = Literal["uniform", "logit_normal", "mode", "cosmap", "log_normal", "earlier", "later", "range", "importance"]

DENSITIES: dict[Process, tuple[Density, ...]] = {
    "ddpm": ("uniform", "logit_normal", "mode", "cosmap", "earlier", "later", "range", "importance"),
    "flow": ("uniform", "logit_normal", "mode", "cosmap"),
    "edm": ("log_normal",),
}
"""Densities of each process; ``auto`` is the first."""

_DRAWN: dict[Process, str] = {"ddpm": "discrete timesteps", "flow": "a time from 0 to 1", "edm": "sigma"}

_NORMAL: tuple[Density, ...] = ("logit_normal", "log_normal")
_BIASED: tuple[Density, ...] = ("earlier", "later", "range")

_OF_DENSITY: dict[str, tuple[Density, ...]] = {
    "truncation": ("logit_normal",),
    "mode_scale": ("mode",),
    "bias_multiplier": _BIASED,
    "bias_portion": ("earlier", "later"),
    "bias_begin": ("range",),
    "bias_end": ("range",),
}
"""Fields that only some densities read."""

_BASE_ELEMENTS = 4096
"""Elements of the latents with shift 1 (Zheng et al. 2025, RAE, arXiv:2510.11690): 4 x 32 x 32, those of SD at 256."""
_LEAST_KEPT = 0.01
"""Smallest probability inside a truncation: with less, fp32 shares no longer resolve the density."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimestepConfig:
    """Distribution of the training's noise levels."""

    density: Literal["auto", Density] = "auto"
    """uniform; logit_normal, mode or cosmap (Esser et al. 2024, arXiv:2403.03206); log_normal (of sigma, edm); earlier,
    later or range (those steps bias_multiplier times as often, ddpm); importance (in proportion to the root mean
    squared loss, with weights that keep the expected loss: Nichol & Dhariwal 2021, section 3.3; ddpm). auto: log_normal
    for edm, otherwise uniform."""
    stratified: bool = False
    """Spread the draws of each optimizer step evenly over the density: the same mean, lower variance."""
    mean: float | None = None
    """Mean of logit_normal (None: 0) and log_normal (None: -1.2)."""
    std: float | None = None
    """Standard deviation of logit_normal (None: 1) and log_normal (None: 1.2)."""
    truncation: float = 0.0
    """Truncate logit_normal to [truncation, 1 - truncation], before the shift; 0: not at all, 0.001: RiT."""
    mode_scale: float = 1.29
    """Scale of mode."""
    shift: float | Literal["latent", "pipeline"] = 1.0
    """Time shift towards noise in flow, shift * t / (1 + (shift - 1) * t): 3 for SD3 at 1024 px. latent: the square
    root of the latents' elements (--model.channels * --model.size^2) over 4096 (RAE, RiT, SR-DiT). pipeline: that of
    the scheduler of --pretrained.path, 1 if it depends on the size of a picture, as in diffusers' scripts. Sampling
    has the same unless it is given another."""
    bias_multiplier: float = 1.0
    """Factor of the probability of biased timesteps; earlier, later and range need another value than 1."""
    bias_portion: float = 0.25
    """Fraction of biased timesteps, for earlier (lowest noise) and later (highest noise)."""
    bias_begin: int = 0
    """First biased timestep, for range."""
    bias_end: int | None = None
    """End of the biased timesteps (exclusive), for range. None: T."""

    def __post_init__(self) -> None:
        require(
            self.std is None or 0 < self.std <= 10,
            f"--timesteps.std {self.std}: above 0, at most 10, because levels beyond are pure data or pure noise",
        )
        require(
            self.mean is None or abs(self.mean) <= 20,
            f"--timesteps.mean {self.mean}: from -20 to 20, because levels beyond are pure data or pure noise",
        )
        require(
            (self.mean is None and self.std is None) or self.density in ("auto", *_NORMAL),
            f"--timesteps.mean and --timesteps.std with --timesteps.density {self.density}: they belong to "
            "logit_normal and log_normal; set both to None, their default",
        )
        # Outside this range the quantile function is not monotonic.
        require(-1.0 <= self.mode_scale <= 1.75, f"--timesteps.mode_scale {self.mode_scale}: from -1 to 1.75")
        require(
            isinstance(self.shift, str) or 0 < self.shift < math.inf,
            f"--timesteps.shift {self.shift}: above 0, or latent (by the size of the latents), or pipeline",
        )
        require(
            0.0 <= self.truncation < 0.5,
            f"--timesteps.truncation {self.truncation}: 0 (none) or above, below 0.5, because t from it to 1 minus it "
            "is kept",
        )
        require(0 < self.bias_multiplier < math.inf, f"--timesteps.bias_multiplier {self.bias_multiplier}: above 0")
        require(0 < self.bias_portion <= 1, f"--timesteps.bias_portion {self.bias_portion}: above 0, at most 1")
        require(
            0 <= self.bias_begin < (math.inf if self.bias_end is None else self.bias_end),
            f"--timesteps.bias_begin {self.bias_begin} and --timesteps.bias_end {self.bias_end}: 0 or above, and the "
            "begin below the end",
        )
        back = self._set_back()
        for name, densities in _OF_DENSITY.items():
            require(
                self.density in densities or name not in back,
                f"--timesteps.{name} {getattr(self, name)} is for --timesteps.density {', '.join(densities)}, given "
                f"{self.density}; set {back.get(name)}, its default",
            )
        low, high = self.kept()
        require(
            high - low >= _LEAST_KEPT,
            f"--timesteps.truncation {self.truncation}: only {high - low:.1g} of the draws of logit_normal with "
            f"--timesteps.mean {self.mean} and --timesteps.std {self.std} are from {self.truncation} to "
            f"{1 - self.truncation}; truncate less, or move the mean towards 0",
        )
        require(
            self.density not in _BIASED or self.bias_multiplier != 1.0,
            f"--timesteps.density {self.density} with --timesteps.bias_multiplier 1 is uniform; set the "
            "multiplier to 2 to draw the biased ones twice as often, or the density to uniform",
        )

    def time_shift(self, elements: int) -> float:
        """Return the time shift for latents with this number of elements, C * H * W; 1 before a pipeline is read."""
        if self.shift == "pipeline":
            return 1.0
        return math.sqrt(elements / _BASE_ELEMENTS) if isinstance(self.shift, str) else self.shift

    def kept(self) -> tuple[float, float]:
        """Return the quantiles of logit_normal at both ends of the truncation; 0 and 1 without one."""
        if not self.truncation:
            return 0.0, 1.0
        logits = NormalDist(self.mean or 0.0, 1.0 if self.std is None else self.std)
        end = math.log((1.0 - self.truncation) / self.truncation)
        return logits.cdf(-end), logits.cdf(end)

    def of(self, objective: ObjectiveConfig) -> Density:
        """Return the density for this objective."""
        return DENSITIES[objective.process][0] if self.density == "auto" else self.density

    def biased(self, timesteps: int) -> range:
        """Return the timesteps that earlier, later or range bias; the portion is rounded down to whole timesteps."""
        count = int(self.bias_portion * timesteps)
        if self.density == "range":
            return range(self.bias_begin, timesteps if self.bias_end is None else self.bias_end)
        return range(count) if self.density == "earlier" else range(timesteps - count, timesteps)

    def check(self, objective: ObjectiveConfig) -> None:
        """Raise ConfigError for a density that the process lacks, or biased timesteps outside its range."""
        known = DENSITIES[objective.process]
        require(
            self.density in ("auto", *known),
            f"--timesteps.density {self.density} draws {self._drawn()}, and --objective.process {objective.process} "
            f"has {_DRAWN[objective.process]}; use {', '.join(known)}",
        )
        require(
            (self.mean is None and self.std is None) or self.of(objective) in _NORMAL,
            f"--timesteps.mean and --timesteps.std with --objective.process {objective.process}: use "
            "--timesteps.density logit_normal",
        )
        require(
            self.shift == 1.0 or isinstance(objective, FlowConfig),
            f"--timesteps.shift {self.shift} is for --objective.process flow, given {objective.process}; set "
            "--timesteps.shift 1, its default",
        )
        if isinstance(objective, DdpmConfig) and self.density in _BIASED:
            self._check_bias(objective.timesteps)

    def in_process(self, objective: ObjectiveConfig) -> TimestepConfig:
        """Return a copy for the process of ``objective``; values that it does not support return to their defaults."""
        changes: dict[str, Any] = {} if isinstance(objective, FlowConfig) else {"shift": 1.0}
        if self.density not in ("auto", *DENSITIES[objective.process]):
            return replace(TimestepConfig(), stratified=self.stratified)
        if self.of(objective) not in _NORMAL:
            changes |= {"mean": None, "std": None}
        return replace(self, **changes)

    def _check_bias(self, timesteps: int) -> None:
        biased = self.biased(timesteps)
        require(
            self.density != "range" or biased.start < biased.stop <= timesteps,
            f"--timesteps.bias_begin {biased.start} to --timesteps.bias_end {biased.stop}: within "
            f"--objective.timesteps {timesteps}",
        )
        require(
            len(biased) > 0,
            f"--timesteps.bias_portion {self.bias_portion} of --objective.timesteps {timesteps} is less than one "
            f"timestep; at least {1 / timesteps:g}",
        )

    def _set_back(self) -> dict[str, str]:
        """Flags that reset the changed fields to their defaults, by field."""
        changed = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return {field.name: f"--timesteps.{field.name} {field.default}" for field in changed}

    def _drawn(self) -> str:
        """Name of the variable that the density draws."""
        if self.density == "importance":
            return "discrete timesteps by the past losses of each"
        return "sigma" if self.density == "log_normal" else _DRAWN["ddpm" if self.density in _BIASED else "flow"]
