"""Verification of a whole data set: read every byte and list all damage (``fastdiff verify``)."""

import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fastdiff.data.shards.format import Column, DatasetInfo, ShardInfo, idx_path, null_path
from fastdiff.data.shards.index import Place, ShardIndex
from fastdiff.data.shards.integrity import Problem, check_index, check_size, crc32_of, difference, unreadable
from fastdiff.data.shards.null_embedding import read_null
from fastdiff.errors import DataError, StorageError
from fastdiff.progress_bar import Bar

_DIGITS = 19  # of the largest class or number of captions


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`."""

    folder: Path
    samples: int
    """Samples declared in dataset.json."""
    bytes: int
    """Bytes of all shards read."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether the data set is intact."""
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return f"{self.folder}: {self.samples} samples, {self.bytes} bytes, no problems"
        lines = [f"{self.folder}: {len(self.problems)} problems", *map(str, self.problems)]
        return "\n".join([*lines, "restore these shards from their source, or run `fastdiff encode` again"])


def verify(folder: str | os.PathLike[str]) -> VerifyReport:
    """Check sizes, sha256 of shards and indices, crc32 and contents of components, idx files and the empty prompt.

    Raises:
        DataError: dataset.json is missing or not usable.
        StorageError: dataset.json cannot be read. A shard that cannot be read is a problem like any other.
    """
    folder = Path(folder)
    info = DatasetInfo.read(folder)
    problems: list[Problem] = []
    count = 0
    with Bar("verify", len(info.shards), "shards") as bar:
        for shard in bar.over(info.shards):
            path = folder / shard.name
            try:
                count += path.stat().st_size if path.exists() else 0
                problems.extend(_check_shard(path, shard, info))
            except OSError as error:
                problems.append(Problem(shard.name, str(unreadable(path, error))))
            except StorageError as error:
                problems.append(Problem(shard.name, str(error)))
    problems.extend(_check_null(folder, info))
    return VerifyReport(folder, info.samples, count, tuple(problems))


def _check_null(folder: Path, info: DatasetInfo) -> Iterator[Problem]:
    for name in info.null:
        try:
            read_null(folder, info, name)
        except (DataError, StorageError) as error:
            yield Problem(null_path(folder, name).name, str(error))


def _check_shard(path: Path, shard: ShardInfo, info: DatasetInfo) -> Iterator[Problem]:
    if not path.exists():
        yield Problem(shard.name, "the file is missing")
        return
    with path.open("rb") as file:
        intact = hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
    index, problem = check_index(path, shard)
    if index is None:
        # Without an index no crc32 is known; the sha256 still verifies the tar itself.
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
    """Compare DALI's index line by line with the output of wds2idx."""
    idx = idx_path(path)
    if not idx.exists():
        yield Problem(shard.name, f"{idx.name} is missing")
        return
    wanted_text = index.wds2idx().encode()
    with idx.open("rb") as file:
        lines, expected = file.read(len(wanted_text) + 1).split(b"\n"), wanted_text.split(b"\n")
    for number, (line, wanted) in enumerate(itertools.zip_longest(lines, expected)):
        if line != wanted:
            row = min(max(number - 1, 0), shard.samples - 1)  # the first line is the header
            what = f"line {number + 1} of {idx.name} is {line!r}, expected {wanted!r} (DALI's wds2idx)"
            yield Problem(shard.name, what, next(index.places_of(row)))
            return


def _check_samples(path: Path, shard: ShardInfo, index: ShardIndex, info: DatasetInfo) -> Iterator[Problem]:
    for component in info.components:
        if component not in index.components:
            yield Problem(shard.name, f"there are no {component} components")
    columns = info.columns_of(shard.bucket)
    arrays = {f"{variant}.npy": (name, column) for name, column in columns.items() for variant in info.variants(name)}
    with path.open("rb") as file:
        for place in index.places():
            name, column = arrays.get(place.component, ("", None))
            column = column.of_size(place.length) if column and info.is_masked(name) else column
            what = _damage(file, place) or _misfit(file, place, column, info)
            if what is not None:
                yield Problem(shard.name, what, place)


def _damage(file: BinaryIO, place: Place) -> str | None:
    found, length = crc32_of(file, place.offset, place.length)
    if length != place.length:
        return f"the file ends after {length} of {place.length} bytes; it was truncated"
    return None if found == place.crc32 else f"crc32 {found:08x}, expected {place.crc32:08x}"


def _misfit(file: BinaryIO, place: Place, column: Column | None, info: DatasetInfo) -> str | None:
    """Return the contradiction between an intact component and dataset.json, or None."""
    file.seek(place.offset)
    if column is not None:
        header, size = column.header, len(column.header) + column.nbytes
        begins = file.read(min(len(header), place.length))
        if begins != header or place.length != size:
            return f"{place.length} bytes from {begins!r}, expected {column.dtype} {column.shape} in {size} bytes"
    numbers = {"cls": range(info.classes or 0), "captions": range(1, info.captions + 1)}.get(place.component)
    if numbers is not None:
        text = file.read(min(place.length, _DIGITS + 1))
        if not (text.isdigit() and len(text) <= _DIGITS and int(text) in numbers):
            of_classes = place.component == "cls"
            known = f"none of the {info.classes} classes" if of_classes else f"not in 1 to {info.captions}"
            return f"{text!r} is {known}"
    return None


def _outside_of_samples(path: Path, shard: ShardInfo, index: ShardIndex) -> Problem:
    """Return the problem of a shard with intact samples but a wrong sha256: a tar header or the padding."""
    different = difference(index, path, shard)
    what = "sha256 of the shard differs from dataset.json"
    if different is None:
        return Problem(shard.name, f"{what}, in the tar headers or the padding; all samples are intact")
    return Problem(shard.name, f"{what}; {different.what}", different.place)
