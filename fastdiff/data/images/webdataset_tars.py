"""Images from WebDataset shards as img2dataset writes them, local or remote; one tar is one unit."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from fastdiff.data.images.items import BadItem, ImageItem, digest_of
from fastdiff.data.images.tar_members import (
    KINDS,
    BadSampleError,
    DamagedTarError,
    Group,
    captions_of,
    groups,
    image_of,
    label_of,
)
from fastdiff.data.shards.remote import is_remote, open_url, shown
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.sanitize import escape

_STREAM_BUFFER = 1 << 18
_JUMP_BUFFER = 1 << 13
_LOOKED_AT = 100


class WebDatasetSource:
    """Tars of ``<key>.jpg`` (or jpeg, png, webp) with ``<key>.txt``, ``<key>.json`` or ``<key>.cls``.

    The first sample decides what the source has: captions if it has any, else classes. Tars are streamed from their
    first to their last byte. Random access, ``len``, ``max_samples`` and the number of classes need all headers first,
    which remote tars refuse.

    Args:
        tars: Paths and addresses, in the order of the units.
        name: For the provenance.
        caption_column: ``text``: the ``.txt`` member, else the caption in the ``.json`` one; otherwise a field of the
            latter.
        max_samples: Only so many, the first ones.

    Raises:
        ConfigError: What is asked for needs local tars.
        DataError: There are no tars, or one is missing or damaged, or the first sample has neither caption nor class.
        StorageError: A tar cannot be read.
    """

    class_names: tuple[str, ...] = ()

    def __init__(
        self,
        tars: Sequence[str],
        *,
        name: str,
        caption_column: str = "text",
        max_samples: int | None = None,
    ) -> None:
        if not tars:
            raise DataError(f"{name}: there are no tars")
        missing = [tar for tar in tars if not is_remote(tar) and not os.path.isfile(tar)]
        if missing:
            raise DataError(f"{missing[0]} is missing, as are {len(missing) - 1} more of {len(tars)} tars of {name}")
        self.name = f"images in {name}"
        self._tars = list(tars)
        self._column = caption_column
        self._most = max_samples
        self._offsets: list[npt.NDArray[np.int64]] | None = None
        self._starts = [0]
        if max_samples is not None:
            self._scan("knowing where so many images end")
        self.captioned = self._has_captions()
        self.classes = None if self.captioned else self._count_classes()
        names = [shown(tar) if is_remote(tar) else Path(tar).name for tar in self._tars]
        self.digest = digest_of(f"webdataset, {caption_column}, {max_samples} samples, {self.classes} classes", names)

    @property
    def units(self) -> int:
        """Number of tars."""
        return len(self._tars)

    def items(self, unit: int) -> Iterator[ImageItem | BadItem]:
        """The samples of one tar.

        Raises:
            DataError: The tar is damaged; samples that were complete before the damage were given.
            StorageError: It cannot be read.
        """
        for row, group in enumerate(self._first(unit, kinds=KINDS)):
            yield self._item(unit, row, group)

    def most_captions(self, unit: int) -> int:
        """How many captions the sample of a tar with the most of them has; of a local tar, only the texts are read."""
        most = 0
        for group in self._first(unit, kinds={"txt", "json"}) if self.captioned else ():
            with contextlib.suppress(BadSampleError):  # of which ``items`` tells
                most = max(most, len(captions_of(group, self._column)))
        return most

    def __len__(self) -> int:
        """Number of samples; the first call reads the headers of all tars (ConfigError if they are remote)."""
        return sum(map(len, self._scan()))

    def item(self, index: int) -> ImageItem | BadItem:
        """One sample by number; the first call reads the headers of all tars (ConfigError if they are remote)."""
        offsets = self._scan()
        unit = bisect.bisect_right(self._starts, index) - 1
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"image {index} of {self._starts[-1]}")
        row = index - self._starts[unit]
        group = next(_read(self._tars[unit], start=int(offsets[unit][row])))
        return self._item(unit, row, group)

    def _item(self, unit: int, row: int, group: Group) -> ImageItem | BadItem:
        key, name = f"{unit:06d}-{row:06d}", f"{_called(self._tars[unit])}!{escape(group.key)}"
        try:
            image = image_of(group)
            if self.captioned:
                return ImageItem(key, name, image, captions_of(group, self._column))
            label = label_of(group)
            if self.classes is not None and label >= self.classes:
                raise BadSampleError(f"its class is {label}, expected one of {self.classes} from 0")
            return ImageItem(key, name, image, label=label)
        except BadSampleError as error:
            return BadItem(key, name, str(error))

    def _first(self, unit: int, *, kinds: Container[str]) -> Iterator[Group]:
        """The samples of a tar, up to the last one that is wanted."""
        most = None if self._offsets is None else len(self._offsets[unit])
        return itertools.islice(_read(self._tars[unit], kinds=kinds), most)

    def _scan(self, purpose: str = "reading single images") -> list[npt.NDArray[np.int64]]:
        """Offsets of the samples of each tar that is needed, from its headers."""
        if self._offsets is None:
            self._require_local(purpose)
            found, missing = [], self._most
            for tar in self._tars:
                offsets = [group.offset for group in itertools.islice(_read(tar, kinds=()), missing)]
                found.append(np.array(offsets, np.int64))
                if missing is not None:
                    missing -= len(offsets)
                    if not missing:
                        break
            self._tars = self._tars[: len(found)]
            self._starts = list(itertools.accumulate(map(len, found), initial=0))
            self._offsets = found
        return self._offsets

    def _has_captions(self) -> bool:
        """Whether the first sample that has anything has a caption and not only a class."""
        everything = itertools.chain.from_iterable(_read(tar, kinds=KINDS) for tar in self._tars)
        tried = 0
        for group in itertools.islice(everything, _LOOKED_AT):
            tried += 1
            for read, captioned in ((lambda g: captions_of(g, self._column), True), (label_of, False)):
                with contextlib.suppress(BadSampleError):
                    read(group)
                    return captioned
        column = "" if self._column == "text" else f" (captions were looked for in the field {self._column!r} of .json)"
        raise DataError(
            f"{self.name}: none of the first {tried} samples has a caption in .txt or .json, or a class in .cls{column}"
        )

    def _count_classes(self) -> int:
        self._require_local("finding the number of classes")
        largest = -1
        for unit in range(self.units):
            for group in self._first(unit, kinds={"cls"}):
                with contextlib.suppress(BadSampleError):
                    largest = max(largest, label_of(group))
        return largest + 1

    def _require_local(self, purpose: str) -> None:
        remote = next(filter(is_remote, self._tars), None)
        if remote is not None:
            raise ConfigError(
                f"{purpose} needs all headers of {_called(remote)}, and so to read all of it: download the tars; or "
                "choose some of them with braces and run `fastdiff encode`, which reads them once"
            )


def _called(tar: str) -> str:
    return shown(tar) if is_remote(tar) else escape(tar)


def _read(tar: str, *, kinds: Container[str] = KINDS, start: int = 0) -> Iterator[Group]:
    """The samples of a tar, with errors that name it."""
    try:
        # From header to header, or to one sample, a large buffer would read all that lies between.
        with _open(tar, _STREAM_BUFFER if kinds is KINDS and not start else _JUMP_BUFFER) as file:
            if start:
                file.seek(start)
            yield from groups(file, kinds)
    except DamagedTarError as error:
        raise DataError(f"{_called(tar)} is damaged: {error}; restore it from its source, or leave it out") from error
    except OSError as error:
        raise StorageError(
            f"cannot read {_called(tar)}: {error.strerror or error}; check its permissions and the disk or network it "
            "is on"
        ) from error


def _open(tar: str, buffer: int) -> IO[bytes]:
    return open_url(tar) if is_remote(tar) else open(tar, "rb", buffering=buffer)
