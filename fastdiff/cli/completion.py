"""``fastdiff completion`` and ``fastdiff schema``: what shells and editors need to complete flags and fields."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from fastdiff.cli import bench
from fastdiff.cli.launch import TRAIN
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
    """Register the commands; ``root`` is the parser of all commands."""
    text = "print a script for the shell that completes commands, flags and their values"
    parser: Parser = commands.add_parser("completion", help=text, epilog=_INSTALLED)
    parser.example = "fastdiff completion bash"
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=partial(_completion, commands, root))
    text = "print the JSON schema of --config files, for editors that complete and check them"
    commands.add_parser("schema", help=text).set_defaults(run=_schema)


def _schema(_: argparse.Namespace) -> None:
    from fastdiff.config.command_line.json_schema import config_schema

    print(json.dumps(config_schema(), indent=2))


def _completion(commands: Subcommands, root: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    import shtab

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

    for action in train_flags.pre_parser()._actions:
        if action.help != argparse.SUPPRESS and not parser._option_string_actions.keys() & set(action.option_strings):
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


def add_fields(parser: argparse.ArgumentParser, sections: tuple[str, ...] = ()) -> None:
    """Register the fields of ``sections`` (none: all), of every network, on a parser that only describes them."""
    from fastdiff.config.command_line.json_schema import config_schema

    schema = config_schema()
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, field in _leaves(schema, schema["$defs"]):
        is_field = not name.startswith("$")  # "$schema" is one of files
        if is_field and (not sections or name.partition(".")[0] in sections):
            found.setdefault(name.replace("_", "-"), []).append(field)
    for name in sorted(found):
        for flag, options in _options(name, found[name]):
            if flag not in parser._option_string_actions:
                parser.add_argument(flag, **options)


def _leaves(schema: Mapping[str, Any], types: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields below a schema, by their dotted names; those of several types several times."""
    parts = (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ()))
    owns = [types[part["$ref"].rpartition("/")[2]] if "$ref" in part else part for part in parts]
    for key, field in (item for own in owns for item in own.get("properties", {}).items()):
        yield from _leaves(field, types, f"{name}.{key}" if name else key)
    if not any("properties" in own for own in owns):
        yield from ((name, own) for own in owns)


def _options(name: str, fields: list[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the flags of a field, with the options of ``add_argument``."""
    described = next((field["description"] for field in fields if "description" in field), name)
    about = {"help": " ".join(described.split())}
    if any(field.get("type") == "boolean" for field in fields):
        section, dot, own = name.rpartition(".")
        yield f"--{name}", about | {"action": "store_true"}
        yield f"--{section}{dot}no-{own}", about | {"action": "store_true"}
        return
    values = {str(value) for field in fields for value in _values(field)}
    is_number = any(field.get("type") in ("integer", "number", "array") for field in fields)
    yield f"--{name}", about | {"choices": sorted(values) or None, "type": float if is_number else str}


def _values(field: Mapping[str, Any]) -> list[Any]:
    return [*field.get("enum", ()), *([field["const"]] if "const" in field else [])]
