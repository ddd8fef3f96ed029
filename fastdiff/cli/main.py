"""The ``fastdiff`` command: one module per subject registers its subcommands."""

import argparse
import errno
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile

from fastdiff import process_limits, verbosity
from fastdiff.cli import bench, check, completion, conform, convert, encode, evaluate, export, launch, runs, sample
from fastdiff.cli.compat import command
from fastdiff.cli.demo import command as demo
from fastdiff.cli.machines import plan
from fastdiff.cli.published_weights import split_fields
from fastdiff.config.arguments.types import Parser
from fastdiff.console import log, quieten, write_line
from fastdiff.errors import FastdiffError, StorageError, report, report_any, require_utf8
from fastdiff.files import raise_open_files
from fastdiff.parallel.launcher import leave_job
from fastdiff.standard_streams import lossy_output
from fastdiff.version import __version__

_OF_NETWORKS = ("sample", "evaluate", "export")
"""Commands that read runs and, with ``--preset`` and flags of its fields, published files."""
_OF_THREADS = ("bench", "demo", "encode", "evaluate", "export", "sample", "train", "verify", "watch")
"""Commands that start threads, or import libraries that do."""
_RANKS = ("encode", "evaluate", "sample")
"""Commands that a launcher may start many times; the variables of ranks mean nothing to the others."""


def entry() -> None:
    """Run the ``fastdiff`` command, in a process of its own."""
    argv = _with_command_first(sys.argv[1:])
    if argv[:1] and argv[0] not in _RANKS:
        _leave_job(argv)
    sys.exit(main(argv))


def main(argv: Sequence[str]) -> int:
    """Run the ``fastdiff`` command with ``argv`` and return its exit code."""
    quieten()
    with lossy_output() as stdout:
        code = _run(_with_command_first(argv))
        sys.stdout.flush()
        if code == 0 and stdout is not None and stdout.error is not None and stdout.error.errno != errno.EPIPE:
            return report(StorageError(f"standard output: {stdout.error.strerror}; the printed result is incomplete"))
    return code


def _run(argv: Sequence[str]) -> int:
    is_rank = bool(argv) and argv[0] in _RANKS
    try:
        for word in argv:
            require_utf8("", word)
        if argv and argv[0] in _OF_THREADS:
            process_limits.try_threads()
        raise_open_files()
        argv = [*argv[1:2], "--help"] if argv[:1] == ["help"] else argv
        if argv[:1] == [bench.NAME]:
            bench.run(argv[1:])
        arguments = argparse.Namespace()
        if argv[:1] and argv[0] in _OF_NETWORKS:
            argv, arguments.fields = split_fields(argv)
        _parser().parse_args(argv, arguments)
        log.debug(f"fastdiff {__version__}, Python {platform.python_version()}, {platform.platform()}")
        run: Callable[[argparse.Namespace], None] = arguments.run
        run(arguments)
    except KeyboardInterrupt:
        write_line("fastdiff: error: interrupted")
        return 128 + signal.SIGINT
    except Exception as error:
        if is_rank and isinstance(error, FastdiffError):
            error.everywhere = False  # the variables may be wrong, and the process that would tell it not there
        return report_any(error)
    return 0


def _with_command_first(argv: Sequence[str]) -> list[str]:
    """Return the arguments with what says how much to tell behind the command, which knows it as well."""
    leading = list(takewhile({f"--{verbosity.QUIET}", f"--{verbosity.VERBOSE}"}.__contains__, argv))
    rest = list(argv[len(leading) :])
    return [*rest[:1], *leading, *rest[1:]] if rest else leading


def _leave_job(argv: Sequence[str]) -> None:
    """Forget the variables of a launcher, in a command of one process; say so where they could be meant."""
    left = leave_job()
    if left and argv[:1] in ([launch.TRAIN], ["launch"]):
        log.warning(f"ignoring {left} of the environment: fastdiff {argv[0]} starts and numbers the ranks itself")


def _parser() -> Parser:
    parser = Parser(prog="fastdiff", description="Train diffusion models from sharded latents.")
    parser.add_argument("-V", "--version", action="version", version=f"fastdiff {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (demo, convert, encode, plan, launch, command, check, sample, evaluate, runs, conform, export, bench):
        module.add(commands)
    completion.add(commands, parser)
    return parser
