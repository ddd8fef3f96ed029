"""Local cache of latent shards on a server: each shard is downloaded at its first use and kept.

The cache of a data set is a folder named after the digest of its ``dataset.json``. Data sets therefore never mix, and a
new encode at the same address gets a new folder. A shard appears under its name only after its sha256 was verified
against ``dataset.json``. The cache grows to the size of the data set; delete it while no run trains from it.
"""

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
from fastdiff.data.shards.writer import is_shard_file
from fastdiff.errors import DataError, StorageError
from fastdiff.files import open_lock, publish


class ShardCache:
    """The local copy of a remote folder of latent shards; safe for any number of processes and threads.

    Args:
        url: Address of the folder.
        folder: Parent folder of the caches, one per data set; created if missing. File locks must work there.

    Raises:
        DataError: dataset.json is invalid, or the embedding of the empty prompt does not match it.
        StorageError: The server cannot be read, or the cache cannot be written.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        with open_url(join(url, INFO_FILE), MAX_INFO_BYTES) as file:
            content = file.read()
        self.folder = folder / hashlib.sha256(content).hexdigest()[:16]
        """Local folder of the shards of this data set."""
        with _storage(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / INFO_FILE).exists():
                publish(self.folder / INFO_FILE, content)
        info = DatasetInfo.read(self.folder)
        for column, null in info.null.items():
            size = len(info.columns[column].header) + info.columns[column].nbytes
            self._fetch_once(null_path(self.folder, column), null.sha256, size)

    def ensure(self, shard: ShardInfo) -> None:
        """Download a shard and its two indices unless they are in the cache.

        Raises:
            DataError: The shard on the server does not match dataset.json.
            StorageError: The server cannot be read, or the cache cannot be written.
        """
        path = self.folder / shard.name
        if self._complete(path, shard):
            return
        with self._locked(path):
            if self._complete(path, shard):
                return  # another process downloaded it meanwhile
            index = index_path(path)
            # The index is smaller than the tar, which has a header of 512 bytes per component.
            self._fetch(index, shard.index_sha256, min(shard.bytes, MAX_INDEX_BYTES))
            with _storage(index):
                publish(idx_path(path), _index_of(index).wds2idx().encode())
            self._fetch(path, shard.sha256, shard.bytes)  # last: its presence implies the indices

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
        """Lock a file against all other writers, in this process and in others."""
        with _storage(path), open(open_lock(path.with_name(f".{path.name}.lock")), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in path.parent.glob(f"{path.stem}.*.tmp"):  # of a process that was killed
                if is_shard_file(leftover.name):
                    leftover.unlink()
            yield


def open_shards_folder(path: str, cache: str) -> tuple[Path, Callable[[ShardInfo], None] | None]:
    """Return the local folder of a data set and, for a remote one, the function that fetches a shard into it.

    Args:
        path: A local folder or the address of a remote one.
        cache: Cache folder for remote shards; empty: ~/.cache/fastdiff/shards. Unused for a local folder.

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
            f"{path} is not a valid index ({error}); restore it at its source, and delete {path.parent}"
        ) from error


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot use the cache {error.filename or path}: {error.strerror or error}; free some space, or choose "
            "another folder with --data.cache"
        ) from error
