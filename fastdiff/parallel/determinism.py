"""Determinism: a run on a GPU repeats to the bit (``--performance.deterministic``), because all sums keep one order.

By default cuBLAS, cuDNN and the backward passes of attention may add in the order in which their blocks finish, and
cuDNN takes the convolution that was fastest when it first met the shapes, which may be another one in the next process.
The kernels of fastdiff never do.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from fastdiff.errors import ConfigError

_REFUSALS = ("does not have a deterministic implementation", "this operation is not deterministic")
"""What torch says of an operation that is not deterministic."""


def reserve_workspaces(wanted: bool) -> None:
    """Let cuBLAS use one fixed workspace per stream; before its first use, when it reads the environment."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, if ``wanted``, every operation is deterministic or raises ``RuntimeError``.

    Otherwise cuDNN measures the convolutions: a run has few shapes, and its heuristics miss the fastest.
    """
    if not wanted:
        with _measured_convolutions():
            yield
        return
    reserve_workspaces(wanted)
    before = torch.get_deterministic_debug_mode()
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    flags = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that it has not written; to fill it would only take time.
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = flags


@contextmanager
def _measured_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def explain_nondeterminism(error: Exception) -> ConfigError | None:
    """Return the error of a nondeterministic operation as one that names the flag; None for any other error."""
    message = str(error)
    if not isinstance(error, RuntimeError) or not any(refusal in message for refusal in _REFUSALS):
        return None
    operation = message.split(" does not have")[0].split()[-1] if _REFUSALS[0] in message else "a product by cuBLAS"
    remedy = "leave the flag out" if _REFUSALS[0] in message else "unset CUBLAS_WORKSPACE_CONFIG, or leave the flag out"
    return ConfigError(f"--performance.deterministic: {operation} has no form that adds in a fixed order; {remedy}")
