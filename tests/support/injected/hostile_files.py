"""Files for ``hostile.py`` that lie, link elsewhere or would run code."""

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

HUGE = 745 << 30
"""Bytes that an input claims to have."""


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def zip_of(path: Path, data_pkl: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """A file of torch.save with one tensor of 4 numbers under ``w``, its pickle and its compression changed."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(4.0)}, buffer)
    with zipfile.ZipFile(buffer) as given, zipfile.ZipFile(path, "w", compression) as made:
        for entry in given.infolist():
            content = given.read(entry)
            is_values = entry.filename.endswith("/data/0") and compression != zipfile.ZIP_STORED
            made.writestr(entry.filename, data_pkl(content) if entry.filename.endswith("data.pkl") else content)
            if is_values:
                made.writestr("bomb", bytes(400 << 20))


def bytearray_pickle(content: bytes) -> bytes:
    """A pickle that asks for a ``bytearray`` of 400 MiB, which no file holds."""
    return b"\x80\x02}U\x01acbuiltins\nbytearray\nJ" + (400 << 20).to_bytes(4, "little") + b"\x85Rs."


def named_from_the_stack(content: bytes) -> bytes:
    """The pickle of a tensor whose function is named by two texts."""
    named = b"\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93"
    return b"\x80\x04" + content[2:].replace(b"ctorch._utils\n_rebuild_tensor_v2\n", named)


def repeated(content: bytes) -> bytes:
    """The pickle of a tensor of 10**12 numbers, all at the same place."""
    size = b"\x8a\x06" + (10**12).to_bytes(6, "little")
    return content.replace(b"K\x00K\x04\x85", b"K\x00" + size + b"\x85").replace(b"K\x01\x85", b"K\x00\x85")


def tar_of(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """A tar of these members, with headers as they are given."""
    with path.open("wb") as file:
        for header, content in members:
            file.write(header.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512))
        file.write(bytes(1024))


def member(name: str, size: int, **fields: Any) -> tarfile.TarInfo:
    """A header that claims this size."""
    header = tarfile.TarInfo(name)
    header.size = size
    for field, value in fields.items():
        setattr(header, field, value)
    return header


def sparse(path: Path, size: int, begin: bytes = b"") -> Path:
    """A file of this size that takes no room."""
    path.write_bytes(begin)
    os.truncate(path, size)
    return path


def png() -> bytes:
    """A small image."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
