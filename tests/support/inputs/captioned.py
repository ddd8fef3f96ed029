"""A small data set with every feature of the format: posteriors, buckets, flips, captions and the empty prompt."""

import dataclasses
import hashlib
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.index import Place
from fastdiff.data.shards.tar_writer import ShardTar
from fastdiff.data.shards.writer import ShardWriter

SIZES = ((4, 6), (6, 4), (5, 5))
CAPTIONS = 3
ARRAYS = (
    "latent", "latent_flipped", "context", "context1", "context2", "pooled", "pooled1", "pooled2", "time_ids",
)  # fmt: skip
"""The arrays of each sample in the shards."""
EMPTY: dict[str, npt.NDArray[Any]] = {
    "context": np.full((3, 2), 0.5, np.float16),
    "pooled": np.full(4, 0.25, np.float32),
}


@dataclass(frozen=True)
class CaptionedSample:
    key: str
    bucket: int
    arrays: dict[str, npt.NDArray[Any]]
    captions: int
    """Number of captions; ``arrays`` has ``context``, ``context1``, ... for them."""


def template(buckets: tuple[tuple[int, int], ...] = SIZES, **changes: Any) -> DatasetInfo:
    """Return the contents of dataset.json before there are shards."""
    fields: dict[str, Any] = {
        "columns": {
            "latent": Column(dtype="float16", shape=(4, *(buckets or SIZES)[0])),
            "context": Column(dtype="float16", shape=(3, 2)),
            "pooled": Column(dtype="float32", shape=(4,)),
            "time_ids": Column(dtype="float32", shape=(6,)),
        },
        "normalisation": Normalisation(shift=(0.5, -1.0, 0.0, 0.0), scale=(2.0, 0.25, 2.0, 0.25)),
        "provenance": Provenance(source="test", transform="none", text_encoder_digest="0" * 64),
        "kind": "posterior",
        "buckets": buckets,
        "flipped": True,
        "captions": CAPTIONS,
    }
    return DatasetInfo(**(fields | changes))


def samples(count: int, buckets: int = len(SIZES), seed: int = 0) -> list[CaptionedSample]:
    """Random samples, in buckets at random; those of number 3, 7, 11, ... have no caption but the empty prompt."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        bucket = int(generator.integers(buckets))
        captions = 1 if number % 4 == 3 else int(generator.integers(1, CAPTIONS + 1))
        latents = generator.standard_normal((2, 4, *SIZES[bucket])).astype(np.float16)
        arrays = {"latent": latents[0], "latent_flipped": latents[1]}
        for caption in range(captions):
            suffix = str(caption or "")
            context, pooled = generator.standard_normal((3, 2)), generator.standard_normal(4)
            arrays[f"context{suffix}"] = EMPTY["context"] if number % 4 == 3 else context.astype(np.float16)
            arrays[f"pooled{suffix}"] = EMPTY["pooled"] if number % 4 == 3 else pooled.astype(np.float32)
        arrays["time_ids"] = np.array([512, 512, 0, 0, 512, 512 + number % 2], np.float32)
        found.append(CaptionedSample(f"{number:09d}", bucket, arrays, captions))
    return found


def encode(
    folder: Path,
    count: int,
    *,
    per_shard: int = 8,
    buckets: tuple[tuple[int, int], ...] = SIZES,
    linked: bool = False,
    **changes: Any,
) -> list[CaptionedSample]:
    """Write samples and return them in the order of their numbers in the data set; ``linked``: as older versions."""
    written, tar = samples(count, max(1, len(buckets))), LinkedTar if linked else ShardTar
    with (
        mock.patch("fastdiff.data.shards.writer.ShardTar", tar),
        ShardWriter(folder, template(buckets, **changes), samples_per_shard=per_shard, null=EMPTY) as writer,
    ):
        for sample in written:
            writer.add(sample.key, sample.arrays, bucket=sample.bucket, captions=sample.captions)
    by_key = {sample.key: sample for sample in written}
    return [by_key[key] for key in _keys(folder)]


class LinkedTar(ShardTar):
    """A shard of versions up to 0.2: a repeated array is a hard link to its first copy."""

    def __init__(self, path: Path, bucket: int = 0) -> None:
        super().__init__(path, bucket)
        self._stored: dict[bytes, Place] = {}

    def add(self, key: str, components: Mapping[str, bytes]) -> None:
        self.keys.add(key)
        for name, content in components.items():
            digest = hashlib.sha256(content).digest()
            if name.endswith(".npy") and (first := self._stored.get(digest)) is not None:
                link = tarfile.TarInfo(f"{key}.{name}")
                link.type, link.linkname = tarfile.LNKTYPE, f"{first.key}.{first.component}"
                self._write(link.tobuf(tarfile.USTAR_FORMAT))
            else:
                self._stored[digest] = first = self._store(key, name, content)
            self._places.append(dataclasses.replace(first, key=key, component=name))


def _keys(folder: Path) -> list[str]:
    from fastdiff.data.shards.reader import LatentReader

    with LatentReader(folder) as reader:
        return [name.partition(":")[2] for name in reader.keys(np.arange(len(reader)))]
