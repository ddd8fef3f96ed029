"""Configurations of runs as objects: presets, changes by name, YAML."""

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from fastdiff.config import presets as known
from fastdiff.config.command_line import config_file
from fastdiff.config.command_line.data_set import network_flags
from fastdiff.config.command_line.run_length import OF_LENGTH, samples_flag
from fastdiff.config.networks.user_defined import file_of
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.errors import ConfigError, require


class Config(RunConfig):
    """The configuration of a run: frozen sections such as ``optim``, with the flags of ``fastdiff train`` as fields.

    ``changed`` returns a copy with other values.
    """

    __slots__ = ("preset",)
    preset: str | None
    """Name of the preset that it comes from; None: of none, or unknown after ``dataclasses.replace``."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "preset", None)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(RunConfig)}
        return type(self)._restored, (fields, self.preset)

    @classmethod
    def _restored(cls, fields: dict[str, Any], preset: str | None) -> Self:
        return cls.of(RunConfig(**fields), preset)

    @classmethod
    def of(cls, config: RunConfig, preset: str | None = None) -> Self:
        """Return ``config`` as this type."""
        made = cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)})
        object.__setattr__(made, "preset", preset)
        return made

    @classmethod
    def from_file(cls, path: str | Path, *, plugins: Sequence[str] = ()) -> Self:
        """Return the configuration in a YAML or JSON file, or in the ``run.json`` of a run.

        Beside fields of the run, the file may name the ``preset`` that they change, and ``steps`` or ``epochs``.

        Args:
            path: of the file.
            plugins: ``PATH.py:NAME`` of each file that a ``run.json`` names and that may be executed.

        Raises:
            ConfigError: the file cannot be read, has an unknown field or a wrong value, or is the ``run.json`` of a run
                with code that ``plugins`` does not name.
        """
        file, source = config_file.read(str(path), plugins), f"--config {path}"
        base = RunConfig() if file.preset is None else known.preset(file.preset, f"{source}: preset")
        length = {unit: value for unit, value in (("steps", file.steps), ("epochs", file.epochs)) if value is not None}
        changed = _changed(base, file.fields | length, file.preset, source, fits_data=file.preset is not None)
        return cls.of(changed, file.preset)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the configuration with these fields, as ``to_dict`` returns them; all others have their defaults."""
        return cls.of(_lay_over(RunConfig(), dict(fields), "Config.from_dict"))

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values: ``config.changed(seed=1, optim={"lr": 1e-4}, steps=200)``.

        Args:
            changes: fields of the run, those of a section as a mapping; or ``steps`` or ``epochs``, the length of the
                run in place of ``samples``. ``model={"kind": "net.py:MLP"}`` executes that file. With another data set
                or network, the data set decides channels, size and classes that are not given, as on the command line.

        Raises:
            ConfigError: an unknown field, with the nearest name; a wrong type; or values that contradict one another.
        """
        name = self.preset
        model = changes.get("model")
        is_new = _within(changes, "data", "path") is not None or _within({"model": model}, "model", "kind") is not None
        return self.of(_changed(self, changes, name, _source(name), fits_data=is_new), name)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, without secrets."""
        return as_json(self)

    def to_yaml(self) -> str:
        """Return all fields as YAML, which ``from_file`` and ``fastdiff train --config`` read.

        A network of a file is named by the file, which reading the YAML executes.
        """
        return yaml.safe_dump(_naming_files(self.model.kind, self.to_dict()), sort_keys=False, allow_unicode=True)

    def __repr__(self) -> str:
        of = f"of the preset {self.preset}, " if self.preset else ""
        fields = {"steps": self.steps, **_differences(self.to_dict(), _defaults(self))}
        text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        return f"<Config {of}what differs from the defaults:\n{text.rstrip()}>"


def presets() -> dict[str, str]:
    """Return the names of all presets, each with its first line."""
    return {name: (inspect.getdoc(make) or "").partition("\n")[0] for name, make in known.PRESETS.items()}


def preset(name: str, **changes: Any) -> Config:
    """Return a complete configuration by name, with changes as in ``Config.changed``.

    Args:
        name: one of ``presets()``.
        changes: as in ``Config.changed``.

    Raises:
        ConfigError: an unknown name or field, or a wrong value.
    """
    return Config.of(_changed(known.preset(name), changes, name, _source(name), fits_data=True), name)


def for_ranks(config: RunConfig) -> bytes:
    """Return the JSON file from which ranks read a configuration; ConfigError if this process alone has the network."""
    return json.dumps(_naming_files(config.model.kind, json.loads(json.dumps(dataclasses.asdict(config))))).encode()


def _naming_files(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration with the kind of the network of a file as ``PATH.py:NAME``."""
    network = file_of(kind)
    if network is None:
        return fields
    assert network.path is not None
    return fields | {"model": {**fields["model"], "kind": f"{network.path.absolute()}:{network.found.__name__}"}}


def _source(name: str | None) -> str:
    return f"preset({name!r})" if name else "Config.changed"


def _changed(
    base: RunConfig, changes: Mapping[str, Any], name: str | None, source: str, *, fits_data: bool
) -> RunConfig:
    given = {key: _plain(value) for key, value in changes.items()}
    length = {unit: given.pop(unit, None) for unit in ("steps", "epochs")}
    if set(length.values()) != {None}:
        given["samples"] = _samples(length["steps"], length["epochs"], given, base, name, source)
    changed = _lay_over(base, given, source)
    decided = _decided_by_data(changed, given, name) if fits_data else {}
    return config_file.lay_over(changed, {"model": decided}, source) if decided else changed


def _decided_by_data(config: RunConfig, given: Mapping[str, Any], name: str | None) -> dict[str, int]:
    """Return the fields of the network that follow from the data set, as on the command line."""
    size = _within(given, "model", "size")
    flags = [] if size is None else ["--model.size", str(size)]
    found = network_flags(flags, given, config, name)
    return {flag.rpartition(".")[2]: int(value) for flag, value in zip(found[::2], found[1::2], strict=True)}


def _lay_over(base: RunConfig, given: dict[str, Any], source: str) -> RunConfig:
    return config_file.lay_over(base, config_file.with_own_network(given, source), source)


def _samples(steps: Any, epochs: Any, given: dict[str, Any], base: RunConfig, name: str | None, source: str) -> int:
    """Return the length of a run in samples."""
    for unit, value in (("steps", steps), ("epochs", epochs)):
        valid = value is None or (isinstance(value, int | float) and value > 0 and (unit != "steps" or value % 1 == 0))
        require(valid, f"{unit}={value!r}: expected a number above 0")
    flags = {
        "--samples": given.get("samples"),
        "--batch.samples": _within(given, "batch", "samples"),
        **{f"--data.{field}": _within(given, "data", field) for field in OF_LENGTH},
    }
    online = ["--data.online"] if _within(given, "data", "online") else []
    several = {flag: value if isinstance(value, list | tuple) else [value] for flag, value in flags.items()}
    words = [str(word) for flag, values in several.items() if values != [None] for word in (flag, *values)]
    whole = None if steps is None else int(steps)
    found = samples_flag(whole, epochs, [*words, *online], base.batch, base.data, name, source)
    return int(found[1])


def _within(given: Mapping[str, Any], section: str, field: str) -> Any:
    fields = given.get(section)
    return fields.get(field) if isinstance(fields, dict) else None


def _plain(value: Any) -> Any:
    """Return a section, given as an object, as a mapping of its fields, and paths as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, Path) else value


def _defaults(config: RunConfig) -> dict[str, Any]:
    """Return the defaults of a configuration with the same network, process and optimizer."""
    same = {"model": {"kind": config.model.kind}, "objective": {"process": config.objective.process}}
    same["optim"] = {"name": config.optim.name}
    try:
        return as_json(config_file.with_kind(RunConfig(), same, "defaults"))
    except ConfigError:  # the defaults of this process need other fields
        return as_json(RunConfig())


def _differences(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(defaults.get(name), dict):
            value = _differences(value, defaults[name])
            if name == "model":
                value = {"kind": fields[name]["kind"], **value}
            if name == "optim" and fields[name]["name"] != RunConfig().optim.name:
                value = {"name": fields[name]["name"], **value}
            if value:
                found[name] = value
        elif value != defaults.get(name):
            found[name] = value
    return found
