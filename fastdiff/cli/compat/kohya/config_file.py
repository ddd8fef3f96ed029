"""The configuration file of sd-scripts, ``--config_file``, whose values are flags."""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdiff import sanitize
from fastdiff.errors import ConfigError, require
from fastdiff.files import read_bounded

_LARGEST = 1 << 20
_NOT_GIVEN: Mapping[str, object] = {"dynamo_backend": "no", "max_token_length": 75}
"""Values that graphical interfaces write where a flag is not given; the scripts check no choices in files."""


def values(file: str) -> dict[str, Any]:
    """Return the values in a configuration file; the names of its sections mean nothing, as in theirs."""
    path = Path(file if file.endswith(".toml") else f"{file}.toml")
    try:
        content = tomllib.loads(read_bounded(path, _LARGEST).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config_file {sanitize.escape(str(path))} cannot be read: {error}") from None
    tables = {name: each for name, each in content.items() if isinstance(each, dict)}
    inner = {name: value for each in tables.values() for name, value in each.items()}
    return {name: value for name, value in content.items() if name not in tables} | inner


def in_file(parser: argparse.ArgumentParser, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of ``--config_file`` as the flags have them, and the names that are no flags.

    Raises:
        ConfigError: values are none that their flags take.
    """
    actions = {action.dest: action for action in parser._actions}
    found: dict[str, Any] = {}
    problems = []
    for name, value in values.items():
        if name in actions and value not in ("", [], _NOT_GIVEN.get(name)):
            try:
                found[name] = _read(actions[name], value)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join(problems))
    return found, sorted(values.keys() - actions.keys())


def _read(action: argparse.Action, value: Any) -> Any:
    name = action.dest
    if action.nargs == 0:
        require(isinstance(value, bool), f"--config_file: {name} = {value!r}: expected true or false")
        return value
    several = action.nargs in ("*", "+")
    values = value if several and isinstance(value, list) else [value]
    try:
        read = [action.type(str(each)) if action.type else str(each) for each in values]  # type: ignore[operator]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"--config_file: {name} = {value!r}: {error}") from None
    known = action.choices
    require(
        known is None or all(each in known for each in read),
        f"--config_file: {name} = {value!r}: expected one of {', '.join(map(str, known or ()))}",
    )
    return read if several else read[0]
