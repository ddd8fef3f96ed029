"""What the ranks of an encode leave one another in ``OUT/.encoding``: there is no other communication.

``plan.json`` says what decides the bytes, ``unit-000012.json`` records a finished unit. Whatever is not recorded is
done again from its start, so that a killed encode goes on with the same command. Whoever sees all records publishes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from fastdiff.data.shards.format import INFO_FILE, DatasetInfo, ShardInfo, canonical_json, idx_path, index_path
from fastdiff.data.shards.null_embedding import write_null
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.files import publish

BAD_IMAGES = "bad_images.jsonl"

_FOLDER = ".encoding"
_CAPTIONS = "captions_per_image"


@dataclass(frozen=True)
class BadRecord:
    """An image that was left out."""

    name: str
    reason: str


@dataclass(frozen=True)
class UnitRecord:
    """What became of a unit."""

    shards: tuple[ShardInfo, ...]
    bad: tuple[BadRecord, ...]

    @property
    def images(self) -> int:
        """Images of the unit, with those that were left out."""
        return sum(shard.samples for shard in self.shards) + len(self.bad)


class EncodeFolder:
    """The folder that several processes encode into.

    Args:
        out: Made if it is missing.
        plan: What decides the bytes, JSON values by name.
        units: Number of units of the source.
        count_captions: Says how many captions an image has at most. Only the first process calls it; the others wait
            for it.
        wait: Called by a process before it waits for the one that counts.

    Attributes:
        published: Whether the data set is there already, encoded by the same plan.
        captions: What ``count_captions`` said.

    Raises:
        ConfigError: The folder holds something else, or was begun by another plan.
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
        self._plan: dict[str, Any] = json.loads(canonical_json(plan))
        self.plan_digest = hashlib.sha256(canonical_json(plan)).hexdigest()
        self.published, self.captions = False, 1
        with self.storage():
            self._refuse_foreign()
        with self._locked("plan", wait):
            with self.storage():
                self.published = self._is_published()
            if not self.published:
                self.captions = self._agree(count_captions)

    def record(self, unit: int) -> UnitRecord | None:
        """The record of a unit, if the unit is finished and its files are all there in full length."""
        try:
            record = TypeAdapter(UnitRecord).validate_json(self._record_path(unit).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return record if all(map(self._is_there, record.shards)) else None

    @contextlib.contextmanager
    def claimed(self, unit: int) -> Iterator[bool]:
        """Keep other processes from a unit; what an earlier attempt at it has left is removed.

        Yields:
            Whether it is still to be done; no, if another process has finished it a moment ago.

        Raises:
            ConfigError: Another process is at work on the unit.
        """
        with self._locked(f"unit-{unit:06d}", None):
            with self.storage():
                # Without a record of this unit nobody can publish, so that from here on the files are ours.
                to_do = not (self.out / INFO_FILE).exists() and self.record(unit) is None
                for leftover in self.out.glob(f"train-{unit:06d}[.-]*") if to_do else ():
                    leftover.unlink(missing_ok=True)
            yield to_do

    def finish(self, unit: int, record: UnitRecord) -> None:
        """Record that a claimed unit is finished; its shards are on the disk."""
        with self.storage():
            publish(self._record_path(unit), canonical_json(dataclasses.asdict(record)))

    def publish(self, template: Callable[[], DatasetInfo], null: Callable[[], Mapping[str, npt.NDArray[Any]]]) -> int:
        """Write dataset.json if all units are finished; the arguments are called only then.

        Args:
            template: What dataset.json will say, without shards, samples and null.
            null: By column: the embedding of the empty prompt.

        Returns:
            Number of units that are not finished; 0: the data set is complete.

        Raises:
            DataError: No image could be used.
        """
        with self._locked("plan"):
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
        """Turn what the file system says of the folder into a StorageError; nothing else may be read within."""
        try:
            yield
        except OSError as error:
            free = "unknown"
            with contextlib.suppress(OSError):
                free = str(shutil.disk_usage(self.out).free)
            raise StorageError(
                f"cannot write to {error.filename or self.out}: {error.strerror or error} ({free} bytes free); make "
                "room, then run the same command again: it goes on behind the last unit that is finished"
            ) from error

    def _write(self, records: list[UnitRecord], template: DatasetInfo, null: Mapping[str, npt.NDArray[Any]]) -> None:
        shards = tuple(shard for record in records for shard in record.shards)
        bad = [bad for record in records for bad in record.bad]
        if not shards:
            worst = f"; {bad[0].name}: {bad[0].reason}" if bad else ""
            raise DataError(f"none of the source's {len(bad)} images can be used{worst}")
        for pattern in ("null.*.tmp", f"{INFO_FILE}.*.tmp", f"{BAD_IMAGES}*"):  # of one who was killed at this
            for leftover in self.out.glob(pattern):
                leftover.unlink(missing_ok=True)
        if bad:
            lines = [canonical_json(dataclasses.asdict(record)) + b"\n" for record in bad]
            publish(self.out / BAD_IMAGES, b"".join(lines))
        info = dataclasses.replace(
            template,
            null=write_null(self.out, null),
            shards=shards,
            samples=sum(shard.samples for shard in shards),
        )
        if problem := info.problem():
            raise DataError(f"{self.out} is not published: {problem}")
        info.write(self.out)
        shutil.rmtree(self._work, ignore_errors=True)

    def _refuse_foreign(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if self._work.is_file():
            raise ConfigError(
                f"{self.out} holds an unfinished encode of another kind; choose another folder, or delete this one"
            )
        # In this order: the others may begin and end while we look.
        found = sorted(self.out.glob("train-*"))
        if found and not self._work.exists() and not (self.out / INFO_FILE).exists():
            raise ConfigError(f"{self.out} holds {found[0].name}, which is not ours to replace; choose another folder")
        if (self.out / INFO_FILE).exists():
            self._is_published()
        self._work.mkdir(exist_ok=True)

    def _is_published(self) -> bool:
        """Whether the data set is there; ConfigError if it is another one."""
        if not (self.out / INFO_FILE).exists():
            return False
        if not DatasetInfo.read(self.out).provenance.transform.endswith(self.plan_digest):
            raise ConfigError(
                f"{self.out} already holds a data set, of another source or other options; choose another folder, or "
                "delete this one"
            )
        # One who published was killed while removing this, or we have just made it anew.
        shutil.rmtree(self._work, ignore_errors=True)
        return True

    def _agree(self, count_captions: Callable[[], int]) -> int:
        path = self._work / "plan.json"
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
                f"{name}: {begun.get(name)} there, {self._plan.get(name)} now"
                for name in names
                if begun.get(name) != self._plan.get(name)
            ]
            raise ConfigError(
                f"{self.out} holds an unfinished encode that was begun otherwise ({'; '.join(changed)}); finish it as "
                "it was begun, choose another folder, or delete this one to begin anew"
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
    def _locked(self, name: str, wait: Callable[[], None] | None = lambda: None) -> Iterator[None]:
        """Hold a lock that ends with this process; it needs a file system that has locks between its machines.

        Args:
            name: Of the lock.
            wait: Called before waiting for another process; None: ConfigError instead.
        """
        with self.storage():
            file = self._lock_file(name)
        with file:
            with self.storage():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    if wait is None:
                        raise ConfigError(
                            f"another `fastdiff encode` is writing {name} to {self.out}; wait for it, or give every "
                            "process a RANK of its own",
                            everywhere=False,
                        ) from error
                    wait()
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _lock_file(self, name: str) -> IO[bytes]:
        while True:
            self._work.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # one who published has removed the folder meanwhile
                return (self._work / f"{name}.lock").open("wb")
