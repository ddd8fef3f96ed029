"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from fastdiff import sanitize
from fastdiff.errors import ConfigError, require

Subcommands: TypeAlias = "argparse._SubParsersAction[Any]"
"""Subparsers action that the ``add`` function of every command gets."""


LARGEST = 2**31 - 1
"""Largest count; no run, data set or picture has as many of anything."""
MOST_WORKERS = 1024
"""Largest number of decoding threads per rank."""
VECTORS = (".svg", ".pdf")
"""Suffixes of drawings of curves."""
_PIXELS = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")
_LARGEST_SHAPE = 2**26
_DIGITS = 30


class Parser(argparse.ArgumentParser):
    """Parser whose errors show no credentials; its subparsers are of this class, too."""

    example = ""
    """A complete command, shown if required arguments are missing."""

    def _check_value(self, action: argparse.Action, value: str) -> None:
        """Name the nearest command instead of all of them."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(value, action.choices, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            self.error(
                f"{value}: unknown {str(action.metavar).lower()}; {hint}expected one of {', '.join(action.choices)}"
            )
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        if self.example and message.startswith("the following arguments are required"):
            message = f"{message}; for example: {self.example}"
        super().error(sanitize.message(message))


class QuietParser(argparse.ArgumentParser):
    """Parser that raises ConfigError instead of printing: every rank parses, only one prints."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise ConfigError(message)


def local_path(text: str) -> Path:
    """Parse a path of this machine; an address is refused before a path folds its ``://``."""
    if sanitize.is_address(text):
        raise argparse.ArgumentTypeError(_address_refused(text))
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


def require_local(flag: str, text: str) -> None:
    """Raise ConfigError if the value of ``flag`` is an address."""
    require(not sanitize.is_address(text), f"{flag} {_address_refused(text)}")


def _address_refused(text: str) -> str:
    return f"{sanitize.address(text)}: an address, expected a path of this machine; copy the files here first"


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


def add_averages(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Register the mutually exclusive ``--ema`` and ``--ema-std`` and return their group."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--ema", type=float, default=None, metavar="RATE", help="rate of the average; default: the first"
    )
    which.add_argument(
        "--ema-std",
        type=float,
        default=None,
        metavar="STD",
        help="power-function average of this relative width: stored in the run, or reconstructed from its snapshots",
    )
    return which
