"""Metrics of users: functions of the features of two image sets, ``--metric PATH.py:FUNCTION``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastdiff.errors import require
from fastdiff.evaluation.image_metrics import Features
from fastdiff.plugins.user_code import Plugin, load

Figures = Mapping[str, float]
_FLAG = "--metric"
_RESERVED = frozenset(
    {
        *("fid", "kid", "kid_std", "precision", "recall", "samples", "reference", "fid_reference", "extractor"),
        *("extractor_sha256", "metrics", "seed", "versions"),
    }
)
"""Names of the other figures of an evaluation, and of what it records beside them."""


@dataclass(frozen=True, slots=True)
class UserMetric:
    """A metric of a user: fp32 features ``[N, D]`` of samples and ``[M, D]`` of real images, to a number or several."""

    plugin: Plugin
    name: str
    """Of its figures: ``NAME``, or ``NAME.KEY`` for each of several."""

    def __call__(self, samples: Features, reference: Features) -> Figures:
        """Return its figures by name, called twice; ConfigError: an exception, no numbers, or others again."""
        figures = self._called(samples, reference)
        require(
            figures == self._called(samples, reference),
            f"{_FLAG} {self.plugin.text} returns other numbers when it is called again; give its generator a fixed "
            "seed",
        )
        return figures

    def _called(self, samples: Features, reference: Features) -> Figures:
        what = f"{_FLAG} {self.plugin.text}"
        given = [_read_only(samples), _read_only(reference)]
        with self.plugin.blamed(what):
            found = self.plugin.found(*given)
        several = found if isinstance(found, Mapping) else {"": found}
        figures = {}
        for key, value in several.items():
            require(
                isinstance(value, int | float | np.number) and math.isfinite(float(value)),
                f"{what} returns {_described(value)}, expected a finite number, or finite numbers by name",
            )
            figures[f"{self.name}.{key}" if key else self.name] = float(value)
        return figures


def open_metrics(names: Sequence[str]) -> list[UserMetric]:
    """Open metrics.

    Args:
        names: ``PATH.py:FUNCTION``, or names of entry points.

    Raises:
        ConfigError: a metric cannot be opened; or two have one name, or one that of another figure.
    """
    found = [_open(name) for name in names]
    twice = {metric.name for metric in found if [other.name for other in found].count(metric.name) > 1}
    require(not twice, f"{_FLAG}: two metrics have the name {', '.join(sorted(twice))}; rename one")
    taken = sorted(_RESERVED & {metric.name for metric in found})
    require(not taken, f"{_FLAG}: {', '.join(taken)} is the name of another figure; rename the function")
    return found


def _open(text: str) -> UserMetric:
    plugin = load(text, "fastdiff.metrics", _FLAG)
    require(callable(plugin.found), f"{_FLAG} {text}: expected a function of the features of two image sets")
    return UserMetric(plugin, text.rpartition(":")[2])


def _read_only(features: Features) -> Features:
    """Return a view that the user's code cannot change."""
    view = features.view()
    view.flags.writeable = False
    return view


def _described(value: object) -> str:
    return repr(value) if isinstance(value, int | float | np.number) else f"a {type(value).__name__}"
