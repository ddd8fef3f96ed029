"""Flags of a script that change nothing of the translated run, beside the others that are given.

They are found by translating without each of them, so that none is left out in silence.
"""

import argparse
from collections.abc import Callable, Iterator

from fastdiff.cli.compat.translation import Translation
from fastdiff.errors import FastdiffError


def idle_flags(
    parser: argparse.ArgumentParser, given: argparse.Namespace, translated: Callable[[argparse.Namespace], Translation]
) -> Iterator[argparse.Action]:
    """Yield the flags that have another value than their default, and the same translation as with it."""
    defaults, whole = _defaults(parser, given), translated(given)
    for action in parser._actions:
        value, default = getattr(given, action.dest), getattr(defaults, action.dest)
        if value != default and _same(given, action.dest, default, translated, whole):
            yield action


def _defaults(parser: argparse.ArgumentParser, given: argparse.Namespace) -> argparse.Namespace:
    """Return all flags at their defaults; those that must be given, as they are."""
    required = [action for action in parser._actions if action.required]
    return parser.parse_args([f"{action.option_strings[0]}={getattr(given, action.dest)}" for action in required])


def _same(
    given: argparse.Namespace,
    name: str,
    default: object,
    translated: Callable[[argparse.Namespace], Translation],
    whole: Translation,
) -> bool:
    try:
        return translated(argparse.Namespace(**{**vars(given), name: default})) == whole
    except FastdiffError:  # without it the flags contradict one another
        return False
