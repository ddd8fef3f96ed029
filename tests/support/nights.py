"""Parameters of a test of which a part is for the night."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_day(always: Iterable[Any], *nightly: Any) -> list[Any]:
    """Return the parameters of every run, and behind them those that only a nightly one has; a tuple is one set."""
    return [
        *always,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.nightly) for one in nightly),
    ]
