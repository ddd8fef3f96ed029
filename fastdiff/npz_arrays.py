"""Arrays in an npz file of unknown origin, read in order and in parts; no pickle, and no size is believed."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fastdiff.errors import DataError

_MOST_PACKED = 100
"""How many times its size a large compressed array may have; of images and statistics it is below 20."""
_LARGE = 64 << 20
"""Bytes; what is smaller may be packed as well as it can be."""


@dataclass(frozen=True, slots=True)
class NpyMember:
    """One array of numbers in the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def blocks(self, rows: int) -> Iterator[npt.NDArray[Any]]:
        """The array in order, ``rows`` of its first axis at a time; the last block may have fewer.

        Raises:
            DataError: The file is damaged.
            OSError: It cannot be read.
        """
        of_row = math.prod(self.shape[1:]) * self.dtype.itemsize
        with _opened(self.path) as archive, archive.open(f"{self.name}.npy") as file:
            _read_header(file)
            for first in range(0, self.shape[0], rows):
                count = min(rows, self.shape[0] - first)
                content = bytearray(file.read(count * of_row))
                if len(content) < count * of_row:
                    raise DataError(f"{self.path}: {self.name} ends before its {self.shape[0]} rows do; copy it again")
                yield np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])

    def whole(self) -> npt.NDArray[Any]:
        """All of it; the caller has looked at the shape."""
        return next(self.blocks(self.shape[0]))


def npz_names(path: Path) -> frozenset[str]:
    """Names of the arrays in a file of ``np.savez`` or ``np.savez_compressed``.

    Raises:
        DataError: It is no such file.
        OSError: It cannot be read.
    """
    if not path.is_file():  # nor a pipe, which would be waited for
        raise DataError(f"{path}: it is not a file")
    with _opened(path) as archive:
        return frozenset(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))


def npz_member(path: Path, name: str) -> NpyMember:
    """One array, of which the header is read.

    Raises:
        DataError: The file is damaged, or the array is of Python objects, in Fortran's order, empty, or of another size
            than what is there.
        OSError: It cannot be read.
    """
    with _opened(path) as archive:
        entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{path}: {name} is compressed as np.savez never does; write it with np.savez")
        with archive.open(entry) as file:
            shape, fortran, dtype = _read_header(file)
            size = entry.file_size - file.tell()
    wrong = _wrong(shape, fortran, dtype, size)
    most = there = min(entry.compress_size, path.stat().st_size)
    if entry.compress_type == zipfile.ZIP_DEFLATED:
        most = max(_LARGE, _MOST_PACKED * there)
    if not wrong and size > most:
        wrong = f"has {size} bytes by its header and {there} in the file"
    if wrong:
        raise DataError(f"{path}: {name} {wrong}; expected an array of numbers, written with np.savez")
    return NpyMember(path, name, shape, dtype)


def _wrong(shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any], size: int) -> str:
    """What is wrong with an array of ``size`` bytes, or nothing."""
    if dtype.hasobject:
        return "holds Python objects (a pickle), which are never loaded"
    if fortran and len(shape) > 1:
        return "is stored column by column (in Fortran's order)"
    if not shape or min(shape) < 1:
        return f"has the shape {shape}"
    if math.prod(shape) * dtype.itemsize != size:
        return f"says that it is {dtype} {shape}, and has {size} bytes"
    return ""


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in the order of Fortran, dtype.

    Only version 1.0, whose header has at most 64 KiB; np.savez writes another one for structured arrays only.
    """
    if (version := np.lib.format.read_magic(file)) != (1, 0):
        raise ValueError(f"npy format {version}, expected (1, 0)")
    return np.lib.format.read_array_header_1_0(file)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, TypeError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is damaged or no npz file ({error}); expected what np.savez writes") from error
