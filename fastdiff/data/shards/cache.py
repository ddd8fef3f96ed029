"""Train from latent shards on a server: each is downloaded when it is first used, and kept.

The cache of a data set is a folder named after its ``dataset.json``, so data sets never mix, and what is encoded anew
under the same address is another one. Shards appear in it under their names only when their sha256 is that of
``dataset.json``. It grows to the size of the data set, and is removed by deleting it while nobody trains from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from fastdiff.data.shards.format import (
    INFO_FILE,
    MAX_INFO_BYTES,
    DatasetInfo,
    ShardInfo,
    idx_path,
    index_path,
    null_path,
)
from fastdiff.data.shards.index import MAX_INDEX_BYTES, ShardIndex
from fastdiff.data.shards.remote import fetch, is_remote, join, open_url
from fastdiff.errors import DataError, StorageError
from fastdiff.files import publish


class ShardCache:
    """The local copy of a folder of latent shards; safe with any number of processes and threads on it.

    Args:
        url: Address of the folder, without the name of a file.
        folder: Where caches are kept, one folder per data set; made if it is missing. File locks must work there.

    Raises:
        DataError: dataset.json is not one, or the embedding of the empty prompt is another than it says.
        StorageError: The server cannot be read or the cache not be written.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        with open_url(join(url, INFO_FILE), MAX_INFO_BYTES) as file:
            content = file.read()
        self.folder = folder / hashlib.sha256(content).hexdigest()[:16]
        """Where the shards of this data set are."""
        with _storage(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / INFO_FILE).exists():
                publish(self.folder / INFO_FILE, content)
        info = DatasetInfo.read(self.folder)
        for column, null in info.null.items():
            size = len(info.columns[column].header) + info.columns[column].nbytes
            self._fetch_once(null_path(self.folder, column), null.sha256, size)

    def ensure(self, shard: ShardInfo) -> None:
        """Bring a shard and its two indices into the folder, unless they are there.

        Raises:
            DataError: The server has another shard than dataset.json says.
            StorageError: The server cannot be read or the cache not be written.
        """
        path = self.folder / shard.name
        if self._complete(path, shard):
            return
        with self._locked(path):
            if self._complete(path, shard):
                return  # another process had the lock until now
            index = index_path(path)
            # Of every component, the tar has a header of 512 bytes and the index less than that.
            self._fetch(index, shard.index_sha256, min(shard.bytes, MAX_INDEX_BYTES))
            with _storage(index):
                publish(idx_path(path), _index_of(index).wds2idx().encode())
            self._fetch(path, shard.sha256, shard.bytes)  # last: where it is, the others are

    def _complete(self, path: Path, shard: ShardInfo) -> bool:
        with _storage(path):
            return path.exists() and path.stat().st_size == shard.bytes

    def _fetch_once(self, path: Path, sha256: str, size: int) -> None:
        if not path.exists():
            with self._locked(path):
                if not path.exists():
                    self._fetch(path, sha256, size)

    def _fetch(self, path: Path, sha256: str, most: int) -> None:
        fetch(join(self._url, path.name), path, sha256, most)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Be the only one, of all processes and threads, who writes a file."""
        with _storage(path), path.with_name(f".{path.name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in path.parent.glob(f"{path.stem}.*.tmp"):
                leftover.unlink()  # of a process that was killed
            yield


def open_shards_folder(path: str, cache: str) -> tuple[Path, Callable[[ShardInfo], None] | None]:
    """Where the shards of a data set are on this machine, and what brings them there, for ``LatentReader``.

    Args:
        path: A folder, or the address of one.
        cache: Where shards from a server are kept; empty: ~/.cache/fastdiff/shards. Not used for a folder.

    Raises:
        DataError: As ``ShardCache``.
        StorageError: As ``ShardCache``.
    """
    if not is_remote(path):
        return Path(path), None
    shards = ShardCache(path, Path(cache) if cache else Path.home() / ".cache" / "fastdiff" / "shards")
    return shards.folder, shards.ensure


def _index_of(path: Path) -> ShardIndex:
    try:
        return ShardIndex.from_bytes(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path} is not readable ({error}); restore it at its source, and delete {path.parent}"
        ) from error


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot use the cache {error.filename or path}: {error.strerror or error}; make room, or choose another "
            "folder with --data.cache"
        ) from error
