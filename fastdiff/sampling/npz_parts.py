"""A sample set as one npz, whose finished batches lie in ``OUT.parts``: ``part-000012`` holds the pixels of a batch.

The rank that finds all parts joins them. The plan is also the zip comment of the finished file.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import ConfigError, require
from fastdiff.files import fsync, publish
from fastdiff.sampling.npz import comment_of, npz_member, write_npz
from fastdiff.sampling.shared_set import JOINED, SharedSet, storage


class NpzParts(SharedSet):
    """Parts of one npz, and the npz itself; an earlier one stays until the new one is complete.

    Args:
        out: the npz to write.
        plan: JSON values by name that determine its bytes; at most 64 KiB, the limit of a zip comment.
        shape: ``(N, H, W, C)``.
        batch: images per part.
        labels: ``[N]`` classes; None: no labels.
        overwrite: replace a set with another plan.

    Raises:
        ConfigError: the output or its parts exist and have another plan, or are no samples.
        StorageError: from every method: the folder cannot be written.
    """

    flag = "--npz"

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        shape: tuple[int, int, int, int],
        batch: int,
        labels: npt.NDArray[np.int64] | None,
        *,
        overwrite: bool = False,
    ) -> None:
        self._labels = labels
        super().__init__(out, plan, shape, batch, overwrite=overwrite)

    @property
    def leftovers(self) -> str:
        """What to delete in order to begin anew."""
        return str(self._folder)

    def has(self, batch: int) -> bool:
        """Whether a batch has been drawn, or joined."""
        with storage(self.out):
            with suppress(FileNotFoundError):
                if self._path(batch).stat().st_size == self._bytes(batch):
                    return True
            return self._plan_of_output() == self._plan

    def blocks(self, batches: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the pixels ``[n, H, W, C]`` of the first batches, which have been drawn."""
        if self.complete:
            yield from islice(npz_member(self.out, "arr_0").blocks(self.batch), batches)
            return
        for batch in range(batches):
            with storage(self.out):
                content = self._path(batch).read_bytes()
            yield np.frombuffer(content, np.uint8).reshape(len(self.images(batch)), *self._shape[1:])

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self._shape[1], self._shape[2]

    def done(self) -> int:
        """Number of images that have been drawn, by all ranks."""
        sizes: dict[str, int] = {}
        with storage(self.out), suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            sizes.update((entry.name, entry.stat().st_size) for entry in entries)
        drawn = (b for b in range(self.batches) if sizes.get(self._path(b).name) == self._bytes(b))
        return sum(len(self.images(batch)) for batch in drawn)

    def _write(self, batch: int, pixels: npt.NDArray[np.uint8]) -> None:
        publish(self._path(batch), pixels.tobytes())

    def _finish(self) -> None:
        joined = self._folder / JOINED
        joined.unlink(missing_ok=True)  # of a killed process
        parts = [self._path(batch) for batch in range(self.batches)]
        write_npz(joined, parts, self._shape, self._labels, canonical_json(self._plan))
        joined.replace(self.out)
        fsync(self.out.parent)
        self._clear()

    def _place(self) -> Path:
        require(not self.out.is_dir(), f"--npz {self.out}: a folder, expected the name of a file to write")
        return self.out.with_name(f"{self.out.name}.parts")

    def _is_complete(self) -> bool:
        found = self._plan_of_output()
        if found is None and self.out.exists():
            raise ConfigError(f"{self.out} exists and was not written by fastdiff; choose another --npz")
        if found is None or self._is_replaceable(found, f"{self.out} exists, drawn with another plan"):
            return False
        self._clear()
        return True

    def _make_room(self) -> None:
        """Remove nothing: an earlier npz stays until the new one takes its place."""

    def _plan_of_output(self) -> dict[str, Any] | None:
        """Return the plan that the npz records; None if there is no npz, or one of someone else."""
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(comment_of(self.out))
            return found if isinstance(found, dict) else None
        return None

    def _path(self, batch: int) -> Path:
        return self._folder / f"part-{batch:06d}"

    def _bytes(self, batch: int) -> int:
        return len(self.images(batch)) * math.prod(self._shape[1:])
