"""Packages of the experiment trackers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from fastdiff.errors import ConfigError
from fastdiff.optional_packages import pip_install

_OPTIONAL = ("wandb", "trackio")


def require_installed(report_to: Sequence[str]) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    for name in _OPTIONAL:
        if name in report_to and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--output.report_to {name} needs {name}, which is not installed: {pip_install(name)}; or leave it out"
            )
