"""What tests of several parts of the benchmarks share."""

from __future__ import annotations

import pytest

from fastdiff_bench.commands import step
from fastdiff_bench.measure import roofline


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the machine from small products, measured in this process: a large one in bf16 takes seconds."""
    for name, small in (("_COPIED_BYTES", 2**20), ("_SIDE", 64)):
        monkeypatch.setattr(roofline, name, {**getattr(roofline, name), "cpu": small})
    monkeypatch.setattr(step, "_in_another_process", roofline.measure)
