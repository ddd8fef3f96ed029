"""A sample set as a folder of PNG files, one per image, written by any number of processes.

Each rank writes the files of its batches. The number in a name is that of the image in the set, so all ranks and
resumed processes write the same names. Every file records the plan of the set in its text ``fastdiff``: a file without
it is of someone else and stays.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import ConfigError, require
from fastdiff.files import is_temporary, publish
from fastdiff.sampling.parts import SampleParts, storage

_TEXT = "fastdiff"
"""Keyword of the plan among the texts of a PNG."""
_NAME = re.compile(r"([0-9]{6,})(-.+)?\.png")
_MOST_WORD = 100
"""Bytes of the class in a name."""


class PngFiles(SampleParts):
    """The files ``000012-flower.png`` of a folder; its subfolder ``.parts`` has the plan and the locks until all exist.

    Args:
        out: the folder.
        plan: JSON values by name that determine the images.
        shape: ``(N, H, W, C)``, C being 1 or 3.
        batch: images that a process draws at once.
        kind: returns the class or prompt of the image with a number, for its name; "": none.

    Raises:
        ConfigError: the folder has files of another plan, or one of the names is that of someone else's file.
        StorageError: from every method: the folder cannot be written.
    """

    flag, anew = "--pngs", "delete those images"

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        shape: tuple[int, int, int, int],
        batch: int,
        kind: Callable[[int], str],
    ) -> None:
        require(shape[-1] in (1, 3), f"--pngs: the images have {shape[-1]} channels, expected 1 or 3; use --npz")
        self._names_of = [_name(image, kind(image)) for image in range(shape[0])]
        self._own = frozenset(self._names_of)
        self._checked: set[str] = set()
        super().__init__(out, plan, shape, batch, None)

    @property
    def leftovers(self) -> str:
        """What to delete in order to begin anew."""
        return f"the images drawn so far in {self.out}, and {self._folder},"

    def has(self, batch: int) -> bool:
        """Whether all files of a batch exist."""
        with storage(self.out):
            return all(os.path.lexists(self._file(image)) for image in self.images(batch))

    def done(self) -> int:
        """Number of files, of all ranks."""
        with storage(self.out):
            return len(self._own.intersection(self._listed()))

    def write(self, batch: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Write the files of a claimed batch ``[n, H, W, C]`` durably, and release it."""
        with storage(self.out):
            for image, levels in zip(self.images(batch), pixels, strict=True):
                path = self._file(image)
                self._check_file(path)
                if not os.path.lexists(path):  # once all exist, another rank removes the temporary names of killed ones
                    publish(path, self._encoded(levels))
                self._checked.add(path.name)
        self._claims.release(batch)

    def join(self) -> int:
        """Return the number of missing images; if there are none, remove plan and locks."""
        with self._locked():
            return 0 if self.complete else self.total - self.done()

    def _place(self) -> Path:
        found = self.out.is_dir() or not os.path.lexists(self.out)
        require(found, f"--pngs {self.out}: a file, expected the name of a folder to write to")
        return self.out / ".parts"

    def _is_drawn(self, batch: int) -> bool:
        return self.has(batch)

    def _is_complete(self) -> bool:
        """Whether all files exist; ConfigError if one is of someone else or has another plan."""
        names = self._listed()
        for name in sorted(filter(_NAME.fullmatch, names)):
            self._check_file(self.out / name)
        if not self._own.issubset(names):
            return False
        for name in names:
            if is_temporary(name, of := name.rsplit(".", 2)[0]) and of in self._own:
                (self.out / name).unlink(missing_ok=True)  # of a killed process
        self._clear()
        return True

    def _listed(self) -> list[str]:
        """Return the names in the folder."""
        with suppress(FileNotFoundError):
            return os.listdir(self.out)
        return []

    def _file(self, image: int) -> Path:
        return self.out / self._names_of[image]

    def _check_file(self, path: Path) -> None:
        """Raise ConfigError if a file has another plan, or one of the names without a plan."""
        if path.name in self._checked or not os.path.lexists(path):
            return
        found = _plan_of(path)
        if found is not None:
            self._check(found, f"{self.out} has images drawn with another plan, such as {path.name}")
        elif path.name in self._own:
            raise ConfigError(f"{path} exists and was not written by fastdiff; choose another --pngs")
        self._checked.add(path.name)

    def _encoded(self, levels: npt.NDArray[np.uint8]) -> bytes:
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        texts, buffer = PngInfo(), io.BytesIO()
        texts.add_text(_TEXT, canonical_json(self._plan).decode())
        Image.fromarray(levels.squeeze(2) if levels.shape[2] == 1 else levels).save(buffer, "PNG", pnginfo=texts)
        return buffer.getvalue()


def _name(image: int, kind: str) -> str:
    word = re.sub(r"\W+", "-", kind).strip("-").encode()[:_MOST_WORD].decode(errors="ignore")
    return f"{image:06d}{word and f'-{word}'}.png"


def _plan_of(path: Path) -> dict[str, Any] | None:
    """Return the plan that a PNG records; None if the file has none or is no PNG."""
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():  # a pipe would block
        return None
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            found = json.loads(picture.info.get(_TEXT, "null"))
    except (UnidentifiedImageError, Image.DecompressionBombError, ValueError, SyntaxError):
        return None
    return found if isinstance(found, dict) else None
