"""JSON schema of ``--config`` files, from which editors complete and check them. This module imports no torch."""

from dataclasses import is_dataclass
from itertools import combinations
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from fastdiff.config.arguments.types import LARGEST
from fastdiff.config.optimizers.registry import optimizers
from fastdiff.config.presets import PRESETS
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DEFAULTS, PROCESSES

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LENGTHS = ("samples", "steps", "epochs")
_OF_FILE = {
    "type": "object",
    "title": "Network of your own file",
    "properties": {"kind": {"type": "string", "pattern": r"\.py:\w+$", "description": "PATH.py:NAME"}},
    "required": ["kind"],
}
"""Its fields are unknown until the file is executed."""


def config_schema() -> dict[str, Any]:
    """Return the schema of the files that ``config_file.read`` takes, apart from a ``run.json``.

    Every field may be left out, ``model.kind`` and ``objective.process`` too: the file changes a preset.
    """
    definitions = _definitions(RunConfig)
    _describe_inherited(definitions)
    for definition in definitions.values():
        definition["additionalProperties"] = False
    _allow_defaults_of_other_processes(definitions)
    run: dict[str, Any] = definitions.pop(RunConfig.__name__)
    properties = run["properties"]
    for section in properties.values():
        if "discriminator" in section:  # without its kind a section may be of several
            del section["discriminator"]
            section["anyOf"] = section.pop("oneOf")
    properties["model"]["anyOf"].append(_OF_FILE)
    run |= {
        "$schema": _DIALECT,
        "title": "--config file of fastdiff",
        "properties": _beside() | properties,
        "not": {"anyOf": [_both(*pair) for pair in combinations(_LENGTHS, 2)]},
        "$defs": definitions,
    }
    return run


def _definitions(kind: type) -> dict[str, Any]:
    """Return the schema of a dataclass and of those in it by their names, with the strings below their fields."""
    # In a list, because pydantic takes settings for a dataclass from its outside only.
    adapter = TypeAdapter(list[kind], config=ConfigDict(use_attribute_docstrings=True))  # type: ignore[valid-type]
    schema = adapter.json_schema()
    definitions: dict[str, Any] = schema.get("$defs") or {kind.__name__: schema["items"]}
    return definitions


def _describe_inherited(definitions: dict[str, Any]) -> None:
    """Describe the fields that a process or an optimizer has from its base, where pydantic does not look."""
    for kind in (*PROCESSES.values(), *{family.config for family in optimizers().values()}):
        properties = definitions[kind.__name__]["properties"]
        for base in filter(is_dataclass, kind.__mro__[1:]):
            for name, field in _definitions(base)[base.__name__]["properties"].items():
                properties[name].setdefault("description", field["description"])


def _allow_defaults_of_other_processes(definitions: dict[str, Any]) -> None:
    """Let the fields of other processes repeat their defaults, as in records of runs."""
    for process in PROCESSES.values():
        properties = definitions[process.__name__]["properties"]
        others = DEFAULTS.keys() - properties.keys()
        properties |= {name: {"const": DEFAULTS[name], "title": "Of another process"} for name in sorted(others)}


def _beside() -> dict[str, Any]:
    """Return the properties of a file that are no fields of the run."""
    return {
        "$schema": {"type": "string", "description": "This schema, for editors."},
        "preset": {"enum": [*PRESETS, None], "description": "Preset that the fields change."},
        "steps": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": LARGEST,
            "description": "Length of the run in optimizer steps, in place of samples.",
        },
        "epochs": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "description": "Length of the run in passes over its data set, in place of samples.",
        },
    }


def _both(*names: str) -> dict[str, Any]:
    """Return the schema of files that set all of these properties."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}
