"""The data sets of a run: how they are written, the list that `fastdiff encode` leaves of several, and their shares.

``--data.sets`` names each as ``[NAME=]PATH[:REPEATS][:weight=W][:loss_weight=W][:condition_dropout=P]``. A folder with
``sets.json`` stands for the data sets in it, as the folders ``N_name`` of kohya's sd-scripts become. It imports no
torch.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from fastdiff.config.local_paths import require_local
from fastdiff.errors import ConfigError, DataError, require
from fastdiff.files import publish, read_bounded
from fastdiff.sanitize import escape, is_address

SETS_FILE = "sets.json"
_LARGEST = 1 << 24  # bytes
_NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)", re.DOTALL)
_OPTION = re.compile(r"(.+):(?:(repeats|weight|loss_weight|condition_dropout)=)?([0-9][0-9.eE+-]*)", re.DOTALL)
_FORM = (
    "[NAME=]PATH[:REPEATS][:weight=W][:loss_weight=W][:condition_dropout=P], such as prior=data/dogs:2:loss_weight=0.5"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """An entry of ``--data.sets``."""

    path: str
    """Folder of shards, also at an address, or a folder with ``sets.json``."""
    name: str = ""
    """Name in the log; empty: that of the folder."""
    repeats: int = 1
    """How often an epoch holds each sample."""
    weight: float | None = None
    """Share of an epoch, in proportion to the other weights; None: by the repeats."""
    loss_weight: float = 1.0
    """Factor of the loss of each sample."""
    condition_dropout: float | None = None
    """Share of the samples whose class or caption is dropped; None: that of its list, or of the run."""


def parse_set(text: str) -> DataSet:
    """Parse an entry of ``--data.sets``; ConfigError: it is none."""
    flag, options, path = f"--data.sets {escape(text)}", {}, text
    name = ""
    if named := _NAMED.fullmatch(path):
        name, path = named[1], named[2]
    while found := _OPTION.fullmatch(path):
        path, option, number = found[1], found[2] or "repeats", found[3]
        require(option not in options, f"{flag}: {option} stands twice; expected {_FORM}")
        options[option] = number
    wrong = path.rpartition(":")[2] if not is_address(path) and ":" in path else ""
    require(bool(path) and "=" not in wrong, f"{flag}: expected {_FORM}")
    require("repeats" not in options or "weight" not in options, f"{flag}: give the repeats or a weight, not both")
    require_local("--data.sets", path) if not is_address(path) else None
    repeats = options.get("repeats", "1")
    require(repeats.isdecimal() and 1 <= int(repeats) <= 10**6, f"{flag}: repeats {repeats}: expected 1 to 1000000")
    numbers = {option: _number(flag, option, text) for option, text in options.items() if option != "repeats"}
    return DataSet(path=path, name=name, repeats=int(repeats), **numbers)


def _number(flag: str, option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    usable, expected = _NUMBERS[option]
    require(usable(value), f"{flag}: {option} {text}: expected {expected}")
    return value


def _is_factor(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _is_share(value: float | None) -> bool:
    return value is None or 0 <= value <= 1


_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "weight": (_is_factor, "a number above 0"),
    "loss_weight": (_is_factor, "a number above 0"),
    "condition_dropout": (_is_share, "a share from 0 to 1"),
}
"""Options that are numbers: whether a value is one of theirs, and what is."""


def parse_sets(texts: Sequence[str]) -> tuple[DataSet, ...]:
    """Parse ``--data.sets``; ConfigError: an entry is none, or some have weights and others repeats."""
    sets = tuple(map(parse_set, texts))
    weighted = [each for each in sets if each.weight is not None]
    others = [each for each in sets if each.weight is None]
    if weighted and others:
        raise ConfigError(
            f"--data.sets: {weighted[0].path} has a weight and {others[0].path} has none; give all a weight, or all "
            "repeats"
        )
    return sets


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedSet:
    """A data set in a folder with ``sets.json``."""

    folder: str
    """Its folder in that one."""
    repeats: int = 1
    loss_weight: float = 1.0
    condition_dropout: float | None = None
    """Share of the samples whose caption is dropped; None: that of the run."""
    regularisation: bool = False
    """Whether an epoch holds as many samples of this data set, together with the other such ones of its group, as of
    the others of the group: kohya's rule for regularisation pictures."""
    group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SetList:
    """The content of ``sets.json``, which is written last: a folder that has one is complete."""

    sets: tuple[ListedSet, ...]
    format: Literal["fastdiff-sets"] = "fastdiff-sets"
    version: Literal[1] = 1


def write_list(folder: Path, sets: Sequence[ListedSet]) -> None:
    """Write ``sets.json``; OSError: it cannot be written."""
    content = TypeAdapter(SetList).dump_json(SetList(sets=tuple(sets)), indent=1)
    publish(folder / SETS_FILE, content + b"\n")


def is_list(path: str) -> bool:
    """Return whether a path of this machine is a folder with ``sets.json``."""
    return bool(path) and not is_address(path) and (Path(path) / SETS_FILE).is_file()


def read_list(folder: str) -> tuple[ListedSet, ...]:
    """Read ``sets.json``; DataError: it is damaged, or cannot be read."""
    path = Path(folder) / SETS_FILE
    try:
        sets = TypeAdapter(SetList).validate_json(read_bounded(path, _LARGEST), strict=True).sets
    except (OSError, ValueError) as error:  # pydantic's is a ValueError
        first = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise DataError(f"{path} is not usable ({escape(first)}); run the same `fastdiff encode` again") from error
    for each in sets:
        inside = Path(each.folder).name == each.folder and each.folder not in ("", "..")
        usable = inside and 1 <= each.repeats <= 10**6 and _is_factor(each.loss_weight)
        usable = usable and _is_share(each.condition_dropout)
        require_data(usable, f"{path}: {escape(each.folder)} is not usable; run the same `fastdiff encode` again")
    require_data(bool(sets), f"{path} lists no data sets; run the same `fastdiff encode` again")
    return sets


def require_data(condition: bool, message: str) -> None:
    """Raise DataError with the message unless the condition holds."""
    if not condition:
        raise DataError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A data set of a run: one folder of shards."""

    entry: int
    """Number of the entry of ``--data.sets`` that it comes from."""
    path: str
    name: str
    """Unique; letters, digits and underscores."""
    listed: ListedSet
    loss_weight: float
    condition_dropout: float | None
    """None: that of the run."""


def members_of(sets: Sequence[DataSet]) -> tuple[Member, ...]:
    """Return the data sets of a run, those of folders with ``sets.json`` one by one; DataError: such a list is damaged.

    Equal names get a number.
    """
    found: list[Member] = []
    names: set[str] = set()
    for entry, given in enumerate(sets):
        inner = read_list(given.path) if is_list(given.path) else (None,)
        for listed in inner:
            own = listed or ListedSet(folder="")
            path = f"{given.path.rstrip('/')}/{own.folder}" if listed else given.path
            last = own.folder or given.path.rstrip("/").rpartition("/")[2]
            text = given.name if given.name and listed is None else "_".join(filter(None, (given.name, last)))
            name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_") or "data"
            unique = next(text for n in itertools.count(1) if (text := name if n == 1 else f"{name}_{n}") not in names)
            names.add(unique)
            found.append(
                Member(
                    entry=entry,
                    path=path,
                    name=unique,
                    listed=own,
                    loss_weight=given.loss_weight * own.loss_weight,
                    condition_dropout=_first(given.condition_dropout, own.condition_dropout),
                )
            )
    return tuple(found)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def samples_per_epoch(sets: Sequence[DataSet], members: Sequence[Member], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many samples of each data set an epoch holds.

    With repeats that is their product with the size; regularisation pictures match the others of their group. With
    weights an epoch has as many samples as all data sets would have without, shared out by largest remainder, between
    the entries of ``--data.sets`` and then within each.

    Args:
        sets: the entries of ``--data.sets``.
        members: their data sets (``members_of``).
        sizes: samples of each of these.

    Raises:
        ConfigError: a data set has no sample of an epoch.
    """
    base = [size * member.listed.repeats for member, size in zip(members, sizes, strict=True)]
    for key in dict.fromkeys((member.entry, member.listed.group) for member in members):
        group = [n for n, member in enumerate(members) if (member.entry, member.listed.group) == key]
        matching = [n for n in group if members[n].listed.regularisation]
        if matching:
            total = sum(base[n] for n in group if n not in matching)
            shared = apportioned(total, [Fraction(base[n]) for n in matching])
            for n, count in zip(matching, shared, strict=True):
                base[n] = count
    entries = [[n for n, member in enumerate(members) if member.entry == entry] for entry in range(len(sets))]
    if sets[0].weight is None:
        found = [count * sets[member.entry].repeats for member, count in zip(members, base, strict=True)]
    else:
        found = [0] * len(members)
        totals = apportioned(sum(base), [Fraction(str(each.weight)) for each in sets])
        for entry, total in zip(entries, totals, strict=True):
            for n, count in zip(entry, apportioned(total, [Fraction(base[n]) for n in entry]), strict=True):
                found[n] = count
    for member, count in zip(members, found, strict=True):
        require(
            count >= 1,
            f"--data.sets {member.path}: its share of an epoch of {sum(found)} samples is less than one sample; give "
            "it a larger weight, or pictures beside the regularisation",
        )
    return tuple(found)


def apportioned(total: int, weights: Sequence[Fraction]) -> list[int]:
    """Share out a whole number by weights: rounded down, and one more where most is lost, the first of equals first."""
    whole = sum(weights)
    exact = [total * weight / whole if whole else Fraction(0) for weight in weights]
    shares = [math.floor(each) for each in exact]
    lost = sorted(range(len(weights)), key=lambda n: (shares[n] - exact[n], n))
    for n in lost[: total - sum(shares) if whole else 0]:
        shares[n] += 1
    return shares
