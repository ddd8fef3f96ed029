"""Writer of a folder of shards, which readers never see incomplete.

Shards are written to temporary names, fsynced and renamed (``tar_writer.py``); dataset.json is written last.
"""

import contextlib
import dataclasses
import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from fastdiff.data.shards.format import INFO_FILE, MAX_SHARD_SAMPLES, DatasetInfo, ShardInfo
from fastdiff.data.shards.null_embedding import write_null
from fastdiff.data.shards.sample_files import components, longest_caption
from fastdiff.data.shards.tar_writer import ShardTar
from fastdiff.errors import ConfigError, DataError, StorageError, remedy
from fastdiff.files import lock, open_lock
from fastdiff.outputs import require_own_folder

# Present during an encode, or after a killed one: all shards in the folder then belong to it and may be replaced.
_MARKER = ".encoding"
_OWN = re.compile(
    r"(train-[0-9]{6,}((-[0-9]+x[0-9]+)?\.(tar|idx|index\.json)|\.source\.json|\.sums\.safetensors)|null\.[a-z_]+\.npy|(dataset|encode)\.json)"
    r"(\.[0-9]+-[0-9a-f]{8}\.tmp)?"
)


def is_shard_file(name: str) -> bool:
    """Return whether a data set has files of this name, or writes them first under this name."""
    return _OWN.fullmatch(name) is not None


class ShardWriter:
    """A context manager that writes a new folder of shards; leaving it without an exception publishes the folder.

    Args:
        folder: Output folder; created if missing.
        template: Content of dataset.json except ``shards`` and ``samples``.
        samples_per_shard: Samples of every shard except the last of each bucket.
        null: The embedding of the empty prompt, by column.

    Raises:
        ConfigError: The folder is in use, or ``samples_per_shard`` is out of range.
        DataError: A sample or the template is invalid.
        StorageError: From any method: no space, no permission or an input/output error. The files written so far are
            not a data set; the next encode into this folder replaces them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        template: DatasetInfo,
        *,
        samples_per_shard: int,
        null: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        if not 1 <= samples_per_shard <= MAX_SHARD_SAMPLES:
            raise ConfigError(f"samples per shard is {samples_per_shard}, expected 1 to {MAX_SHARD_SAMPLES}")
        if problem := template.problem_of_layout():
            raise DataError(f"cannot write a data set to {folder}: {problem}")
        self.folder = Path(folder)
        self._template = template
        self._samples_per_shard = samples_per_shard
        self._shards: list[ShardInfo] = []
        self._tars: dict[int, ShardTar] = {}  # by bucket
        self._numbers: Counter[int] = Counter()
        self._null = null or {}
        self._longest_caption = longest_caption(self._null)
        self._marker: io.BufferedReader | None = None

    def __enter__(self) -> Self:
        with _storage(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim()
        return self

    def add(
        self,
        key: str,
        arrays: Mapping[str, npt.NDArray[Any]],
        label: int | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        bucket: int = 0,
        captions: int | None = None,
    ) -> None:
        """Append a sample, of a key unique in its shard; see ``components``. DataError: it does not fit the data."""
        content = components(self._template, bucket, key, arrays, label, captions, meta)
        if (longest := longest_caption(arrays)) is not None:
            self._longest_caption = max(longest, self._longest_caption or 0)
        path = self.folder / self._template.shard_name(self._numbers[bucket], bucket)
        with _storage(path):
            if bucket not in self._tars:
                self._tars[bucket] = ShardTar(path, bucket)
            self._tars[bucket].add(key, content)
            if len(self._tars[bucket].keys) == self._samples_per_shard:
                self._finish_shard(bucket)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            for tar in self._tars.values():
                tar.abandon()
            if self._marker is not None:
                self._marker.close()

    def _claim(self) -> None:
        """Require a folder without other data, and lock it against a second encode."""
        self._refuse_published()
        marker = self.folder / _MARKER
        if marker.is_dir():
            raise ConfigError(
                f"{self.folder} holds an unfinished encode of images; resume it, choose another folder, or delete this "
                "one"
            )
        names = [path.name for path in self.folder.iterdir()]
        found = [name for name in names if name.startswith("train-") or is_shard_file(name)]
        if not marker.exists() and found:
            raise ConfigError(
                f"{self.folder} holds {min(found)}, which was not written by an unfinished encode; choose another "
                "folder"
            )
        require_own_folder("OUT", self.folder, lambda name: name == _MARKER or is_shard_file(name))
        self._marker = open(open_lock(marker), "rb")  # noqa: SIM115  (held, with its lock, until __exit__)
        if os.fstat(self._marker.fileno()).st_size:
            self._marker.close()
            raise ConfigError(f"{marker} is not the mark of an unfinished encode; choose another folder")
        try:
            lock(self._marker.fileno(), self.folder)
        except BlockingIOError as error:
            self._marker.close()
            raise ConfigError(f"another `fastdiff encode` is writing to {self.folder}; wait until it ends") from error
        self._refuse_published()  # again: the other encode may have ended between the first check and the lock
        for leftover in self.folder.iterdir():
            if is_shard_file(leftover.name):
                leftover.unlink(missing_ok=True)

    def _refuse_published(self) -> None:
        if (self.folder / INFO_FILE).exists():
            raise ConfigError(f"{self.folder} already holds a data set; choose another folder, or delete this one")

    def _finish_shard(self, bucket: int) -> None:
        self._shards.append(self._tars[bucket].publish())
        del self._tars[bucket]
        self._numbers[bucket] += 1

    def _publish(self) -> None:
        with _storage(self.folder):
            for bucket in sorted(self._tars):
                self._finish_shard(bucket)
            if not self._shards:
                raise DataError(f"the source has no samples; no data set was written to {self.folder}")
            null = write_null(self.folder, self._null)
            total = sum(shard.samples for shard in self._shards)
            info = dataclasses.replace(
                self._template,
                null=null,
                longest_caption=self._longest_caption,
                shards=tuple(self._shards),
                samples=total,
            )
            if problem := info.problem():
                raise DataError(f"{self.folder} is not published: {problem}")
            info.write(self.folder)
            (self.folder / _MARKER).unlink()


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write to {error.filename or path}: {error.strerror or error}; {remedy(error)}. The same command "
            "starts over and replaces the files written so far"
        ) from error
