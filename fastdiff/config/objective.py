"""What a model learns from which noise, as a frozen dataclass. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from fastdiff.errors import require

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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

_WEIGHTINGS: dict[Process, tuple[str, ...]] = {
    "ddpm": ("none", "min_snr", "soft_min_snr", "p2", "debiased", "snr"),
    "flow": ("none", "min_snr", "soft_min_snr", "sigma_sqrt", "cosmap", "velocity", "likelihood"),
    "edm": ("none", "min_snr", "soft_min_snr"),
}

_OF_PROCESS: dict[str, Process] = {
    "schedule": "ddpm",
    "timesteps": "ddpm",
    "rescale_timesteps": "ddpm",
    "zero_terminal_snr": "ddpm",
    "path": "flow",
    "sigma_data": "edm",
}
"""Fields of the objective that one process alone reads."""

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
    rescale_timesteps: bool = False
    """Tell the model t * 1000 / T instead of the timestep t, as improved-diffusion does."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that the last step is pure noise (Lin et al. 2023, arXiv:2305.08891)."""
    path: FlowPath = "linear"
    """Path of flow: linear (rectified flow, SD3), gvp (trigonometric) or vp (that of score SDEs), as in SiT."""
    sigma_data: float = 0.5
    """Standard deviation of the latents, for edm."""
    prediction: Literal["auto", Prediction] = "auto"
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
    weighting: Literal["auto", Weighting] = "auto"
    """Weight of the squared error by noise level: none, min_snr, soft_min_snr, p2 (Choi et al. 2022), debiased, or snr
    (plain error of the noise, whatever is predicted); for flow also sigma_sqrt and cosmap (SD3), and velocity and
    likelihood (SiT, for epsilon and score). auto: min_snr if its gamma is given, else none."""
    min_snr_gamma: float | None = None
    """Clamp of Min-SNR (Hang et al. 2023, arXiv:2303.09556) and of its soft form. None: 5, as is usual, if one of them
    is the weighting."""
    p2_gamma: float = 1.0
    """Exponent of p2 (arXiv:2204.00227, whose k is 1 here); 0.5 and 1 there."""
    cosine_weight: float = 0.0
    """Weight of LightningDiT's cosine distance between predicted and true velocity (flow prediction only); 1 there."""
    noise_offset: float = 0.0
    """Size of a noise constant over each channel, added to the noise; 0.05-0.1 is usual."""
    multires_noise_iterations: int = 0
    """Noise of that many coarser resolutions, each half the one before, added to the noise (multi-resolution or pyramid
    noise); 6-8 is usual, 0: none."""
    multires_noise_discount: float = 0.3
    """Size of each coarser noise over that of the one before."""
    low_res_noise: float = 0.0
    """Largest standard deviation of the noise on the small images of super-resolution (Ho et al. 2022)."""
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
            f"--objective.prediction {self.prediction}: --objective.process {self.process} predicts "
            f"{', '.join(known)}; set --objective.prediction {known[0]}, or auto",
        )
        back = set_back(self, "objective")
        for name, process in _OF_PROCESS.items():
            require(
                self.process == process or name not in back,
                f"--objective.{name} {getattr(self, name)} is for --objective.process {process}, given {self.process}; "
                f"set {back.get(name)}, its default",
            )
        require(
            1e-3 <= self.sigma_data <= 1e3,
            f"--objective.sigma_data {self.sigma_data}: from 0.001 to 1000, because the coefficients become infinite "
            "beyond; scale the latents (`fastdiff encode` normalises them)",
        )
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
            "flow and edm do not have; set --objective.variance fixed_small and --objective.loss mse",
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
            "own; set --objective.weighting none without a gamma, or --objective.loss mse or rescaled_mse",
        )
        require(
            not (bound_only or self.learns_variance) or not self.dream,
            f"--objective.loss {self.loss} and --objective.variance {self.variance} with --objective.dream, which "
            "changes input and target so that the bound does not hold; set --objective.loss mse and "
            "--objective.variance fixed_small",
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
            "clamp; set --objective.weighting min_snr or soft_min_snr, or --objective.min_snr_gamma None",
        )
        require(0 < self.p2_gamma < math.inf, f"--objective.p2_gamma {self.p2_gamma}: above 0; 0.5 and 1 are usual")
        require(
            self.p2_gamma == 1.0 or self.weighted == "p2",
            f"--objective.p2_gamma {self.p2_gamma}: --objective.weighting {self.weighting} has no such exponent; set "
            "--objective.weighting p2, or --objective.p2_gamma 1",
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
        for name in ("noise_offset", "low_res_noise", "input_perturbation", "dream_detail_preservation"):
            value = getattr(self, name)
            require(0.0 <= value < math.inf, f"--objective.{name} {value}: 0 or a finite number above")
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
            "the distribution of the noise, for which the variational bound does not hold; set --objective.loss mse "
            "and --objective.variance fixed_small",
        )
        require(
            0.0 <= self.condition_dropout <= 1.0,
            f"--objective.condition_dropout {self.condition_dropout}: a share from 0 to 1",
        )


def set_back(config: DataclassInstance, part: str) -> dict[str, str]:
    """The flags that undo what a preset, a file or another flag has changed, by field."""
    return {
        field.name: f"--{part}.no_{field.name}" if field.default is False else f"--{part}.{field.name} {field.default}"
        for field in fields(config)
        if getattr(config, field.name) != field.default
    }
