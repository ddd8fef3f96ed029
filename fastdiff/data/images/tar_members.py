"""Samples in tars of WebDataset's layout: consecutive members with one key form a sample.

Members are neither unpickled nor extracted to disk. Python's tarfile silently ends at a damaged or missing header; here
that is an error, because all later samples would be lost.
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
"""Extensions of the members in use."""

_BLOCK = 1 << 20


@dataclass(slots=True)
class Member:
    """A file of a sample."""

    name: str
    content: bytes | None = None
    """None: not requested, or refused."""
    refused: str | None = None
    """Reason of the refusal, if any."""


@dataclass(slots=True)
class Group:
    """A sample: its members by extension in lower case."""

    key: str
    offset: int
    """Offset of its first header in the tar."""
    members: dict[str, Member] = field(default_factory=dict)


class DamagedTarError(Exception):
    """A tar cannot be read to its end; the message gives the reason and the offset."""


class BadSampleError(Exception):
    """A sample cannot be used; the message gives the reason."""


def groups(file: IO[bytes], kinds: Container[str] = KINDS) -> Iterator[Group]:
    """Yield the samples of a tar in order.

    Args:
        file: The tar, read from its current position to its end, with seeks if it is seekable.
        kinds: Extensions of the members to read.

    Raises:
        DamagedTarError: The tar is damaged; complete samples before the damage were yielded.
        OSError: The tar cannot be read.
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
                    raise tarfile.ReadError("data after the zero block that ends an archive")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DamagedTarError(f"{error}, after offset {offset}") from error


def _grouped(archive: tarfile.TarFile, kinds: Container[str]) -> Iterator[Group]:
    current = Group("", 0)
    while (header := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps all headers
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
    """Return the captions of a sample with its content read.

    Column ``text`` is the ``.txt`` member (one caption), otherwise ``caption`` or ``text`` in the ``.json`` member. Any
    other column is a field of the ``.json`` member.

    Raises:
        BadSampleError: The captions are missing or invalid.
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
    what = "txt member and no caption in a json member" if column == "text" else f"field {column!r} in a json member"
    raise BadSampleError(f"there is no {what}")


def label_of(group: Group) -> int:
    """Return the class in the ``.cls`` member of a sample; BadSampleError if it is missing or invalid."""
    if "cls" not in group.members:
        raise BadSampleError("there is no cls member")
    text = _text(group.members["cls"]).strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadSampleError(f"its class is {text[:40]!r}, expected a non-negative integer")
    return int(text)


def image_of(group: Group) -> bytes:
    """Return the image of a sample with its content read; BadSampleError unless there is exactly one."""
    images = [member for kind, member in group.members.items() if kind in IMAGE_EXTENSIONS]
    dotted = [member for kind, member in group.members.items() if kind not in KINDS]
    if dotted and not images:
        raise BadSampleError(
            f"{escape(dotted[0].name)} has more than one dot in its name, but a key ends at the first dot; rename it"
        )
    if len(images) != 1:
        raise BadSampleError(f"it has {len(images)} images among its members ({', '.join(group.members)}), expected 1")
    return _content(images[0])


def _split(name: str) -> tuple[str, str] | None:
    """Split a name at its first dot into key and extension, WebDataset's rule; None for files outside of samples.

    Images with two extensions (``1.mask.png``) are kept, to report a sample with a wrong name if it has no other image.
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
        member.refused = f"{escape(header.name)} is a link or a sparse file; repack the tar with regular files"
    elif header.size > most:
        member.refused = f"{escape(header.name)} has {header.size} bytes, expected at most {most}"
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
    """Return the fields of the ``.json`` member; empty if it is missing."""
    member = group.members.get("json")
    if member is None:
        return {}
    try:
        fields = json.loads(_text(member))
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"{escape(member.name)} is not valid JSON ({str(error)[:200]})") from error
    if not isinstance(fields, dict):
        raise BadSampleError(f"{escape(member.name)} is not a JSON object")
    return fields
