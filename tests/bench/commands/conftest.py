"""The smoke runs of the benchmarks fork their programs; ``test_interleaved`` spawns them as a benchmark does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.benches.forked_programs import forked_programs


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with forked_programs():
        yield
