"""fastdiff: train diffusion models from sharded latents, fast, at any scale.

``import fastdiff`` imports no torch; the names below are imported on first use.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fastdiff.standard_streams import open_closed_descriptors
from fastdiff.version import __version__

if TYPE_CHECKING:
    from fastdiff.api.config import Config, preset, presets
    from fastdiff.api.data_set import webdataset
    from fastdiff.api.run import Run
    from fastdiff.api.training import RunError, train
    from fastdiff.errors import (
        ConfigError,
        DataError,
        DivergedError,
        FastdiffError,
        NoMemoryError,
        Preempted,
        ProcessLimitError,
        StorageError,
    )

__all__ = [
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "FastdiffError",
    "NoMemoryError",
    "Preempted",
    "ProcessLimitError",
    "Run",
    "RunError",
    "StorageError",
    "__version__",
    "preset",
    "presets",
    "train",
    "webdataset",
]
_MODULES = {
    "Config": "api.config", "preset": "api.config", "presets": "api.config", "webdataset": "api.data_set",
    "Run": "api.run", "RunError": "api.training", "train": "api.training",
}  # fmt: skip
"""Modules of the names; all others are errors."""

open_closed_descriptors()  # before an import opens a file


def __getattr__(name: str) -> Any:
    if name in __all__:
        return resolve_name(f"fastdiff.{_MODULES.get(name, 'errors')}:{name}")
    raise AttributeError(f"module 'fastdiff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
