"""The ``fastdiff`` command: one module per subject, each of which registers its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from fastdiff.cli import bench, check, compare, encode, evaluate, export, launch, sample
from fastdiff.cli.compat import command
from fastdiff.console import quieten
from fastdiff.errors import FastdiffError, as_storage_error, report


def entry() -> None:
    """Run the ``fastdiff`` command."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run the ``fastdiff`` command with ``argv`` and return its exit code."""
    quieten()
    try:
        if argv[:1] == [bench.NAME]:
            bench.run(argv[1:])
        arguments = _parser().parse_args(list(argv))
        run: Callable[[argparse.Namespace], None] = arguments.run
        run(arguments)
    except FastdiffError as error:
        return report(error)
    except OSError as error:
        return report(as_storage_error(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdiff", description="Train diffusion models from sharded latents.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (encode, launch, command, check, sample, evaluate, compare, export, bench):
        module.add(commands)
    return parser
