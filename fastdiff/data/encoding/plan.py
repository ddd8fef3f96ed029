"""Coordination of the ranks of an encode through files in ``OUT/.encoding``, their only communication.

``plan.json`` holds all options that affect the bytes, and ``unit-000012.json`` records a finished partition. A
partition without a record is encoded again from its start, so the same command resumes a killed encode. A process
claims a partition by the lock of ``unit-000012.lock`` (``parallel/claims.py``). The rank that finds all records
publishes the data set.

The plan stays beside the published data set as ``encode.json``, and each record with what its partition was encoded
from (``source_metadata.py``), as ``train-000012.source.json``. By them a later call of the same command finds what was
edited in the source. It makes the data set an unfinished encode again, without the partitions that are stale.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any

import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from fastdiff.conditions import CAPTIONED
from fastdiff.data.encoding.source_metadata import Changes, PartitionMetadata
from fastdiff.data.encoding.teacher_features import BASIS_FILE
from fastdiff.data.selection import Counted, Selection
from fastdiff.data.shards.format import (
    ENCODE_PLAN,
    INFO_FILE,
    DatasetInfo,
    ShardInfo,
    canonical_json,
    idx_path,
    index_path,
    null_path,
)
from fastdiff.data.shards.null_embedding import write_null
from fastdiff.data.shards.sample_files import longest_caption
from fastdiff.data.shards.usage import runs_that_use
from fastdiff.data.shards.writer import is_shard_file
from fastdiff.errors import ConfigError, DataError, StorageError, remedy
from fastdiff.files import fsync, is_temporary, lock, open_lock_in, publish
from fastdiff.outputs import require_own_folder
from fastdiff.parallel.claims import Claims

BAD_IMAGES = "bad_images.jsonl"

_RESULTS = (BAD_IMAGES, *(null_path(Path(), column).name for column in CAPTIONED))
"""Files beside the shards that are written last."""

_FOLDER = ".encoding"
_OWN = re.compile(r"(plan|living|unit-[0-9]{6,})\.(json|lock)(\.[0-9]+-[0-9a-f]{8}\.tmp)?")
"""Names of the files in it."""
_CAPTIONS, _LISTING = "captions_per_image", "source_listing"
LISTING_OPTIONS = "listing_options"
"""Key of the options that choose what the source lists; data sets of before them have the same digest of the plan."""


@dataclass(frozen=True)
class BadRecord:
    """A skipped image."""

    name: str
    reason: str


@dataclass(frozen=True)
class PartitionRecord:
    """The record of a finished partition."""

    shards: tuple[ShardInfo, ...]
    bad: tuple[BadRecord, ...]
    selection: Selection = field(default_factory=Selection)
    """What was left out of the partition, or found in it, without the listing of the source."""
    longest_caption: int | None = None
    """As in dataset.json; None also in records of older versions."""

    @property
    def images(self) -> int:
        """Images of the partition, skipped ones included."""
        return sum(shard.samples for shard in self.shards) + len(self.bad)


@dataclass(frozen=True)
class _Stored:
    """The content of ``train-000012.source.json``."""

    record: PartitionRecord
    facts: PartitionMetadata


Compare = Callable[[Mapping[int, PartitionMetadata], bool], Changes]


class EncodeFolder:
    """A folder into which several processes encode.

    Args:
        out: The folder; created if missing.
        plan: Options that affect the bytes, JSON values by name.
        partitions: Number of partitions of the source.
        count_captions: Returns the largest number of captions per image. Only the first process calls it; all others
            wait for the result.
        wait: Called by a process before it waits for the first one.
        compare: Returns the changes of the source since these partitions were encoded; the second argument says whether
            they are all. Only the first process calls it.
        say: Called with a line about the changes.
        prepare: Returns further files of the data set, by name. Only the first process calls it, before a new encode.

    Attributes:
        published: Whether the folder already holds the data set of this plan.
        unseen: Whether it does, and edits of its source cannot be seen.
        captions: Result of ``count_captions``.
        has_written: Whether this process published the data set.

    Raises:
        ConfigError: The folder holds other files, or an encode with another plan.
        StorageError: From every method: the folder cannot be written.
    """

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        partitions: int,
        count_captions: Callable[[], int],
        wait: Callable[[], None] = lambda: None,
        compare: Compare = lambda known, whole: Changes(),
        say: Callable[[str], None] = lambda text: None,
        prepare: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        self.out, self._partitions, self._say = out, partitions, say
        self._work = out / _FOLDER
        self._plan_path = self._work / "plan.json"
        self._claims = Claims(self._work, "unit")
        self._plan: dict[str, Any] = json.loads(canonical_json(plan))
        of_bytes = {name: value for name, value in plan.items() if name != LISTING_OPTIONS}
        self.plan_digest = hashlib.sha256(canonical_json(of_bytes)).hexdigest()
        self.published, self.unseen, self.captions = False, False, 1
        self.has_written = False
        self._living: IO[bytes] | None = None
        with self.storage():
            self._refuse_foreign()
        with self._locked(wait):
            try:
                with self.storage():
                    alone = self._join()
                    self.published = (self.out / INFO_FILE).exists()
                    begun = self._begun()
                if begun is None:
                    self._begin(count_captions, prepare)
                else:
                    self._go_on(begun, alone, compare, count_captions)
            except BaseException:
                self.close()
                raise
            finally:
                if self.published:
                    self._remove_work()

    def close(self) -> None:
        """Release all partitions that are claimed and not finished, and let other processes be alone."""
        self._claims.release_all()
        if self._living is not None:
            self._living.close()

    def record(self, partition: int) -> PartitionRecord | None:
        """Return the record of a partition if the partition is finished and all its files have their full length."""
        try:
            record = TypeAdapter(PartitionRecord).validate_json(self._record_path(partition).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return record if all(map(self._is_there, record.shards)) else None

    def claim(self, partition: int) -> bool:
        """Claim a partition and remove files of earlier attempts; False: it is finished, or another process has it."""
        with self.storage():
            if self._is_finished(partition) or not self._claims.take(partition):
                return False
            self._require_the_same_source()
            # Without a record of this partition no process can publish, so from here on the files belong to this one.
            if self._is_finished(partition):
                self._claims.release(partition)
                return False
            self._remove_files(partition)
            return True

    def finish(self, partition: int, record: PartitionRecord, metadata: PartitionMetadata) -> None:
        """Record that a claimed partition is finished, and release it; its shards must be on disk."""
        with self.storage():
            self._store(partition, _Stored(record, metadata))
            publish(self._record_path(partition), canonical_json(dataclasses.asdict(record)))
        self._claims.release(partition)

    def release_all(self) -> None:
        """Release all partitions that are claimed and not finished."""
        self._claims.release_all()

    def unfinished(self) -> list[int]:
        """Return the partitions that are not finished, by any process."""
        with self.storage():
            return [partition for partition in range(self._partitions) if not self._is_finished(partition)]

    def wait(self, partition: int) -> None:
        """Wait until no other process holds a partition."""
        with self.storage():
            self._claims.wait(partition)

    def _is_finished(self, partition: int) -> bool:
        return (self.out / INFO_FILE).exists() or self.record(partition) is not None

    def publish(self, template: Callable[[], DatasetInfo], null: Callable[[], Mapping[str, npt.NDArray[Any]]]) -> int:
        """Write dataset.json if all partitions are finished; only then the arguments are called.

        Returns:
            Number of unfinished partitions; 0: the data set is complete.

        Raises:
            DataError: All images are unusable.
        """
        with self._locked():
            with self.storage():
                if self._is_published():
                    return 0
                if missing := self._partitions - sum(1 for _ in self._work.glob("unit-*.json")):
                    return missing
                every = map(self.record, range(self._partitions))
                records = [record for record in every if record is not None]
            if len(records) == self._partitions:
                described, embedding = template(), null()
                with self.storage():
                    self._write(records, described, embedding)
                self.has_written = True
            return self._partitions - len(records)

    @contextlib.contextmanager
    def storage(self) -> Iterator[None]:
        """Turn an OSError of the folder into a StorageError; only files of this folder may be accessed within."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot write to {error.filename or self.out}: {error.strerror or error}; {remedy(error)}. The same "
                "command resumes after the last finished partition"
            ) from error

    def _write(
        self, records: list[PartitionRecord], template: DatasetInfo, null: Mapping[str, npt.NDArray[Any]]
    ) -> None:
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
            longest_caption=_longest_caption(records, null),
            selection=_selection(template, records),
            shards=shards,
            samples=sum(shard.samples for shard in shards),
        )
        if problem := info.problem():
            raise DataError(f"{self.out} is not published: {problem}")
        publish(self.out / ENCODE_PLAN, self._content())
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
        if (self.out / INFO_FILE).exists() and self._begun() is None:
            self._require_this_plan()
        own = (_FOLDER, BASIS_FILE, *_RESULTS)
        require_own_folder("OUT", self.out, lambda name: name in own or is_shard_file(name))
        self._work.mkdir(exist_ok=True)

    def _require_this_plan(self, why: str = "") -> None:
        """Raise ConfigError if the published data set has another plan."""
        if not DatasetInfo.read(self.out).provenance.transform.endswith(self.plan_digest):
            raise ConfigError(
                f"{self.out} already holds a data set with another source or other options{why}; choose another "
                "folder, or delete this one"
            )

    def _is_published(self) -> bool:
        """Return whether the data set is published; ConfigError if it has another plan."""
        if not (self.out / INFO_FILE).exists():
            return False
        self._require_this_plan()
        # The publishing process was killed before it removed this folder, or this process has just created it again.
        self._remove_work()
        return True

    def _join(self) -> bool:
        """Let other processes see that this one lives; return whether it is the only one."""
        self._living = open(open_lock_in(self._work, "living.lock"), "rb")  # noqa: SIM115  (held until ``close``)
        try:
            lock(self._living.fileno(), self.out)
        except BlockingIOError:
            fcntl.flock(self._living, fcntl.LOCK_SH)
            return False
        fcntl.flock(self._living, fcntl.LOCK_SH)
        return True

    def _begun(self) -> dict[str, Any] | None:
        """Return the plan of the unfinished encode, or of the published data set; None: there is none."""
        path = self.out / ENCODE_PLAN if (self.out / INFO_FILE).exists() else self._plan_path
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get(_CAPTIONS), int):
            raise ConfigError(f"{path} was changed by another program; delete {self.out} to encode anew")
        return found

    def _content(self) -> bytes:
        return canonical_json(self._plan | {_CAPTIONS: self.captions})

    def _begin(self, count_captions: Callable[[], int], prepare: Callable[[], Mapping[str, bytes]]) -> None:
        """Begin an encode, or accept a data set of an older version, which has no plan."""
        if self.published:
            self._require_this_plan()
            self.unseen = True
            return
        files, self.captions = prepare(), count_captions()
        with self.storage():
            for name, content in files.items():
                publish(self.out / name, content)
            publish(self._plan_path, self._content())

    def _go_on(self, begun: dict[str, Any], alone: bool, compare: Compare, count_captions: Callable[[], int]) -> None:
        """Go on with an encode, or accept a data set, both without what is stale; other options are an error."""
        self.captions = int(begun.pop(_CAPTIONS))
        if changed := _differences(begun, self._plan):
            if self.published:
                self._require_this_plan(f" ({changed})")
            raise ConfigError(
                f"{self.out} holds an unfinished encode with other options ({changed}); finish it with its options, "
                "choose another folder, or delete this one to start over"
            )
        moved = begun.get(_LISTING) != self._plan.get(_LISTING)
        if not alone:
            if moved:
                raise self._changed_meanwhile()
            return
        with self.storage():
            stored = self._all_stored()
        changes = compare({partition: each.facts for partition, each in stored.items()}, self.published)
        self.unseen = changes.unseen
        with self.storage():
            for partition, metadata in changes.fresh.items():
                self._store(partition, _Stored(stored[partition].record, metadata))
        if moved:  # only what was compared is still known to be of the source
            self._drop_others(changes.same, begun, stored, changes, count_captions)
        elif changes.stale:
            self._drop_others(set(stored) - changes.stale, begun, stored, changes, count_captions)

    def _drop_others(
        self,
        same: Set[int],
        begun: Mapping[str, Any],
        stored: Mapping[int, _Stored],
        changes: Changes,
        count_captions: Callable[[], int],
    ) -> None:
        """Make an unfinished encode of the source as it is now, from the partitions that are still the same."""
        what = f"the source has changed since it was encoded ({changes.shown or 'its listing'})"
        if self.published:
            self._refuse_used(what)
        captions, before = count_captions(), self.captions
        with self.storage():
            known, every = self._known_partitions(), range(self._partitions)
            finished = set(every) if self.published else set(filter(self._is_finished, known))
            if self.published:
                self.published = False
                self._withdraw(begun, stored)
            kept = set() if captions != before else {partition for partition in same if partition in every}
            for partition in known - kept:
                self._drop(partition)
            self.captions = captions
            publish(self._plan_path, self._content())
        if finished:
            self._say(f"{what}: {len(finished - kept)} of {self._partitions} shards are encoded anew")

    def _refuse_used(self, what: str) -> None:
        if runs := runs_that_use(self.out):
            more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
            raise ConfigError(
                f"{what}, and the run {runs[0]}{more} has used {self.out}, without which it cannot go on; encode into "
                "another folder, and train with it under another --output.folder (or delete the run first)"
            )

    def _withdraw(self, begun: Mapping[str, Any], stored: Mapping[int, _Stored]) -> None:
        """Make a published data set the unfinished encode that it was before; a kill leaves the one or the other."""
        for partition, each in stored.items():
            publish(self._record_path(partition), canonical_json(dataclasses.asdict(each.record)))
        publish(self._plan_path, canonical_json({**begun, _CAPTIONS: self.captions}))
        (self.out / INFO_FILE).unlink()
        fsync(self.out)

    def _drop(self, partition: int) -> None:
        """Remove the record and all files of a partition."""
        self._record_path(partition).unlink(missing_ok=True)
        self._remove_files(partition)

    def _remove_files(self, partition: int) -> None:
        for path in self.out.glob(f"train-{partition:06d}[.-]*"):
            if is_shard_file(path.name):
                path.unlink(missing_ok=True)

    def _known_partitions(self) -> set[int]:
        """Return the partitions that have files or a record."""
        names = [*os.listdir(self.out), *os.listdir(self._work)]
        found = (re.match(r"(?:train|unit)-([0-9]{6,})[.-]", name) for name in names)
        return {int(match[1]) for match in found if match}

    def _store(self, partition: int, stored: _Stored) -> None:
        publish(self._stored_path(partition), canonical_json(dataclasses.asdict(stored)))

    def _all_stored(self) -> dict[int, _Stored]:
        """Return what lies beside the shards of all partitions, of an unfinished encode: of its finished partitions."""
        found = {}
        for partition in sorted(self._known_partitions()):
            with contextlib.suppress(FileNotFoundError, ValidationError):
                if self.published or self.record(partition) is not None:
                    found[partition] = TypeAdapter(_Stored).validate_json(self._stored_path(partition).read_bytes())
        return found

    def _stored_path(self, partition: int) -> Path:
        return self.out / f"train-{partition:06d}.source.json"

    def _require_the_same_source(self) -> None:
        """Raise ConfigError if another process has found that the source has changed, and encodes it anew."""
        begun = self._begun()
        if begun is not None and begun.get(_LISTING) != self._plan.get(_LISTING):
            raise self._changed_meanwhile()

    def _changed_meanwhile(self) -> ConfigError:
        return ConfigError(
            f"the source has changed since other processes began to encode it into {self.out}; wait until they end, "
            "and run this command again",
            everywhere=False,
        )

    def _remove_work(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._work.iterdir():
                if _OWN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            self._work.rmdir()

    def _record_path(self, partition: int) -> Path:
        return self._work / f"unit-{partition:06d}.json"

    def _is_there(self, shard: ShardInfo) -> bool:
        path = self.out / shard.name
        try:
            return path.stat().st_size == shard.bytes and idx_path(path).exists() and index_path(path).exists()
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _locked(self, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of the plan, which ends with this process; ``wait`` is called before a wait for another one."""
        while True:
            with self.storage():
                file = open(open_lock_in(self._work, "plan.lock"), "rb")  # noqa: SIM115
            with file:
                with self.storage():
                    try:
                        lock(file.fileno(), self.out)
                    except BlockingIOError:
                        wait()
                        fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:  # otherwise the process that held it has removed it
                    yield
                    return


def _differences(begun: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Describe the options that differ; the listing of the source is none."""
    same = {LISTING_OPTIONS} if begun.get(_LISTING) == plan.get(_LISTING) else set()
    names = sorted((begun.keys() | plan.keys()) - {_LISTING} - same)
    changed = [name for name in names if begun.get(name) != plan.get(name)]
    return "; ".join(f"{name} was {begun.get(name)}, is {plan.get(name)}" for name in changed)


def _longest_caption(records: list[PartitionRecord], null: Mapping[str, npt.NDArray[Any]]) -> int | None:
    """Return the rows of the longest caption of all partitions and of the empty one; None if one is unknown."""
    found = [longest_caption(null), *(record.longest_caption for record in records if record.shards)]
    known = [rows for rows in found if rows is not None]
    return max(known) if len(known) == len(found) else None


def _selection(template: DatasetInfo, records: list[PartitionRecord]) -> Selection:
    """Return what the listing of the source and all partitions left out, skipped images included."""
    bad = [bad for record in records for bad in record.bad]
    first = tuple(PurePath(each.name).name for each in bad[:3])
    skipped = Counted(reason=f"unusable, listed in {BAD_IMAGES}", count=len(bad), first=first)
    listing = template.selection or Selection()
    return listing.and_then([*(record.selection for record in records), Selection(left_out=(skipped,) if bad else ())])
