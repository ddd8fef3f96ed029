"""The smoke runs of the benchmarks fork their programs."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _forked(forked: None) -> None:
    pass
