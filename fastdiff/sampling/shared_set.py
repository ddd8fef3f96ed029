"""A sample set that any number of processes draw together, by files alone: its plan, its locks and its claims.

``plan.json`` in a folder of the set records everything that determines the bytes. A batch without a file is drawn
again, so that the same command continues after a kill. A process claims a batch by the lock of ``part-000012.lock``
(``parallel/claims.py``). The finished set records its plan as well, which identifies it.
"""

import fcntl
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import ConfigError, StorageError, remedy
from fastdiff.files import is_temporary, make_parents, open_lock_in, publish
from fastdiff.parallel.claims import Claims
from fastdiff.run_files import read_inside

_PLAN, _LOCK, JOINED = "plan.json", "lock", "joined"
_OWN = re.compile(r"(plan\.json|joined|lock|part-[0-9]{6,}(\.lock)?)(\.[0-9]+-[0-9a-f]{8}\.tmp)?")
"""Names of the files in the folder."""
_MOST_PLAN = 2**17
"""Bytes of the largest plan that is read."""
_OF_LOCK = re.compile(r"lock|part-[0-9]{6,}\.lock")
"""Those that a process may make again after another one has removed the folder."""


class SharedSet(ABC):
    """The parts that all forms of a set share.

    Args:
        out: file or folder to write.
        plan: JSON values by name that determine its bytes.
        shape: ``(N, H, W, C)``.
        batch: images that a process draws at once.
        overwrite: replace a finished set with another plan in ``out``.

    Attributes:
        complete: whether ``out`` is finished, drawn with the same plan.

    Raises:
        ConfigError: ``out`` or its unfinished set exists and has another plan, or is no set.
        StorageError: from every method: the folder cannot be written.
    """

    flag: ClassVar[str]
    """Option of the command that names ``out``."""

    def __init__(
        self, out: Path, plan: Mapping[str, Any], shape: tuple[int, int, int, int], batch: int, *, overwrite: bool
    ) -> None:
        self.out, self.batch = out, batch
        self.complete = False
        self._plan: dict[str, Any] = json.loads(canonical_json(plan))
        self._shape, self._overwrite = shape, overwrite
        self._folder = self._place()
        self._claims = Claims(self._folder, "part")
        with self._locked():
            if not self.complete:
                self._agree()
                self._make_room()

    @property
    def total(self) -> int:
        """Number of images."""
        return self._shape[0]

    @property
    def batches(self) -> int:
        """Number of batches."""
        return math.ceil(self.total / self.batch)

    @property
    @abstractmethod
    def leftovers(self) -> str:
        """What to delete in order to begin anew."""

    def images(self, batch: int) -> range:
        """Numbers of the images of a batch; a function of the plan alone."""
        return range(batch * self.batch, min((batch + 1) * self.batch, self.total))

    def batches_of(self, count: int) -> int:
        """Number of batches that have the first ``count`` images."""
        return math.ceil(min(count, self.total) / self.batch)

    def discard(self) -> None:
        """Delete the batches of a set that is not finished."""
        if not self.complete:
            self._clear()

    @abstractmethod
    def has(self, batch: int) -> bool:
        """Whether a batch has been drawn."""

    @abstractmethod
    def done(self) -> int:
        """Number of images that have been drawn, by all ranks."""

    def claim(self, batch: int) -> bool:
        """Claim a batch; False: it has been drawn, or another process draws it."""
        with storage(self.out):
            if self.has(batch) or not self._claims.take(batch):
                return False
            if self.has(batch):
                self._claims.release(batch)
                return False
            return True

    def write(self, batch: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Write a claimed batch ``[n, H, W, C]`` durably, and release it: a kill after the return does not lose it."""
        assert pixels.shape == (len(self.images(batch)), *self._shape[1:])
        with storage(self.out):
            self._write(batch, pixels)
        self._claims.release(batch)

    def release_all(self) -> None:
        """Release all batches that are claimed and not drawn."""
        self._claims.release_all()

    def wait(self) -> None:
        """Wait until no other process holds the first batch that has not been drawn."""
        with storage(self.out):
            batch = next((batch for batch in range(self.batches) if not self.has(batch)), None)
            if batch is not None:
                self._claims.wait(batch)

    def join(self) -> int:
        """Finish the set if all batches have been drawn; return the number of images that are missing."""
        with self._locked():
            if self.complete:
                return 0
            if not (missing := self.total - self.done()):
                self._finish()
            return missing

    @abstractmethod
    def _place(self) -> Path:
        """Return the folder of plan and locks; ConfigError if ``out`` cannot be written there."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether ``out`` is finished; ConfigError if it has another plan and may not be replaced."""

    @abstractmethod
    def _write(self, batch: int, pixels: npt.NDArray[np.uint8]) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Turn the batches into the finished set."""

    @abstractmethod
    def _make_room(self) -> None:
        """Remove what would be in the way of a set that replaces another one."""

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
        if changed := self._changes(found if isinstance(found, dict) else {}):
            raise ConfigError(
                f"{self._folder} holds samples of another plan ({changed}); give the same options, choose another "
                f"{self.flag}, or delete {self.leftovers} to begin anew"
            )

    def _changes(self, found: Mapping[str, Any]) -> str:
        """Return in words what another plan has otherwise; empty for the same one."""
        return "; ".join(
            f"{name}: {found.get(name)} there, {self._plan.get(name)} now"
            for name in sorted(found.keys() | self._plan.keys())
            if found.get(name) != self._plan.get(name)
        )

    def _is_replaceable(self, found: Mapping[str, Any], what: str) -> bool:
        """Whether a finished set has another plan, and is to be replaced; ConfigError if it is not to be."""
        changed = self._changes(found)
        if changed and not self._overwrite:
            raise ConfigError(
                f"{what} ({changed}); give the same options, choose another {self.flag}, or replace what is there by "
                "--overwrite"
            )
        return bool(changed)

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
            self.complete = self._is_complete()  # after it: another rank finishes the set before it removes the folder
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
