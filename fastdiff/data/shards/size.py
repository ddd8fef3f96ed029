"""The size of a data set before it is written."""

import math
import tarfile

from fastdiff.data.shards.format import DatasetInfo

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
