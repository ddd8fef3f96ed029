"""``python -m bench``: see ``python -m bench --help``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType, ModuleType

from bench import BenchError
from fastdiff.config.argument_types import Parser
from fastdiff.errors import ConfigError, report_any

COMMANDS = (
    "op", "step", "scripts", "startup", "data", "scale", "plan", "checkpoint", "aot", "emit", "objectives", "compare",
    "report",
)  # fmt: skip
"""Subcommands; each is a module with ``add``."""
_ELSEWHERE = {"scale": "scaling.command", "emit": "emission.command"}
"""Modules of subcommands beside what they need; the others are in ``bench.commands``."""


def module_of(name: str) -> ModuleType:
    """Import the module of a subcommand."""
    place = _ELSEWHERE.get(name, f"commands.{name}")
    return import_module(f"bench.{place}")


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return the exit code: 2 if it cannot run with these flags, 74 without its files."""
    parser = Parser(prog="python -m bench", description="Speed and memory, with evidence.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # Import only the requested command; some take seconds.
    for name in [name for name in COMMANDS if name in argv[:1]] or COMMANDS:
        module_of(name).add(commands)
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except (BenchError, ConfigError) as error:
        parser.error(str(error))
    except OSError as error:
        return report_any(error)


def _terminated(number: int, frame: FrameType | None) -> None:
    """Exit as after an error, so that temporary folders and the trainers' processes are removed."""
    signal.signal(number, signal.SIG_IGN)  # ignore further signals, which would interrupt the cleanup
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _terminated)
    sys.exit(main(sys.argv[1:]))
