"""What more training is expected to gain, from the validations of a run, and whether it still gains anything.

The validation loss is extrapolated by ``c + a t^-b`` in the steps t, the power law of learning curves ("pow3" of Domhan
et al. 2015, "Speeding up automatic hyperparameter optimization of deep neural networks by extrapolation of learning
curves"). It holds while the learning rate stays as it is: a decay gains more.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.diffusion.snr_bins import Floats
from fastdiff.evaluation.comparison import SIGNIFICANT, Comparison, MeasuredRun, compare
from fastdiff.evaluation.validation_files import Validated, read, steps_of

FEWEST = 5
"""Validations that a fit needs: it has three numbers."""
_MOST = 64
"""Validations that are read, evenly chosen."""
_BEGIN = 10
"""The fit leaves out the first tenth of the run, which is no power law yet."""
_WINDOW = 4
"""The last quarter of the run is the window in which it must have gained."""
_EXPONENTS = np.geomspace(0.02, 5.0, 120)
_DRAWS, _BLOCK = 1000, 50
"""Curves of the bootstrap, and how many of them are drawn at once, for the sake of memory."""
_INTERVAL = (5.0, 95.0)
_SEED = 20_261_123
_FEW = 4
"""Bins that are listed."""


@dataclass(frozen=True, slots=True)
class ExpectedGain:
    """The fall of the validation loss that more steps are expected to bring."""

    steps: int
    """More steps, from the last validation on."""
    loss: float
    """Of the last validation."""
    gain: float
    low: float
    high: float
    """Ends of the interval of 90 %."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run can still expect."""

    gain: ExpectedGain | None
    """None: there are fewer than ``FEWEST`` comparable validations."""
    comparison: Comparison | None
    """The last validation (B) against the one before the window (A); None: there is only one."""

    @property
    def gained(self) -> list[str]:
        """The ranges of the log SNR whose loss has fallen by more than two standard errors in the window."""
        rows = [] if self.comparison is None else self.comparison.bins
        return [row.name for row in rows if row.significant and row.difference < 0]


def look_ahead(run: Path, steps: int) -> Forecast:
    """Return what ``steps`` more steps are expected to gain.

    Args:
        run: a run folder with a validation.
        steps: from the last validation on.

    Raises:
        StorageError: a file of a validation is damaged.
    """
    found = _comparable(run)
    taken = np.array([one.about["step"] for one in found], dtype=np.float64)
    fitted = [one for one, step in zip(found, taken, strict=True) if step >= taken[-1] / _BEGIN]
    before = [one for one, step in zip(found, taken, strict=True) if 0 < step <= taken[-1] * (1 - 1 / _WINDOW)]
    comparison = compare(MeasuredRun(run, before[-1]), MeasuredRun(run, found[-1])) if before else None
    return Forecast(_expected_gain(fitted, steps) if len(fitted) >= FEWEST else None, comparison)


def _comparable(run: Path) -> list[Validated]:
    """Return validations in the order of their steps that measured the same as the last one."""
    steps = steps_of(run)
    chosen = sorted({steps[round(n)] for n in np.linspace(0, len(steps) - 1, min(len(steps), _MOST))})
    found = [read(run, step) for step in chosen]
    return [one for one in found if _measure(one) == _measure(found[-1])]


def _measure(one: Validated) -> list[object]:
    return [len(one.index), *(one.about.get(name) for name in ("data", "seed", "unit", "objective"))]


def _expected_gain(found: Sequence[Validated], steps: int) -> ExpectedGain | None:
    """Fit the power law, and refit it to bootstrapped curves for the interval; None without a finite loss.

    A curve of the bootstrap has the samples of the validation drawn again, the same at every step, and the residuals of
    the fit as normal noise: the errors of the measurement and of the law.
    """
    taken = np.array([one.about["step"] for one in found], dtype=np.float64)
    losses = np.stack([one.loss for one in found])  # [validations, samples]
    losses = losses[:, np.isfinite(losses).all(axis=0)]
    if not losses.size:
        return None
    curve, draw = losses.mean(axis=1), np.random.default_rng(_SEED)
    (gain,), (residuals,) = _gains(taken, curve[None], steps)
    spread = np.sqrt((residuals**2).sum() / max(1, len(taken) - 3))
    count = losses.shape[1]
    even = np.full(count, 1 / count)
    drawn = [draw.multinomial(count, even, size=_BLOCK) @ losses.T / count for _ in range(_DRAWS // _BLOCK)]
    curves = np.concatenate(drawn) + draw.normal(0.0, spread, size=(_DRAWS, len(taken)))
    low, high = np.percentile(_gains(taken, curves, steps)[0], _INTERVAL)
    return ExpectedGain(steps, float(curve[-1]), float(gain), float(min(low, gain)), float(max(high, gain)))


def _gains(taken: Floats, curves: Floats, steps: int) -> tuple[Floats, Floats]:
    """Fit curves ``[n, validations]`` by least squares; return the fall after the last ``[n]``, and the residuals."""
    scaled, until = taken / taken[-1], 1 + steps / taken[-1]
    errors: list[Floats] = []
    falls: list[Floats] = []
    residuals: list[npt.NDArray[np.float64]] = []
    for exponent in _EXPONENTS:
        basis = np.stack([np.ones_like(scaled), scaled**-exponent])  # [2, validations]
        weights = curves @ np.linalg.pinv(basis)  # [n, 2]: c and a
        left = curves - weights @ basis
        errors.append((left**2).sum(axis=1))
        falls.append(weights[:, 1] * (1 - until**-exponent))
        residuals.append(left)
    best, every = np.argmin(errors, axis=0), np.arange(len(curves))
    return np.array(falls)[best, every], np.array(residuals)[best, every]


def as_json(found: Forecast) -> dict[str, Any]:
    """Return the forecast as JSON values."""
    since = None if found.comparison is None else found.comparison.a.found.about["step"]
    forecast = None if found.gain is None else asdict(found.gain)
    return {"forecast": forecast, "window_since_step": since, "bins_gained": found.gained}


def in_words(found: Forecast, gpu_hours: float) -> str:
    """Return the forecast as two sentences; ``gpu_hours`` are those of the steps of the forecast."""
    return "\n".join([_of_gain(found.gain, gpu_hours), _of_window(found)])


def _of_gain(found: ExpectedGain | None, gpu_hours: float) -> str:
    if found is None:
        return f"no forecast of the validation loss: it needs {FEWEST} validations, in the last nine tenths of the run"
    verb, by, ends = "lower", found.gain, (found.low, found.high)
    if found.gain < 0:
        verb, by, ends = "raise", -found.gain, (-found.high, -found.low)
    percent = f" ({100 * by / abs(found.loss):.2g} %)" if found.loss else ""
    return (
        f"the next {gpu_hours:,.3g} GPU-hours ({found.steps:,} steps) are expected to {verb} the validation loss of "
        f"{found.loss:.4g} by {by:.2g}{percent}; 90 % interval {ends[0]:.2g} to {ends[1]:.2g}"
    )


def _of_window(found: Forecast) -> str:
    if found.comparison is None:
        return "no window to judge: there is one validation"
    since, bins = found.comparison.a.found.about["step"], found.comparison.bins
    measured = sum(row.b.count > 0 for row in bins)
    if not found.gained:
        return (
            f"since step {since:,} the loss has fallen by {SIGNIFICANT:g} standard errors at no noise level: more "
            "steps like these are not expected to help"
        )
    which = f": {', '.join(found.gained)}" if len(found.gained) <= _FEW else ""
    return (
        f"since step {since:,} the loss has fallen by more than {SIGNIFICANT:g} standard errors in "
        f"{len(found.gained)} of {measured} bins of the log SNR{which}"
    )
