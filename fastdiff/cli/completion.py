"""``fastdiff completion``: a script for the shell that completes commands, flags and their values."""

import argparse
import textwrap
from collections.abc import Iterator
from functools import partial

from fastdiff.cli import bench
from fastdiff.cli.launch import TRAIN, train_parser
from fastdiff.cli.machines import plan
from fastdiff.config.arguments.types import Parser, Subcommands, may_be_file

_SHELLS = ("bash", "zsh", "fish")
_WITH_FIELDS: dict[str, tuple[str, ...]] = {
    TRAIN: (), plan.NAME: (),
    "sample": ("model", "objective"), "evaluate": ("model", "objective"), "export": ("model", "objective"),
}  # fmt: skip
"""Commands that take the fields of a run as flags, and the sections; none: all."""
_LONGEST = 60
_INSTALLED = """\
The script takes some seconds to write; write it again after an update.

  bash:
    fastdiff completion bash > ~/.local/share/bash-completion/completions/fastdiff
  zsh, with fpath+=~/.zfunc before compinit in ~/.zshrc:
    fastdiff completion zsh > ~/.zfunc/_fastdiff
  fish:
    fastdiff completion fish > ~/.config/fish/completions/fastdiff.fish
"""


def add(commands: Subcommands, root: argparse.ArgumentParser) -> None:
    """Register the command; ``root`` is the parser of all commands."""
    text = "print a script for the shell that completes commands, flags and their values"
    parser: Parser = commands.add_parser("completion", help=text, epilog=_INSTALLED)
    parser.example = "fastdiff completion bash"
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=partial(_completion, commands, root))


def _completion(commands: Subcommands, root: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    import shtab

    from fastdiff.config.command_line.completion import add_fields

    _fill_train(commands.choices[TRAIN])
    bench.add_flags(commands.choices[bench.NAME])
    for name, sections in _WITH_FIELDS.items():
        add_fields(commands.choices[name], sections)
    names = _names()
    for action in _actions(root):
        action.choices = (
            names.get(action.option_strings[-1], action.choices) if action.option_strings else action.choices
        )
        action.help = _shortened(action.help)
        if may_be_file(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(root, arguments.shell))


def _shortened(text: str | None) -> str | None:
    """Return a help that has room beside a flag."""
    if text is None or text == argparse.SUPPRESS:
        return text
    return textwrap.shorten(text.partition("; default")[0].replace("%", ""), _LONGEST, placeholder=" ...")


def _names() -> dict[str, list[str]]:
    """Return the names that a flag takes and its parser does not list, because finding them takes imports."""
    from fastdiff.config import deepspeed
    from fastdiff.config.networks.registry import networks
    from fastdiff.config.presets import PRESETS
    from fastdiff.export.formats import formats_of

    formats = {name for network in networks().values() for name in formats_of(network)}
    return {"--preset": [*PRESETS], "--deepspeed_config": [*deepspeed.named()], "--format": sorted(formats)}


def _fill_train(parser: argparse.ArgumentParser) -> None:
    """Give the command the flags that it hands on unparsed."""
    from fastdiff.config.command_line import train_flags

    for flags in (train_parser(), train_flags.pre_parser()):
        for action in flags._actions:
            if action.help != argparse.SUPPRESS and not parser._option_string_actions.keys() & set(
                action.option_strings
            ):
                parser._add_action(action)
    parser.add_argument("--help", "-h", action="store_true", help="show the main flags")
    parser.add_argument("--help-all", action="store_true", help="show all flags")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)
