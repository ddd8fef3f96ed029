"""What a start of the trainer was asked to do, and the run folder it works in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastdiff.config.deepspeed import DsConfig

Resume = Literal["auto", "must", "never"]
HANG_TIMEOUT_S = 900.0
"""Longer than a first step with its compilation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The parts of the command line that do not decide the result of the run."""

    deepspeed: DsConfig
    """The DeepSpeed JSON as given, with its "auto" entries."""
    resume: Resume = "auto"
    allow_change: tuple[str, ...] = ()
    dry_run: bool = False
    hang_timeout_s: float = HANG_TIMEOUT_S
    """A rank that makes no progress for so long counts as hanging."""
    argv: tuple[str, ...] = ()
