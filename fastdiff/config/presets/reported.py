"""Hours of published trainings, as their authors report them, for the plan of the preset of each."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Cost of a training."""

    gpu: str
    """Name in ``planning/gpus.toml``."""
    gpu_hours: float
    """Of all GPUs together."""
    samples: int
    """Trained in these hours."""
    source: str
    """Place of the report, and what the hours include beside the steps of the preset."""


REPORTED: Mapping[str, tuple[Reported, ...]] = {
    "lightningdit-xl-1-256": (
        Reported(
            gpu="H800",
            gpu_hours=80,
            samples=80_000 * 1024,
            source="README of github.com/hustvl/LightningDiT (2725fed): about 10 hours on 8 GPUs for 64 epochs",
        ),
    ),
    "sr-dit-b-1-256": (
        Reported(
            gpu="H100",
            gpu_hours=120,
            samples=400_000 * 256,
            source="README of github.com/SwayStar123/SpeedrunDiT (c24c2ff): about 15 hours on 8 GPUs, with a pass of "
            "DINOv2-B in every step and without torch.compile",
        ),
    ),
    "sit-xl-2-256": (),
    "jit-b-16-256": (),
    "rit-xl-256": (),
    "pixart-256": (),
}
"""By preset; none: no hours are known."""
