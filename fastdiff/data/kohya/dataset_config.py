"""Reader of kohya's configurations of data sets (``--dataset_config FILE.toml`` or ``.json``). It imports no torch."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.data.kohya.keys import DATASET, GENERAL, KEYS, SUBSET
from fastdiff.errors import ConfigError, require
from fastdiff.files import read_bounded
from fastdiff.sanitize import escape

_LARGEST = 10 << 20


@dataclass(frozen=True, slots=True)
class Subset:
    """A ``[[datasets.subsets]]``: a folder of pictures, with every key that ``keys.KEYS`` takes."""

    dataset: int
    """Number of its ``[[datasets]]``, from 0."""
    values: Mapping[str, Any]
    """Value of each key, the innermost one, or the default."""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def folder(self) -> str:
        """Folder of the pictures, or that of the file of metadata."""
        file = self.values["metadata_file"]
        return str(self.values["image_dir"] if file is None else self.values["image_dir"] or Path(file).parent)

    @property
    def source(self) -> str:
        """What names the pictures: the file of metadata, or their folder."""
        return self.folder if self.values["metadata_file"] is None else str(self.values["metadata_file"])


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key that is not taken."""

    key: str
    place: str
    """Where it stands: ``[general]``, ``[[datasets]] 1``, ``[[datasets.subsets]] 1.2`` or, for a flag, ``--``."""
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.place} {self.key} = {self.value!r}: {self.reason}"


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """What a file holds."""

    subsets: tuple[Subset, ...]
    refusals: tuple[Refusal, ...]
    left_out: tuple[str, ...]
    """Subsets that kohya leaves out, in words: no repeats, or a folder twice in one ``[[datasets]]``."""


def is_dataset_config(path: Path) -> bool:
    """Return whether a file is a configuration of data sets: a .toml, or a .json of an object with ``datasets``."""
    if not path.is_file() or path.suffix.lower() != ".json":
        return path.is_file() and path.suffix.lower() == ".toml"
    with suppress(OSError, ValueError, RecursionError):  # larger files, and what is no JSON, are metadata
        content = json.loads(read_bounded(path, _LARGEST).decode("utf-8-sig"))
        return isinstance(content, dict) and isinstance(content.get("datasets"), list)
    return False


def read_dataset_config(path: Path, flags: Mapping[str, Any] | None = None) -> DatasetConfig:
    """Read a file of kohya's data sets.

    Args:
        path: ends in .toml or .json, as kohya demands.
        flags: of the script, by the names of the keys (``resolution``, ``shuffle_caption``, ...); they count where the
            file says nothing. None as a value: not given.

    Raises:
        ConfigError: the file cannot be read, is not of this form, or a value is none that its key takes.
    """
    where, content = escape(str(path)), _read(path)
    if unknown := sorted(content.keys() - {"general", "datasets"}):
        raise ConfigError(f"{where}: {escape(unknown[0])}: expected [general] and [[datasets]]")
    general, datasets = content.get("general", {}), content.get("datasets", [])
    require(isinstance(general, dict), f"{where}: general: expected a table, [general]")
    _require_tables(where, DATASET, datasets)
    refusals = list(_checked(where, GENERAL, general, GENERAL))
    subsets: list[Subset] = []
    left_out: list[str] = []
    for number, dataset in enumerate(datasets):
        own = {key: value for key, value in dataset.items() if key != "subsets"}
        refusals += _checked(where, DATASET, own, f"{DATASET} {number + 1}")
        inner = dataset.get("subsets", [])
        _require_tables(where, SUBSET, inner)
        folders: set[str] = set()
        for row, subset in enumerate(inner):
            place = f"{SUBSET} {number + 1}.{row + 1}"
            refusals += _checked(where, SUBSET, subset, place)
            found = Subset(number, _values(subset, own, general, flags or {}))
            named = found["image_dir"] is not None or found["metadata_file"] is not None
            require(named, f"{where}: {place}: image_dir is missing")
            if found["num_repeats"] < 1:
                left_out.append(f"{place}: num_repeats is {found['num_repeats']}, so kohya leaves it out")
            elif found.source in folders:
                left_out.append(f"{place}: {found.source} stands twice in this [[datasets]]; kohya takes the first")
            else:
                folders.add(found.source)
                subsets.append(found)
    require(bool(subsets), f"{where} names no pictures; expected [[datasets]] with [[datasets.subsets]]")
    refusals += _refused_flags(flags or {}, [general, *datasets])
    return DatasetConfig(tuple(subsets), tuple(refusals), tuple(left_out))


def _read(path: Path) -> dict[str, Any]:
    where, ending = escape(str(path)), path.suffix.lower()
    require(ending in (".toml", ".json"), f"{where}: expected a file that ends in .toml or .json")
    try:
        text = read_bounded(path, _LARGEST).decode("utf-8-sig")
        content: Any = tomllib.loads(text) if ending == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # those of TOML, JSON and UTF-8 are ValueErrors
        raise ConfigError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    require(isinstance(content, dict), f"{where}: expected [general] and [[datasets]]")
    assert isinstance(content, dict)
    return content


def _require_tables(where: str, what: str, found: Any) -> None:
    tables = isinstance(found, list) and all(isinstance(each, dict) for each in found)
    require(tables, f"{where}: expected {what}, tables in a list")


def _checked(where: str, level: str, table: Mapping[str, Any], place: str) -> Iterator[Refusal]:
    """Check the keys of a table, and yield those that are refused; ConfigError: a key that kohya does not know."""
    for name, value in table.items():
        key = KEYS.get(name)
        if key is None or level not in key.places:
            known = f"expected in {' or '.join(key.places)}" if key else "no key of kohya's sd-scripts"
            raise ConfigError(f"{where}: {place} {escape(name)}: {known}")
        require(key.valid(value), f"{where}: {place} {name} = {value!r}: expected {key.expected}")
        if key.refused and value != key.default:
            yield Refusal(name, place, value, key.refused)


def _values(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every key: that of the first table that has one, or the default."""
    return {
        name: next((table[name] for table in tables if table.get(name) is not None), key.default)
        for name, key in KEYS.items()
    }


def _refused_flags(flags: Mapping[str, Any], outer: list[Mapping[str, Any]]) -> Iterator[Refusal]:
    """Yield the flags that are refused, unless every data set says something else."""
    for name, value in flags.items():
        key = KEYS[name]
        overruled = all(name in table or name in outer[0] for table in outer[1:])
        if value is not None and key.refused and value != key.default and not overruled:
            yield Refusal(name, "--", value, key.refused)
