"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

Subcommands: TypeAlias = "argparse._SubParsersAction[Any]"
"""Subparsers action that the ``add`` function of every command gets."""


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
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


def shape(text: str) -> tuple[int, int, int]:
    """Parse ``4,32,32`` to channels, height and width."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: expected C,H,W, for example 4,32,32")
    channels, height, width = map(int, parts)
    return channels, height, width


_FLAG = re.compile(r"--[a-z]\w*\.\w")
"""Begin of a flag of a run's configuration, ``--group.field``."""
_OPTION = re.compile(r"-(?![\d.])")
"""Begin of any flag, in contrast to a negative number."""


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Register ``--preset``, for commands on runs that also read published files (``split_fields``)."""
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="network and objective of a published file of weights (DiT, SiT, improved-diffusion, guided-diffusion), "
        "which takes the place of RUN; flags of the training, such as --model.classes 10, change it",
    )


def split_fields(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its own arguments and the ``--group.field VALUE ...`` flags of a configuration."""
    parts: tuple[list[str], list[str]] = ([], [])
    of_fields = False
    for argument in argv:
        if _OPTION.match(argument):
            of_fields = _FLAG.match(argument) is not None
        parts[of_fields].append(argument)
    return parts


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


def classes(text: str) -> list[int]:
    """Parse ``0-9`` or ``1,5,7`` to a list of classes."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal() or int(high or low) < int(low):
            raise argparse.ArgumentTypeError(f"{text}: expected classes as 0-9 or 1,5,7")
        found += range(int(low), int(high or low) + 1)
    return found
