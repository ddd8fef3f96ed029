"""What the ranks that draw a set of samples leave one another in ``OUT.parts``: there is no other communication.

``plan.json`` says what decides the bytes, ``part-000012`` holds the pixels of a batch. A batch without a file is drawn
anew, so that the same command goes on after a kill. Whoever sees all parts joins them. The plan is the comment of the
finished file too, by which that is known again.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import ConfigError, StorageError
from fastdiff.files import fsync, publish
from fastdiff.sampling.npz import comment_of, write_npz

_PLAN = "plan.json"


class SampleParts:
    """The parts of one npz, and the npz.

    Args:
        out: the npz to write.
        plan: what decides its bytes, JSON values by name; few, because a zip has room for 64 KiB of them.
        shape: ``(N, H, W, C)``.
        batch: images per part.
        labels: ``[N]``, if there are any.

    Attributes:
        complete: whether ``out`` is there, drawn by the same plan.

    Raises:
        ConfigError: something else is there, or what is there was begun by another plan.
        StorageError: from every method: the folder cannot be written.
    """

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        shape: tuple[int, int, int, int],
        batch: int,
        labels: npt.NDArray[np.int64] | None,
    ) -> None:
        self.out, self.batch = out, batch
        self.complete = False
        self._plan: dict[str, Any] = json.loads(canonical_json(plan))
        self._shape, self._labels = shape, labels
        self._folder = out.with_name(f"{out.name}.parts")
        with self._locked():
            if not self.complete:
                self._agree()

    @property
    def total(self) -> int:
        """Number of images."""
        return self._shape[0]

    @property
    def batches(self) -> int:
        """Number of batches."""
        return math.ceil(self.total / self.batch)

    def images(self, batch: int) -> range:
        """Numbers of the images of a batch; they depend on nothing but the plan."""
        return range(batch * self.batch, min((batch + 1) * self.batch, self.total))

    def has(self, batch: int) -> bool:
        """Whether a batch has been drawn."""
        with _storage(self.out), suppress(FileNotFoundError):
            return self._path(batch).stat().st_size == self._bytes(batch)
        return False

    def done(self) -> int:
        """Number of images that have been drawn, by all ranks."""
        sizes: dict[str, int] = {}
        with _storage(self.out), suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            sizes.update((entry.name, entry.stat().st_size) for entry in entries)
        drawn = (b for b in range(self.batches) if sizes.get(self._path(b).name) == self._bytes(b))
        return sum(len(self.images(batch)) for batch in drawn)

    def write(self, batch: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Keep a batch, ``[n, H, W, C]``; when this returns, a kill does not lose it."""
        assert pixels.shape == (len(self.images(batch)), *self._shape[1:])
        with _storage(self.out):
            publish(self._path(batch), pixels.tobytes())

    def join(self) -> int:
        """Write the npz if all batches have been drawn, and remove the parts.

        Returns:
            Number of images that are missing.
        """
        with self._locked():
            if self.complete:
                return 0
            if missing := self.total - self.done():
                return missing
            joined = self._folder / "joined"
            parts = [self._path(batch) for batch in range(self.batches)]
            write_npz(joined, parts, self._shape, self._labels, canonical_json(self._plan))
            joined.replace(self.out)
            fsync(self.out.parent)
            self._clear()
        return 0

    def _agree(self) -> None:
        """Begin, or see that what was begun is the same."""
        path = self._folder / _PLAN
        if path.exists():
            self._check(json.loads(path.read_bytes()), f"{self._folder} holds samples that were begun otherwise")
            return
        for stray in self._folder.glob("part-*"):  # of a set that was finished, and removed halfway
            stray.unlink()
        publish(path, canonical_json(self._plan))

    def _is_complete(self) -> bool:
        """Whether the npz is there; ConfigError if it is another one."""
        if not self.out.exists():
            return False
        try:
            found = json.loads(comment_of(self.out))
            if not isinstance(found, dict):
                raise ValueError
        except ValueError:
            raise ConfigError(f"{self.out} exists, and is not ours to replace; choose another --npz") from None
        self._check(found, f"{self.out} exists, drawn otherwise")
        self._clear()
        return True

    def _check(self, found: Mapping[str, Any], what: str) -> None:
        names = sorted(found.keys() | self._plan.keys())
        changed = [
            f"{name}: {found.get(name)} there, {self._plan.get(name)} now"
            for name in names
            if found.get(name) != self._plan.get(name)
        ]
        if changed:
            raise ConfigError(
                f"{what} ({'; '.join(changed)}); give the same options, choose another --npz, or delete it to "
                "begin anew"
            )

    def _path(self, batch: int) -> Path:
        return self._folder / f"part-{batch:06d}"

    def _bytes(self, batch: int) -> int:
        return len(self.images(batch)) * math.prod(self._shape[1:])

    def _clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Know whether the npz is complete and, if it is not, hold a lock that ends with this process.

        It needs a file system that has locks between its machines.
        """
        with _storage(self.out):
            self.complete = self._is_complete()
            if self.complete:
                yield
                return
            self.out.parent.mkdir(parents=True, exist_ok=True)
            while True:
                self._folder.mkdir(exist_ok=True)
                with suppress(FileNotFoundError):  # one who joined has removed the folder meanwhile
                    file = (self._folder / "lock").open("wb")
                    break
            with file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self.complete = self._is_complete()  # by another one, while we waited
                yield


@contextmanager
def _storage(out: Path) -> Iterator[None]:
    """Turn what the file system says into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or out}: {error.strerror or error}; the samples that are drawn are kept, and the same "
            "command goes on from them"
        ) from None
