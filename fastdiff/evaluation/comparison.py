"""Comparison of two runs by their losses on the same validation samples under the same noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fastdiff.config.run_record import require_run
from fastdiff.config.sections.objective import DEFAULTS
from fastdiff.diffusion.snr_bins import BINS, SNR_CENTRES, SNR_EDGES, Floats, Mean, by_log_snr, name_of
from fastdiff.errors import ConfigError
from fastdiff.evaluation.figures import figure_for
from fastdiff.evaluation.validation_files import Validated, read, steps_of
from fastdiff.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SIGNIFICANT = 2.0
"""Standard errors from 0 beyond which a difference is marked."""
_ENOUGH = 8
"""Samples of a bin below which its difference is not marked and it is left out of the mean of unpaired bins."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run and one of its validations."""

    folder: Path
    found: Validated

    @property
    def description(self) -> str:
        """Run, step, weights, precision and unit of the loss."""
        about = self.found.about
        return f"{self.folder}, step {about['step']}, {about['weights']} in {about['precision']}: {about['unit']}"


@dataclass(frozen=True, slots=True)
class Row:
    """Losses of both runs at some noise levels."""

    name: str
    a: Mean
    b: Mean
    difference: float
    """B - A; NaN where one of the runs has no sample."""
    error: float
    """Standard error of the difference."""

    @property
    def relative(self) -> float:
        """The difference over the loss of A."""
        return self.difference / self.a.mean if self.a.mean else math.nan

    @property
    def enough(self) -> bool:
        """Whether both runs have enough samples for a comparison."""
        return min(self.a.count, self.b.count) >= _ENOUGH

    @property
    def significant(self) -> bool:
        """Whether the difference exceeds ``SIGNIFICANT`` standard errors, with enough samples."""
        return self.enough and abs(self.difference) > SIGNIFICANT * self.error


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run B against run A."""

    a: MeasuredRun
    b: MeasuredRun
    unit: str
    paired: bool
    """Whether the noise levels are the same in both runs, so that they are compared sample by sample."""
    left_out: int
    """Samples whose loss is not finite in one of the runs."""
    bins: Sequence[Row]
    total: Row


def read_both(a: Path, b: Path, step: int | None = None) -> tuple[MeasuredRun, MeasuredRun]:
    """Read the validations of two runs at the same step.

    Args:
        a: a run folder.
        b: another one.
        step: of the validations; None: the newest common one.

    Raises:
        ConfigError: a folder has no run or no validation of the step, or the runs have no step in common.
        StorageError: a file cannot be read.
    """
    steps = [_steps(folder) for folder in (a, b)]
    common = set(steps[0]) & set(steps[1])
    if step is None and not common:
        raise ConfigError(
            f"{a} and {b} were never validated at the same step: {_in_words(steps[0])} and {_in_words(steps[1])}; "
            "choose the same --validation.every and --samples for both"
        )
    for folder, known in zip((a, b), steps, strict=True):
        if step is not None and step not in known:
            raise ConfigError(f"{folder}: no validation at step {step}; there are {_in_words(known)}")
    chosen = max(common) if step is None else step
    return MeasuredRun(a, read(a, chosen)), MeasuredRun(b, read(b, chosen))


def compare(a: MeasuredRun, b: MeasuredRun) -> Comparison:
    """Compare run B with run A, by bin of the log SNR and over all.

    If both runs have the same loss function, their losses are compared, otherwise the squared errors of x0. At the same
    noise levels the comparison is paired, sample by sample, which cancels the difficulty of each sample. At different
    levels the means of each bin are compared as independent samples; the total is the mean over the bins that have
    enough samples of both runs. ConfigError: the runs were validated on different samples or under different noise.
    """
    _require_same_samples(a, b)
    first, second = a.found, b.found
    same_loss = _loss_of(first) == _loss_of(second)
    unit = f"loss ({first.about['unit']})" if same_loss else "squared error of x0, as the losses differ in kind"
    values = [one.loss if same_loss else one.x0_mse for one in (first, second)]
    finite = np.isfinite(values[0]) & np.isfinite(values[1])
    paired = np.array_equal(first.log_snr, second.log_snr)
    rows, total = (_paired if paired else _unpaired)(
        [one.log_snr[finite] for one in (first, second)], [found[finite] for found in values]
    )
    return Comparison(a, b, unit, paired, int((~finite).sum()), rows, total)


def in_words(comparison: Comparison, room: int | None = None) -> str:
    """Return the comparison with its table, fitted into ``room`` columns of a terminal; None: one line per row."""
    unpaired = "unpaired, as their noise levels differ: each bin has the samples that fall into it"
    how = "sample by sample" if comparison.paired else unpaired
    lines = [
        f"A: {comparison.a.description}",
        f"B: {comparison.b.description}",
        f"{comparison.unit}; {len(comparison.a.found.index)} samples, {how}",
        "",
    ]
    cells = [["log SNR", "samples", "A", "B", "B - A", "+-", "%", ""]]
    cells += [_cells(row, comparison.paired) for row in (*comparison.bins, comparison.total)]
    lines += [
        table(cells, (), room),
        "",
        f"+-: standard error of B - A.  *: more than {SIGNIFICANT:g} standard errors, from at least {_ENOUGH} samples.",
    ]
    if not comparison.paired:
        lines.append(f"{comparison.total.name}: over the bins with at least {_ENOUGH} samples of each run.")
    if comparison.left_out:
        lines.append(f"Left out: {comparison.left_out} samples, not finite in one of the runs.")
    return "\n".join(lines)


def _cells(row: Row, paired: bool) -> list[str]:
    count = str(row.a.count) if paired else f"{row.a.count}, {row.b.count}"
    percent = 100 * row.relative
    return [
        row.name,
        count,
        _number(row.a.mean),
        _number(row.b.mean),
        _number(row.difference, signed=True),
        _number(row.error),
        "-" if math.isnan(percent) else f"{percent:+.2f}",
        "*" if row.significant else "",
    ]


def _number(value: float, *, signed: bool = False) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:{'+' if signed else ''}.4g}"


def _paired(log_snr: Sequence[npt.NDArray[np.float32]], values: Sequence[Floats]) -> tuple[list[Row], Row]:
    a, b, both = (by_log_snr(log_snr[0], found) for found in (values[0], values[1], values[1] - values[0]))
    rows = [Row(name_of(n), a[1][n], b[1][n], both[1][n].mean, both[1][n].error) for n in range(BINS)]
    return rows, Row("all samples", a[0], b[0], both[0].mean, both[0].error)


def _unpaired(log_snr: Sequence[npt.NDArray[np.float32]], values: Sequence[Floats]) -> tuple[list[Row], Row]:
    a, b = (by_log_snr(*found)[1] for found in zip(log_snr, values, strict=True))
    rows = [_independent(name_of(n), a[n], b[n]) for n in range(BINS)]
    common = [row for row in rows if row.enough]
    means = [_mean_of_bins([row.a for row in common]), _mean_of_bins([row.b for row in common])]
    return rows, _independent("mean of bins", *means)


def _independent(name: str, a: Mean, b: Mean) -> Row:
    return Row(name, a, b, b.mean - a.mean, math.hypot(a.error, b.error))


def _mean_of_bins(bins: Sequence[Mean]) -> Mean:
    """Average bins with equal weights."""
    if not bins:
        return Mean(0, math.nan, math.nan)
    error = math.hypot(*(found.error for found in bins)) / len(bins)
    return Mean(sum(found.count for found in bins), sum(found.mean for found in bins) / len(bins), error)


def _loss_of(found: Validated) -> dict[str, object]:
    """Return the fields that determine the loss; defaults hold for those that older records lack."""
    recorded: dict[str, object] = found.about["objective"]
    return DEFAULTS | recorded | {"convention": DEFAULTS["convention"]}  # it changes no loss


def _require_same_samples(a: MeasuredRun, b: MeasuredRun) -> None:
    for what, found, expected in (
        ("data sets (digests {})", a.found.about["data"][:12], b.found.about["data"][:12]),
        ("numbers of samples ({})", len(a.found.index), len(b.found.index)),
        ("noise (seeds {})", a.found.about["seed"], b.found.about["seed"]),
    ):
        if found != expected:
            raise ConfigError(
                f"{a.folder} and {b.folder} were validated with different {what.format(f'{found} and {expected}')}; "
                "give both the same --validation.data and --validation.samples"
            )


def _steps(folder: Path) -> list[int]:
    require_run(folder)
    steps = steps_of(folder)
    if not steps:
        raise ConfigError(f"{folder}: no validation; train with --validation.data")
    return steps


def _in_words(steps: Sequence[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if len(steps) < 10 else f"steps {steps[0]}, {steps[1]} ... {steps[-1]}"


# Colour-blind safe palette of Okabe and Ito (2008); the shapes differ too.
_A, _B, _SAME, _SMALL = "#0072B2", "#D55E00", "#999999", "#555555"
_LOGARITHMIC = 10.0
"""Ratio of the largest to the smallest loss above which their axis is logarithmic."""
_FAR = 2.0
"""Relative difference above which its axis is symmetric logarithmic."""
_SHIFT = 0.08
"""Horizontal offset of A and B from the centre of their bin, so that their error bars do not overlap."""


def draw(comparison: Comparison, path: Path) -> None:
    """Write the plot (``figures.figure_for``).

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: with the path; it cannot be written.
    """
    with figure_for(path, (9.0, 6.2)) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _losses(top, comparison)
        _differences(bottom, comparison)


def _losses(axes: Axes, comparison: Comparison) -> None:
    names = _names(comparison)
    for shift, colour, shape, of in ((-_SHIFT, _A, "o", "a"), (_SHIFT, _B, "s", "b")):
        known = [(x, getattr(row, of)) for x, row in zip(SNR_CENTRES, comparison.bins, strict=True)]
        known = [(x, mean) for x, mean in known if mean.count]
        axes.errorbar(
            [x + shift for x, _ in known],
            [mean.mean for _, mean in known],
            [0.0 if math.isnan(mean.error) else SIGNIFICANT * mean.error for _, mean in known],
            color=colour, marker=shape, markersize=5, linewidth=1.5, elinewidth=1.2, capsize=2.5, label=names[of],
        )  # fmt: skip
    means = [mean.mean for row in comparison.bins for mean in (row.a, row.b) if mean.count]
    if means and min(means) > 0 and max(means) > _LOGARITHMIC * min(means):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(comparison.unit.split(", as ")[0])
    axes.set_title(_verdict(comparison.total, names))
    axes.legend(loc="best")


def _differences(axes: Axes, comparison: Comparison) -> None:
    """Plot the differences in percent of A, because the losses of bins may differ by decades."""
    for x, row in zip(SNR_CENTRES, comparison.bins, strict=True):
        if math.isnan(row.relative):
            continue
        error = 0.0 if math.isnan(row.error) else 100 * SIGNIFICANT * row.error / row.a.mean
        colour = _SAME if not row.significant else _B if row.difference > 0 else _A
        axes.errorbar(
            x, 100 * row.relative, error, color=colour, marker="D", markersize=5, elinewidth=1.6, capsize=3,
            markerfacecolor=colour if row.significant else "white",
        )  # fmt: skip
        axes.annotate(
            f"{row.a.count}", (x, 0.02), xycoords=("data", "axes fraction"), color=_SMALL, fontsize=7.5, ha="center"
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.margins(y=0.18)  # for the numbers of samples
    if any(abs(row.relative) > _FAR for row in comparison.bins):
        axes.set_yscale("symlog", linthresh=10)
    axes.set_ylabel("B − A, % of A")
    kind = "paired differences" if comparison.paired else "differences (other noise levels: not paired)"
    marks = f"±{SIGNIFICANT:g} standard errors; filled: marked in the table"
    axes.set_title(f"{kind} with {marks}; below: samples", fontsize=9, color=_SMALL)
    axes.set_xticks(SNR_EDGES[1::2])
    axes.set_xlim(SNR_CENTRES[0] - 1, SNR_CENTRES[-1] + 1)
    axes.set_xlabel("more noise  ←   log SNR   →  less noise")


def _names(comparison: Comparison) -> dict[str, str]:
    folders: Sequence[Path] = [found.folder.resolve() for found in (comparison.a, comparison.b)]
    same = folders[0].name == folders[1].name
    return {of: f"{of.upper()}: {folder if same else folder.name}" for of, folder in zip("ab", folders, strict=True)}


def _verdict(total: Row, names: dict[str, str]) -> str:
    """Summarize the total in one sentence."""
    if math.isnan(total.relative):
        return f"{names['b']} against {names['a']}"
    verdict = ("B is higher" if total.difference > 0 else "B is lower") if total.significant else "no clear difference"
    middle, reach = 100 * total.relative, 100 * SIGNIFICANT * total.error / total.a.mean
    signed = f"{middle:+.2f}".replace("-", "−")
    return f"{verdict}: B − A is {signed} ± {reach:.2f} % of A ({total.name})"
