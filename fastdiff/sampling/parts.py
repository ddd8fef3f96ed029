"""Finished batches of a sample set in ``OUT.parts``: the only communication between the ranks that draw it.

``plan.json`` records everything that determines the bytes, ``part-000012`` holds the pixels of a batch. A batch without
a file is drawn again, so that the same command continues after a kill. A process claims a batch by the lock of
``part-000012.lock`` (``parallel/claims.py``). The rank that finds all parts joins them. The plan is also the zip
comment of the finished file, which identifies it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import ConfigError, StorageError, remedy, require
from fastdiff.files import fsync, is_temporary, make_parents, open_lock_in, publish
from fastdiff.parallel.claims import Claims
from fastdiff.run_files import read_inside
from fastdiff.sampling.npz import comment_of, write_npz

_PLAN, _LOCK, _JOINED = "plan.json", "lock", "joined"
_OWN = re.compile(r"(plan\.json|joined|lock|part-[0-9]{6,}(\.lock)?)(\.[0-9]+-[0-9a-f]{8}\.tmp)?")
"""Names of the files in the folder."""
_MOST_PLAN = 2**17
"""Bytes of the largest plan that is read."""
_OF_LOCK = re.compile(r"lock|part-[0-9]{6,}\.lock")
"""Those that a process may make again after another one has removed the folder."""


class SampleParts:
    """Parts of one npz, and the npz itself; ``png_files.PngFiles`` writes separate files instead.

    Args:
        out: the npz to write.
        plan: JSON values by name that determine its bytes; at most 64 KiB, the limit of a zip comment.
        shape: ``(N, H, W, C)``.
        batch: images per part.
        labels: ``[N]`` classes; None: no labels.

    Attributes:
        complete: whether ``out`` exists, drawn with the same plan.

    Raises:
        ConfigError: the output or its parts exist and have another plan, or are no samples.
        StorageError: from every method: the folder cannot be written.
    """

    flag, anew = "--npz", "delete it"
    """Option of the command that names ``out``; what makes room for another plan there."""

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
        self._folder = self._place()
        self._claims = Claims(self._folder, "part")
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
        """Numbers of the images of a batch; a function of the plan alone."""
        return range(batch * self.batch, min((batch + 1) * self.batch, self.total))

    @property
    def leftovers(self) -> str:
        """What to delete in order to begin anew."""
        return str(self._folder)

    def has(self, batch: int) -> bool:
        """Whether a batch has been drawn."""
        with storage(self.out), suppress(FileNotFoundError):
            return self._path(batch).stat().st_size == self._bytes(batch)
        return False

    def done(self) -> int:
        """Number of images that have been drawn, by all ranks."""
        sizes: dict[str, int] = {}
        with storage(self.out), suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            sizes.update((entry.name, entry.stat().st_size) for entry in entries)
        drawn = (b for b in range(self.batches) if sizes.get(self._path(b).name) == self._bytes(b))
        return sum(len(self.images(batch)) for batch in drawn)

    def claim(self, batch: int) -> bool:
        """Claim a batch; False: it has been drawn, or another process draws it."""
        with storage(self.out):
            if self._is_drawn(batch) or not self._claims.take(batch):
                return False
            if self._is_drawn(batch):
                self._claims.release(batch)
                return False
            return True

    def write(self, batch: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Write a claimed batch ``[n, H, W, C]`` durably, and release it: a kill after the return does not lose it."""
        assert pixels.shape == (len(self.images(batch)), *self._shape[1:])
        with storage(self.out):
            publish(self._path(batch), pixels.tobytes())
        self._claims.release(batch)

    def release_all(self) -> None:
        """Release all batches that are claimed and not drawn."""
        self._claims.release_all()

    def wait(self) -> None:
        """Wait until no other process holds the first batch that has not been drawn."""
        with storage(self.out):
            batch = next((batch for batch in range(self.batches) if not self._is_drawn(batch)), None)
            if batch is not None:
                self._claims.wait(batch)

    def _place(self) -> Path:
        """Return the folder of the parts; ConfigError if ``out`` cannot be written there."""
        require(not self.out.is_dir(), f"--npz {self.out}: a folder, expected the name of a file to write")
        return self.out.with_name(f"{self.out.name}.parts")

    def _is_drawn(self, batch: int) -> bool:
        return self.out.exists() or self.has(batch)

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
            joined = self._folder / _JOINED
            joined.unlink(missing_ok=True)  # of a killed process
            parts = [self._path(batch) for batch in range(self.batches)]
            write_npz(joined, parts, self._shape, self._labels, canonical_json(self._plan))
            joined.replace(self.out)
            fsync(self.out.parent)
            self._clear()
        return 0

    def _agree(self) -> None:
        """Record the plan, or check it against the recorded one."""
        path = self._folder / _PLAN
        if not path.exists():
            publish(path, canonical_json(self._plan))
            return
        try:
            found = json.loads(read_inside(self._folder, _PLAN, _MOST_PLAN))
        except ValueError:
            raise self._foreign() from None
        self._check(found if isinstance(found, dict) else {}, f"{self._folder} holds samples of another plan")

    def _is_complete(self) -> bool:
        """Whether the npz exists; ConfigError if it has another plan."""
        if not self.out.exists():
            return False
        try:
            found = json.loads(comment_of(self.out))
            if not isinstance(found, dict):
                raise ValueError
        except ValueError:
            raise ConfigError(f"{self.out} exists and was not written by fastdiff; choose another --npz") from None
        self._check(found, f"{self.out} exists, drawn with another plan")
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
                f"{what} ({'; '.join(changed)}); give the same options, choose another {self.flag}, or "
                f"{self.anew} to begin anew"
            )

    def _path(self, batch: int) -> Path:
        return self._folder / f"part-{batch:06d}"

    def _bytes(self, batch: int) -> int:
        return len(self.images(batch)) * math.prod(self._shape[1:])

    def _clear(self) -> None:
        """Remove the folder, the plan behind the parts: without it, the next process would not know them."""
        if self._is_foreign():
            return
        with suppress(OSError, ValueError):
            plan = self._folder / _PLAN
            if plan.exists() and json.loads(read_inside(self._folder, _PLAN, _MOST_PLAN)) != self._plan:
                return
            own = [path for path in self._folder.iterdir() if _OWN.fullmatch(path.name)]
            for path in sorted(own, key=lambda path: (path.name == _LOCK, path.name == _PLAN)):
                path.unlink(missing_ok=True)
            self._folder.rmdir()

    def _is_foreign(self) -> bool:
        """Whether the folder is of someone else: it has files, but no plan."""
        plan = self._folder / _PLAN
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            return os.path.lexists(self._folder)  # or a file stands in place of a folder above it
        others = [name for name in names if not _OF_LOCK.fullmatch(name) and not is_temporary(name, _PLAN)]
        return bool(others) and not plan.exists()

    def _foreign(self) -> ConfigError:
        return ConfigError(
            f"{self._folder} exists and is not of fastdiff, which would keep finished images there; rename it, or "
            f"choose another {self.flag}"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Set ``complete`` and, if it is False, hold a lock that ends with this process.

        Several machines need a file system that locks files across them.
        """
        with storage(self.out):
            is_foreign = self._is_foreign()
            self.complete = self._is_complete()  # after it: another rank writes the npz before it removes the parts
            if self.complete:
                yield
                return
            if is_foreign:
                raise self._foreign()
            make_parents(self.out)
            self._folder.parent.mkdir(exist_ok=True)
            file = open_lock_in(self._folder, _LOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                self.complete = self._is_complete()  # another rank may have finished during the wait
                yield
            finally:
                os.close(file)


@contextmanager
def storage(out: Path) -> Iterator[None]:
    """Convert an OSError to a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or out}: {error.strerror or error}; {remedy(error)}: the finished batches are kept, and "
            "the same command continues from them"
        ) from None
