"""``fastdiff bench``: the benchmarks."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from typing import Any

NAME = "bench"


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Register the command; the benchmarks parse its flags."""
    commands.add_parser(NAME, help="measure speed and memory", add_help=False)


def run(argv: Sequence[str]) -> None:
    """Run a benchmark with ``argv`` and end the process."""
    sys.argv = [f"fastdiff {NAME}", *argv]
    runpy.run_module("fastdiff_bench", run_name="__main__", alter_sys=True)
