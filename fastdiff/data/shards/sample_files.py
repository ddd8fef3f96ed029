"""Serialisation of one sample into the files of a shard, checked against its data set."""

import math
import re
import tarfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.conditions import CAPTIONED, MASK_OF, MASKS
from fastdiff.data.shards.format import LOSS_MASK, Column, DatasetInfo, canonical_json
from fastdiff.errors import DataError


def components(
    info: DatasetInfo,
    bucket: int,
    key: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    label: int | None = None,
    captions: int | None = None,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Serialise a sample for ``ShardTar.add``.

    Args:
        info: The data set; its ``shards`` and ``samples`` are ignored.
        bucket: Bucket of the latents.
        key: Key of the sample: letters, digits, ``_`` and ``-``.
        arrays: Arrays by name (``DatasetInfo.variants``), with the column's dtype and shape; captioned columns have
            one array per caption of the sample.
        label: Class of the sample, if the data set has classes.
        captions: Number of captions of the sample, if the data set has several per sample.
        meta: Content of ``<key>.json``; give it for all samples or for none.

    Raises:
        DataError: The sample does not fit the data set.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key):
        raise DataError(f"key {key!r}: expected 1 to 80 letters, digits, _ and - (a dot would end the key in a tar)")
    if (captions is None) != (info.captions == 1) or captions not in (None, *range(1, info.captions + 1)):
        raise DataError(f"key {key}: {captions} captions, expected 1 to {info.captions} per sample")
    own = {column: _own_variants(info, column, captions) for column in info.columns}
    expected = {name for names in own.values() for name in names}
    if arrays.keys() != expected:
        raise DataError(f"key {key}: columns {sorted(arrays)}, expected {sorted(expected)}")
    columns = info.columns_of(bucket)
    checked = {v: _checked(key, v, arrays[v], column) for name, column in columns.items() for v in own[name]}
    if empty := [v for name in MASKS & columns.keys() for v in own[name] if not checked[v].any()]:
        raise DataError(f"key {key}: {empty[0]} marks no token of the caption, expected one or more")
    if LOSS_MASK in checked and not ((checked[LOSS_MASK] >= 0) & (checked[LOSS_MASK] <= 1)).all():
        raise DataError(f"key {key}: {LOSS_MASK} holds values outside of 0 to 1")
    content: dict[str, bytes] = {}
    for name, column in columns.items():
        masks = [checked[v] for v in own[MASK_OF[name]]] if info.is_masked(name) else [None] * len(own[name])
        npy = [_npy(checked[v], column, mask) for v, mask in zip(own[name], masks, strict=True)]
        for number, variant in enumerate(info.variants(name)):
            content[f"{variant}.npy"] = npy[number % len(npy)]
    if (label is None) != (info.classes is None) or not 0 <= (label or 0) < (info.classes or 1):
        raise DataError(f"key {key}: class {label}, expected one of {info.classes} classes")
    if label is not None:
        content["cls"] = str(int(label)).encode()
    if captions is not None:
        content["captions"] = str(int(captions)).encode()
    if meta is not None:
        content["json"] = canonical_json(dict(meta))
    return content


def longest_caption(arrays: Mapping[str, npt.NDArray[Any]]) -> int | None:
    """Return the rows up to the last valid one of the longest caption, by all masks among the arrays; None: no masks.

    Args:
        arrays: of a sample, by name (``DatasetInfo.variants``).
    """
    masks = [values for name, values in arrays.items() if name.rstrip("0123456789") in MASKS]
    return max((1 + int(np.flatnonzero(mask).max(initial=0)) for mask in masks), default=None)


def _own_variants(info: DatasetInfo, column: str, captions: int | None) -> tuple[str, ...]:
    """Return the arrays that differ; further variants repeat them in turn."""
    variants = info.variants(column)
    return variants[:captions] if column in CAPTIONED else variants


def _npy(values: npt.NDArray[Any], column: Column, mask: npt.NDArray[Any] | None) -> bytes:
    """Serialise an array; of a masked one the rows up to the last valid one, at least one, with zeros between."""
    if mask is not None:
        rows = 1 + int(np.flatnonzero(mask).max(initial=0))
        column, values = column.first(rows), np.where(mask[:, None] != 0, values, values.dtype.type(0))[:rows]
    return column.header + values.tobytes()


def _checked(key: str, name: str, values: npt.NDArray[Any], column: Column) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if (array.dtype, array.shape) != (column.numpy, column.shape):
        raise DataError(f"key {key}: {name} is {array.dtype} {array.shape}, expected {column.numpy} {column.shape}")
    if not np.isfinite(array).all():
        raise DataError(f"key {key}: {name} holds non-finite values")
    return array


_SMALL = 2 * tarfile.BLOCKSIZE
"""Bytes of a short component with its header: class, number of captions, notes."""


def sample_bytes(info: DatasetInfo) -> int:
    """Return the bytes of a sample in a tar, of the largest bucket; all its arrays are stored, repeated ones too."""
    return max(_of_bucket(info, bucket) for bucket in range(max(1, len(info.buckets))))


def _of_bucket(info: DatasetInfo, bucket: int) -> int:
    total = _SMALL * (1 + (info.classes is not None) + (info.captions > 1))
    for name, column in info.columns_of(bucket).items():
        blocks = 1 + math.ceil((len(column.header) + column.nbytes) / tarfile.BLOCKSIZE)
        total += len(info.variants(name)) * blocks * tarfile.BLOCKSIZE
    return total
