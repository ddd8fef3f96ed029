"""What tests of several parts of the benchmarks share."""

from __future__ import annotations

import pytest

from fastdiff_bench.commands import step
from tests.support.benches import programs


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the machine from small products, measured in this process."""
    monkeypatch.setattr(step, "_in_another_process", programs.small_limits)
