"""Launch options of the trainer, which do not affect the result of a run."""

from dataclasses import dataclass
from typing import Literal

from fastdiff.config.deepspeed import DsConfig

Resume = Literal["auto", "must", "never"]
HANG_TIMEOUT_S = 900.0
"""Seconds; longer than a first step with its compilation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Options of the command line that do not affect the result of the run."""

    deepspeed: DsConfig | None = None
    """The DeepSpeed JSON as given, with its "auto" entries; None: the default (``config.deepspeed.resolve``)."""
    resume: Resume = "auto"
    allow_change: tuple[str, ...] = ()
    dry_run: bool = False
    hang_timeout_s: float = HANG_TIMEOUT_S
    """Seconds without progress after which a rank counts as hanging."""
    argv: tuple[str, ...] = ()
    preset: str | None = None
    """Name of the preset, for messages."""

    def gives(self, flag: str) -> bool:
        """Whether the command line has a flag, spelled with ``_`` or ``-``."""
        return any(word.partition("=")[0].replace("-", "_") == flag.replace("-", "_") for word in self.argv)
