"""Writer of one shard: the tar, DALI's idx and our index, each published atomically.

Bytes are deterministic: USTAR headers without times and owners, no compression. Every sample has all of its components
as files of its own, repeated ones too: the webdataset package skips the hard links by which a tar can share them.
"""

import contextlib
import hashlib
import os
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from fastdiff.data.shards.format import ShardInfo, idx_path, index_path
from fastdiff.data.shards.index import Place, ShardIndex
from fastdiff.errors import DataError
from fastdiff.files import publish, rename, temporary


class ShardTar:
    """A shard being written.

    Args:
        path: Final path of the shard; until then it has a temporary name in the same folder, unique per process.
        bucket: Bucket of its samples, see ``DatasetInfo.buckets``.

    Raises:
        OSError: From every method except ``abandon``.
    """

    def __init__(self, path: Path, bucket: int = 0) -> None:
        self._path, self._bucket = path, bucket
        self._file = temporary(path).open("wb", buffering=1 << 20)
        self._sha256 = hashlib.sha256()
        self._size = 0
        self._places: list[Place] = []
        self.keys: set[str] = set()

    def add(self, key: str, components: Mapping[str, bytes]) -> None:
        """Append the components of one sample; DataError if the key is a duplicate."""
        if key in self.keys:
            raise DataError(f"duplicate key {key} in {self._path.name}; keys must be unique")
        self.keys.add(key)
        self._places += [self._store(key, name, content) for name, content in components.items()]

    def _store(self, key: str, name: str, content: bytes) -> Place:
        member = tarfile.TarInfo(f"{key}.{name}")
        member.size = len(content)
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        place = Place(key, name, self._size, len(content), zlib.crc32(content))
        self._write(content + bytes(-len(content) % tarfile.BLOCKSIZE))
        return place

    def publish(self) -> ShardInfo:
        """Complete the tar and give it, its idx and its index, in this order, their final names."""
        try:
            index = ShardIndex.collect(self._places)
        except ValueError as error:
            raise DataError(f"{self._path.name}: {error}") from error
        end = 2 * tarfile.BLOCKSIZE
        self._write(bytes(end + -(self._size + end) % tarfile.RECORDSIZE))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        rename(temporary(self._path), self._path)
        publish(idx_path(self._path), index.wds2idx().encode())
        content = index.to_bytes()
        publish(index_path(self._path), content)
        return ShardInfo(
            name=self._path.name,
            samples=len(index.keys),
            bytes=self._size,
            sha256=self._sha256.hexdigest(),
            index_sha256=hashlib.sha256(content).hexdigest(),
            bucket=self._bucket,
        )

    def abandon(self) -> None:
        """Remove all unpublished files; closing may fail again after a failed write."""
        with contextlib.suppress(OSError):
            self._file.close()
        for path in (self._path, idx_path(self._path), index_path(self._path)):
            with contextlib.suppress(OSError):
                temporary(path).unlink(missing_ok=True)

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)
        self._size += len(content)
