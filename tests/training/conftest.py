"""Fixtures of the tests of the training."""

import pytest
from deepspeed.accelerator import get_accelerator


@pytest.fixture
def cpu_with_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DeepSpeed use fp16 on a CPU without fast instructions for it; torch computes it on every CPU, only slowly."""
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
