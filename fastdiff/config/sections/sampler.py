"""Options of sampling from a trained model, as a frozen dataclass. This module imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from fastdiff.errors import require

SchedulerName = Literal["ddim", "dpmsolver++", "ddpm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """Solver, noise levels and guidance.

    A run replaces None by its own values (``fastdiff.sampling.run.Run.decided``). Without a run, None means no
    guidance, no clamp and no shift.
    """

    scheduler: SchedulerName = "ddim"
    """Solver: ddim (Song et al. 2021, arXiv:2010.02502, eta 0), dpmsolver++ (Lu et al. 2022, arXiv:2211.01095, second
    order) or ddpm (Ho et al. 2020, arXiv:2006.11239), the only one that uses the objective's variance."""
    steps: int = 50
    """Number of noise levels, at least 1, in ddpm at most that of the training. Their spacing is ``trailing``; edm uses
    the sigmas of Karras et al. 2022."""
    respacing: str | None = None
    """Noise levels instead of ``steps``, in the syntax of ``fastdiff.sampling.respacing.spaced``; for ddpm only."""
    shift: float | None = None
    """Time shift towards noise in flow; None: the shift of the training's ``TimestepConfig``."""
    cfg: float | None = None
    """Scale of classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598), ``uncond + cfg * (cond - uncond)``; 1:
    no guidance, at half the cost. None: the usual scale for the kind of model, and no guidance for a model that was
    trained without condition dropout."""
    cfg_channels: int | None = None
    """Number of leading channels of the prediction that are guided (3 in DiT's published code); the other channels are
    the conditional prediction. None: all. The channels of a learned variance are never guided."""
    clip: bool | None = None
    """Clamp every estimate of x0 to [-1, 1], the range of pixels (clip_denoised of Nichol & Dhariwal 2021). For
    prediction previous_x, a step of ddpm to the adjacent level uses the predicted mean unclamped; a longer step clamps.
    None: clamp for models of pixels; for a set of samples, if it is decoded by identity."""
    seed: int = 0
    """Any integer; its low 64 bits count."""

    def __post_init__(self) -> None:
        known = get_args(SchedulerName)
        require(self.scheduler in known, f"scheduler {self.scheduler!r} is unknown; choose one of {', '.join(known)}")
