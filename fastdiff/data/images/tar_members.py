"""Tars of images in WebDataset's layout: members that stand together and share a key are one sample.

Nothing is unpickled or extracted. Python's tarfile ends silently at a header that is damaged or missing; here that is
an error, since everything behind it would be lost without a word.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from fastdiff.data.images.items import IMAGE_EXTENSIONS, LARGEST_IMAGE, LARGEST_TEXT, BadCaptionError, clean_captions
from fastdiff.data.shards.integrity import StrictHeader
from fastdiff.sanitize import escape

KINDS = IMAGE_EXTENSIONS | {"txt", "json", "cls"}
"""What of a sample is used: the extensions of its members."""

_BLOCK = 1 << 20


@dataclass(slots=True)
class Member:
    """One file of a sample."""

    name: str
    content: bytes | None = None
    """None: not asked for, or refused."""
    refused: str | None = None
    """Why it is not used, if so."""


@dataclass(slots=True)
class Group:
    """One sample: its members by what follows the key, in lower case."""

    key: str
    offset: int
    """Of its first header in the tar."""
    members: dict[str, Member] = field(default_factory=dict)


class DamagedTarError(Exception):
    """A tar cannot be read to its end; the text says why and where."""


class BadSampleError(Exception):
    """A sample cannot be used; the text says why."""


def groups(file: IO[bytes], kinds: Container[str] = KINDS) -> Iterator[Group]:
    """The samples of a tar, in its order.

    Args:
        file: Read from where it stands to its end; sought in where it can be.
        kinds: The kinds of members whose contents are read.

    Raises:
        DamagedTarError: The tar is damaged; samples that were complete before that were given.
        OSError: It cannot be read.
    """
    offset = 0
    mode: Literal["r|", "r:"] = "r:" if file.seekable() else "r|"
    try:
        with tarfile.open(fileobj=file, mode=mode, tarinfo=StrictHeader, bufsize=_BLOCK) as archive:
            for group in _grouped(archive, kinds):
                yield group
                offset = archive.offset
            offset = archive.offset
            assert archive.fileobj is not None
            while block := archive.fileobj.read(_BLOCK):
                if any(block):
                    raise tarfile.ReadError("there is more after a block of zeros, which ends an archive")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DamagedTarError(f"{error}, after offset {offset}") from error


def _grouped(archive: tarfile.TarFile, kinds: Container[str]) -> Iterator[Group]:
    current = Group("", 0)
    while (header := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # or it keeps every header to the end
        parts = _split(header.name)
        if parts is None or header.isdir():
            continue
        key, kind = parts
        if key != current.key or kind in current.members:
            if current.members:
                yield current
            current = Group(key, header.offset)
        current.members[kind] = _member(archive, header, kind, kind in kinds)
    if current.members:
        yield current


def captions_of(group: Group, column: str) -> tuple[str, ...]:
    """The captions of a sample whose members were read.

    ``text``: the ``.txt`` member, which is one caption, or else ``caption`` or ``text`` of the ``.json`` one. Any
    other column: that field of the ``.json`` member.

    Raises:
        BadSampleError: There are none, or they are no text.
    """
    try:
        if column == "text" and "txt" in group.members:
            return clean_captions(_text(group.members["txt"]))
        fields = _fields(group)
        for name in ("caption", "text") if column == "text" else (column,):
            if name in fields:
                return clean_captions(fields[name])
    except BadCaptionError as error:
        raise BadSampleError(str(error)) from error
    what = "txt member, nor a caption in a json one" if column == "text" else f"field {column!r} in a json member"
    raise BadSampleError(f"there is no {what}")


def label_of(group: Group) -> int:
    """The class in the ``.cls`` member of a sample (BadSampleError if there is none)."""
    if "cls" not in group.members:
        raise BadSampleError("there is no cls member")
    text = _text(group.members["cls"]).strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadSampleError(f"its class is {text[:40]!r}, expected a number from 0")
    return int(text)


def image_of(group: Group) -> bytes:
    """The image of a sample whose members were read (BadSampleError if there is not exactly one)."""
    images = [member for kind, member in group.members.items() if kind in IMAGE_EXTENSIONS]
    dotted = [member for kind, member in group.members.items() if kind not in KINDS]
    if dotted and not images:
        raise BadSampleError(
            f"the name of {escape(dotted[0].name)} has more than one dot, and a key ends at the first; rename it"
        )
    if len(images) != 1:
        raise BadSampleError(
            f"it has {len(images)} images among its members ({', '.join(group.members)}), expected one"
        )
    return _content(images[0])


def _split(name: str) -> tuple[str, str] | None:
    """Key and kind of a member by WebDataset's rule: the file name up to its first dot; None: no part of a sample.

    Images of a longer kind (``1.mask.png``) are kept: beside no other image, they are a sample with a wrong name.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    kind = kind.lower()
    if not stem or not dot or not (kind in KINDS or kind.rpartition(".")[2] in IMAGE_EXTENSIONS):
        return None
    return folder + slash + stem, kind


def _member(archive: tarfile.TarFile, header: tarfile.TarInfo, kind: str, wanted: bool) -> Member:
    member = Member(header.name)
    most = LARGEST_IMAGE if kind in IMAGE_EXTENSIONS else LARGEST_TEXT
    if not header.isreg() or header.issparse():
        member.refused = f"{escape(header.name)} is a link or a sparse file; pack the tar again with plain files"
    elif header.size > most:
        member.refused = f"{escape(header.name)} has {header.size} bytes; at most {most}"
    elif wanted:
        file = archive.extractfile(header)
        assert file is not None
        member.content = file.read()
    return member


def _content(member: Member) -> bytes:
    if member.refused is not None:
        raise BadSampleError(member.refused)
    assert member.content is not None
    return member.content


def _text(member: Member) -> str:
    try:
        return _content(member).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSampleError(f"{escape(member.name)} is not UTF-8 ({error.reason} at byte {error.start})") from error


def _fields(group: Group) -> dict[str, Any]:
    """The fields of the ``.json`` member; empty if there is none."""
    member = group.members.get("json")
    if member is None:
        return {}
    try:
        fields = json.loads(_text(member))
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"{escape(member.name)} is no JSON ({str(error)[:200]})") from error
    if not isinstance(fields, dict):
        raise BadSampleError(f"{escape(member.name)} holds no object")
    return fields
