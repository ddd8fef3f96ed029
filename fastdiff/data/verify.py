"""``fastdiff verify``: read every byte of a data set and list all damage, not only the first."""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fastdiff.data.index import Place, ShardIndex
from fastdiff.data.integrity import Problem, check_index, check_size, difference, unreadable
from fastdiff.data.shards import DatasetInfo, ShardInfo, idx_path
from fastdiff.errors import StorageError


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found."""

    folder: Path
    samples: int
    """Samples that dataset.json declares."""
    bytes: int
    """Bytes of shards that were read."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return f"{self.folder}: {self.samples} samples, {self.bytes} bytes, no problems"
        lines = [f"{self.folder}: {len(self.problems)} problems", *map(str, self.problems)]
        return "\n".join([*lines, "restore these shards from their source, or run `fastdiff encode` again"])


def verify(folder: str | os.PathLike[str]) -> VerifyReport:
    """Check sizes, sha256 of shards and indices, crc32 of components, npy headers, classes and idx files.

    Raises:
        DataError: dataset.json is missing or not usable.
        StorageError: dataset.json cannot be read. A shard that cannot be read is a problem like any other.
    """
    folder = Path(folder)
    info = DatasetInfo.read(folder)
    problems: list[Problem] = []
    count = 0
    for shard in tqdm(info.shards, desc="verify", unit="shard", disable=None):
        path = folder / shard.name
        try:
            count += path.stat().st_size if path.exists() else 0
            problems.extend(_check_shard(path, shard, info))
        except OSError as error:
            problems.append(Problem(shard.name, str(unreadable(path, error))))
        except StorageError as error:
            problems.append(Problem(shard.name, str(error)))
    return VerifyReport(folder, info.samples, count, tuple(problems))


def _check_shard(path: Path, shard: ShardInfo, info: DatasetInfo) -> Iterator[Problem]:
    if not path.exists():
        yield Problem(shard.name, "the file is missing")
        return
    with path.open("rb") as file:
        intact = hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
    index, problem = check_index(path, shard)
    if index is None:
        # Without its index, no crc32 is known; the sha256 still says whether the tar itself is the right one.
        yield from [problem] if problem else []
        if not intact:
            yield Problem(shard.name, "sha256 of the shard differs from dataset.json")
        return
    found = [*_check_size(path, shard), *_check_samples(path, shard, index, info)]
    yield from found
    if not intact and not found:
        yield _outside_of_samples(path, shard, index)
    yield from _check_idx(path, shard, index)


def _check_size(path: Path, shard: ShardInfo) -> Iterator[Problem]:
    problem = check_size(path, shard)
    if problem is not None:
        yield problem


def _check_idx(path: Path, shard: ShardInfo, index: ShardIndex) -> Iterator[Problem]:
    """Compare DALI's index, line by line, with what wds2idx would write."""
    idx = idx_path(path)
    if not idx.exists():
        yield Problem(shard.name, f"{idx.name} is missing")
        return
    lines, expected = idx.read_bytes().split(b"\n"), index.wds2idx().encode().split(b"\n")
    for number, (line, wanted) in enumerate(itertools.zip_longest(lines, expected)):
        if line != wanted:
            row = min(max(number - 1, 0), shard.samples - 1)  # the first line is the header
            what = f"line {number + 1} of {idx.name} is {line!r}, DALI's wds2idx writes {wanted!r}"
            yield Problem(shard.name, what, next(index.places_of(row)))
            return


def _check_samples(path: Path, shard: ShardInfo, index: ShardIndex, info: DatasetInfo) -> Iterator[Problem]:
    wanted = [f"{name}.npy" for name in info.columns] + ([] if info.classes is None else ["cls"])
    for component in wanted:
        if component not in index.components:
            yield Problem(shard.name, f"there are no {component} components")
    with path.open("rb") as file:
        for place in index.places():
            file.seek(place.offset)
            content = file.read(place.length)
            what = _damage(place, content) or _misfit(place, content, info)
            if what is not None:
                yield Problem(shard.name, what, place)


def _damage(place: Place, content: bytes) -> str | None:
    if len(content) != place.length:
        return f"the file ends after {len(content)} of {place.length} bytes; it was truncated"
    found = zlib.crc32(content)
    return None if found == place.crc32 else f"crc32 {found:08x}, expected {place.crc32:08x}"


def _misfit(place: Place, content: bytes, info: DatasetInfo) -> str | None:
    """What an intact component has against dataset.json."""
    name, _, extension = place.component.rpartition(".")
    if extension == "npy" and name in info.columns:
        array = np.load(BytesIO(content), allow_pickle=False)
        column = info.columns[name]
        if (array.dtype, array.shape) != (np.dtype(column.dtype), column.shape):
            return f"{array.dtype} {array.shape}, expected {column.dtype} {column.shape}"
    if place.component == "cls" and not (content.isdigit() and int(content) < (info.classes or 0)):
        return f"{content!r} is none of the {info.classes} classes"
    return None


def _outside_of_samples(path: Path, shard: ShardInfo, index: ShardIndex) -> Problem:
    """The sha256 is wrong though every sample is intact: a tar header, or the padding."""
    different = difference(index, path, shard)
    what = "sha256 of the shard differs from dataset.json"
    if different is None:
        return Problem(shard.name, f"{what}, in the tar headers or the padding; all samples are intact")
    return Problem(shard.name, f"{what}; {different.what}", different.place)
