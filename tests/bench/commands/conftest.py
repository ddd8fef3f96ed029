"""The smoke runs of the benchmarks fork their programs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _forked(forked: None) -> None:
    pass
