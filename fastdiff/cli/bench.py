"""``fastdiff bench``: the benchmarks of the clone that fastdiff is installed from."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from fastdiff.errors import ConfigError

NAME = "bench"


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Register the command; the benchmarks parse its flags."""
    commands.add_parser(NAME, help="measure speed and memory, as `python -m bench`", add_help=False)


def run(argv: Sequence[str]) -> None:
    """Run ``python -m bench`` with ``argv`` and end the process.

    Raises:
        ConfigError: the benchmarks are not installed; a wheel does not contain them.
    """
    if not _installed():
        raise ConfigError("fastdiff bench: the benchmarks come with the repository; clone it and `pip install -e .`")
    sys.argv = [f"python -m {NAME}", *argv]
    runpy.run_module(NAME, run_name="__main__", alter_sys=True)


def _installed() -> bool:
    """Return whether the package ``bench`` is the one of the repository."""
    try:
        return importlib.util.find_spec("bench.measure.interleaved") is not None
    except ModuleNotFoundError:
        return False
