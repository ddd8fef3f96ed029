"""One shard on its way to disk: the tar, DALI's idx and our index, each there completely or not at all.

Bytes are deterministic: USTAR headers without times and owners, no compression.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from fastdiff.data.index import Place, ShardIndex
from fastdiff.data.shards import ShardInfo, idx_path, index_path, publish, rename, temporary
from fastdiff.errors import DataError


class ShardTar:
    """One shard while it is written.

    Args:
        path: Where the shard will be; it is written to a temporary name beside it.

    Raises:
        OSError: From every method but ``abandon``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = temporary(path).open("wb", buffering=1 << 20)
        self._sha256 = hashlib.sha256()
        self._size = 0
        self._places: list[Place] = []
        self.keys: set[str] = set()

    def add(self, key: str, components: Mapping[str, bytes]) -> None:
        """Append the components of one sample; DataError if the key is already there."""
        if key in self.keys:
            raise DataError(f"key {key} comes twice in {self._path.name}; keys must be unique")
        self.keys.add(key)
        for name, content in components.items():
            member = tarfile.TarInfo(f"{key}.{name}")
            member.size = len(content)
            self._write(member.tobuf(tarfile.USTAR_FORMAT))
            self._places.append(Place(key, name, self._size, len(content), zlib.crc32(content)))
            self._write(content + bytes(-len(content) % tarfile.BLOCKSIZE))

    def publish(self) -> ShardInfo:
        """End the tar and put it, its idx and its index, in this order, under their final names."""
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
        )

    def abandon(self) -> None:
        """Remove what is not published; closing may fail again where writing did."""
        with contextlib.suppress(OSError):
            self._file.close()
        for path in (self._path, idx_path(self._path), index_path(self._path)):
            with contextlib.suppress(OSError):
                temporary(path).unlink(missing_ok=True)

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)
        self._size += len(content)
