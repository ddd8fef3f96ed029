"""Types of command-line arguments."""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from fastdiff import sanitize, verbosity
from fastdiff.config.arguments.help_format import HelpFormatter, sentence
from fastdiff.config.arguments.unknown import as_typed, explained
from fastdiff.config.local_paths import refusal
from fastdiff.console import quieten
from fastdiff.errors import ConfigError

Subcommands: TypeAlias = "argparse._SubParsersAction[Any]"
"""Subparsers action that the ``add`` function of every command gets."""


LARGEST = 2**31 - 1
"""Largest count; no run, data set or picture has as many of anything."""
VECTORS = (".svg", ".pdf")
"""Suffixes of drawings of curves."""
_PIXELS = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")
_LARGEST_SHAPE = 2**26
_DIGITS = 30
_MISSING = "the following arguments are required: "
"""Start of argparse's message."""


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    def add_parser(self, name: str, **options: Any) -> Any:
        """Add a subcommand; its purpose is its description unless it has one."""
        if options.get("help"):
            options.setdefault("description", sentence(options["help"]))
        return super().add_parser(name, **options)


class Parser(argparse.ArgumentParser):
    """Parser that raises ConfigError, reason first; flags are known with ``-`` and ``_``, as those of a run are.

    Nothing is printed: every rank parses, and only one prints.
    """

    example = ""
    """A complete command, shown if required arguments are missing."""

    def __init__(self, **options: Any) -> None:
        """Create the parser, with ``--quiet`` and ``--verbose`` if it has a help."""
        super().__init__(**({"formatter_class": HelpFormatter} | options))
        self.register("action", "parsers", _Commands)
        if self.add_help:
            add_verbosity(self)

    def add_subparsers(self, **options: Any) -> Any:
        """Add subcommands that know all of their flags."""
        return super().add_subparsers(**({"parser_class": Command} | options))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; without any argument, a command of subcommands shows its help."""
        if args is not None and not args and self._subparsers is not None:
            self.print_help()
            self.exit(0)
        return super().parse_known_args(None if args is None else self._as_written(args), namespace)

    def _as_written(self, args: Sequence[str]) -> list[str]:
        """Return the arguments with each flag as it was registered, up to those of another command behind ``--``."""
        own = args.index("--") if "--" in args else len(args)
        return [*map(self._registered, args[:own]), *args[own:]]

    def _registered(self, word: str) -> str:
        name, equals, value = word.partition("=")
        known = self._option_string_actions
        if name.startswith("--") and name not in known:
            for other in (name.replace("_", "-"), f"--{name[2:].replace('-', '_')}"):
                if other in known:
                    return f"{other}{equals}{value}"
        return word

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the nearest of the choices."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        expected = f"expected {'one of ' * (len(choices) > 1)}{', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"{value}: unknown {str(action.metavar).lower()}; {hint}{expected}")
        raise argparse.ArgumentError(action, f"{value}: {hint}{expected}")

    def error(self, message: str) -> NoReturn:
        """Raise the error, in one form for all commands."""
        if message.startswith(_MISSING):
            names = message.removeprefix(_MISSING).split(", ")
            usage = f"for example: {self.example}" if self.example else f"usage: {self._needed()}"
            message = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing; {usage}"
        raise ConfigError(sanitize.message(message.removeprefix("argument ")))

    @property
    def flags(self) -> list[str]:
        """Its flags, with their hyphens."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def _needed(self) -> str:
        """Return the command with what it needs."""
        needed = [action for action in self._actions if action.required]
        words = [(*action.option_strings[:1], str(action.metavar or action.dest)) for action in needed]
        return " ".join([self.prog, *(word for some in words for word in some), "[FLAGS]"])


class Command(Parser):
    """A subcommand: whatever it does not know is an error of its own, which names the nearest flag."""

    leaves = ""
    """Attribute of the result that gets what the command does not know, instead of an error."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse all arguments; ConfigError if one is unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if self.leaves:
            setattr(found, self.leaves, unknown)
            return found, []
        if unknown:
            typed = sys.argv[1:] if args is None else args
            words = as_typed(unknown, typed)
            raise ConfigError(explained(words, self.flags, self.prog.removeprefix("fastdiff "), typed))
        return found, unknown


def local_path(text: str) -> Path:
    """Parse a path of this machine; an address is refused before a path folds its ``://``, or a folder is named so.

    ``~`` is the home folder as in a shell, which leaves it as it is in quotes and in ``--flag=~/folder``.
    """
    if (why := refusal(text)) is not None:
        raise argparse.ArgumentTypeError(why)
    try:
        return Path(text).expanduser()
    except RuntimeError:  # of an unknown user
        return Path(text)


def picture(*more: str) -> Callable[[str], Path]:
    """Return the type of a picture to write; ``more`` are suffixes besides those of pixels."""
    return partial(_picture, suffixes=(*_PIXELS, *more))


def _picture(text: str, suffixes: Sequence[str]) -> Path:
    path = local_path(text)
    if path.suffix.lower() not in suffixes:
        raise argparse.ArgumentTypeError(f"{text}: expected the name of a picture, with {', '.join(suffixes)}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: a folder, expected the name of a picture in it")
    return path


def may_be_file(action: argparse.Action) -> bool:
    """Return whether the value of an argument is a path, or a text that may be one."""
    is_text = action.type in (None, str, local_path) or getattr(action.type, "func", None) is _picture
    return is_text and action.nargs != 0 and not action.choices


def count(text: str) -> int:
    """Parse a whole number from 1 to ``LARGEST``."""
    return _count(text, LARGEST)


def count_or_zero(text: str) -> int:
    """Parse a whole number from 0 to ``LARGEST``."""
    return 0 if text == "0" else count(text)


def at_most(most: int) -> Callable[[str], int]:
    """Return the type of a whole number from 1 to ``most``."""
    return partial(_count, most=most)


def _count(text: str, most: int) -> int:
    # A number of thousands of digits is none for Python.
    if not text.isdecimal() or len(text) > _DIGITS or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text[:_DIGITS]}: expected a whole number from 1 to {most}")
    return int(text)


def seed(text: str) -> int:
    """Parse a seed: a whole number from 0 to 2**64 - 1."""
    if not text.isdecimal() or len(text) > _DIGITS or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text[:_DIGITS]}: expected a whole number from 0 to 2**64 - 1")
    return int(text)


def finite(text: str) -> float:
    """Parse a number that is neither infinite nor NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a finite number")
    return value


def time_shift(text: str) -> float | Literal["latent"]:
    """Parse a time shift: a number above 0, or ``latent``."""
    if text == "latent":
        return "latent"
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0, or latent") from None


def interval(text: str) -> tuple[float, float]:
    """Parse ``LOW:HIGH``, both from 0 to 1."""
    low, _, high = text.partition(":")
    try:
        found = finite(low), finite(high)
    except argparse.ArgumentTypeError:
        found = (1.0, 0.0)
    if not 0.0 <= found[0] < found[1] <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: expected LOW:HIGH from 0 (data) to 1 (noise), for example 0:0.9")
    return found


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    if (value := finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def shape(text: str) -> tuple[int, int, int]:
    """Parse ``4,32,32`` to channels, height and width."""
    parts = text.split(",")
    sides = [int(part) if part.isdecimal() and len(part) <= _DIGITS else 0 for part in parts]
    if len(parts) != 3 or not 1 <= math.prod(sides) <= _LARGEST_SHAPE:
        raise argparse.ArgumentTypeError(
            f"{text[:100]}: expected C,H,W of at most {_LARGEST_SHAPE} numbers, for example 4,32,32"
        )
    channels, height, width = sides
    return channels, height, width


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Register the mutually exclusive ``--quiet`` and ``--verbose``, which act as they are read."""
    which = parser.add_mutually_exclusive_group()
    for how, text in (
        (verbosity.QUIET, "tell only warnings, errors and results"),
        (verbosity.VERBOSE, "tell details, what libraries say, and the traceback of an error"),
    ):
        which.add_argument(f"--{how}", action=_Verbosity, nargs=0, const=how, default=argparse.SUPPRESS, help=text)


class _Verbosity(argparse.Action):
    """Sets how much this process, and those that it starts, tell."""

    def __call__(self, parser: argparse.ArgumentParser, arguments: Any, values: Any, option: str | None = None) -> None:
        os.environ[verbosity.VARIABLE] = str(self.const)
        quieten()


def add_averages(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Register the mutually exclusive ``--ema`` and ``--ema-std`` and return their group."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ema", type=float, metavar="RATE", help="rate of the average; default: the first")
    which.add_argument(
        "--ema-std",
        type=float,
        metavar="STD",
        help="power-function average of this relative std: stored in the run, or reconstructed from its snapshots",
    )
    return which
