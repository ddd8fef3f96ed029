"""Whether a shard is the one that was published, and if not, at which key and offset it first differs.

dataset.json holds the size and sha256 of each shard and the sha256 of its index. An index that was damaged,
left over from another encode or copied from another shard is never used: the tar is read to say where the two
disagree.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from fastdiff.data.shards.format import ShardInfo, idx_path, index_path
from fastdiff.data.shards.index import MAX_INDEX_BYTES, Place, ShardIndex
from fastdiff.errors import DataError, StorageError
from fastdiff.files import read_bounded
from fastdiff.sanitize import escape

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a shard."""

    shard: str
    """Name of the tar."""
    what: str
    """What was found, and what was expected."""
    place: Place | None = None
    """The component it is about; None: the shard as a whole."""

    def __str__(self) -> str:
        return escape(f"shard {self.shard}{f', {self.place}' if self.place else ''}: {self.what}")

    def error(self, folder: Path) -> DataError:
        """The error that says so, with the remedy."""
        shard = Path(self.shard)
        files = f"{shard.name}, {idx_path(shard).name} and {index_path(shard).name}"
        return DataError(
            f"{self}; restore {files} from their source or encode again (`fastdiff verify {folder}` lists all damage)"
        )


def load_index(shard: Path, info: ShardInfo) -> ShardIndex:
    """Load the index of a shard, if it is the one of dataset.json.

    Raises:
        DataError: It is missing or another; names the first key and offset at which index and tar disagree.
        StorageError: It cannot be read.
    """
    index, problem = check_index(shard, info)
    if problem is not None:
        raise problem.error(shard.parent)
    assert index is not None
    return index


def check_index(shard: Path, info: ShardInfo) -> tuple[ShardIndex | None, Problem | None]:
    """The index of a shard, or what is wrong with it; exactly one of the two.

    Raises:
        StorageError: A file cannot be read.
    """
    path = index_path(shard)
    try:
        # Of every component, the tar has a header of 512 bytes and the index less than that.
        content = read_bounded(path, min(info.bytes, MAX_INDEX_BYTES))
        index = ShardIndex.from_bytes(content)
    except FileNotFoundError:
        return None, Problem(info.name, f"{path.name} is missing", next(scan(shard), None))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        return None, Problem(info.name, f"{path.name} is not readable ({error})", next(scan(shard), None))
    if hashlib.sha256(content).hexdigest() != info.index_sha256:
        another = f"{path.name} is not the index that dataset.json knows; index and tar are of another encode"
        return None, difference(index, shard, info) or Problem(info.name, another, next(index.places(), None))
    if len(index.keys) != info.samples:
        return None, Problem(info.name, f"{len(index.keys)} samples, dataset.json says {info.samples}")
    return index, None


def check_size(shard: Path, info: ShardInfo) -> Problem | None:
    """Compare the size of a shard with dataset.json; the shard is read only if it is wrong.

    Raises:
        DataError: The size is wrong, and the index as well.
        StorageError: A file cannot be read.
    """
    try:
        size = shard.stat().st_size
    except FileNotFoundError:
        return Problem(info.name, "the file is missing")
    except OSError as error:
        raise unreadable(shard, error) from error
    if size == info.bytes:
        return None
    sizes = f"the shard has {size} bytes, dataset.json says {info.bytes}"
    index = load_index(shard, info)
    for place in index.places():
        if place.offset + place.length > size:
            return Problem(info.name, f"truncated: {sizes}", place)
    different = difference(index, shard, info)
    if different is not None:
        return Problem(info.name, f"{sizes}; {different.what}", different.place)
    # Only the end of the archive is cut off or added to.
    return Problem(info.name, f"{sizes}; all samples are there, the last one at this offset", place)


def difference(index: ShardIndex, shard: Path, info: ShardInfo) -> Problem | None:
    """The first component at which an index and a tar disagree; reads the tar (StorageError if it cannot)."""
    groups = (list(group) for _, group in itertools.groupby(scan(shard), key=lambda place: place.key))
    samples = (list(index.places_of(row)) for row in range(len(index.keys)))
    for wanted, found in itertools.zip_longest(samples, groups, fillvalue=()):
        for expected, actual in _pairs(wanted, found):
            if expected is None:
                return Problem(info.name, "index and tar disagree: the tar holds more than the index", actual)
            if actual != expected:
                has = "no more readable component"
                if actual is not None:
                    has = f"{actual} with {actual.length} bytes and crc32 {actual.crc32:08x}"
                says = f"{expected.length} bytes and crc32 {expected.crc32:08x}"
                what = f"index and tar disagree: the index says {says}, the tar has {has}"
                return Problem(info.name, what, expected)
    return None


def _pairs(wanted: Sequence[Place], found: Sequence[Place]) -> Iterator[tuple[Place | None, Place | None]]:
    """The components of a sample as the index and as the tar has them, those that only the tar has at the end.

    By name, not by place in the tar: the order of hard links cannot be told from an index.
    """
    if wanted and found and wanted[0].key != found[0].key:
        yield wanted[0], found[0]
        return
    by_name = {place.component: place for place in found}
    yield from ((place, by_name.pop(place.component, None)) for place in wanted)
    yield from ((None, place) for place in by_name.values())


def scan(shard: Path) -> Iterator[Place]:
    """Walk through a tar and say what is there; ends at the first header that is damaged.

    A hard link is where the member is that it leads to; one that leads nowhere is passed over.

    Raises:
        StorageError: The tar cannot be read: that says nothing about what is in it.
    """
    stored: dict[str, Place] = {}
    try:
        with shard.open("rb") as file, tarfile.open(fileobj=file, mode="r:", tarinfo=StrictHeader) as archive:
            for member in archive:
                key, _, component = member.name.partition(".")
                if member.islnk():
                    if member.linkname in stored:
                        yield dataclasses.replace(stored[member.linkname], key=key, component=component)
                    continue
                crc32, _ = crc32_of(file, member.offset_data, member.size)
                stored[member.name] = Place(key, component, member.offset_data, member.size, crc32)
                yield stored[member.name]
    except (tarfile.TarError, FileNotFoundError, ValueError, OverflowError):  # the latter two of numbers that lie
        return
    except OSError as error:
        raise unreadable(shard, error) from error


def crc32_of(file: BinaryIO, offset: int, length: int) -> tuple[int, int]:
    """The crc32 of ``length`` bytes of a file and how many there are; block by block, as the length may lie."""
    file.seek(offset)
    found, done = 0, 0
    while block := file.read(min(_BLOCK, length - done)):
        found = zlib.crc32(block, found)
        done += len(block)
    return found, done


def unreadable(path: Path, error: OSError, where: str = "") -> StorageError:
    """The error for a file that is there and cannot be read, with the remedy."""
    remedy = "check its permissions and the disk or network it is on"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = (
            "lower --data.shuffle_shards (twice as many shards of every bucket are kept open), or raise `ulimit -n`"
        )
    return StorageError(f"cannot read {error.filename or path}{where}: {error.strerror or error}; {remedy}")


# Headers whose contents tarfile reads into memory whatever their size is said to be.
_EXTENSIONS = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}
_LARGEST_EXTENSION = 1 << 20


class StrictHeader(tarfile.TarInfo):
    """A header of a tar; the only thing that may stand in its place is the block of zeros that ends an archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """A header from its 512 bytes; ReadError if its size lies."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError("a header with a negative size")
        if header.type in _EXTENSIONS and header.size > _LARGEST_EXTENSION:
            raise tarfile.ReadError(f"an extended header of {header.size} bytes; at most {_LARGEST_EXTENSION}")
        return header

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """The next header of a tar; ReadError if there is something else."""
        try:
            header = super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(str(error)) from None
        if header.size < 0:
            raise tarfile.ReadError("a header with a negative size")  # of an extended header
        return header
