"""Options of sampling from a trained model, as frozen dataclasses. This module imports no torch."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from fastdiff.config.sections.objective import Process
from fastdiff.errors import require

SchedulerName = Literal["ddim", "dpmsolver++", "ddpm", "euler", "heun", "euler-maruyama", "pipeline"]
Labels = Literal["random", "balanced"]
Protocol = Literal["adm", "torch-fidelity"]

OF_FLOW: tuple[SchedulerName, ...] = ("euler", "heun", "euler-maruyama")
"""Solvers that integrate the velocity of flow in its own time; the others serve every process."""
_OF_GUIDANCE = ("cfg", "cfg_channels", "cfg_interval", "cfg_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """Solver, noise levels and guidance.

    A run replaces None by its own values (``fastdiff.sampling.run.Run.decided``). Without a run, None means no
    guidance, no clamp and no shift.
    """

    scheduler: SchedulerName = "ddim"
    """Solver: ddim (Song et al. 2021, arXiv:2010.02502, eta 0), dpmsolver++ (Lu et al. 2022, arXiv:2211.01095, second
    order) or ddpm (Ho et al. 2020, arXiv:2006.11239), the only one that uses the objective's variance. For flow also
    euler, heun (with a last step of euler; Li & He 2025, JiT, arXiv:2511.13720) and euler-maruyama (Ma et al. 2024,
    SiT, arXiv:2401.08740). For the network of a pipeline also pipeline: the pipeline's own scheduler."""
    steps: int = 50
    """Number of noise levels, at least 1, in ddpm at most that of the training. Their spacing is ``trailing``; edm uses
    the sigmas of Karras et al. 2022, and euler-maruyama has its last level at t = 0.04."""
    respacing: str | None = None
    """Noise levels instead of ``steps``, in the syntax of ``fastdiff.sampling.respacing.spaced``; for ddpm only."""
    shift: float | Literal["latent"] | None = None
    """Time shift towards noise in flow; latent: by the size of the latents, as in ``TimestepConfig``; None: that of the
    training."""
    cfg: float | None = None
    """Scale of classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598), ``uncond + cfg * (cond - uncond)``; 1:
    no guidance, at half the cost. None: the usual scale for the kind of model, and no guidance for a model that was
    trained without condition dropout."""
    cfg_channels: int | None = None
    """Number of leading channels of the prediction that are guided (3 in DiT's published code); the other channels are
    the conditional prediction. None: all. The channels of a learned variance are never guided."""
    cfg_interval: tuple[float, float] | None = None
    """Lowest and highest noise level with guidance (Kynkäänniemi et al. 2024, arXiv:2404.07724), both included, as a
    share of the way from data (0) to noise (1): t of flow, t / T of ddpm. Elsewhere the prediction is the conditional
    one. None: all levels."""
    clip: bool | None = None
    """Clamp every estimate of x0 to [-1, 1], the range of pixels (clip_denoised of Nichol & Dhariwal 2021). For
    prediction previous_x, a step of ddpm to the adjacent level uses the predicted mean unclamped; a longer step clamps.
    None: clamp for models of pixels; for a set of samples, if it is decoded by identity."""
    cfg_norm: int | None = None
    """Side of a square of latents whose guided prediction gets the norm of the conditional one. None: no change."""
    published: str | None = None
    """Scheduler of the run's pipeline (``fastdiff.sampling.pipeline_solver.describe``), for the solver pipeline."""
    coupled_noise: bool = False
    """Begin the class token of a teacher at the mean of the latents' noise over the pixels instead of noise of its own,
    as the published evaluation of RiT does (arXiv:2605.21981). Its noise then has the standard deviation 1 / 16 for
    256 pixels, where training has 1."""
    seed: int = 0
    """Any integer; its low 64 bits count."""

    def __post_init__(self) -> None:
        known = get_args(SchedulerName)
        require(self.scheduler in known, f"scheduler {self.scheduler!r} is unknown; choose one of {', '.join(known)}")
        _check_shift("--shift", self.shift)
        _check_interval("--cfg-interval", self.cfg_interval)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Sampler of the recipe and protocol of its figures: the defaults of sample, evaluate, previews and export."""

    scheduler: SchedulerName | None = None
    """Solver: ddim, dpmsolver++ or ddpm; for flow also euler, heun (its last step is euler's) and euler-maruyama; for
    the network of a pipeline also pipeline, its own scheduler. None: pipeline for a fine-tuned network; otherwise ddim,
    and dpmsolver++ for previews and digits."""
    steps: int | None = None
    """Steps of the solver; None: those of the pipeline for a fine-tuned network, otherwise 50. Previews have
    --output.sample_steps and --validation.steps."""
    shift: float | Literal["latent"] | None = None
    """Time shift towards noise in sampling with flow, as --timesteps.shift in training. latent: the square root of the
    latents' elements over 4096. None: that of the training."""
    cfg: float | None = None
    """Scale of classifier-free guidance; 1: none. None: 1.5 for classes, that of the pipeline for prompts (7.5 in
    Stable Diffusion)."""
    cfg_channels: int | None = None
    """Number of leading channels that are guided (LightningDiT: 3). None: all."""
    cfg_interval: tuple[float, float] | None = None
    """Lowest and highest noise level with guidance, from 0 (data) to 1 (noise): t of flow. None: all levels."""
    clip: bool | None = None
    """Clamp every estimate of the data to [-1, 1]. None: for pixels only."""
    coupled_noise: bool = False
    """Begin the class token of a teacher at the mean of the latents' noise over the pixels (RiT's evaluation), which is
    less noise than in training, instead of noise of its own."""
    labels: Labels = "random"
    """Classes of the images of an evaluation: drawn at random, or balanced: the classes in turn."""
    protocol: Protocol | None = None
    """Reference statistics of the recipe's figures: adm (the npz of ADM's evaluation) or torch-fidelity (mu and sigma
    of the training images by torch-fidelity, as JiT publishes them). None: not said."""

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 1, f"--sampling.steps {self.steps}: at least 1")
        _check_shift("--sampling.shift", self.shift)
        require(
            self.cfg is None or math.isfinite(self.cfg),
            f"--sampling.cfg {self.cfg}: a finite number; 1 for no guidance",
        )
        require(
            self.cfg_channels is None or self.cfg_channels >= 1,
            f"--sampling.cfg_channels {self.cfg_channels}: at least 1",
        )
        _check_interval("--sampling.cfg_interval", self.cfg_interval)
        idle = [f"--sampling.{name}" for name in ("cfg_channels", "cfg_interval") if getattr(self, name) is not None]
        require(
            self.cfg != 1.0 or not idle,
            f"{' and '.join(idle)}: there is no guidance with --sampling.cfg 1; set "
            f"{' '.join(f'{flag} None' for flag in idle)}, or another --sampling.cfg",
        )

    def check(self, process: Process) -> None:
        """Raise ConfigError for a solver or a shift that the process lacks."""
        require(
            process == "flow" or self.scheduler not in OF_FLOW,
            f"--sampling.scheduler {self.scheduler} is for --objective.process flow, given {process}; set "
            "--sampling.scheduler dpmsolver++",
        )
        require(
            process == "flow" or self.shift is None,
            f"--sampling.shift {self.shift} is for --objective.process flow, given {process}; leave it out",
        )

    def in_process(self, process: Process) -> "SamplingConfig":
        """Return a copy for this process; values that it does not support return to their defaults."""
        if process == "flow":
            return self
        return replace(self, shift=None, scheduler=None if self.scheduler in OF_FLOW else self.scheduler)

    def sampler(self, usual: SamplerConfig | None = None, *, guided: bool = True, **given: Any) -> SamplerConfig:
        """Return the sampler of this section, with the options ``given`` before it.

        Args:
            usual: values of what neither says; None: the defaults of ``SamplerConfig``.
            guided: whether the model can be guided; otherwise the section's guidance is left out.
            given: fields of a ``SamplerConfig``; None: not given.
        """
        given = {name: value for name, value in given.items() if value is not None}
        known = {field.name for field in fields(SamplerConfig)}
        own: dict[str, Any] = {
            name: value for name, value in asdict(self).items() if name in known and value is not None
        }
        if not guided or given.get("cfg") == 1.0:
            own = {name: value for name, value in own.items() if name not in _OF_GUIDANCE}
        if self.scheduler is not None:
            own.setdefault("steps", SamplerConfig().steps)  # the usual ones are those of another solver
        return replace(usual or SamplerConfig(), **own | given)


def _check_shift(flag: str, shift: float | str | None) -> None:
    require(
        shift is None or shift == "latent" or (not isinstance(shift, str) and 0 < shift < math.inf),
        f"{flag} {shift}: above 0, or latent, which follows from the size of the latents",
    )


def _check_interval(flag: str, interval: tuple[float, float] | None) -> None:
    low, high = interval or (0.0, 1.0)
    require(
        0.0 <= low < high <= 1.0,
        f"{flag} {low:g} {high:g}: the lowest and the highest noise level with guidance, from 0 (data) to 1 (noise)",
    )
