"""Tables of another script's flags: how each is read, and what it is here."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastdiff.cli.compat.translation import Translation, flag
from fastdiff.errors import ConfigError

REQUIRED = ...
"""In place of the default of a flag that must be given."""
SWITCH = None
"""Kind of a flag without a value."""
Defaults = Mapping[str, object]
"""Flags of a script, without their hyphens, with the script's defaults."""
Words = Callable[[Any, Any], list[str]]
"""Words of the training command for a flag, by the whole command line of the script and the flag's value."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a flag is here; one without words and reasons is read together with others."""

    kind: Callable[[str], Any] | None = str
    """Reads the text; ``SWITCH``: there is none."""
    words: Words | None = None
    told: str = ""
    """Difference to tell where the value is not the default."""
    refused: str = ""
    """Why another value than the default has no counterpart, and what to do."""
    idle: str = ""
    """Why the flag changes nothing, where other flags make it so."""
    choices: tuple[str | int | None, ...] | None = None
    several: str | None = None
    """Number of values, as in argparse: ``+`` or ``*``; None: one."""


Meanings = Mapping[str, Meaning]


def to(name: str) -> Words:
    """Return the words of a flag that is ``--name`` here, with its value as it is."""
    return lambda _, value: flag(name, value)


def add_flags(parser: argparse.ArgumentParser, defaults: Defaults, meanings: Meanings) -> None:
    """Add the flags of a script."""
    for name, default in defaults.items():
        meaning = meanings[name]
        if meaning.kind is SWITCH:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(
                f"--{name}", type=meaning.kind, default=None if default is REQUIRED else default,
                required=default is REQUIRED, choices=meaning.choices, nargs=meaning.several,
            )  # fmt: skip


def words(given: Any, flags: argparse.Namespace, defaults: Defaults, meanings: Meanings) -> list[str]:
    """Return the words of the training command, in the order of ``meanings``.

    Args:
        given: the command line of the script, as its meanings read it.
        flags: the values.
        defaults: those of the script.
        meanings: of at least its flags.

    Raises:
        ConfigError: flags are refused, with the reason of each.
    """
    found: list[str] = []
    problems: list[str] = []
    for name, meaning in _of_script(defaults, meanings):
        value = getattr(flags, name)
        if meaning.refused and value != defaults[name]:
            problems.append(f"--{name}{_shown(value)}: {meaning.refused}")
            continue
        try:
            found += meaning.words(given, value) if meaning.words else []
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join(dict.fromkeys(problems)))  # all at once; one may end several flags
    return found


def tell(done: Translation, flags: argparse.Namespace, defaults: Defaults, meanings: Meanings) -> None:
    """Add the differences of the flags that have another value than their default."""
    for name, meaning in _of_script(defaults, meanings):
        value = getattr(flags, name)
        done.note(meaning.told and value != defaults[name], f"--{name}{_shown(value)}: {meaning.told}")


def idle(defaults: Defaults, meanings: Meanings) -> dict[str, str]:
    """Return why flags change nothing, where other flags make it so."""
    return {name: meanings[name].idle for name in defaults if meanings[name].idle}


def _of_script(defaults: Defaults, meanings: Meanings) -> Iterator[tuple[str, Meaning]]:
    return ((name, meaning) for name, meaning in meanings.items() if name in defaults)


def _shown(value: object) -> str:
    """Return a number behind a space; texts may be secret, and switches have none."""
    return f" {value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else ""
