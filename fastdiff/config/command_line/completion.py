"""The flags of a run as plain options with their values, for the completion of shells. This module imports no torch."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from fastdiff.config.command_line.json_schema import config_schema


def add_fields(parser: argparse.ArgumentParser, sections: tuple[str, ...] = ()) -> None:
    """Register the fields of ``sections`` (none: all), of every network, on a parser that only describes them."""
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
