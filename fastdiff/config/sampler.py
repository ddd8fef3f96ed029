"""How images are sampled from a trained model, as a frozen dataclass. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fastdiff.errors import require

SchedulerName = Literal["ddim", "dpmsolver++", "ddpm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """The solver, the noise levels that it visits, and the guidance.

    A run decides what is None (``TrainedRun.decided``). Without a run None is no guidance, no clamp and no shift.
    """

    scheduler: SchedulerName = "ddim"
    """ddim (Song et al. 2021, arXiv:2010.02502, eta 0), dpmsolver++ (Lu et al. 2022, arXiv:2211.01095, second order) or
    ddpm (Ho et al. 2020, arXiv:2006.11239), alone in using the objective's variance."""
    steps: int = 50
    """Noise levels visited, 1 or more, at most those of the training in ddpm: ``trailing`` ones, for edm the sigmas of
    Karras et al. 2022."""
    respacing: str | None = None
    """The levels instead, as ``fastdiff.sampling.respacing.spaced`` reads them; for ddpm only."""
    shift: float | None = None
    """Shift of the time of flow towards noise; None: that of the training's ``TimestepConfig``."""
    cfg: float | None = None
    """Scale of classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598) in the form ``without + cfg * (with -
    without)``; 1: none, at half the cost. None: the usual one for the kind of model, and none for a model that has not
    learned to do without its condition."""
    cfg_channels: int | None = None
    """Guide so many channels of the prediction, the first ones, as DiT's published code does with 3; the others are the
    conditional's. None: all. The channels of a learned variance are always the conditional's."""
    clip: bool | None = None
    """Clamp every estimate of x0 to [-1, 1], the range of pixels (Nichol & Dhariwal 2021's clip_denoised). A step of
    ddpm to the level before has no such estimate if the model predicts its mean (previous_x), which is taken as it is;
    a longer step has. None: for models of pixels; of a set of samples, where identity decodes it."""
    seed: int = 0
    """Any integer; its low 64 bits count."""

    def __post_init__(self) -> None:
        known = get_args(SchedulerName)
        require(self.scheduler in known, f"scheduler {self.scheduler!r} is unknown; choose one of {', '.join(known)}")
