"""Training objectives: one frozen dataclass per process, with its own fields, predictions and weightings.

``ObjectiveConfig`` is their union, discriminated by ``process``. This module imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import Discriminator

from fastdiff.errors import ConfigError, require

Process = Literal["ddpm", "flow", "edm"]
ScheduleName = Literal[
    "linear", "scaled_linear", "cosine", "sigmoid", "quad", "const", "jsd", "warmup10", "warmup50", "laplace"
]
FlowPath = Literal["linear", "gvp", "vp"]
FlowConvention = Literal["sd3", "sit", "repa"]
DdpmPrediction = Literal["epsilon", "v", "x0", "previous_x"]
FlowPrediction = Literal["flow", "x0", "epsilon", "score"]
EdmPrediction = Literal["edm"]
Prediction = Literal[DdpmPrediction, FlowPrediction, EdmPrediction]
Variance = Literal["fixed_small", "fixed_large", "learned", "learned_range"]
LossName = Literal["mse", "rescaled_mse", "kl", "rescaled_kl"]
EdmWeighting = Literal["none", "min_snr", "soft_min_snr"]
DdpmWeighting = Literal[EdmWeighting, "p2", "debiased", "snr"]
FlowWeighting = Literal[EdmWeighting, "sigma_sqrt", "cosmap", "velocity", "x0", "likelihood"]
Weighting = Literal[DdpmWeighting, FlowWeighting]

PREDICTION_TYPES: dict[Prediction, str] = {
    "epsilon": "epsilon",
    "v": "v_prediction",
    "x0": "sample",
    "flow": "flow_prediction",
}
"""``prediction_type`` of diffusers' schedulers for each prediction that they support."""


@dataclass(frozen=True, slots=True)
class TimeConvention:
    """Time input of a flow network, and the direction of its velocity."""

    at_data: float
    """Time input of clean data."""
    at_noise: float
    """Time input of pure noise; it is linear in t between the two."""
    to_noise: bool
    """Whether the velocity points from data to noise; otherwise from noise to data."""
    words: str
    """The time input in words."""
    owner: str = ""
    """Published code that a model card names for it; empty: none."""


CONVENTIONS: dict[FlowConvention, TimeConvention] = {
    "sd3": TimeConvention(0.0, 1000.0, True, "1000 t (t = 0: the data, 1: noise)"),
    "sit": TimeConvention(1.0, 0.0, False, "t (t = 0: noise, 1: the data)", "SiT"),
    "repa": TimeConvention(0.0, 1.0, True, "t (t = 0: the data, 1: noise)", "REPA"),
}
"""Esser et al. 2024 (arXiv:2403.03206), Ma et al. 2024 (arXiv:2401.08740) and Yu et al. 2024 (arXiv:2410.06940)."""

_SCALED_SCHEDULES = ("linear", "quad", "const", "warmup10", "warmup50")
"""Schedules whose last beta is 20 / T."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfEveryProcess:
    """Fields of every process, and the properties that other modules read."""

    predictions: ClassVar[tuple[Prediction, ...]]
    """Predictions of the process; without a pipeline ``auto`` is the first."""

    process: Process
    """Noising process: ddpm (discrete steps; Ho et al. 2020), flow (flow matching, t in [0, 1]; Lipman et al. 2023, Ma
    et al. 2024) or edm (Karras et al. 2022, with its preconditioning). Some flags exist for one process only: `--help`
    with this flag lists those of the given process."""
    prediction: Literal["auto", Prediction] = "auto"
    """Prediction target of the model."""
    weighting: Literal["auto", Weighting] = "auto"
    """Weight of the squared error by noise level."""
    min_snr_gamma: float | None = None
    """Gamma of Min-SNR (Hang et al. 2023, arXiv:2303.09556) and of soft Min-SNR. None: 5 for these weightings."""
    noise_offset: float = 0.0
    """Scale of a noise that is constant over each channel, added to the noise; 0.05-0.1 is usual."""
    multires_noise_iterations: int = 0
    """Number of coarser resolutions of added noise, each half of the previous one (multi-resolution or pyramid noise);
    6-8 is usual, 0: none."""
    multires_noise_discount: float = 0.3
    """Scale of the noise of each resolution relative to the next finer one."""
    low_res_noise: float = 0.0
    """Maximum standard deviation of the noise on the low-resolution images of super-resolution (Ho et al. 2022)."""
    input_perturbation: float = 0.0
    """Scale of an extra noise on the input only (Ning et al. 2023, arXiv:2301.11706); 0.1 is usual."""
    condition_dropout: float = 0.1
    """Fraction of the samples whose class or caption is dropped (classifier-free guidance)."""
    masked: bool | None = None
    """Multiply the loss of each position by the mask of its picture (`fastdiff encode --masks`). None: if the data have
    masks."""
    alignment_weight: float = 0.0
    """Weight of the alignment of a block's features with those of a teacher (--model.aligned_width; REPA,
    arXiv:2410.06940, which uses 0.5): minus their cosine."""
    alignment_steps: int = 0
    """Optimizer steps, at the beginning, that are aligned (arXiv:2505.16792 ends it early). 0: all."""
    plugin: str = ""
    """Your own loss in place of the squared error: PATH.py:FUNCTION, which is executed, or the name of an installed
    plug-in (docs/api.md). The weighting applies to it; the validation loss stays the squared error."""

    def __post_init__(self) -> None:
        require(
            self.min_snr_gamma is None or 0 < self.min_snr_gamma < math.inf,
            f"--objective.min_snr_gamma {self.min_snr_gamma}: above 0, because it clamps the SNR; 5 is usual",
        )
        require(
            self.min_snr_gamma is None or self.weighting in ("auto", "min_snr", "soft_min_snr"),
            f"--objective.min_snr_gamma {self.min_snr_gamma}: --objective.weighting {self.weighting} does not "
            "use it; set --objective.weighting min_snr or soft_min_snr, or --objective.min_snr_gamma None",
        )
        self._check_noise()
        _check_size("alignment_weight", self.alignment_weight)
        require(
            self.alignment_steps >= 0, f"--objective.alignment_steps {self.alignment_steps}: at least 1, or 0 for all"
        )
        require(
            self.alignment_weight > 0 or not self.alignment_steps,
            f"--objective.alignment_steps {self.alignment_steps} without --objective.alignment_weight: nothing is "
            "aligned; give the weight (0.5 in REPA), or leave the steps out",
        )
        self._check_own()

    def _check_noise(self) -> None:
        for name in ("noise_offset", "low_res_noise", "input_perturbation"):
            _check_size(name, getattr(self, name))
        require(
            self.multires_noise_iterations >= 0,
            f"--objective.multires_noise_iterations {self.multires_noise_iterations}: 0 (none) or above",
        )
        require(
            0.0 < self.multires_noise_discount <= 1.0,
            f"--objective.multires_noise_discount {self.multires_noise_discount}: above 0, at most 1",
        )
        require(
            0.0 <= self.condition_dropout <= 1.0,
            f"--objective.condition_dropout {self.condition_dropout}: a fraction from 0 to 1",
        )

    def _check_own(self) -> None:
        """Refuse inconsistent values of the process's own fields."""

    @property
    def samples_together(self) -> int:
        """Samples that one micro-batch holds, since their losses depend on each other: it has a multiple of them."""
        return 1

    @property
    def predicted(self) -> Prediction:
        """Prediction target; ``auto`` is the first of the process, unless a pretrained pipeline decides it later."""
        return self.predictions[0] if self.prediction == "auto" else self.prediction

    @property
    def weighted(self) -> Weighting:
        """Weighting; ``auto`` is Min-SNR if its gamma is given, otherwise the usual one of the prediction."""
        if self.weighting == "auto":
            return self.usual_weighting if self.min_snr_gamma is None else "min_snr"
        return self.weighting

    @property
    def usual_weighting(self) -> Weighting:
        """Weighting of ``auto`` without a gamma of Min-SNR."""
        return "none"

    @property
    def step_variance(self) -> Variance:
        """Variance of the reverse step of an ancestral sampler."""
        return "fixed_small"

    @property
    def learns_variance(self) -> bool:
        """Whether the model has twice the output channels, the second half for the variance."""
        return False

    @property
    def determines_x0(self) -> bool:
        """Whether the prediction determines x0 at every noise level."""
        return True

    @property
    def takes_two_passes(self) -> bool:
        """Whether a training step has an additional forward pass without a gradient (DREAM)."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpmConfig(_OfEveryProcess):
    """Denoising diffusion in discrete steps (Ho et al. 2020, arXiv:2006.11239)."""

    predictions: ClassVar[tuple[Prediction, ...]] = get_args(DdpmPrediction)

    process: Literal["ddpm"] = "ddpm"
    schedule: ScheduleName = "linear"
    """Noise schedule: linear (DDPM, DiT), scaled_linear (Stable Diffusion), cosine (IDDPM), sigmoid, quad, const, jsd,
    warmup10, warmup50 or laplace."""
    timesteps: int = 1000
    """Number of noise levels T."""
    rescale_timesteps: bool = False
    """Pass t * 1000 / T to the model instead of the timestep t, as improved-diffusion does."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that the last step is pure noise (Lin et al. 2023, arXiv:2305.08891)."""
    prediction: Literal["auto", DdpmPrediction] = "auto"
    """Prediction target: epsilon, v, x0 or previous_x (mean of the previous step). auto: as in the scheduler of
    --pretrained.path; without a pipeline epsilon."""
    variance: Variance = "fixed_small"
    """Variance of the reverse step: fixed_small (posterior variance), fixed_large (beta), learned, or learned_range
    (interpolates between the two fixed ones). A learned variance needs twice the output channels
    (--model.learn_sigma)."""
    loss: LossName = "mse"
    """mse (for a learned variance plus the variational bound, which trains the variance only, as in DiT), rescaled_mse
    (the same with the bound times T/1000: the hybrid loss of IDDPM), kl (the variational bound in bits per dimension)
    or rescaled_kl (kl times T). For a fixed variance rescaled_mse equals mse."""
    weighting: Literal["auto", DdpmWeighting] = "auto"
    """Weight of the squared error by noise level: none, min_snr, soft_min_snr, p2 (Choi et al. 2022), debiased, or snr
    (plain error of the noise for every prediction). auto: min_snr if its gamma is given, otherwise none."""
    p2_gamma: float = 1.0
    """Exponent of p2 (arXiv:2204.00227, with k = 1); the paper uses 0.5 and 1."""
    dream: bool = False
    """DREAM (Zhou et al. 2023, arXiv:2312.00210): train on the model's own noise estimate, too. Needs one more forward
    pass per step and epsilon prediction."""
    dream_detail_preservation: float = 1.0
    """Exponent of sigma in DREAM; a larger one stays closer to the plain objective, mainly at low noise."""

    @property
    def step_variance(self) -> Variance:
        """The configured variance."""
        return self.variance

    @property
    def learns_variance(self) -> bool:
        """Whether the variance is learned."""
        return self.variance in ("learned", "learned_range")

    @property
    def determines_x0(self) -> bool:
        """False for epsilon prediction with a schedule that ends in pure noise."""
        return not self.ends_in_noise or self.predicted != "epsilon"

    @property
    def takes_two_passes(self) -> bool:
        """True with DREAM."""
        return self.dream

    @property
    def ends_in_noise(self) -> bool:
        """Whether the last timestep is pure noise (zero terminal SNR)."""
        return self.zero_terminal_snr or self.schedule == "jsd"

    @property
    def is_bound(self) -> bool:
        """Whether the loss is the variational bound instead of a squared error."""
        return self.loss in ("kl", "rescaled_kl")

    @property
    def has_bound(self) -> bool:
        """Whether the variational bound is the loss, or the part of the loss that trains the variance."""
        return self.is_bound or self.learns_variance

    def _check_own(self) -> None:
        require(self.timesteps >= 2, f"--objective.timesteps {self.timesteps}: at least 2")
        require(
            self.schedule not in _SCALED_SCHEDULES or self.timesteps > 20,
            f"--objective.timesteps {self.timesteps}: the {self.schedule} schedule needs more than 20; "
            "use --objective.schedule cosine",
        )
        require(
            self.predicted != "previous_x" or self.weighted == "none",
            f"--objective.weighting {self.weighted} with --objective.prediction previous_x: the error of the "
            "mean of one step is too small a part of the error of the noise; use none",
        )
        require(0 < self.p2_gamma < math.inf, f"--objective.p2_gamma {self.p2_gamma}: above 0; 0.5 and 1 are usual")
        require(
            self.p2_gamma == 1.0 or self.weighted == "p2",
            f"--objective.p2_gamma {self.p2_gamma}: --objective.weighting {self.weighting} does not use it; set "
            "--objective.weighting p2, or --objective.p2_gamma 1",
        )
        _check_size("dream_detail_preservation", self.dream_detail_preservation)
        require(
            not (self.plugin and self.is_bound),
            f"--objective.plugin {self.plugin} with --objective.loss {self.loss}: the bound is the whole loss; use "
            "--objective.loss mse",
        )
        require(
            not (self.plugin and self.dream),
            f"--objective.plugin {self.plugin} with --objective.dream, which corrects the target of the squared error; "
            "leave one of them out",
        )
        require(
            not self.dream or self.predicted == "epsilon",
            f"--objective.dream needs --objective.prediction epsilon, given {self.predicted}",
        )
        if self.has_bound:
            self._check_bound()

    def _check_bound(self) -> None:
        chosen = f"--objective.loss {self.loss} and --objective.variance {self.variance}"
        require(
            self.determines_x0,
            f"{chosen} with a schedule that ends in pure noise (jsd, or zero_terminal_snr): at zero terminal SNR the "
            "KL of epsilon prediction is infinite; use --objective.prediction v or x0",
        )
        require(
            not self.is_bound or self.weighted == "none",
            f"--objective.loss {self.loss} with --objective.weighting {self.weighted}: the bound has its own "
            "weights; set --objective.weighting none without a gamma, or --objective.loss mse or rescaled_mse",
        )
        require(
            not self.dream,
            f"{chosen} with --objective.dream, which changes input and target, so the bound does not hold; set "
            "--objective.loss mse and --objective.variance fixed_small",
        )
        self._require_gaussian_noise()

    def _require_gaussian_noise(self) -> None:
        require(
            not self.noise_offset and not self.multires_noise_iterations and not self.input_perturbation,
            "--objective.noise_offset, --objective.multires_noise_iterations and --objective.input_perturbation change "
            "the distribution of the noise, so the variational bound does not hold; set --objective.loss mse "
            "and --objective.variance fixed_small",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig(_OfEveryProcess):
    """Flow matching (Lipman et al. 2023, arXiv:2210.02747; Ma et al. 2024, arXiv:2401.08740)."""

    predictions: ClassVar[tuple[Prediction, ...]] = get_args(FlowPrediction)

    process: Literal["flow"] = "flow"
    path: FlowPath = "linear"
    """Path from data to noise, as in SiT: linear (rectified flow, SD3), gvp (trigonometric) or vp (variance preserving,
    as in score SDEs)."""
    convention: FlowConvention = "sd3"
    """Time input and velocity of the network. sd3 (Stable Diffusion 3): 1000 t, where t = 1 is noise, and the velocity
    from data to noise. sit (SiT, LightningDiT, JiT): 1 - t, where 1 is data, and the velocity from noise to data. repa
    (REPA, SR-DiT): t, where 1 is noise, and the velocity from data to noise. Weights need the convention that they were
    trained with; their names and shapes do not show it."""
    prediction: Literal["auto", FlowPrediction] = "auto"
    """Prediction target: flow (the velocity), x0 (the data: JiT), epsilon or score. auto: flow."""
    weighting: Literal["auto", FlowWeighting] = "auto"
    """Weight of the squared error by noise level: none, min_snr, soft_min_snr, sigma_sqrt and cosmap (SD3), velocity
    (the error of the velocity, for x0, epsilon and score), x0 (the error of x0, for flow: diffusers' scripts of SD3) or
    likelihood (SiT, for epsilon and score). auto: min_snr if
    its gamma is given, otherwise velocity for x0 and none for the others."""
    velocity_floor: float = 0.05
    """Smallest sigma by which prediction x0 is divided to give the velocity, in the loss and in sampling (Li & He 2025,
    arXiv:2511.13720)."""
    cosine_weight: float = 0.0
    """Weight of the cosine distance between predicted and true velocity (LightningDiT, which uses 1; flow prediction
    only)."""
    contrastive_weight: float = 0.0
    """Weight of contrastive flow matching (arXiv:2506.05350; 0.05 there and in SR-DiT): of the squared error against
    the target of the other sample of a pair, which is subtracted. For flow prediction and even micro-batches."""
    teacher_weight: float = 0.0
    """Weight of the loss of the class token of a teacher, which a network with --model.teacher_width predicts beside
    the latents (0.2 in RiT, 0.03 in SR-DiT). The token has the noise level of its sample and plain noise of its own;
    plug-in, cosine distance and extra noise act on the latents alone."""

    @property
    def samples_together(self) -> int:
        """Those of a pair, with a contrastive loss."""
        return 2 if self.contrastive_weight else 1

    @property
    def usual_weighting(self) -> Weighting:
        """The error of the velocity for x0; none for the others."""
        return "velocity" if self.predicted == "x0" else "none"

    @property
    def time(self) -> TimeConvention:
        """Time input of the network and direction of its velocity."""
        return CONVENTIONS[self.convention]

    def _check_own(self) -> None:
        _check_size("teacher_weight", self.teacher_weight)
        require(
            1e-3 <= self.velocity_floor < 1.0,
            f"--objective.velocity_floor {self.velocity_floor}: at least 0.001 and below 1; 0.05 is usual",
        )
        require(
            self.velocity_floor == 0.05 or self.predicted == "x0",
            f"--objective.velocity_floor {self.velocity_floor}: --objective.prediction {self.predicted} does not use "
            "it; set --objective.prediction x0, or --objective.velocity_floor 0.05",
        )
        require(
            0.0 <= self.cosine_weight < math.inf and (self.cosine_weight == 0 or self.predicted == "flow"),
            f"--objective.cosine_weight {self.cosine_weight}: 0, or above with --objective.prediction flow, because it "
            "compares the directions of velocities",
        )
        require(
            0.0 <= self.contrastive_weight < 1.0 and (self.contrastive_weight == 0 or self.predicted == "flow"),
            f"--objective.contrastive_weight {self.contrastive_weight}: 0, or above and below 1 with "
            "--objective.prediction flow; from 1 on the loss has no minimum, and 0.05 is usual",
        )
        of_predictions = {
            "velocity": ("x0", "epsilon", "score"), "x0": ("flow",), "likelihood": ("epsilon", "score"),
        }  # fmt: skip
        able = of_predictions.get(self.weighted)
        require(
            able is None or self.predicted in able,
            f"--objective.weighting {self.weighting} is for --objective.prediction {' or '.join(able or ())}, given "
            f"--objective.prediction {self.predicted}",
        )
        require(
            self.weighted not in ("sigma_sqrt", "cosmap") or (self.predicted == "flow" and self.path == "linear"),
            f"--objective.weighting {self.weighting} is for the velocity of the linear path: use "
            f"--objective.prediction flow --objective.path linear, given {self.predicted} and {self.path}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EdmConfig(_OfEveryProcess):
    """Variance exploding noise with preconditioning (Karras et al. 2022, arXiv:2206.00364)."""

    predictions: ClassVar[tuple[Prediction, ...]] = get_args(EdmPrediction)

    process: Literal["edm"] = "edm"
    sigma_data: float = 0.5
    """Standard deviation of the latents."""
    prediction: Literal["auto", EdmPrediction] = "auto"
    """Prediction target: edm, the target of its preconditioning. auto: edm."""
    weighting: Literal["auto", EdmWeighting] = "auto"
    """Weight of the squared error by noise level: none, min_snr or soft_min_snr. auto: min_snr if its gamma is given,
    otherwise none."""

    def _check_own(self) -> None:
        require(
            1e-3 <= self.sigma_data <= 1e3,
            f"--objective.sigma_data {self.sigma_data}: from 0.001 to 1000, because the coefficients overflow "
            "beyond; scale the latents (`fastdiff encode` normalises them)",
        )


ObjectiveConfig = Annotated[DdpmConfig | FlowConfig | EdmConfig, Discriminator("process")]
"""Objective of a run: noising process, prediction target, loss, weighting and extra noise."""

PROCESSES: dict[Process, type[DdpmConfig] | type[FlowConfig] | type[EdmConfig]] = {
    "ddpm": DdpmConfig,
    "flow": FlowConfig,
    "edm": EdmConfig,
}
DEFAULTS: dict[str, Any] = {f.name: f.default for kind in PROCESSES.values() for f in fields(kind)}
"""Defaults of the fields of all processes; a field of several processes has the same default in each."""
_WITHOUT_EFFECT = ("dream_detail_preservation",)
"""Fields that only another field activates (``dream``); recorded runs of every process may have any value."""


def in_full(objective: ObjectiveConfig) -> dict[str, Any]:
    """Return the fields of ``objective``, and the defaults of the fields that only other processes have.

    Runs are compared in this form, so that runs of different processes, and older records, have the same fields.
    """
    return DEFAULTS | asdict(objective)


def in_process(objective: ObjectiveConfig, process: Process) -> ObjectiveConfig:
    """Convert ``objective`` to another process; shared fields keep their value if the process supports it."""
    kind = PROCESSES[process]
    hints = get_type_hints(kind)
    kept = {name: value for name, value in asdict(objective).items() if name in hints and name != "process"}
    for name in ("prediction", "weighting"):
        if kept[name] not in get_args(hints[name]):
            del kept[name]
    return kind(**kept)


def without_defaults_of_others(process: Process, given: Mapping[str, Any]) -> dict[str, Any]:
    """Remove fields of other processes from ``given``; ConfigError for one with an effect and not at its default."""
    own = {field.name for field in fields(PROCESSES[process])}
    for name in sorted(DEFAULTS.keys() & given.keys() - own):
        if given[name] != DEFAULTS[name] and name not in _WITHOUT_EFFECT:
            has = " or ".join(p for p, kind in PROCESSES.items() if name in {field.name for field in fields(kind)})
            raise ConfigError(
                f"--objective.{name} {given[name]} is for --objective.process {has}, given {process}; leave it out, or "
                f"set --objective.process {has}"
            )
    return {name: value for name, value in given.items() if name in own or name not in DEFAULTS}


def _check_size(name: str, value: float) -> None:
    require(0.0 <= value < math.inf, f"--objective.{name} {value}: a finite number, at least 0")
