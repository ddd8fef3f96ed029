"""Moving averages of the weights of a run."""

from dataclasses import dataclass

from fastdiff.errors import require

WIDEST = 12.0**-0.5
"""Relative std of the uniform mean of all weights so far. A wider power-function average would weight old weights
more than new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """Moving averages of the weights; samples and evaluations use the first."""

    rates: tuple[float, ...] = (0.9999,)
    """One exponential average per rate. Empty: none."""
    warmup: bool = False
    """Begin with lower rates, (1 + n) / (10 + n) at step n. For fine-tuning: otherwise its few steps hardly move an
    average that starts at the pretrained weights."""
    power_stds: tuple[float, ...] = ()
    """One power-function average (EDM2) per relative std, listed after those of --ema.rates; its time window grows
    with the training. With snapshots of 0.05 and 0.10, any std between and around them can be reconstructed after the
    training."""
    snapshot_every: int = 0
    """Optimizer steps between snapshots of the power-function averages; all are kept, in 16 bits. `fastdiff sample`,
    `evaluate` and `export` reconstruct the average of another --ema-std from them. 0: none."""

    def __post_init__(self) -> None:
        require(
            all(0.0 < std <= WIDEST for std in self.power_stds) and len(set(self.power_stds)) == len(self.power_stds),
            f"--ema.power_stds {self.power_stds}: different stds above 0 and at most {WIDEST:.4f} (the plain mean), "
            "for example 0.05 0.10",
        )
        require(self.snapshot_every >= 0, f"--ema.snapshot_every {self.snapshot_every}: at least 0")
        require(
            self.snapshot_every == 0 or len(self.power_stds) > 0,
            f"--ema.snapshot_every {self.snapshot_every} needs power-function averages: --ema.power_stds 0.05 0.10",
        )
        require(
            all(0.0 < rate < 1.0 for rate in self.rates) and len(set(self.rates)) == len(self.rates),
            f"--ema.rates {self.rates}: different values between 0 and 1, for example 0.999 0.9999",
        )
