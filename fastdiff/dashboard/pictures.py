"""Sample pictures of a run: ``samples/step-N.png``, as they are or smaller."""

from __future__ import annotations

import base64
import io
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastdiff.files import read_bounded

FOLDER = "samples"
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.png")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES, _MOST_PIXELS = 2**27, 2**27
_IN_A_REPORT, _MOST_EMBEDDED, _REPORT_WIDTH = 24, 200_000, 1024
"""Pictures of a run in a report, and the size in bytes from which they are made as small as this width in pixels."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture on the disk."""

    path: Path
    step: int
    width: int
    height: int
    changed: int
    """Time of its last change in nanoseconds: a run that begins anew writes the same names."""

    def as_json(self) -> dict[str, Any]:
        """Return what the page needs to ask for it."""
        return {"step": self.step, "width": self.width, "height": self.height, "changed": str(self.changed)}


def pictures_of(run: Path) -> list[Picture]:
    """Return the pictures of a run by step; links, and files that are no PNG, are left out."""
    found = []
    with suppress(OSError), _opened_folder(run / FOLDER) as folder:
        for name in filter(None, map(_NAME.fullmatch, os.listdir(folder))):
            try:
                status = os.stat(name[0], dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            path = run / FOLDER / name[0]
            size = _size(path, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
            if size is not None:
                found.append(Picture(path, int(name[1]), *size, status.st_mtime_ns))
    return sorted(found, key=lambda picture: picture.step)


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    """Open a folder that is no link, so that nothing outside the run is ever read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    with _opened_folder(path.parent) as folder:
        return os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)


@lru_cache(maxsize=65536)
def _size(path: Path, changed: int) -> tuple[int, int] | None:
    """Return width and height from the header of a PNG; None: it is none, or too large."""
    try:
        with open(_opened(path), "rb") as file:
            head = file.read(24)
    except OSError:
        return None
    if len(head) < 24 or not head.startswith(_SIGNATURE):
        return None
    width, height = struct.unpack(">II", head[16:24])
    return (width, height) if 0 < width * height <= _MOST_PIXELS else None


def content(picture: Picture, width: int | None = None) -> tuple[bytes, str]:
    """Return a picture and its type; a wider one than ``width`` pixels is made as small.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or cannot be decoded.
    """
    if width is not None and picture.width > width:
        return _smaller(picture.path, picture.changed, width), "image/webp"
    return read_bounded(_opened(picture.path), _MOST_BYTES), "image/png"


@lru_cache(maxsize=512)
def _smaller(path: Path, changed: int, width: int) -> bytes:
    from PIL import Image, UnidentifiedImageError

    data = read_bounded(_opened(path), _MOST_BYTES)
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
            picture.load()
            small = picture.convert("RGB" if picture.mode not in ("L", "RGB") else picture.mode)
        small = small.resize((width, max(1, round(small.height * width / small.width))), Image.Resampling.LANCZOS)
    except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, OSError) as error:
        raise ValueError(f"no picture: {error}") from None
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=85)
    return buffer.getvalue()


def embedded(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the section of a report: pictures with their content as data URIs, and what of them is left out.

    It has the first, the last and evenly between; large ones are made smaller.
    """
    count = min(len(pictures), _IN_A_REPORT)
    places = sorted({round(n * (len(pictures) - 1) / max(1, count - 1)) for n in range(count)})
    found, smaller = [], 0
    for picture in (pictures[place] for place in places):
        try:
            data, kind = content(picture)
            if len(data) > _MOST_EMBEDDED:
                data, kind = content(picture, _REPORT_WIDTH)
                smaller += picture.width > _REPORT_WIDTH
        except (OSError, ValueError):
            continue
        found.append(picture.as_json() | {"data": f"data:{kind};base64,{base64.b64encode(data).decode()}"})
    left_out = {"count": len(pictures), "smaller": smaller, "width": _REPORT_WIDTH}
    return {"tag": "", "data": found, "left_out": left_out}
