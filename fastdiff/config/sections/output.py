"""Files and trackers of a run."""

import math
from dataclasses import dataclass
from typing import Literal

from fastdiff.config.local_paths import require_local
from fastdiff.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """Outputs of a run: folder, contents and intervals (in optimizer steps; 0: never)."""

    folder: str = ""
    """Run folder; default: runs/<preset>."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl and TensorBoard."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is always written at the end. 0: no others, whatever the time."""
    checkpoint_minutes: float = 30.0
    """The most minutes between checkpoints, and so the most that a restart loses; 0: no bound."""
    keep: int = 2
    """Number of newest checkpoints to keep. 1: none is left to fall back on if the newest is damaged."""
    failed_saves: int = 0
    """Consecutive checkpoints, or snapshots, that may fail before the run stops, for example because a disk is full.
    Above 0, all other files of the run wait in memory, too. The last checkpoint, at the end or on preemption, must
    succeed."""
    pinned_gib: float = 16.0
    """Limit, per rank, of the page-locked host memory through which a checkpoint leaves the GPU, in GiB; it stays
    locked for the whole run. A checkpoint has 16 bytes per parameter with AdamW and one average, shared by the ranks;
    what goes beyond the limit passes through ordinary memory, which is slower. Snapshots of the averages
    (--ema.snapshot_every) may lock as much again. 0: none."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Trackers of metrics and images, in addition to metrics.jsonl and samples/."""
    prometheus: str = ""
    """File for the textfile collector of Prometheus, replaced with every line of metrics.jsonl; empty: none."""
    callbacks: tuple[str, ...] = ()
    """Your own callbacks: PATH.py:CLASS, which is executed, or names of installed plug-ins (docs/api.md)."""
    project: str | None = None
    """Name of the project in wandb and trackio; default: wandb's own setting, as WANDB_PROJECT, or fastdiff."""
    sample_every: int = 1000
    """Steps between sample grids of a class-conditional model."""
    sample_steps: int = 20
    """Denoising steps of a grid, by --sampling.scheduler or DPM-Solver++."""
    sample_cfg: float | None = None
    """Classifier-free guidance scale of a grid; 1: none. None: --sampling.cfg, or 1.5."""

    def __post_init__(self) -> None:
        require_local("--output.folder", self.folder)
        require_local("--output.prometheus", self.prometheus)
        least = {
            "keep": 1,
            "log_every": 1,
            "checkpoint_every": 0,
            "checkpoint_minutes": 0,
            "failed_saves": 0,
            "pinned_gib": 0,
            "sample_every": 0,
            "sample_steps": 1,
        }
        for name in ("checkpoint_minutes", "pinned_gib", "sample_cfg"):
            value = getattr(self, name)
            require(value is None or math.isfinite(value), f"--output.{name} {value}: a finite number")
        for name, value in least.items():
            require(getattr(self, name) >= value, f"--output.{name} {getattr(self, name)}: at least {value}")
