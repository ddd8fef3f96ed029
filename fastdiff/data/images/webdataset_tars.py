"""Images in local or remote WebDataset tars, as written by img2dataset; each tar is a partition."""

import bisect
import contextlib
import itertools
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.images.items import BadItem, ImageItem, ImageSource, clean_captions, digest_of, stamp
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.tar_members import (
    KINDS,
    TEXTS,
    BadSampleError,
    DamagedTarError,
    Group,
    Leftovers,
    NoCaptionError,
    Use,
    captions_of,
    groups,
    image_of,
    label_of,
    unread_texts,
)
from fastdiff.data.selection import Selection, Tally
from fastdiff.data.shards.remote import is_remote, open_url, resource, shown
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.sanitize import escape

_STREAM_BUFFER = 1 << 18
_JUMP_BUFFER = 1 << 13
_LOOKED_AT = 100


class WebDatasetSource(ImageSource):
    """A source of tars with ``<key>.jpg`` (or another kind) and ``<key>.txt``, ``.caption``, ``.json`` or ``.cls``.

    The first usable sample decides whether the source has captions or classes; images alone have neither. Tars are
    streamed sequentially. Random access, ``len``, ``max_samples`` and the number of classes require all headers, and
    hence local tars.

    Args:
        tars: Paths and addresses, in the order of the partitions.
        options: What is read. ``caption_column`` ``text``: the ``.txt`` member, or the caption in the ``.json`` member;
            any other name: a field of the ``.json`` member.
        beside: What lies beside the tars and is not read; None: nothing.

    Raises:
        ConfigError: The options require local tars.
        DataError: A tar is missing or damaged, there are none, or the first samples have texts without captions.
        StorageError: A tar cannot be read.
    """

    def __init__(self, tars: Sequence[str], options: SourceOptions, *, beside: Selection | None = None) -> None:
        name, caption, max_samples = options.name, options.caption, options.max_samples
        if not tars:
            raise DataError(f"{name}: there are no tars")
        missing = [tar for tar in tars if not is_remote(tar) and not os.path.isfile(tar)]
        if missing:
            raise DataError(f"{missing[0]} is missing, and {len(missing) - 1} more of {len(tars)} tars of {name}")
        self.name = f"images in {name}"
        self._tars = list(tars)
        self._column = options.caption_column
        self._most = max_samples
        self._caption, self._needs_captions = caption, options.needs_captions
        self._found: dict[int, Selection] = {}
        self._left_out, self._noted = Tally(), Tally()
        self._offsets: list[npt.NDArray[np.int64]] | None = None
        self._starts = [0]
        if max_samples is not None:
            self._scan("limiting the number of samples")
        found = "captions" if caption else self._look()
        self.captioned = found == "captions"
        self.classes = self._count_classes() if found == "classes" else None
        names = [resource(tar) if is_remote(tar) else Path(tar).name for tar in self._tars]
        of_tars = Selection(left_out=self._left_out.counted(), noted=self._noted.counted())
        self.selection = of_tars.and_then([beside or Selection()])
        kind = f"webdataset, {self._column}, {max_samples} samples, {self.classes} classes"
        self.digest = digest_of(f"{kind}, {caption}" if caption else kind, names)

    @property
    def partitions(self) -> int:
        """Number of tars."""
        return len(self._tars)

    def stamps(self, partition: int) -> dict[str, Any] | None:
        """See ``ImageSource``; those of remote tars cannot tell."""
        tar = self._tars[partition]
        most = None if self._offsets is None else len(self._offsets[partition])
        return None if is_remote(tar) else {"": [self._column, most], Path(tar).name: stamp(tar)}

    def found_in(self, partition: int) -> Selection:
        """See ``ImageSource``; where only headers were read, what they show."""
        return self._found.get(partition, Selection())

    def items(self, partition: int) -> Iterator[ImageItem | BadItem]:
        """Yield the samples of a tar.

        Raises:
            DataError: The tar is damaged; complete samples before the damage were yielded.
            StorageError: The tar cannot be read.
        """
        leftovers = Leftovers()
        for row, group in enumerate(self._first(partition, kinds=KINDS, leftovers=leftovers)):
            yield self._item(partition, row, group, leftovers)
        self._found[partition] = _selected(leftovers)

    def most_captions(self, partition: int) -> int:
        """Return the largest number of captions per sample in a tar; in a local tar only texts are read."""
        most = 0
        for group in self._first(partition, kinds=TEXTS) if self.captioned else ():
            with contextlib.suppress(BadSampleError):  # reported by ``items``
                most = max(most, len(self._captions(group, Leftovers())))
        return most

    def __len__(self) -> int:
        """Return the number of samples; the first call reads all headers (ConfigError for remote tars)."""
        return sum(map(len, self._scan()))

    def item(self, index: int) -> ImageItem | BadItem:
        """Return a sample by number; the first call reads all headers (ConfigError for remote tars)."""
        offsets = self._scan()
        partition = bisect.bisect_right(self._starts, index) - 1
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"image {index} of {self._starts[-1]}")
        row = index - self._starts[partition]
        group = next(_read(self._tars[partition], start=int(offsets[partition][row])))
        return self._item(partition, row, group, Leftovers())

    def _item(self, partition: int, row: int, group: Group, leftovers: Leftovers) -> ImageItem | BadItem:
        key, name = f"{partition:06d}-{row:06d}", f"{_called(self._tars[partition])}!{escape(group.key)}"
        use: Use = "captions" if self.captioned else "nothing" if self.classes is None else "classes"
        for why, member in unread_texts(group, self._column, use):
            leftovers.noted.add(why, member)
        try:
            image = image_of(group)
            if self.captioned:
                return ImageItem(key, name, image, self._captions(group, leftovers) if self._needs_captions else ())
            if self.classes is None:
                return ImageItem(key, name, image)
            label = label_of(group)
            if label >= self.classes:
                raise BadSampleError(f"its class is {label}, expected 0 to {self.classes - 1}")
            return ImageItem(key, name, image, label=label)
        except BadSampleError as error:
            return BadItem(key, name, str(error))

    def _captions(self, group: Group, leftovers: Leftovers) -> tuple[str, ...]:
        try:
            return captions_of(group, self._column)
        except NoCaptionError:
            if not self._caption:
                raise
            leftovers.noted.add("pictures with the caption of --caption", group.key)
            return clean_captions(self._caption)

    def _first(self, partition: int, *, kinds: Container[str], leftovers: Leftovers | None = None) -> Iterator[Group]:
        """Yield the samples of a tar, up to ``max_samples`` in total."""
        most = None if self._offsets is None else len(self._offsets[partition])
        return itertools.islice(_read(self._tars[partition], kinds=kinds, leftovers=leftovers), most)

    def _scan(self, purpose: str = "reading single images") -> list[npt.NDArray[np.int64]]:
        """Return the offsets of the samples of each required tar, read from the headers."""
        if self._offsets is None:
            self._require_local(purpose)
            found, missing = [], self._most
            for partition, tar in enumerate(self._tars):
                leftovers = Leftovers()
                offsets = [group.offset for group in _read(tar, kinds=(), leftovers=leftovers)]
                self._found[partition] = _selected(leftovers)
                found.append(np.array(offsets[:missing], np.int64))
                if missing is not None:
                    self._leave_out(len(offsets) - missing)
                    missing = max(missing - len(offsets), 0)
                    if not missing:
                        break
            for tar in self._tars[len(found) :]:  # nobody waits for their headers
                self._noted.add(f"tars, not read because of --max-samples {self._most}", Path(tar).name)
            self._tars = self._tars[: len(found)]
            self._starts = list(itertools.accumulate(map(len, found), initial=0))
            self._offsets = found
        return self._offsets

    def _leave_out(self, samples: int) -> None:
        if samples > 0:
            self._left_out.add(f"beyond --max-samples {self._most}", count=samples)

    def _look(self) -> Use:
        """Return what the first sample with a caption or a class has; nothing if the first samples are images alone."""
        everything = itertools.chain.from_iterable(_read(tar, kinds=KINDS) for tar in self._tars)
        tried, alone = 0, self._column == "text"
        for group in itertools.islice(everything, _LOOKED_AT):
            tried += 1
            alone &= not group.members.keys() & {*TEXTS, "cls"}
            with contextlib.suppress(BadSampleError):
                captions_of(group, self._column)
                return "captions"
            with contextlib.suppress(BadSampleError):
                label_of(group)
                return "classes"
        if tried and alone:
            return "nothing"
        column = "" if self._column == "text" else f" (captions were expected in the field {self._column!r} of .json)"
        raise DataError(
            f"{self.name}: none of the first {tried} samples has a caption in .txt, .caption or .json, or a class in "
            f".cls{column}; give one caption for all with --caption"
        )

    def _count_classes(self) -> int:
        self._require_local("finding the number of classes")
        largest = -1
        for partition in range(self.partitions):
            for group in self._first(partition, kinds={"cls"}):
                with contextlib.suppress(BadSampleError):
                    largest = max(largest, label_of(group))
        return largest + 1

    def _require_local(self, purpose: str) -> None:
        remote = next(filter(is_remote, self._tars), None)
        if remote is not None:
            raise ConfigError(
                f"{purpose} needs all headers of {_called(remote)}, and so to read all of it: download the tars; or "
                "select some with braces and run `fastdiff encode`, which reads them once"
            )


def _called(tar: str) -> str:
    return shown(tar) if is_remote(tar) else escape(tar)


def _selected(leftovers: Leftovers) -> Selection:
    return Selection(left_out=leftovers.left_out.counted(), noted=leftovers.noted.counted())


def _read(
    tar: str, *, kinds: Container[str] = KINDS, start: int = 0, leftovers: Leftovers | None = None
) -> Iterator[Group]:
    """Yield the samples of a tar; errors name the tar."""
    try:
        # For reads of headers or single samples, a large buffer would read all data in between.
        with _open(tar, _STREAM_BUFFER if kinds is KINDS and not start else _JUMP_BUFFER) as file:
            if start:
                file.seek(start)
            yield from groups(file, kinds, leftovers)
    except DamagedTarError as error:
        raise DataError(f"{_called(tar)} is damaged: {error}; restore it from its source, or leave it out") from error
    except OSError as error:
        raise StorageError(
            f"cannot read {_called(tar)}: {error.strerror or error}; check its permissions and its disk or network"
        ) from error


def _open(tar: str, buffer: int) -> IO[bytes]:
    return open_url(tar) if is_remote(tar) else open(tar, "rb", buffering=buffer)
