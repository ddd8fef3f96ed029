"""``python -m bench``: see ``python -m bench --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from bench import BenchError, aot, compare, data, op, report, scale, step


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return the exit code: 2 if it cannot run as it was asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Speed and memory, with evidence.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (op, step, data, scale, aot, compare, report):
        module.add(commands)
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except BenchError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
