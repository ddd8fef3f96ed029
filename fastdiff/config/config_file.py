"""``RunConfig`` from a YAML or JSON file, laid over a preset."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from fastdiff.config.networks.of_user import add_network
from fastdiff.config.networks.registry import network_called
from fastdiff.config.objective import PROCESSES, Process, in_process, without_defaults_of_others
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError, require
from fastdiff.files import read_bounded
from fastdiff.plugins.user_code import names_file

_LARGEST = 1 << 20
"""Maximum size of a ``--config`` file, in bytes."""
_CODE = ("model.kind", "objective.plugin", "output.callbacks")
"""Fields that may name a file to execute."""


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-4 as a number, as JSON does (YAML 1.1 needs 1.0e-4), and refuses aliases.

    A few lines of nested aliases can expand to gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node; YAMLError if it is an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported; write the value out")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def overlay(base: RunConfig, path: str, named: Collection[str] = ()) -> RunConfig:
    """Return ``base`` with the fields of the file in ``path``; a ``run.json`` serves as well.

    ``model.kind`` may be ``PATH.py:NAME``, which is executed.

    Args:
        base: the configuration under the file.
        path: of the file.
        named: words of the user. A ``run.json`` is of a run folder, so the code that it names must be among them.

    Raises:
        ConfigError: as of ``read_fields``; an unknown field (with the nearest name), or a wrong type.
    """
    return lay_over(base, read_fields(path, named), f"--config {path}")


def read_fields(path: str, named: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields that the file in ``path`` gives, unchecked but for their being values of JSON.

    Args:
        path: of the file.
        named: as of ``overlay``.

    Raises:
        ConfigError: no such file, or not a mapping in YAML or JSON; it names code of a run, or code that fails.
    """
    try:
        given = yaml.load(read_bounded(Path(path), _LARGEST), Loader=_Loader)  # JSON is YAML
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: not a readable YAML or JSON file ({error})") from None
    if isinstance(given, dict) and isinstance(given.get("config"), dict):
        given = given["config"]
        refuse_code(given, named, f"--config {path}")
    if not isinstance(given, dict):
        raise ConfigError(f"--config {path}: expected a mapping of fields, found {type(given).__name__}")
    _check_json(given, f"--config {path}")
    return with_own_network(given, f"--config {path}")


def refuse_code(record: dict[str, Any], named: Collection[str], source: str, how: str = "add --{flag} {text}") -> None:
    """Raise ConfigError if the record of a run names files to execute that the user has not named.

    Args:
        record: fields of the run.
        named: words of the user, ``PATH.py:NAME`` or ``--FLAG=PATH.py:NAME``.
        source: origin of the record, for messages.
        how: what names ``{text}`` of the flag ``{flag}``, for messages.
    """
    named = {*named, *(word.partition("=")[2] for word in named if word.startswith("--"))}
    sections = {flag: record.get(flag.partition(".")[0]) for flag in _CODE}
    for flag, section in sections.items():
        value = section.get(flag.partition(".")[2]) if isinstance(section, dict) else None
        for text in value if isinstance(value, list) else [value]:
            require(
                not isinstance(text, str) or not names_file(text) or text in named,
                f"{source} is of a run, which names code: {text}; to execute it, {how.format(flag=flag, text=text)}",
            )


def with_own_network(given: dict[str, Any], source: str) -> dict[str, Any]:
    """Register the network of a file that the user names as ``model.kind``, and return the fields with its kind.

    Raises:
        ConfigError: the file cannot be executed.
    """
    model = given.get("model")
    if not isinstance(model, dict) or not isinstance(kind := model.get("kind"), str) or not names_file(kind):
        return given
    return given | {"model": {**model, "kind": add_network(kind, f"{source}: model.kind")}}


def _check_json(value: Any, source: str, place: str = "") -> None:
    """Raise ConfigError for values that YAML has and JSON lacks, such as dates, binaries and sets."""
    if isinstance(value, dict):
        for key, inner in value.items():
            require(isinstance(key, str), f"{source}: {place}{key!r}: expected the name of a field")
            _check_json(inner, source, f"{place}{key}.")
    elif isinstance(value, list):
        for inner in value:
            _check_json(inner, source, place)
    else:
        known = value is None or isinstance(value, str | int | float)
        name = place.rstrip(".")
        require(known, f"{source}: {name}: a {type(value).__name__}, expected a text or a number; put it in quotes")


def from_mapping(fields: dict[str, Any], source: str) -> RunConfig:
    """Return the configuration that a checkpoint's manifest records; ``source`` names it in errors."""
    return lay_over(RunConfig(), fields, source)


def with_kind(base: RunConfig, given: dict[str, Any], source: str) -> RunConfig:
    """Return ``base`` with the ``given`` kind of network and process.

    A new kind of network starts from its defaults; for a new process see ``with_process``.

    Raises:
        ConfigError: unknown network or process; ``source`` names the origin of ``given``.
    """
    model, objective = given.get("model"), given.get("objective")
    kind = model.get("kind", base.model.kind) if isinstance(model, dict) else base.model.kind
    require(isinstance(kind, str), f"{source}: model.kind: expected the name of a network, given {kind!r}")
    if kind != base.model.kind:
        base = replace(base, model=network_called(kind, source)())
    process = base.objective.process
    if isinstance(objective, dict):
        process = objective.get("process", process)
    if not isinstance(process, str) or process not in PROCESSES:
        raise ConfigError(f"{source}: objective.process: expected {', '.join(PROCESSES)}, given {process!r}")
    return with_process(base, process)


def with_process(base: RunConfig, process: Process) -> RunConfig:
    """Return ``base`` with this process; values that it does not support return to their defaults."""
    if process == base.objective.process:
        return base
    objective = in_process(base.objective, process)
    return replace(base, objective=objective, timesteps=base.timesteps.in_process(objective))


def lay_over(base: RunConfig, given: dict[str, Any], source: str) -> RunConfig:
    """Return ``base`` with the ``given`` fields; ``source`` names them in errors.

    Raises:
        ConfigError: an unknown field (with the nearest name), a wrong type, or inconsistent values.
    """
    base = with_kind(base, given, source)
    if isinstance(objective := given.get("objective"), dict):
        given = given | {"objective": without_defaults_of_others(base.objective.process, objective)}
    merged = _merge(asdict(base), given, source)
    try:
        return TypeAdapter(RunConfig).validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        # In a union, pydantic's location also contains the discriminator.
        named = place[:2] in (["model", base.model.kind], ["objective", base.objective.process])
        field = ".".join([*place[:1], *place[2:]] if named else place)
        raise ConfigError(f"{source}: {field}: {first['msg']}, given {first['input']!r}") from None


def _merge(base: dict[str, Any], given: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    merged = dict(base)
    for key, value in given.items():
        if key not in base:
            near = difflib.get_close_matches(str(key), base, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"fields: {', '.join(base)}"
            raise ConfigError(f"{source}: unknown field {prefix}{key}; {hint}")
        nested = isinstance(base[key], dict) and isinstance(value, dict)
        merged[key] = _merge(base[key], value, source, f"{prefix}{key}.") if nested else value
    return merged
