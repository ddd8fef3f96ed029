"""``fastdiff bench``: see ``fastdiff bench --help``."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType, ModuleType

from fastdiff.config.arguments.help_format import sentence
from fastdiff.config.arguments.types import Parser
from fastdiff.errors import ConfigError, report_any
from fastdiff_bench import BenchError

COMMANDS = {
    "op": "time every op by every implementation",
    "step": "measure fastdiff's own loop on synthetic latents: times, memory, utilization",
    "scripts": "cost of a step beside published scripts",
    "startup": "measure the time to the first step",
    "data": "measure readers of samples on disk",
    "scale": "measure several ranks on this machine, and predict many GPUs",
    "plan": "predict steps of other micro-batches from a measured one, and measure",
    "checkpoint": "measure the cost of checkpoints",
    "aot": "compile every kernel without a GPU: registers, spills, access widths",
    "emit": "count Inductor's code for the compiled blocks, without a GPU",
    "objectives": "train the digits with each objective",
    "features": "train on features as latents: int8 and bfloat16, x and velocity",
    "alignment": "measure what stored features of a teacher, the head and the teacher add to a step",
    "recipes": "train with each method at its own rate: how many fewer steps, with standard errors",
    "fp8": "train the digits in FP8 and in bf16, and test whether they differ",
    "widths": "train the digits at several widths and learning rates, with muP and without it",
    "compare": "compare two records; exit code 1 if a measurement got worse by more than noise or is missing",
    "report": "write records as a page with tables and plots, or into the documentation",
}
"""What each subcommand does; it is a module with ``add``."""
_ELSEWHERE = {"scale": "scaling.command", "emit": "emission.command"}
"""Modules of subcommands beside what they need; the others are in ``fastdiff_bench.commands``."""


def module_of(name: str) -> ModuleType:
    """Import the module of a subcommand."""
    place = _ELSEWHERE.get(name, f"commands.{name}")
    return import_module(f"fastdiff_bench.{place}")


def parser_of(names: Sequence[str]) -> Parser:
    """Return the parser of these subcommands; of the others it has the names, as the modules of some take seconds."""
    parser = Parser(prog="fastdiff bench", description="Speed and memory, with evidence.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    known = [name for name in COMMANDS if name in names]
    for name in known:
        module_of(name).add(commands)
        own = commands.choices[name]
        own.description = own.description or sentence(COMMANDS[name])
    if not known:
        for name, purpose in COMMANDS.items():
            commands.add_parser(name, help=purpose)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return the exit code: 2 if it cannot run with these flags, 74 without its files."""
    try:
        arguments = parser_of([word for word in argv if not word.startswith("-")][:1]).parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except BenchError as error:
        return report_any(ConfigError(str(error)))
    except (ConfigError, OSError) as error:
        return report_any(error)


def _terminated(number: int, frame: FrameType | None) -> None:
    """Exit as after an error, so that temporary folders and the trainers' processes are removed."""
    signal.signal(number, signal.SIG_IGN)  # ignore further signals, which would interrupt the cleanup
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _terminated)
    sys.exit(main(sys.argv[1:]))
