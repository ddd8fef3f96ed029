"""Write a folder of shards so that a reader never sees half of it.

Shards go to temporary names, are fsynced and renamed (``tar.py``); dataset.json comes at the very end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards import INFO_FILE, DatasetInfo, ShardInfo, canonical_json, temporary
from fastdiff.data.tar import ShardTar
from fastdiff.errors import ConfigError, DataError, StorageError

# Present while an encode is at work or was killed: whatever shards lie beside it are its own and may be
# replaced.
_MARKER = ".encoding"


class ShardWriter:
    """Context manager that writes a new folder of shards; leaving it without an exception publishes it.

    Args:
        folder: Made if it is missing.
        template: What dataset.json will say, without ``shards`` and ``samples``.
        samples_per_shard: Size of every shard but the last.

    Raises:
        ConfigError: The folder is taken.
        DataError: A sample or the template does not fit.
        StorageError: No space, no permission or an input/output error, from any method. What was written so far is no
            data set, and the next run into this folder replaces it.
    """

    def __init__(self, folder: str | os.PathLike[str], template: DatasetInfo, *, samples_per_shard: int) -> None:
        if samples_per_shard < 1:
            raise ConfigError(f"samples per shard is {samples_per_shard}: at least 1")
        if problem := template.problem_of_layout():
            raise DataError(f"no data set can be written to {folder}: {problem}")
        self.folder = Path(folder)
        self._template = template
        self._samples_per_shard = samples_per_shard
        self._shards: list[ShardInfo] = []
        self._tar: ShardTar | None = None
        self._marker: io.FileIO | None = None

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
    ) -> None:
        """Append one sample.

        Args:
            key: Letters, digits, ``_`` and ``-``; once per shard.
            arrays: One array per column, of the column's dtype and shape.
            label: Class of the sample, if the data set has classes.
            meta: Goes into ``<key>.json``; give it for all samples or for none.

        Raises:
            DataError: The sample does not fit the data set.
        """
        components = self._components(key, arrays, label, meta)
        path = self.folder / f"train-{len(self._shards):06d}.tar"
        with _storage(path):
            if self._tar is None:
                self._tar = ShardTar(path)
            self._tar.add(key, components)
            if len(self._tar.keys) == self._samples_per_shard:
                self._finish_shard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            if self._tar is not None:
                self._tar.abandon()
            if self._marker is not None:
                self._marker.close()

    def _claim(self) -> None:
        """Make sure that nothing of value is in the folder, and lock it against a second encode."""
        self._refuse_published()
        marker = self.folder / _MARKER
        if not marker.exists() and (found := sorted(self.folder.glob("train-*"))):
            raise ConfigError(
                f"{self.folder} holds {found[0].name}, which is not ours to replace; choose another folder"
            )
        self._marker = open(marker, "wb", buffering=0)  # noqa: SIM115  (held, with its lock, until __exit__)
        try:
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._marker.close()
            raise ConfigError(f"another `fastdiff encode` is writing to {self.folder}; wait for it") from error
        self._refuse_published()  # again: the other encode may have ended between the first look and the lock
        for leftover in [*self.folder.glob("train-*"), temporary(self.folder / INFO_FILE)]:
            leftover.unlink(missing_ok=True)

    def _refuse_published(self) -> None:
        if (self.folder / INFO_FILE).exists():
            raise ConfigError(f"{self.folder} already holds a data set; choose another folder, or delete this one")

    def _components(
        self,
        key: str,
        arrays: Mapping[str, npt.NDArray[Any]],
        label: int | None,
        meta: Mapping[str, Any] | None,
    ) -> dict[str, bytes]:
        info = self._template
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key):
            raise DataError(f"key {key!r}: 1 to 80 letters, digits, _ and - (a dot would end the key in a tar)")
        if arrays.keys() != info.columns.keys():
            raise DataError(f"key {key}: columns {sorted(arrays)}, expected {sorted(info.columns)}")
        components = {}
        for name, column in info.columns.items():
            array = np.asarray(arrays[name])
            if (array.dtype, array.shape) != (np.dtype(column.dtype), column.shape):
                raise DataError(
                    f"key {key}: {name} is {array.dtype} {array.shape}, expected {column.dtype} {column.shape}"
                )
            if not np.isfinite(array).all():
                raise DataError(f"key {key}: {name} holds values that are not finite")
            components[f"{name}.npy"] = column.header + array.tobytes()
        if (label is None) != (info.classes is None) or not 0 <= (label or 0) < (info.classes or 1):
            raise DataError(f"key {key}: class {label}, expected one of {info.classes} classes")
        if label is not None:
            components["cls"] = str(int(label)).encode()
        if meta is not None:
            components["json"] = canonical_json(dict(meta))
        return components

    def _finish_shard(self) -> None:
        assert self._tar is not None
        self._shards.append(self._tar.publish())
        self._tar = None

    def _publish(self) -> None:
        with _storage(self.folder):
            if self._tar is not None:
                self._finish_shard()
            if not self._shards:
                raise DataError(f"the source has no samples; {self.folder} is not a data set")
            total = sum(shard.samples for shard in self._shards)
            info = dataclasses.replace(self._template, shards=tuple(self._shards), samples=total)
            if problem := info.problem():
                raise DataError(f"{self.folder} is not published: {problem}")
            info.write(self.folder)
            (self.folder / _MARKER).unlink()


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = str(shutil.disk_usage(path if path.is_dir() else path.parent).free)
        raise StorageError(
            f"cannot write to {error.filename or path}: {error.strerror or error} ({free} bytes free); "
            "make room or choose another folder, then run the same command again: it starts anew and replaces what "
            "was written so far"
        ) from error
