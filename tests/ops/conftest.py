"""What the tests of the kernels share."""

from __future__ import annotations

import pytest
import torch

from fastdiff_kernels import launch


@pytest.fixture
def device() -> str:
    """Where kernels run: the GPU, else the CPU by Triton's interpreter."""
    assert torch.cuda.is_available() or launch.INTERPRETED
    return "cuda" if torch.cuda.is_available() else "cpu"
