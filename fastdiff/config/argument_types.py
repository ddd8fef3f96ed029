"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math
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
