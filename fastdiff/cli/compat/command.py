"""``fastdiff compat``: translation of another training script's command line."""

import argparse
import sys

from fastdiff.cli.compat.names import ALIASES, REFUSED, TITLES
from fastdiff.config.arguments.types import Subcommands, count
from fastdiff.terminal import columns


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "compat",
        help="translate the flags of another training script",
        usage="fastdiff compat [--gpus N] SCRIPT -- FLAGS",
        description="Prints the fastdiff commands equivalent to the other script with these flags, and lists the "
        f"differences. SCRIPT is one of {'; '.join(f'{name}: {title}' for name, title in TITLES.items())}. The names "
        f"of their files are known too: {', '.join(ALIASES)}.",
    )
    parser.add_argument("--gpus", type=count, default=1, help="number of processes of the other script")
    parser.add_argument("script", type=_script, choices=(*TITLES, *ALIASES), metavar="SCRIPT", help="the script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="its flags, unchanged")
    parser.set_defaults(run=_compat)


def _script(text: str) -> str:
    name = text.removesuffix(".py")
    if name in REFUSED:
        raise argparse.ArgumentTypeError(f"{name}: {REFUSED[name]}")
    return name


def _compat(arguments: argparse.Namespace) -> None:
    from fastdiff.cli.compat.run import in_words, translate

    flags = arguments.flags[1:] if arguments.flags[:1] == ["--"] else arguments.flags
    print(in_words(translate(arguments.script, flags, gpus=arguments.gpus), columns(sys.stdout)))
