"""Images in one npz, laid out as ADM's evaluation reads it: ``arr_0`` uint8 ``[N, H, W, C]``, ``arr_1`` int64 ``[N]``.

The file is written piece by piece, so that its images never are in memory together, and it depends on nothing but what
is in it: no time of day, no owner.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fastdiff.errors import DataError, StorageError
from fastdiff.npz_arrays import npz_member, npz_names

IMAGES, LABELS = "arr_0", "arr_1"

_CHUNK = 2**22
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The first day that a zip can name."""
_UNIX = 3


def write_npz(
    path: Path, parts: Sequence[Path], shape: tuple[int, ...], labels: npt.NDArray[np.int64] | None, comment: bytes
) -> None:
    """Write the file anew and wait until it is on the disk.

    Args:
        path: replaced if it is there.
        parts: files whose bytes, one after another, are the images.
        shape: ``(N, H, W, C)``.
        labels: ``[N]``; None: no ``arr_1``.
        comment: of the zip, at most 65,535 bytes.

    Raises:
        OSError: it could not be written, or a part not be read.
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


def read_npz(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]:
    """Return the images ``[N, H, W, C]`` uint8 and their labels ``[N]``, if there are any.

    Raises:
        DataError: the file is missing, damaged, or laid out otherwise.
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
    """The comment of a zip; nothing, if it has none or is no zip.

    Raises:
        OSError: it cannot be read.
    """
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
