"""npz files: a writer, and a reader of untrusted files in blocks, without pickle and with checked sizes."""

import contextlib
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fastdiff.errors import DataError, StorageError

_MOST_PACKED = 100
"""Largest compression ratio of a large array; images and statistics stay below 20."""
_LARGE = 64 << 20
"""Bytes; a smaller array may have any compression ratio."""


@dataclass(frozen=True, slots=True)
class NpyMember:
    """A numeric array in an npz file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def blocks(self, rows: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the array in order as blocks ``[rows, ...]`` of its first axis; the last block may be shorter.

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
                    raise DataError(f"{self.path}: {self.name} ends before its {self.shape[0]} rows; copy it again")
                yield np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])

    def whole(self) -> npt.NDArray[Any]:
        """Return the whole array; the caller has checked its shape."""
        return next(self.blocks(self.shape[0]))


def npz_names(path: Path) -> frozenset[str]:
    """Return the names of the arrays in a file of ``np.savez`` or ``np.savez_compressed``.

    Raises:
        DataError: The path is not such a file.
        OSError: It cannot be read.
    """
    if not path.is_file():  # a pipe would block
        raise DataError(f"{path}: it is not a file")
    with _opened(path) as archive:
        return frozenset(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))


def npz_member(path: Path, name: str) -> NpyMember:
    """Open one array: read and check its header.

    Raises:
        DataError: The file is damaged, or the array holds Python objects, is in Fortran order, is empty, or has another
            size than its header declares.
        OSError: It cannot be read.
    """
    with _opened(path) as archive:
        entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{path}: {name} has a compression that np.savez never uses; write it with np.savez")
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
    """Describe the problem of an array of ``size`` bytes; empty if there is none."""
    if dtype.hasobject:
        return "holds Python objects (a pickle), which are never loaded"
    if fortran and len(shape) > 1:
        return "is stored column by column (Fortran order)"
    if not shape or min(shape) < 1:
        return f"has the shape {shape}"
    if math.prod(shape) * dtype.itemsize != size:
        return f"declares {dtype} {shape} and has {size} bytes"
    return ""


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether in Fortran order, and dtype.

    Only version 1.0 is read, whose header has at most 64 KiB; np.savez writes others for structured arrays only.
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
        raise DataError(f"{path} is damaged or no npz file ({error}); expected a file of np.savez") from error


IMAGES, LABELS = "arr_0", "arr_1"

_CHUNK = 2**22
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Earliest date of the zip format."""
_UNIX = 3


def write_npz(
    path: Path, parts: Sequence[Path], shape: tuple[int, ...], labels: npt.NDArray[np.int64] | None, comment: bytes
) -> None:
    """Write an npz of images and sync it to the disk.

    Args:
        path: replaced if it is there.
        parts: files whose concatenated bytes are the images.
        shape: ``(N, H, W, C)``.
        labels: ``[N]``; None: no ``arr_1``.
        comment: of the zip, at most 65,535 bytes.

    Raises:
        OSError: the file cannot be written, or a part cannot be read.
    """
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.comment = comment
            with _member(archive, IMAGES) as member:
                _write_header(member, np.dtype(np.uint8), shape)
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, member, _CHUNK)
            if labels is not None:
                with _member(archive, LABELS) as member:
                    _write_header(member, np.dtype("<i8"), labels.shape)
                    member.write(labels.astype("<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def save_npz(path: Path, images: npt.NDArray[np.uint8]) -> None:
    """Write images ``[N, H, W, C]`` that are in memory, without labels; OSError if they cannot be written."""
    np.savez(path, images)  # as arr_0


def read_npz(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]:
    """Return the images ``[N, H, W, C]`` uint8 and their labels ``[N]``, if there are any.

    Raises:
        DataError: the file is missing, damaged, or has another layout.
        StorageError: it cannot be read.
    """
    try:
        names = npz_names(path)
        if IMAGES not in names:
            raise DataError(f"{path} has no {IMAGES}; expected the images there, uint8 [N, H, W, C]", everywhere=True)
        images = npz_member(path, IMAGES)
        labels = npz_member(path, LABELS) if LABELS in names else None
        good = images.dtype == np.uint8 and len(images.shape) == 4
        if not good or (labels is not None and (labels.dtype.kind not in "iu" or labels.shape != images.shape[:1])):
            of_labels = "missing" if labels is None else f"{labels.dtype} {labels.shape}"
            raise DataError(
                f"{path}: {IMAGES} is {images.dtype} {images.shape} and {LABELS} {of_labels}; expected uint8 "
                "[N, H, W, C] and, if there are labels, integers [N]",
                everywhere=True,
            )
        return images.whole(), None if labels is None else labels.whole().astype(np.int64)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", everywhere=True) from None


def comment_of(path: Path) -> bytes:
    """Return the comment of a zip; empty if it has none or is no zip; OSError if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.comment
    except zipfile.BadZipFile:
        return b""


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
    info.create_system, info.external_attr = _UNIX, 0o644 << 16
    return archive.open(info, "w", force_zip64=True)


def _write_header(member: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(member, described)
