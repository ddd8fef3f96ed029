"""``RunConfig`` from a YAML or JSON file, laid over a preset."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from fastdiff.config.arguments.of_others import answer
from fastdiff.config.arguments.types import LARGEST
from fastdiff.config.arguments.unknown import nearest
from fastdiff.config.networks.registry import network_called
from fastdiff.config.networks.user_defined import add_network
from fastdiff.config.optimizers.registry import optimizer_family
from fastdiff.config.run import RunConfig, texts
from fastdiff.config.sections.objective import PROCESSES, Process, in_process, without_defaults_of_others
from fastdiff.config.sections.optim import OF_RUN
from fastdiff.errors import ConfigError, require, require_utf8
from fastdiff.files import read_bounded
from fastdiff.plugins.user_code import names_file

Section = TypeVar("Section")
_LARGEST = 1 << 20
"""Maximum size of a ``--config`` file, in bytes."""
_DIGITS = 300
_LARGEST_NUMBER = 10.0**_DIGITS
_SHOWN = 200
"""Characters of a wrong value that a message shows."""
_CODE = ("model.kind", "objective.plugin", "output.callbacks")
"""Fields that may name a file to execute."""


class _Loader(yaml.SafeLoader):
    """YAML loader that reads numbers as JSON does, and refuses aliases and names that are given twice.

    YAML 1.1 needs 1.0e-4 for 1e-4, reads 010 as 8 and 1:30 as 90; a few lines of nested aliases can expand to
    gigabytes; of two equal names PyYAML takes the last one in silence.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node; YAMLError if it is an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping; YAMLError if a name is given twice."""
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise yaml.YAMLError(f"{twice[:_SHOWN]} is given {names[twice]} times; leave out all but one")
        return super().construct_mapping(node, deep)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_NUMBERS[0], re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _NUMBERS[1],
    re.compile(r"[-+]?((\d[\d_]*\.[\d_]*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """A ``--config`` file."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the run, unchecked but for their being values of JSON."""
    preset: str | None = None
    """Name of the preset that the fields change."""
    steps: int | None = None
    """Length of the run, in place of ``samples``."""
    epochs: float | None = None


def read(path: str, named: Collection[str] = ()) -> ConfigFile:
    """Read a YAML or JSON file with fields of a run and, beside them, ``preset``, and ``steps`` or ``epochs``.

    A ``run.json`` serves as well. ``model.kind`` may be ``PATH.py:NAME``, which is executed.

    Args:
        path: of the file.
        named: words of the user. A ``run.json`` is of a run folder, so the code that it names must be among them.

    Raises:
        ConfigError: no such file, or not a mapping in YAML or JSON; it names code of a run, or code that fails.
    """
    source = f"--config {path}"
    try:
        given = yaml.load(read_bounded(Path(path), _LARGEST), Loader=_Loader)  # JSON is YAML
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: not a readable YAML or JSON file ({' '.join(str(error).split())})") from None
    require(given is not None, f"{source}: it is empty; expected fields of a run, such as seed: 1")
    if isinstance(given, dict) and isinstance(given.get("config"), dict):
        given = given["config"]
        refuse_code(given, named, source)
    require(isinstance(given, dict), f"{source}: expected a mapping of fields, found {type(given).__name__}")
    _check_json(given, source)
    given.pop("$schema", None)  # of editors
    beside = {name: given.pop(name, None) for name in BESIDE}
    _check_beside(beside, given, source)
    return ConfigFile(fields=with_own_network(given, source), **beside)


BESIDE = ("preset", "steps", "epochs")
"""Names of a ``--config`` file beside the fields of a run, with the meaning of the flags."""


def _check_beside(beside: Mapping[str, Any], fields: Mapping[str, Any], source: str) -> None:
    preset, steps, epochs = (beside[name] for name in BESIDE)
    require(
        preset is None or isinstance(preset, str), f"{source}: preset: expected the name of a preset, given {preset!r}"
    )
    require(
        steps is None or (type(steps) is int and 0 < steps <= LARGEST),
        f"{source}: steps: expected a whole number from 1 to {LARGEST}, given {steps!r}",
    )
    require(
        epochs is None or (type(epochs) in (int, float) and 0 < epochs < math.inf),
        f"{source}: epochs: expected a number above 0, given {epochs!r}",
    )
    lengths = [name for name in ("samples", "steps", "epochs") if {**fields, **beside}.get(name) is not None]
    require(len(lengths) <= 1, f"{source}: {' and '.join(lengths)}: each is the length of the run; give one of them")


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
    """Register the network of a file named as ``model.kind``; return the fields with its kind. ConfigError: no code."""
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
        name = place.rstrip(".")
        known = value is None or isinstance(value, str | int | float)
        require(known, f"{source}: {name}: a {type(value).__name__}, expected a text or a number; put it in quotes")
        finite = isinstance(value, bool | str) or value is None or abs(value) < _LARGEST_NUMBER
        require(finite, f"{source}: {name}: expected a finite number of at most {_DIGITS} digits")


def from_mapping(fields: dict[str, Any], source: str) -> RunConfig:
    """Return the configuration that a checkpoint's manifest records; ``source`` names it in errors."""
    return lay_over(RunConfig(), fields, source)


def with_kind(base: RunConfig, given: dict[str, Any], source: str) -> RunConfig:
    """Return ``base`` with the ``given`` kind of network, process and optimizer.

    A new kind of network starts from its defaults; see also ``with_process`` and ``with_optimizer``. ConfigError: an
    unknown one; ``source`` names the origin of ``given``.
    """
    model, objective, optim = given.get("model"), given.get("objective"), given.get("optim")
    kind = model.get("kind", base.model.kind) if isinstance(model, dict) else base.model.kind
    require(isinstance(kind, str), f"{source}: model.kind: expected the name of a network, given {kind!r}")
    if kind != base.model.kind:
        base = _with(base, model=network_called(kind, source)())
    if isinstance(optim, dict):
        base = with_optimizer(base, optim.get("name", base.optim.name), f"{source}: optim.name")
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
    timesteps, sampling = base.timesteps.in_process(objective), base.sampling.in_process(process)
    return _with(base, objective=objective, timesteps=timesteps, sampling=sampling)


def with_optimizer(base: RunConfig, name: object, source: str) -> RunConfig:
    """Return ``base`` with this optimizer; one with other hyper-parameters starts from their defaults.

    ConfigError: unknown optimizer; ``source`` names the origin of ``name``.
    """
    require(isinstance(name, str), f"{source}: expected the name of an optimizer, given {name!r}")
    config, optim = optimizer_family(str(name), source).config, base.optim
    if type(optim) is config:
        return _with(base, optim=_with(optim, name=str(name)))
    kept = {field: getattr(optim, field) for field in OF_RUN}
    return _with(base, optim=_with(config(name=str(name)), **kept))


def _with(base: Section, **fields: Any) -> Section:
    """Return ``base`` with other fields, whose values are not checked: those of flags may follow."""
    made = copy(base)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def with_one_source(base: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """Return the run without its own data where others are given in the other of ``path`` and ``sets``.

    Args:
        base: the run.
        given: fields of the section ``data``.
    """
    if given.get("sets") and given.get("path") is None and base.data.path:
        return replace(base, data=replace(base.data, path=""))
    if given.get("path") and given.get("sets") is None and base.data.sets:
        return replace(base, data=replace(base.data, sets=()))
    return base


def lay_unchecked(base: RunConfig, given: dict[str, Any], source: str) -> RunConfig:
    """Return ``base`` with the ``given`` fields, of which names and types are checked; flags may mend the values.

    Raises:
        ConfigError: an unknown field or a wrong type.
    """
    base = with_kind(base, given, source)
    if isinstance(data := given.get("data"), dict):
        base = with_one_source(base, data)
    if isinstance(objective := given.get("objective"), dict):
        given = given | {"objective": without_defaults_of_others(base.objective.process, objective)}
    for name, text in texts(_merge(asdict(base), given, source)):
        require_utf8(f"{source}: {name}", text)
    return _typed(base, given, source)


def _typed(base: Section, given: Mapping[str, Any], source: str, prefix: str = "") -> Section:
    hints, found = get_type_hints(type(base), include_extras=True), {}
    for name, value in given.items():
        section = getattr(base, name)
        if is_dataclass(section) and isinstance(value, dict):
            found[name] = _typed(section, value, source, f"{prefix}{name}.")
            continue
        try:
            found[name] = TypeAdapter(hints[name]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join([f"{prefix}{name}", *map(str, first["loc"])])
            raise ConfigError(f"{source}: {place}: {first['msg']}, given {repr(first['input'])[:_SHOWN]}") from None
    return _with(base, **found)


def blamed_on_file(text: str, fields: Mapping[str, Any], flags: Sequence[str], source: str) -> str:
    """Return a message about a configuration, which names the file if it is about fields that no flag gives."""
    given = {flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in flags if flag.startswith("--")}
    named = _as_fields(text, {*leaves(fields)} - given)
    return f"{source}: {named}" if named != text or not given else text


def lay_over(base: RunConfig, given: dict[str, Any], source: str) -> RunConfig:
    """Return ``base`` with the fields ``given`` by ``source``; ConfigError: unknown, of a wrong type, inconsistent."""
    base = with_kind(base, given, source)
    if isinstance(data := given.get("data"), dict):
        base = with_one_source(base, data)
    if isinstance(objective := given.get("objective"), dict):
        given = given | {"objective": without_defaults_of_others(base.objective.process, objective)}
    merged = _merge(asdict(base), given, source)
    for name, text in texts(merged):
        require_utf8(f"{source}: {name}", text)
    try:
        return TypeAdapter(RunConfig).validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        # In a union, pydantic's location also contains the discriminator.
        chosen = {"model": base.model.kind, "objective": base.objective.process, "optim": base.optim.name}
        named = len(place) > 1 and chosen.get(place[0]) == place[1]
        name = ".".join([*place[:1], *place[2:]] if named else place)
        raise ConfigError(f"{source}: {name}: {first['msg']}, given {repr(first['input'])[:_SHOWN]}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {_as_fields(str(error), leaves(given))}") from None


def _as_fields(text: str, given: Iterable[str]) -> str:
    """Return a message about flags with the names of fields, where a file gives these."""
    names = {name.replace("-", "_") for name in given}
    flag = re.compile(r"--([A-Za-z][\w-]*(?:\.[\w-]+)*)")
    return flag.sub(lambda found: found[found[1].replace("-", "_") in names], text)


def _meant(key: str, value: Any, base: Mapping[str, Any], prefix: str) -> str:
    """Say what an unknown field may be, by the table and the names for unknown flags."""
    beside = () if prefix else BESIDE
    words = [str(each) for each in (value if isinstance(value, list) else [value]) if not isinstance(each, dict)]
    if not prefix and (said := answer(f"--{key}", [word for word in words if word != "None"], "train")):
        return f"as a flag, {said}"
    near = nearest(key, [*base, *beside, *leaves(base)])
    return f"did you mean {prefix}{near[0]}?" if near else f"fields: {', '.join([*beside, *base])}"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the values in nested mappings."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _merge(base: dict[str, Any], given: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    merged = dict(base)
    for key, value in given.items():
        if key not in base:
            raise ConfigError(f"{source}: unknown field {prefix}{key}; {_meant(key, value, base, prefix)}")
        nested = isinstance(base[key], dict) and isinstance(value, dict)
        merged[key] = _merge(base[key], value, source, f"{prefix}{key}.") if nested else value
    return merged
