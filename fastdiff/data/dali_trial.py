"""Whether NVIDIA DALI loads and works on a device, tried once per process."""

import importlib.util
from collections.abc import Sequence
from functools import cache
from importlib import import_module, metadata
from typing import Any

import numpy as np
import torch

from fastdiff.optional_packages import pip_install

_PACKAGES = {13: "nvidia-dali-cuda130", 12: "nvidia-dali-cuda120", 11: "nvidia-dali-cuda110"}
"""Package of each CUDA version; all provide the module ``nvidia.dali``."""


@cache
def dali_problem(on_cuda: bool) -> str | None:
    """Return why DALI cannot be used, with the remedy; None: a small pipeline ran.

    A DALI for another CUDA version than torch's is not tried on a GPU: it may need a newer driver, and would load a
    second CUDA into the process.
    """
    if not dali_installed():
        return f"NVIDIA DALI is not installed; {install_dali()}"
    wanted = _cuda_of_torch()
    if on_cuda and wanted is not None and (problem := version_problem(_installed(), wanted)):
        return problem
    try:
        _run(torch.cuda.current_device() if on_cuda else None)
    except Exception as error:  # a library that is missing, a driver that is too old, ...
        return f"NVIDIA DALI fails here ({' '.join(str(error).split())[:300]}); reinstall it: {install_dali()}"
    return None


def dali_installed() -> bool:
    """Return whether NVIDIA DALI is installed, without importing it."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        return False  # no package nvidia


def version_problem(installed: Sequence[int], cuda: int) -> str | None:
    """Return why the installed packages do not fit the CUDA version of torch; None: one fits, or none is known.

    Args:
        installed: CUDA version of each installed package.
        cuda: CUDA version of torch, for example 13.
    """
    if list(installed) in ([], [cuda]):
        return None
    names = [_PACKAGES[found] for found in installed]
    return (
        f"{' and '.join(names)} is for CUDA {' and '.join(map(str, installed))}, and torch for CUDA {cuda}; "
        f"pip uninstall {' '.join(names)}; {install_dali(cuda)}"
    )


def install_dali(cuda: int | None = None) -> str:
    """Return the command that installs the DALI of a CUDA version; None: of torch's, or the newest."""
    return pip_install(_PACKAGES[12 if (cuda or _cuda_of_torch()) == 12 else 13])


def _cuda_of_torch() -> int | None:
    return int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else None


def _installed() -> list[int]:
    """Return the CUDA version of each installed package."""
    return [cuda for cuda, name in _PACKAGES.items() if any(metadata.distributions(name=name))]


def _run(device_id: int | None) -> None:
    """Send one number through a pipeline, to the GPU if there is one."""
    dali: Any = import_module("nvidia.dali")
    pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=device_id, exec_async=False, exec_pipelined=False)
    with pipeline:
        number = dali.fn.external_source(lambda: [np.ones(1, np.float32)], dtype=dali.types.FLOAT, ndim=1)
        pipeline.set_outputs(number if device_id is None else number.gpu())
    pipeline.build()
    (output,) = pipeline.run()
    assert np.array((output if device_id is None else output.as_cpu()).at(0)).tolist() == [1.0]
