"""``fastdiff bench``: the benchmarks."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

NAME = "bench"


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Register the command; the benchmarks parse its flags."""
    commands.add_parser(NAME, help="measure speed and memory", add_help=False)


def run(argv: Sequence[str]) -> None:
    """Run a benchmark with ``argv`` and end the process."""
    sys.argv = [f"fastdiff {NAME}", *argv]
    runpy.run_module("fastdiff_bench", run_name="__main__", alter_sys=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Register the benchmarks and their flags, for a parser that only describes; the imports take seconds."""
    benchmarks = import_module("fastdiff_bench.__main__")
    commands = parser.add_subparsers(metavar="COMMAND")
    add_parser = commands.add_parser
    for name, text in benchmarks.COMMANDS.items():
        commands.add_parser = partial(add_parser, help=text)  # type: ignore[method-assign]  # shtab hides those without
        try:
            benchmarks.module_of(name).add(commands)
        except ImportError:  # an optional package is missing
            commands.add_parser(name)
