"""``python -m bench``: see ``python -m bench --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cases import OPS, cases


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    aot = commands.add_parser("aot", help="compile every kernel without a GPU: registers, spills, access widths")
    aot.add_argument("ops", nargs="*", metavar="OP", help=f"some of: {', '.join(OPS)}; default: all")
    aot.add_argument("--arch", nargs="+", type=int, default=[80, 90, 100], help="compute capabilities, as in sm_90")
    aot.add_argument("--json", type=Path, help="file for the same numbers")
    arguments = parser.parse_args(argv)
    if arguments.command == "aot":
        from bench.aot import main as run_aot

        return run_aot(cases(tuple(arguments.ops) or OPS), arguments.arch, arguments.json)
    raise AssertionError(arguments.command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
