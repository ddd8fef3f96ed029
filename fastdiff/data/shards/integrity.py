"""Integrity of a shard: sizes, digests and tar headers; a damaged shard is reported by key and offset.

dataset.json holds the size and sha256 of each shard and the sha256 of its index. An index with another digest
(damaged, from another encode or another shard) is never used. Instead the tar is read to find the first difference.
"""

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
    """A problem of a shard."""

    shard: str
    """Name of the tar."""
    what: str
    """Description: found and expected."""
    place: Place | None = None
    """The affected component; None: the whole shard."""

    def __str__(self) -> str:
        return escape(f"shard {self.shard}{f', {self.place}' if self.place else ''}: {self.what}")

    def error(self, folder: Path) -> DataError:
        """Return the error for this problem, with the remedy."""
        shard = Path(self.shard)
        files = f"{shard.name}, {idx_path(shard).name} and {index_path(shard).name}"
        return DataError(
            f"{self}; restore {files} from their source or encode again (`fastdiff verify {folder}` lists all damage)"
        )


def load_index(shard: Path, info: ShardInfo) -> ShardIndex:
    """Load the index of a shard and verify it against dataset.json.

    Raises:
        DataError: The index is missing or does not match; the message gives the first key and offset at which index
            and tar differ.
        StorageError: The index cannot be read.
    """
    index, problem = check_index(shard, info)
    if problem is not None:
        raise problem.error(shard.parent)
    assert index is not None
    return index


def check_index(shard: Path, info: ShardInfo) -> tuple[ShardIndex | None, Problem | None]:
    """Return the index of a shard or its problem, exactly one of the two; StorageError: a file cannot be read."""
    path = index_path(shard)
    try:
        # The index is smaller than the tar, which has a header of 512 bytes per component.
        content = read_bounded(path, min(info.bytes, MAX_INDEX_BYTES))
        index = ShardIndex.from_bytes(content)
    except FileNotFoundError:
        return None, Problem(info.name, f"{path.name} is missing", next(scan(shard), None))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        return None, Problem(info.name, f"{path.name} is not a valid index ({error})", next(scan(shard), None))
    if hashlib.sha256(content).hexdigest() != info.index_sha256:
        another = f"{path.name} does not match dataset.json; index and tar are from another encode"
        return None, difference(index, shard, info) or Problem(info.name, another, next(index.places(), None))
    if len(index.keys) != info.samples:
        return None, Problem(info.name, f"{len(index.keys)} samples, expected {info.samples} (dataset.json)")
    return index, None


def check_size(shard: Path, info: ShardInfo) -> Problem | None:
    """Compare the size of a shard with dataset.json; read the shard only if the size is wrong.

    Raises:
        DataError: The size and the index are wrong.
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
    sizes = f"the shard has {size} bytes, expected {info.bytes} (dataset.json)"
    index = load_index(shard, info)
    for place in index.places():
        if place.offset + place.length > size:
            return Problem(info.name, f"truncated: {sizes}", place)
    different = difference(index, shard, info)
    if different is not None:
        return Problem(info.name, f"{sizes}; {different.what}", different.place)
    # Only the padding at the end of the archive is shorter or longer.
    return Problem(info.name, f"{sizes}; all samples are present, the last one at this offset", place)


def difference(index: ShardIndex, shard: Path, info: ShardInfo) -> Problem | None:
    """Read the tar and return the first component that differs from the index; StorageError if it cannot be read."""
    groups = (list(group) for _, group in itertools.groupby(scan(shard), key=lambda place: place.key))
    samples = (list(index.places_of(row)) for row in range(len(index.keys)))
    for wanted, found in itertools.zip_longest(samples, groups, fillvalue=()):
        for expected, actual in _pairs(wanted, found):
            if expected is None:
                return Problem(info.name, "index and tar differ: this component is missing in the index", actual)
            if actual != expected:
                has = "no further readable component"
                if actual is not None:
                    has = f"{actual} with {actual.length} bytes and crc32 {actual.crc32:08x}"
                says = f"{expected.length} bytes and crc32 {expected.crc32:08x}"
                what = f"index and tar differ: the index has {says}, the tar has {has}"
                return Problem(info.name, what, expected)
    return None


def _pairs(wanted: Sequence[Place], found: Sequence[Place]) -> Iterator[tuple[Place | None, Place | None]]:
    """Yield each component of a sample as (index, tar); components missing in the index come last.

    They are matched by name: the index does not record the order of hard links.
    """
    if wanted and found and wanted[0].key != found[0].key:
        yield wanted[0], found[0]
        return
    by_name = {place.component: place for place in found}
    yield from ((place, by_name.pop(place.component, None)) for place in wanted)
    yield from ((None, place) for place in by_name.values())


def scan(shard: Path) -> Iterator[Place]:
    """Yield the components of a tar up to the first damaged header; StorageError: it cannot be read.

    A hard link gets the place of its target; a link without a target is skipped.
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
    except (tarfile.TarError, FileNotFoundError, ValueError, OverflowError):  # the last two: wrong numbers
        return
    except OSError as error:
        raise unreadable(shard, error) from error


def crc32_of(file: BinaryIO, offset: int, length: int) -> tuple[int, int]:
    """Return the crc32 of up to ``length`` bytes of a file and their number; in blocks, as ``length`` may be wrong."""
    file.seek(offset)
    found, done = 0, 0
    while block := file.read(min(_BLOCK, length - done)):
        found = zlib.crc32(block, found)
        done += len(block)
    return found, done


def unreadable(path: Path, error: OSError, where: str = "") -> StorageError:
    """Return the error for an existing file that cannot be read, with the remedy."""
    remedy = "check its permissions and its disk or network"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = (
            "lower --data.shuffle_shards (twice as many shards of every bucket are kept open), or raise `ulimit -n`"
        )
    return StorageError(f"cannot read {error.filename or path}{where}: {error.strerror or error}; {remedy}")


# Headers whose content tarfile reads into memory without a size limit.
_EXTENSIONS = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}
_LARGEST_EXTENSION = 1 << 20


class StrictHeader(tarfile.TarInfo):
    """A tar header; anything other than a valid header or the zero block at the end of an archive is an error."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header from its 512 bytes; ReadError if its size is impossible."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError("a header with a negative size")
        if header.type in _EXTENSIONS and header.size > _LARGEST_EXTENSION:
            raise tarfile.ReadError(f"an extended header of {header.size} bytes; at most {_LARGEST_EXTENSION}")
        return header

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """Read the next header of a tar; ReadError if it is invalid."""
        try:
            header = super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(str(error)) from None
        if header.size < 0:
            raise tarfile.ReadError("a header with a negative size")  # from an extended header
        return header
