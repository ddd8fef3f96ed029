"""What a model learns and at which noise levels, as frozen dataclasses. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from fastdiff.errors import require

Process = Literal["ddpm", "flow", "edm"]
ScheduleName = Literal[
    "linear", "scaled_linear", "cosine", "sigmoid", "quad", "const", "jsd", "warmup10", "warmup50", "laplace"
]
FlowPath = Literal["linear", "gvp", "vp"]
Prediction = Literal["epsilon", "v", "x0", "previous_x", "flow", "score", "edm"]
Variance = Literal["fixed_small", "fixed_large", "learned", "learned_range"]
LossName = Literal["mse", "rescaled_mse", "kl", "rescaled_kl"]
Weighting = Literal[
    "none", "min_snr", "soft_min_snr", "p2", "debiased", "snr", "sigma_sqrt", "cosmap", "velocity", "likelihood"
]
Density = Literal["uniform", "logit_normal", "mode", "cosmap", "log_normal", "earlier", "later", "range", "importance"]

PREDICTION_TYPES: dict[Prediction, str] = {
    "epsilon": "epsilon",
    "v": "v_prediction",
    "x0": "sample",
    "flow": "flow_prediction",
}
"""What the schedulers of diffusers call the predictions that they know."""

PREDICTIONS: dict[Process, tuple[Prediction, ...]] = {
    "ddpm": ("epsilon", "v", "x0", "previous_x"),
    "flow": ("flow", "epsilon", "score"),
    "edm": ("edm",),
}
"""What can be predicted in each process; the first is what ``auto`` means."""

DENSITIES: dict[Process, tuple[Density, ...]] = {
    "ddpm": ("uniform", "logit_normal", "mode", "cosmap", "earlier", "later", "range", "importance"),
    "flow": ("uniform", "logit_normal", "mode", "cosmap"),
    "edm": ("log_normal",),
}
"""How timesteps can be drawn in each process; the first is what ``auto`` means."""

_WEIGHTINGS: dict[Process, tuple[str, ...]] = {
    "ddpm": ("none", "min_snr", "soft_min_snr", "p2", "debiased", "snr"),
    "flow": ("none", "min_snr", "soft_min_snr", "sigma_sqrt", "cosmap", "velocity", "likelihood"),
    "edm": ("none", "min_snr", "soft_min_snr"),
}

_OF_PROCESS: dict[str, Process] = {
    "schedule": "ddpm",
    "timesteps": "ddpm",
    "zero_terminal_snr": "ddpm",
    "path": "flow",
    "sigma_data": "edm",
}
"""Fields of the objective that one process alone reads."""

_DRAWN: dict[Process, str] = {"ddpm": "discrete timesteps", "flow": "a time from 0 to 1", "edm": "sigma"}

_BIASED: tuple[Density, ...] = ("earlier", "later", "range")

_OF_DENSITY: dict[str, tuple[Density, ...]] = {
    "mode_scale": ("mode",),
    "bias_multiplier": _BIASED,
    "bias_portion": ("earlier", "later"),
    "bias_begin": ("range",),
    "bias_end": ("range",),
}
"""Fields of the timesteps that some densities alone read."""

_SCALED_SCHEDULES = ("linear", "quad", "const", "warmup10", "warmup50")
"""Their betas end at 20 / T."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """What the model predicts, from which noise, and how its errors count."""

    process: Process = "ddpm"
    """How noise comes in: ddpm (discrete steps; Ho et al. 2020), flow (flow matching, t in [0, 1]; Lipman et al. 2023,
    Ma et al. 2024) or edm (Karras et al. 2022, with its preconditioning)."""
    schedule: ScheduleName = "linear"
    """Noise schedule of ddpm: linear (DDPM, DiT), scaled_linear (Stable Diffusion), cosine (IDDPM), sigmoid, quad,
    const, jsd, warmup10, warmup50 or laplace."""
    timesteps: int = 1000
    """Number of noise levels T of ddpm."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that the last step is pure noise (Lin et al. 2023, arXiv:2305.08891)."""
    path: FlowPath = "linear"
    """Path of flow: linear (rectified flow, SD3), gvp (trigonometric) or vp (that of score SDEs), as in SiT."""
    sigma_data: float = 0.5
    """Standard deviation of the latents, for edm."""
    prediction: Literal["auto", "epsilon", "v", "x0", "previous_x", "flow", "score", "edm"] = "auto"
    """What the model predicts. ddpm: epsilon, v, x0, previous_x (mean of the step before); flow: flow (the velocity
    noise - x0), epsilon, score; edm: edm. auto: what the scheduler of --pretrained.path says, else the first of its
    process."""
    variance: Variance = "fixed_small"
    """Variance of a step back, in ddpm: fixed_small (of the posterior), fixed_large (beta), learned or learned_range
    (between the two; the model then has twice the output channels, --model.learn_sigma)."""
    loss: LossName = "mse"
    """mse (with a learned variance plus the variational bound of the variance alone, as in DiT), rescaled_mse (that
    bound times T/1000: the hybrid loss of IDDPM; with a fixed variance the same as mse), kl (the variational bound in
    bits per dimension) or rescaled_kl (times T). All but mse for ddpm only."""
    weighting: Literal[
        "auto",
        "none",
        "min_snr",
        "soft_min_snr",
        "p2",
        "debiased",
        "snr",
        "sigma_sqrt",
        "cosmap",
        "velocity",
        "likelihood",
    ] = "auto"
    """Weight of the squared error by noise level: none, min_snr, soft_min_snr, p2 (gamma 1, k 1), debiased, or snr
    (plain error of the noise, whatever is predicted); for flow also sigma_sqrt and cosmap (SD3), and velocity and
    likelihood (SiT, for epsilon and score). auto: min_snr if its gamma is given, else none."""
    min_snr_gamma: float | None = None
    """Clamp of Min-SNR (Hang et al. 2023, arXiv:2303.09556) and of its soft form. None: 5, as is usual, if one of them
    is the weighting."""
    cosine_weight: float = 0.0
    """Weight of LightningDiT's cosine distance between predicted and true velocity (flow prediction only); 1 there."""
    noise_offset: float = 0.0
    """Size of a noise constant over each channel, added to the noise; 0.05-0.1 is usual."""
    multires_noise_iterations: int = 0
    """Noise of that many coarser resolutions, each half the one before, added to the noise (multi-resolution or pyramid
    noise); 6-8 is usual, 0: none."""
    multires_noise_discount: float = 0.3
    """Size of each coarser noise over that of the one before."""
    input_perturbation: float = 0.0
    """Extra noise on the input only (Ning et al. 2023, arXiv:2301.11706); 0.1 is usual."""
    dream: bool = False
    """Learn from the model's own estimate of the noise too (Zhou et al. 2023, arXiv:2312.00210): one more forward pass
    per step, epsilon prediction in ddpm only."""
    dream_detail_preservation: float = 1.0
    """Exponent of sigma in DREAM; larger keeps more of the plain objective, above all at low noise."""
    condition_dropout: float = 0.1
    """Share of the samples whose class or caption is replaced by none (classifier-free guidance)."""

    def __post_init__(self) -> None:
        self._check_schedule()
        self._check_process()
        self._check_variational()
        self._check_weighting()
        self._check_noise()

    @property
    def predicted(self) -> Prediction:
        """What the model predicts, where no pretrained pipeline says so: ``auto`` is the first of the process."""
        return PREDICTIONS[self.process][0] if self.prediction == "auto" else self.prediction

    @property
    def weighted(self) -> Weighting:
        """The weighting: ``auto`` is Min-SNR if its gamma is given."""
        if self.weighting == "auto":
            return "none" if self.min_snr_gamma is None else "min_snr"
        return self.weighting

    @property
    def learns_variance(self) -> bool:
        """Whether the model has twice the output channels, the second half for the variance."""
        return self.variance in ("learned", "learned_range")

    @property
    def ends_in_noise(self) -> bool:
        """Whether nothing of the data is left at the last timestep of ddpm."""
        return self.zero_terminal_snr or self.schedule == "jsd"

    def _check_schedule(self) -> None:
        require(self.timesteps >= 2, f"--objective.timesteps {self.timesteps}: at least 2")
        require(
            self.schedule not in _SCALED_SCHEDULES or self.timesteps > 20,
            f"--objective.timesteps {self.timesteps}: the {self.schedule} schedule needs more than 20; "
            "use --objective.schedule cosine",
        )

    def _check_process(self) -> None:
        known = PREDICTIONS[self.process]
        require(
            self.prediction in ("auto", *known),
            f"--objective.prediction {self.prediction}: --objective.process {self.process} predicts {', '.join(known)}",
        )
        defaults = {field.name: field.default for field in fields(self)}
        for name, process in _OF_PROCESS.items():
            require(
                self.process == process or getattr(self, name) == defaults[name],
                f"--objective.{name} {getattr(self, name)} is for --objective.process {process}, given {self.process}; "
                "leave it out",
            )
        require(0 < self.sigma_data < math.inf, f"--objective.sigma_data {self.sigma_data}: above 0")
        require(
            not self.dream or (self.process == "ddpm" and self.predicted == "epsilon"),
            "--objective.dream needs --objective.process ddpm and --objective.prediction epsilon, given "
            f"{self.process} and {self.predicted}",
        )
        require(
            0.0 <= self.cosine_weight < math.inf and (self.cosine_weight == 0 or self.predicted == "flow"),
            f"--objective.cosine_weight {self.cosine_weight}: 0, or above with --objective.prediction flow, because it "
            "compares the directions of velocities",
        )

    def _check_variational(self) -> None:
        require(
            self.process == "ddpm" or (self.variance == "fixed_small" and self.loss == "mse"),
            f"--objective.variance {self.variance} --objective.loss {self.loss} with --objective.process "
            f"{self.process}: the variance, and the bound that it is part of, are of the steps back of ddpm, which "
            "flow and edm do not have; leave them out",
        )
        bound_only = "kl" in self.loss
        require(
            not (bound_only or self.learns_variance) or not self.ends_in_noise or self.predicted != "epsilon",
            f"--objective.loss {self.loss} and --objective.variance {self.variance} with a schedule that ends in pure "
            "noise (jsd, or zero_terminal_snr): the bound of the step from there is infinite when the noise is "
            "predicted; use --objective.prediction v or x0",
        )
        require(
            not bound_only or self.weighted == "none",
            f"--objective.loss {self.loss} with --objective.weighting {self.weighted}: the bound has weights of its "
            "own; use mse or rescaled_mse",
        )
        require(
            not (bound_only or self.learns_variance) or not self.dream,
            f"--objective.loss {self.loss} and --objective.variance {self.variance} with --objective.dream, which "
            "changes input and target so that the bound does not hold; use mse and fixed_small",
        )

    def _check_weighting(self) -> None:
        require(
            self.min_snr_gamma is None or 0 < self.min_snr_gamma < math.inf,
            f"--objective.min_snr_gamma {self.min_snr_gamma}: above 0, because it is the largest SNR that counts; 5 is "
            "usual",
        )
        require(
            self.min_snr_gamma is None or self.weighting in ("auto", "min_snr", "soft_min_snr"),
            f"--objective.min_snr_gamma {self.min_snr_gamma}: --objective.weighting {self.weighting} has no such "
            "clamp; leave one of them out, or use min_snr or soft_min_snr",
        )
        require(
            self.weighted in _WEIGHTINGS[self.process],
            f"--objective.weighting {self.weighting}: --objective.process {self.process} has "
            f"{', '.join(_WEIGHTINGS[self.process])}",
        )
        require(
            self.weighted not in ("velocity", "likelihood") or self.predicted in ("epsilon", "score"),
            f"--objective.weighting {self.weighting} weighs the error of epsilon or score, given "
            f"--objective.prediction {self.predicted}",
        )
        require(
            self.weighted not in ("sigma_sqrt", "cosmap") or (self.predicted == "flow" and self.path == "linear"),
            f"--objective.weighting {self.weighting} weighs the error of the velocity of the linear path: use "
            f"--objective.prediction flow --objective.path linear, given {self.predicted} and {self.path}",
        )
        require(
            self.predicted != "previous_x" or self.weighted == "none",
            f"--objective.weighting {self.weighted} with --objective.prediction previous_x: the error of the mean of "
            "one step is too small a part of that of the noise to be weighed like it; use none",
        )

    def _check_noise(self) -> None:
        for name in ("noise_offset", "input_perturbation"):
            value = getattr(self, name)
            require(0.0 <= value < math.inf, f"--objective.{name} {value}: 0 (none) or a finite number above")
        require(
            self.multires_noise_iterations >= 0,
            f"--objective.multires_noise_iterations {self.multires_noise_iterations}: 0 (none) or above",
        )
        require(
            0.0 < self.multires_noise_discount <= 1.0,
            f"--objective.multires_noise_discount {self.multires_noise_discount}: above 0, at most 1",
        )
        gaussian = not self.noise_offset and not self.multires_noise_iterations and not self.input_perturbation
        require(
            gaussian or (self.loss == "mse" and not self.learns_variance),
            "--objective.noise_offset, --objective.multires_noise_iterations and --objective.input_perturbation change "
            "the distribution of the noise, for which the variational bound does not hold; use --objective.loss mse "
            "with a fixed variance",
        )
        require(
            0.0 <= self.condition_dropout <= 1.0,
            f"--objective.condition_dropout {self.condition_dropout}: a share from 0 to 1",
        )
        require(
            0.0 <= self.dream_detail_preservation < math.inf,
            f"--objective.dream_detail_preservation {self.dream_detail_preservation}: 0 or above",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TimestepConfig:
    """Which noise levels the training draws."""

    density: Literal[
        "auto", "uniform", "logit_normal", "mode", "cosmap", "log_normal", "earlier", "later", "range", "importance"
    ] = "auto"
    """uniform; logit_normal, mode or cosmap (Esser et al. 2024, arXiv:2403.03206); log_normal (of sigma, edm); earlier,
    later or range (those steps bias_multiplier times as often, ddpm); importance (in proportion to the root of the mean
    squared loss, and weighted so that the mean stays the same: Nichol & Dhariwal 2021, section 3.3; ddpm). auto:
    uniform, for edm log_normal."""
    stratified: bool = False
    """Spread the draws of each optimizer step evenly over the density: the same mean with less noise."""
    mean: float | None = None
    """Mean of logit_normal (None: 0) and log_normal (None: -1.2)."""
    std: float | None = None
    """Standard deviation of logit_normal (None: 1) and log_normal (None: 1.2)."""
    mode_scale: float = 1.29
    """Scale of mode."""
    shift: float = 1.0
    """Shift of t towards noise in flow, shift * t / (1 + (shift - 1) * t): 3 for SD3 at 1024 px."""
    bias_multiplier: float = 1.0
    """How many times as often biased timesteps are drawn."""
    bias_portion: float = 0.25
    """Share of the timesteps that is biased, for earlier (those of low noise) and later."""
    bias_begin: int = 0
    """First biased timestep, for range."""
    bias_end: int = 1000
    """End of the biased timesteps, not included, for range."""

    def __post_init__(self) -> None:
        require(
            self.std is None or 0 < self.std < math.inf,
            f"--timesteps.std {self.std}: above 0",
        )
        require(self.mean is None or math.isfinite(self.mean), f"--timesteps.mean {self.mean}: a finite number")
        require(
            (self.mean is None and self.std is None) or self.density in ("auto", "logit_normal", "log_normal"),
            f"--timesteps.mean and --timesteps.std with --timesteps.density {self.density}: they belong to "
            "logit_normal and log_normal",
        )
        # Beyond these the map from the uniform number is no longer monotonous.
        require(-1.0 <= self.mode_scale <= 1.75, f"--timesteps.mode_scale {self.mode_scale}: from -1 to 1.75")
        require(0 < self.shift < math.inf, f"--timesteps.shift {self.shift}: above 0")
        require(0 < self.bias_multiplier < math.inf, f"--timesteps.bias_multiplier {self.bias_multiplier}: above 0")
        require(0 < self.bias_portion <= 1, f"--timesteps.bias_portion {self.bias_portion}: above 0, at most 1")
        require(
            0 <= self.bias_begin < self.bias_end,
            f"--timesteps.bias_begin {self.bias_begin} and --timesteps.bias_end {self.bias_end}: 0 or above, and the "
            "begin below the end",
        )
        defaults = {field.name: field.default for field in fields(self)}
        for name, densities in _OF_DENSITY.items():
            require(
                self.density in densities or getattr(self, name) == defaults[name],
                f"--timesteps.{name} {getattr(self, name)} is for --timesteps.density {', '.join(densities)}, given "
                f"{self.density}; leave it out",
            )

    def of(self, objective: DiffusionConfig) -> Density:
        """The density for this objective."""
        return DENSITIES[objective.process][0] if self.density == "auto" else self.density

    def check(self, objective: DiffusionConfig) -> None:
        """Refuse what does not go with ``objective``.

        Raises:
            ConfigError: it does not draw from its process, or biases steps that it has not.
        """
        known = DENSITIES[objective.process]
        require(
            self.density in ("auto", *known),
            f"--timesteps.density {self.density} draws {self._drawn()}, and --objective.process {objective.process} "
            f"has {_DRAWN[objective.process]}; use {', '.join(known)}",
        )
        require(
            (self.mean is None and self.std is None) or self.of(objective) in ("logit_normal", "log_normal"),
            f"--timesteps.mean and --timesteps.std with --objective.process {objective.process}: use "
            "--timesteps.density logit_normal",
        )
        require(
            self.shift == 1.0 or objective.process == "flow",
            f"--timesteps.shift {self.shift} is for --objective.process flow, given {objective.process}",
        )
        require(
            self.density != "range" or self.bias_end <= objective.timesteps,
            f"--timesteps.bias_end {self.bias_end}: at most --objective.timesteps {objective.timesteps}",
        )

    def _drawn(self) -> str:
        """What the density is over."""
        if self.density == "importance":
            return "discrete timesteps by the past losses of each"
        return "sigma" if self.density == "log_normal" else _DRAWN["ddpm" if self.density in _BIASED else "flow"]
