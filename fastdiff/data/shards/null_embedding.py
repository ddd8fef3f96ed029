"""The embedding of the empty prompt, which replaces a dropped caption: one npy file per column."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.conditions import BITS, CAPTIONED, MASKS, stored_dtypes
from fastdiff.data.shards.format import Column, DatasetInfo, NullInfo, null_path
from fastdiff.data.shards.integrity import unreadable
from fastdiff.errors import DataError
from fastdiff.files import publish


def write_null(folder: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, NullInfo]:
    """Write ``null.context.npy``, ``null.pooled.npy`` and so on.

    Args:
        folder: Folder of dataset.json.
        arrays: Embeddings and masks by column, with the column's dtype and shape.

    Raises:
        DataError: An array does not belong to a captioned column, or is not finite, or is a mask of nothing.
        OSError: A file cannot be written.
    """
    written = {}
    for name, array in arrays.items():
        dtypes = stored_dtypes(name) if name in CAPTIONED else ()
        dtype = next((dtype for dtype in dtypes if np.dtype(BITS.get(dtype, dtype)) == array.dtype), None)
        if dtype is None or not np.isfinite(array).all():
            raise DataError(
                f"the empty prompt's {name} is {array.dtype} {array.shape}; expected finite values of "
                f"{' or '.join(dtypes) or ', '.join(CAPTIONED)}"
            )
        if name in MASKS and not array.any():
            raise DataError(f"the empty prompt's {name} marks no token, expected one or more")
        column = Column(dtype=dtype, shape=array.shape)
        content = column.header + array.tobytes()
        publish(null_path(folder, name), content)
        written[name] = NullInfo(sha256=hashlib.sha256(content).hexdigest())
    return written


def read_null(folder: Path, info: DatasetInfo, name: str) -> npt.NDArray[Any]:
    """Read the embedding of the empty prompt for one column of ``info.null``.

    Raises:
        DataError: The file is missing, or does not match dataset.json.
        StorageError: The file cannot be read.
    """
    path, column = null_path(folder, name), info.columns[name]
    size = len(column.header) + column.nbytes
    try:
        with path.open("rb") as file:
            content = file.read(size + 1)
    except FileNotFoundError as error:
        raise _damaged(path, "it is missing") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) != size or not content.startswith(column.header):
        raise _damaged(path, f"it is not an npy file of {column.dtype} {column.shape} with {size} bytes")
    if hashlib.sha256(content).hexdigest() != info.null[name].sha256:
        raise _damaged(path, "its sha256 differs from dataset.json")
    return np.frombuffer(content, column.numpy, offset=len(column.header)).reshape(column.shape).copy()


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; restore it from its source or encode again")
