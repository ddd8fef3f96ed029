"""Likely causes of the deviations of a run, by the table of signatures ``causes.toml``."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from fastdiff.evaluation.conformance.comparison import Conformance

_LEAST = 0.5
"""Share of what should be as in the reference, and is, below which a cause is not named."""
_MOST = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of the table."""

    name: str
    title: str
    off: tuple[tuple[str, ...], ...]
    """For each, one of these names deviates."""
    same: tuple[str, ...]
    """None of these names deviates."""
    check: str
    """What to check."""

    def fit(self, deviating: Iterable[str], compared: Iterable[str]) -> float:
        """Return from 0 to 1 how well the cause explains which names deviate; patterns without a number are unknown."""
        deviating = list(deviating)
        if not all(any(_matches(pattern, deviating) for pattern in row) for row in self.off):
            return 0.0
        known = [pattern for pattern in self.same if _matches(pattern, compared)]
        return sum(not _matches(pattern, deviating) for pattern in known) / len(known) if known else 1.0


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


@cache
def table() -> tuple[Cause, ...]:
    """Return the known causes."""
    rows = tomllib.loads(Path(__file__).with_name("causes.toml").read_text())["cause"]
    return tuple(
        Cause(row["name"], row["title"], tuple(map(tuple, row["off"])), tuple(row["same"]), row["check"])
        for row in rows
    )


def likely(found: Conformance) -> Sequence[Cause]:
    """Return the causes that explain the deviations, the likeliest first: at most three."""
    deviating = [deviation.name for deviation in found.deviations]
    fits = {cause.name: cause.fit(deviating, found.names) for cause in table()}
    ranked = sorted((cause for cause in table() if fits[cause.name] >= _LEAST), key=lambda cause: -fits[cause.name])
    return ranked[:_MOST]
