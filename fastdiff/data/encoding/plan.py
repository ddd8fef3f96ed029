"""Coordination of the ranks of an encode through files in ``OUT/.encoding``, their only communication.

``plan.json`` holds all options that affect the bytes, and ``unit-000012.json`` records a finished unit. A unit without
a record is encoded again from its start, so the same command resumes a killed encode. A process claims a unit by the
lock of ``unit-000012.lock`` (``parallel/claims.py``). The rank that finds all records publishes the data set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from fastdiff.data.selection import Counted, Selection
from fastdiff.data.shards.format import (
    CAPTIONED,
    INFO_FILE,
    DatasetInfo,
    ShardInfo,
    canonical_json,
    idx_path,
    index_path,
    null_path,
)
from fastdiff.data.shards.null_embedding import write_null
from fastdiff.data.shards.writer import is_shard_file
from fastdiff.errors import ConfigError, DataError, StorageError, remedy
from fastdiff.files import is_temporary, lock, open_lock_in, publish
from fastdiff.parallel.claims import Claims

BAD_IMAGES = "bad_images.jsonl"

_RESULTS = (BAD_IMAGES, *(null_path(Path(), column).name for column in CAPTIONED))
"""Files beside the shards that are written last."""

_FOLDER = ".encoding"
_OWN = re.compile(r"(plan|unit-[0-9]{6,})\.(json|lock)(\.[0-9]+-[0-9a-f]{8}\.tmp)?")
"""Names of the files in it."""
_CAPTIONS = "captions_per_image"


@dataclass(frozen=True)
class BadRecord:
    """A skipped image."""

    name: str
    reason: str


@dataclass(frozen=True)
class UnitRecord:
    """The record of a finished unit."""

    shards: tuple[ShardInfo, ...]
    bad: tuple[BadRecord, ...]
    selection: Selection = field(default_factory=Selection)
    """What was left out of the unit, or found in it, without the listing of the source."""

    @property
    def images(self) -> int:
        """Images of the unit, skipped ones included."""
        return sum(shard.samples for shard in self.shards) + len(self.bad)


class EncodeFolder:
    """A folder into which several processes encode.

    Args:
        out: The folder; created if missing.
        plan: Options that affect the bytes, JSON values by name.
        units: Number of units of the source.
        count_captions: Returns the largest number of captions per image. Only the first process calls it; all others
            wait for the result.
        wait: Called by a process before it waits for the count.

    Attributes:
        published: Whether the folder already holds the data set of this plan.
        captions: Result of ``count_captions``.

    Raises:
        ConfigError: The folder holds other files, or an encode with another plan.
        StorageError: From every method: the folder cannot be written.
    """

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        units: int,
        count_captions: Callable[[], int],
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.out, self._units = out, units
        self._work = out / _FOLDER
        self._plan_path = self._work / "plan.json"
        self._claims = Claims(self._work, "unit")
        self._plan: dict[str, Any] = json.loads(canonical_json(plan))
        self.plan_digest = hashlib.sha256(canonical_json(plan)).hexdigest()
        self.published, self.captions = False, 1
        with self.storage():
            self._refuse_foreign()
        with self._locked(wait):
            with self.storage():
                self.published = self._is_published()
            if not self.published:
                self.captions = self._agree(count_captions)

    def record(self, unit: int) -> UnitRecord | None:
        """Return the record of a unit if the unit is finished and all its files have their full length."""
        try:
            record = TypeAdapter(UnitRecord).validate_json(self._record_path(unit).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return record if all(map(self._is_there, record.shards)) else None

    def claim(self, unit: int) -> bool:
        """Claim a unit and remove the files of earlier attempts; False: it is finished, or another process has it."""
        with self.storage():
            if self._is_finished(unit) or not self._claims.take(unit):
                return False
            # Without a record of this unit no process can publish, so from here on the files belong to this one.
            if self._is_finished(unit):
                self._claims.release(unit)
                return False
            for leftover in self.out.glob(f"train-{unit:06d}[.-]*"):
                if is_shard_file(leftover.name):
                    leftover.unlink(missing_ok=True)
            return True

    def finish(self, unit: int, record: UnitRecord) -> None:
        """Record that a claimed unit is finished, and release it; its shards must be on disk."""
        with self.storage():
            publish(self._record_path(unit), canonical_json(dataclasses.asdict(record)))
        self._claims.release(unit)

    def release_all(self) -> None:
        """Release all units that are claimed and not finished."""
        self._claims.release_all()

    def unfinished(self) -> list[int]:
        """Return the units that are not finished, by any process."""
        with self.storage():
            return [unit for unit in range(self._units) if not self._is_finished(unit)]

    def wait(self, unit: int) -> None:
        """Wait until no other process holds a unit."""
        with self.storage():
            self._claims.wait(unit)

    def _is_finished(self, unit: int) -> bool:
        return (self.out / INFO_FILE).exists() or self.record(unit) is not None

    def publish(self, template: Callable[[], DatasetInfo], null: Callable[[], Mapping[str, npt.NDArray[Any]]]) -> int:
        """Write dataset.json if all units are finished; only then the arguments are called.

        Args:
            template: Returns the content of dataset.json without shards, samples and null.
            null: Returns the embedding of the empty prompt, by column.

        Returns:
            Number of unfinished units; 0: the data set is complete.

        Raises:
            DataError: All images are unusable.
        """
        with self._locked():
            with self.storage():
                if self._is_published():
                    return 0
                if missing := self._units - sum(1 for _ in self._work.glob("unit-*.json")):
                    return missing
                records = [record for unit in range(self._units) if (record := self.record(unit)) is not None]
            if len(records) == self._units:
                described, embedding = template(), null()
                with self.storage():
                    self._write(records, described, embedding)
            return self._units - len(records)

    @contextlib.contextmanager
    def storage(self) -> Iterator[None]:
        """Turn an OSError of the folder into a StorageError; only files of this folder may be accessed within."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot write to {error.filename or self.out}: {error.strerror or error}; {remedy(error)}. The same "
                "command resumes after the last finished unit"
            ) from error

    def _write(self, records: list[UnitRecord], template: DatasetInfo, null: Mapping[str, npt.NDArray[Any]]) -> None:
        shards = tuple(shard for record in records for shard in record.shards)
        bad = [bad for record in records for bad in record.bad]
        if not shards:
            worst = f"; {bad[0].name}: {bad[0].reason}" if bad else ""
            raise DataError(f"all {len(bad)} images of the source are unusable{worst}")
        for leftover in self.out.iterdir():  # of a process killed here
            name = leftover.name
            if name == BAD_IMAGES or is_temporary(name, BAD_IMAGES) or (is_shard_file(name) and name.endswith(".tmp")):
                leftover.unlink(missing_ok=True)
        if bad:
            lines = [canonical_json(dataclasses.asdict(record)) + b"\n" for record in bad]
            publish(self.out / BAD_IMAGES, b"".join(lines))
        info = dataclasses.replace(
            template,
            null=write_null(self.out, null),
            selection=_selection(template, records),
            shards=shards,
            samples=sum(shard.samples for shard in shards),
        )
        if problem := info.problem():
            raise DataError(f"{self.out} is not published: {problem}")
        info.write(self.out)
        self._remove_work()

    def _refuse_foreign(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if self._work.is_file():
            raise ConfigError(
                f"{self.out} holds an unfinished encode of digits or synthetic data; choose another folder, or delete "
                "this one"
            )
        # In this order, because other processes may begin and end during these checks.
        found = [name for name in os.listdir(self.out) if name.startswith("train-") or name in _RESULTS]
        if found and not self._plan_path.exists() and not (self.out / INFO_FILE).exists():
            raise ConfigError(
                f"{self.out} holds {min(found)}, which was not written by an unfinished encode; choose another folder"
            )
        if (self.out / INFO_FILE).exists():
            self._is_published()
        self._work.mkdir(exist_ok=True)

    def _is_published(self) -> bool:
        """Return whether the data set is published; ConfigError if it has another plan."""
        if not (self.out / INFO_FILE).exists():
            return False
        if not DatasetInfo.read(self.out).provenance.transform.endswith(self.plan_digest):
            raise ConfigError(
                f"{self.out} already holds a data set with another source or other options; choose another folder, or "
                "delete this one"
            )
        # The publishing process was killed before it removed this folder, or this process has just created it again.
        self._remove_work()
        return True

    def _remove_work(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._work.iterdir():
                if _OWN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            self._work.rmdir()

    def _agree(self, count_captions: Callable[[], int]) -> int:
        path = self._plan_path
        if not path.exists():
            captions = count_captions()
            with self.storage():
                publish(path, canonical_json(self._plan | {_CAPTIONS: captions}))
            return captions
        with self.storage():
            begun: dict[str, Any] = json.loads(path.read_bytes())
        captions = begun.pop(_CAPTIONS)
        if begun != self._plan:
            names = sorted(begun.keys() | self._plan.keys())
            changed = [
                f"{name} was {begun.get(name)}, is {self._plan.get(name)}"
                for name in names
                if begun.get(name) != self._plan.get(name)
            ]
            raise ConfigError(
                f"{self.out} holds an unfinished encode with other options ({'; '.join(changed)}); finish it with its "
                "options, choose another folder, or delete this one to start over"
            )
        return int(captions)

    def _record_path(self, unit: int) -> Path:
        return self._work / f"unit-{unit:06d}.json"

    def _is_there(self, shard: ShardInfo) -> bool:
        path = self.out / shard.name
        try:
            return path.stat().st_size == shard.bytes and idx_path(path).exists() and index_path(path).exists()
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _locked(self, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of the plan, which ends with this process; ``wait`` is called before a wait for another one."""
        with self.storage():
            descriptor = open_lock_in(self._work, "plan.lock")
        with open(descriptor, "rb") as file:
            with self.storage():
                try:
                    lock(file.fileno(), self.out)
                except BlockingIOError:
                    wait()
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _selection(template: DatasetInfo, records: list[UnitRecord]) -> Selection:
    """Return what the listing of the source and all units left out, skipped images included."""
    bad = [bad for record in records for bad in record.bad]
    first = tuple(PurePath(each.name).name for each in bad[:3])
    skipped = Counted(reason=f"unusable, listed in {BAD_IMAGES}", count=len(bad), first=first)
    listing = template.selection or Selection()
    return listing.and_then([*(record.selection for record in records), Selection(left_out=(skipped,) if bad else ())])
