"""A sample set as a folder of PNG files, one per image, written by any number of processes.

Each rank writes the files of its batches. The number in a name is that of the image in the set, so all ranks and
resumed processes write the same names. Every file records the plan of the set in its text ``fastdiff``: a file without
it is of someone else and stays.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import require
from fastdiff.files import is_temporary, publish
from fastdiff.outputs import require_own_folder
from fastdiff.sampling.shared_set import SharedSet, storage

_TEXT = "fastdiff"
"""Keyword of the plan among the texts of a PNG."""
_NAME = re.compile(r"([0-9]{6,})(-.+)?\.png")
_MOST_WORD = 100
"""Bytes of the class in a name."""
_UNFINISHED = ".parts"
_FOREIGN = "exists and was not written by fastdiff"


class PngFiles(SharedSet):
    """The files ``000012-flower.png`` of a folder; its subfolder ``.parts`` has the plan and the locks until all exist.

    Args:
        out: the folder: a new one, an empty one, or one with such files.
        plan: JSON values by name that determine the images.
        shape: ``(N, H, W, C)``, C being 1 or 3.
        batch: images that a process draws at once.
        kind: returns the class or prompt of the image with a number, for its name; "": none.
        overwrite: delete the images of a finished set with another plan first.

    Raises:
        ConfigError: the folder has images of another plan or nothing but files of someone else, or one of these has
            the name of an image.
        StorageError: from every method: the folder cannot be written.
    """

    flag = "--pngs"

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        shape: tuple[int, int, int, int],
        batch: int,
        kind: Callable[[int], str],
        *,
        overwrite: bool = False,
    ) -> None:
        require(shape[-1] in (1, 3), f"--pngs: the images have {shape[-1]} channels, expected 1 or 3; use --npz")
        self._names_of = [_name(image, kind(image)) for image in range(shape[0])]
        self._own = frozenset(self._names_of)
        self._checked: set[str] = set()
        """Names of files that have the plan."""
        super().__init__(out, plan, shape, batch, overwrite=overwrite)

    @property
    def leftovers(self) -> str:
        """What to delete in order to begin anew."""
        return f"the images drawn so far in {self.out}, and {self._folder},"

    def has(self, batch: int) -> bool:
        """Whether all files of a batch exist."""
        with storage(self.out):
            return all(os.path.lexists(self.out / self._names_of[image]) for image in self.images(batch))

    def done(self) -> int:
        """Number of files, of all ranks."""
        with storage(self.out):
            return len(self._own.intersection(self._listed()))

    def _write(self, batch: int, pixels: npt.NDArray[np.uint8]) -> None:
        for image, levels in zip(self.images(batch), pixels, strict=True):
            path = self.out / self._names_of[image]
            # Once all exist, another rank removes the temporary names of killed ones, so none is written again.
            if not os.path.lexists(path):
                publish(path, self._encoded(levels))
                self._checked.add(path.name)

    def _finish(self) -> None:
        self.complete = self._is_complete()

    def _place(self) -> Path:
        found = self.out.is_dir() or not os.path.lexists(self.out)
        require(found, f"--pngs {self.out}: a file, expected the name of a folder to write to")
        require_own_folder("--pngs", self.out, self._is_of_a_set)
        return self.out / _UNFINISHED

    def _is_complete(self) -> bool:
        names = self._listed()
        if self._of_another_plan(names) or not self._own.issubset(names):
            return False
        for name in names:
            if is_temporary(name, of := name.rsplit(".", 2)[0]) and of in self._own:
                (self.out / name).unlink(missing_ok=True)  # of a killed process
        self._clear()
        return True

    def _make_room(self) -> None:
        for name in self._of_another_plan(self._listed()):
            (self.out / name).unlink(missing_ok=True)

    def _of_another_plan(self, names: Iterable[str]) -> list[str]:
        """Return the images to replace; ConfigError if they are not to be, or one of the names is of someone else."""
        found = []
        for name in sorted(filter(_NAME.fullmatch, names)):
            if name in self._checked:
                continue
            plan = _plan_of(self.out / name)
            if plan is None:
                require(name not in self._own, f"{self.out / name} {_FOREIGN}; choose another --pngs")
            elif self._is_replaceable(plan, f"{self.out} has images drawn with another plan, such as {name}"):
                found.append(name)
            else:
                self._checked.add(name)
        return found

    def _is_of_a_set(self, name: str) -> bool:
        return name == _UNFINISHED or (_NAME.fullmatch(name) is not None and _plan_of(self.out / name) is not None)

    def _listed(self) -> list[str]:
        with suppress(FileNotFoundError):
            return os.listdir(self.out)
        return []

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
