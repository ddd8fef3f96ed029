"""Sample pictures of a run: ``samples/step-N.png``, as they are or smaller."""

import base64
import io
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from fastdiff.run_files import names_inside, open_inside, read_inside

FOLDER = "samples"
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.png")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES, _MOST_PIXELS = 2**27, 2**27
_MOST_DECODED, _MOST_DECODED_BYTES = 2**25, 2**26
"""Pixels and bytes of a picture that is made smaller here: decoded it takes 128 MiB, and about a second."""
_LAYOUT, _MOST_HEAD = b"fastdiff-layout", 2**16
"""Keyword of the text in a PNG that says where its pictures are, and the bytes in which it is looked for."""
_CHUNKS, _LEAST_CHUNK = 256, 1024
"""Chunks of a picture that is made smaller, at most: so many, and one for so many bytes. Each costs its time."""
_IN_A_REPORT, _MOST_EMBEDDED, _REPORT_WIDTH = 24, 200_000, 1024
"""Pictures of a run in a report, and the size in bytes from which they are made as small as this width in pixels."""
_MOST_OF_REPORT = 2**23
"""Bytes of a picture that a report takes as it is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places in a picture with the texts of the prompts (``sampling.captioned_grid.Layout``), in pixels."""

    columns: tuple[str, ...]
    side: tuple[int, int]
    pitch: tuple[int, int]
    first: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture on the disk."""

    run: Path
    step: int
    width: int
    height: int
    changed: int
    """Time of its last change in nanoseconds: a run that begins anew writes the same names."""
    layout: Layout | None = None
    """Places of the pictures of prompts; None: one column per prompt."""

    @property
    def name(self) -> str:
        """Path of the file in the folder of the run."""
        return f"{FOLDER}/step-{self.step:08d}.png"

    @property
    def can_shrink(self) -> bool:
        """Whether it is small enough to be made smaller."""
        return self.width * self.height <= _MOST_DECODED

    def as_json(self) -> dict[str, Any]:
        """Return what the page needs to ask for it."""
        found: dict[str, Any] = {
            "step": self.step, "width": self.width, "height": self.height, "changed": str(self.changed),
        }  # fmt: skip
        found |= {} if self.layout is None else {"layout": asdict(self.layout)}
        return found if self.can_shrink else found | {"whole": True}


def pictures_of(run: Path) -> tuple[list[Picture], list[str]]:
    """Return the pictures of a run by step, and what is left out of them and why: links, and files that are no PNG."""
    try:
        names = names_inside(run, FOLDER)
    except OSError as error:
        return [], [error.strerror or "it cannot be read"]
    found, left_out = [], []
    for name in filter(None, map(_NAME.fullmatch, names)):
        try:
            changed = os.stat(run / FOLDER / name[0], follow_symlinks=False).st_mtime_ns
            width, height, layout = _header(run, f"{FOLDER}/{name[0]}", changed)
            found.append(Picture(run, int(name[1]), width, height, changed, layout))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            left_out.append(f"{name[0]}: {error.strerror}")
        except ValueError as error:
            left_out.append(f"{name[0]}: {error}")
    return sorted(found, key=lambda picture: picture.step), left_out


@lru_cache(maxsize=65536)
def _header(run: Path, name: str, changed: int) -> tuple[int, int, Layout | None]:
    """Return width and height from the header of a PNG, and the layout that it names before its pixels.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, or too large.
    """
    with open(open_inside(run, name), "rb") as file:
        head = file.read(_MOST_HEAD)
    if len(head) < 24 or not head.startswith(_SIGNATURE):
        raise ValueError("no PNG")
    width, height = struct.unpack(">II", head[16:24])
    if not 0 < width * height <= _MOST_PIXELS:
        raise ValueError(f"{width:,} x {height:,} pixels, at most {_MOST_PIXELS:,} are shown")
    return width, height, _layout(head, width, height)


def _layout(head: bytes, width: int, height: int) -> Layout | None:
    """Return the layout in the first chunks of a PNG; None: there is none, or none of places inside the picture."""
    place = len(_SIGNATURE)
    while place + 8 <= len(head):
        length, kind = struct.unpack(">I4s", head[place : place + 8])
        keyword, _, text = head[place + 8 : place + 8 + length].partition(b"\0")
        if kind == b"tEXt" and keyword == _LAYOUT:
            return _checked(text, width, height)
        if kind == b"IDAT":
            break
        place += 12 + length
    return None


def _checked(text: bytes, width: int, height: int) -> Layout | None:
    try:
        found = json.loads(text)
        columns = tuple(str(label) for label in found["columns"])
        side, pitch, *first = ((int(x), int(y)) for x, y in (found["side"], found["pitch"], *found["first"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    inside = all(0 <= x <= width - side[0] and 0 <= y <= height - side[1] for x, y in first)
    if not inside or min(*side, *pitch) < 1 or not columns or not first:
        return None
    return Layout(columns, side, pitch, tuple(first))


def content(picture: Picture, width: int | None = None) -> tuple[bytes, str]:
    """Return a picture and its type; a wider one than ``width`` pixels is made as small.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or cannot be decoded.
    """
    if width is not None and picture.width > width:
        return _smaller(picture, width), "image/webp"
    return read_inside(picture.run, picture.name, _MOST_BYTES), "image/png"


@lru_cache(maxsize=512)
def _smaller(picture: Picture, width: int) -> bytes:
    from PIL import Image, UnidentifiedImageError

    with open(open_inside(picture.run, picture.name), "rb") as file:
        _require_cheap(file)
        try:
            with Image.open(file, formats=("PNG",)) as image:
                if (image.width, image.height) != (picture.width, picture.height):  # of a file that is replaced
                    raise ValueError("it has changed")
                image.load()
                plain = image if image.mode in ("L", "RGB") else image.convert("RGB")
                fewer = plain.reduce(max(1, image.width // (4 * width)))  # fast, and without a copy of the whole
                size = (width, max(1, round(picture.height * width / picture.width)))
                small = fewer.resize(size, Image.Resampling.LANCZOS)
        except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, OSError) as error:
            raise ValueError(f"no picture: {error}") from None
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=85)
    return buffer.getvalue()


def _require_cheap(file: BinaryIO) -> None:
    """Raise ValueError for a PNG too large, or in too many chunks, to be decoded; then the file is at its begin."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(24)
    width, height = struct.unpack(">II", head[16:24]) if len(head) == 24 else (0, 0)
    if size > _MOST_DECODED_BYTES or width * height > _MOST_DECODED:
        raise ValueError(f"{width:,} x {height:,} pixels in {size:,} bytes are not made smaller")
    place, chunks = len(_SIGNATURE), 0
    while place < size:
        chunks += 1
        if chunks > _CHUNKS + size // _LEAST_CHUNK:
            raise ValueError(f"it is cut into more than {chunks - 1:,} chunks")
        length = os.pread(file.fileno(), 4, place)
        place += 12 + int.from_bytes(length, "big")
    file.seek(0)


def embedded(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the section of a report: pictures with their content as data URIs, and what of them is left out.

    It has the first, the last and evenly between; large ones are made smaller.
    """
    count = min(len(pictures), _IN_A_REPORT)
    places = sorted({round(n * (len(pictures) - 1) / max(1, count - 1)) for n in range(count)})
    found, smaller, unreadable = [], 0, []
    for picture in (pictures[place] for place in places):
        try:
            data, kind = content(picture)
            if len(data) > _MOST_EMBEDDED and picture.can_shrink:
                data, kind = content(picture, _REPORT_WIDTH)
                smaller += picture.width > _REPORT_WIDTH
            if len(data) > _MOST_OF_REPORT:
                raise ValueError(f"{len(data):,} bytes")
        except OSError as error:
            unreadable.append(f"step {picture.step:,}: {error.strerror}")
            continue
        except ValueError as error:
            unreadable.append(f"step {picture.step:,}: {error}")
            continue
        found.append(picture.as_json() | {"data": f"data:{kind};base64,{base64.b64encode(data).decode()}"})
    left_out = {"count": len(pictures), "smaller": smaller, "width": _REPORT_WIDTH, "unreadable": unreadable}
    return {"tag": "", "data": found, "left_out": left_out}
