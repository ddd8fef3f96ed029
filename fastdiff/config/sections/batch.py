"""Batch size of a run."""

from dataclasses import dataclass
from typing import Literal

from fastdiff.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch size per optimizer step and per forward pass."""

    samples: int = 256
    """Samples per optimizer step, over all ranks."""
    micro: int | Literal["auto"] | None = None
    """Samples per rank per forward pass. None: samples / ranks, without accumulation; auto: the most that the memory of
    the device is predicted to hold, decided at the start. Where the memory of a rank does not suffice, the run starts
    again with half of it. The losses do not depend on it beyond rounding."""

    def __post_init__(self) -> None:
        require(self.samples >= 1, f"--batch.samples {self.samples}: at least 1")
        least = self.micro if isinstance(self.micro, int) else 1
        require(least >= 1, f"--batch.micro {self.micro}: at least 1, auto or None")

    def per_rank(self, ranks: int) -> int:
        """Return the samples per rank per forward pass with ``ranks`` ranks; RuntimeError for auto, still undecided."""
        if self.micro == "auto":
            raise RuntimeError("--batch.micro auto is asked for its number before it has one")
        return self.micro if self.micro is not None else max(1, self.samples // ranks)

    def accumulation(self, ranks: int) -> int:
        """Return the forward passes per optimizer step; errors as of ``require_divisible`` and ``per_rank``."""
        self.require_divisible(ranks)
        return self.samples // (self.per_rank(ranks) * ranks)

    def require_divisible(self, ranks: int) -> None:
        """Raise ConfigError unless micro-batches of all ranks divide the batch; auto can be 1."""
        micro = self.micro if isinstance(self.micro, int) else 1
        together = micro * ranks
        if self.samples % together:
            below = self.samples // together * together
            near = [str(n) for n in (below, below + together) if n > 0]
            given = f" = {micro} (--batch.micro) x {ranks} ranks" if isinstance(self.micro, int) else " ranks"
            raise ConfigError(
                f"--batch.samples {self.samples} is not divisible by {together}{given}; "
                f"nearest values: {', '.join(near)}"
            )


def micro_batches(samples: int, together: int) -> list[int]:
    """Return the micro-batches into which the samples of a rank can be cut, the largest first.

    Args:
        samples: of the rank.
        together: each is a multiple of it (``ObjectiveConfig.samples_together``).
    """
    return [size for size in range(samples, 0, -1) if samples % size == 0 and size % together == 0]
