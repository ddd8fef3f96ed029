"""Samples in tars of WebDataset's layout: consecutive members with one key form a sample.

Members are neither unpickled nor extracted to disk. Python's tarfile silently ends at a damaged or missing header; here
that is an error, because all later samples would be lost.
"""

import contextlib
import json
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Literal, TypeAlias

from fastdiff.data.images.caption_files import ENDINGS as CAPTIONS
from fastdiff.data.images.items import LARGEST_IMAGE, LARGEST_TEXT, BadCaptionError, clean_captions
from fastdiff.data.images.kinds import ENDINGS, TAKEN, USUAL, not_read
from fastdiff.data.images.walk import nfc, within_other_program
from fastdiff.data.selection import Tally
from fastdiff.data.shards.integrity import StrictHeader
from fastdiff.sanitize import escape

TEXTS = frozenset({*CAPTIONS, "json"})
"""Extensions of the members with captions."""
KINDS = TAKEN | TEXTS | {"cls"}
"""Extensions of the members in use."""

Use: TypeAlias = Literal["captions", "classes", "nothing"]
"""What of a sample beside its picture is read."""
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
    others: list[str] = field(default_factory=list)
    """Names of its pictures of kinds that are not read."""


@dataclass
class Leftovers:
    """Counts of the members of a tar that no sample uses."""

    left_out: Tally = field(default_factory=Tally)
    noted: Tally = field(default_factory=Tally)


class DamagedTarError(Exception):
    """A tar cannot be read to its end; the message gives the reason and the offset."""


class BadSampleError(Exception):
    """A sample cannot be used; the message gives the reason."""


class NoCaptionError(BadSampleError):
    """A sample has no caption, or null."""


def groups(file: IO[bytes], kinds: Container[str] = KINDS, leftovers: Leftovers | None = None) -> Iterator[Group]:
    """Yield the samples of a tar in order.

    Args:
        file: The tar, read from its current position to its end, with seeks if it is seekable.
        kinds: Extensions of the members to read.
        leftovers: Counts the members before the end that no sample uses.

    Raises:
        DamagedTarError: The tar is damaged; complete samples before the damage were yielded.
        OSError: The tar cannot be read.
    """
    offset = 0
    mode: Literal["r|", "r:"] = "r:" if file.seekable() else "r|"
    try:
        with tarfile.open(fileobj=file, mode=mode, tarinfo=StrictHeader, bufsize=_BLOCK) as archive:
            for group in _grouped(archive, kinds, leftovers or Leftovers()):
                yield group
                offset = archive.offset
            offset = archive.offset
            assert archive.fileobj is not None
            while block := archive.fileobj.read(_BLOCK):
                if any(block):
                    raise tarfile.ReadError("data after the zero block that ends an archive")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DamagedTarError(f"{error}, after offset {offset}") from error


def _grouped(archive: tarfile.TarFile, kinds: Container[str], leftovers: Leftovers) -> Iterator[Group]:
    current = Group("", 0)
    while (header := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps all headers
        parts = None if header.isdir() else _split(header.name, leftovers)
        if parts is None:
            continue
        key, kind = parts
        if nfc(key) != nfc(current.key) or kind in current.members:
            _count(current, leftovers)
            if current.members:
                yield current
            current = Group(key, header.offset)
        if _is_of_other_kind(kind):
            current.others.append(header.name)
        else:
            if not current.members:
                current.offset = header.offset
            current.members[kind] = _member(archive, header, kind, kind.rpartition(".")[2] in kinds)
    _count(current, leftovers)
    if current.members:
        yield current


def _count(group: Group, leftovers: Leftovers) -> None:
    """Count the pictures that a sample does not use."""
    used = _images(group)
    if used or not group.members:  # otherwise the sample is refused, and its message names them
        for name in group.others:
            leftovers.left_out.add(not_read(ENDINGS[name.lower().rpartition(".")[2]]), name)
    if len(used) == 1:
        for kind, member in group.members.items():
            if kind not in used and kind.rpartition(".")[2] in TAKEN:
                leftovers.left_out.add("beside the picture of their sample", member.name)


def _images(group: Group) -> list[str]:
    """Return the extensions of the images of a sample."""
    return [kind for kind in group.members if kind in USUAL] or [kind for kind in group.members if kind in TAKEN]


def captions_of(group: Group, column: str) -> tuple[str, ...]:
    """Return the captions of a sample with its content read.

    Column ``text`` is the ``.txt`` member, the ``.caption`` member or the member of a name such as ``1.png.txt`` (one
    caption), otherwise ``caption`` or ``text`` in the ``.json`` member. Any other column is a field of that member.

    Raises:
        NoCaptionError: There is none, or it is null.
        BadSampleError: The captions are invalid.
    """
    try:
        if column == "text" and (texts := _caption_members(group)):
            return clean_captions(_text(texts[0]))
        fields = _fields(group)
        for name in ("caption", "text") if column == "text" else (column,):
            if name in fields:
                if fields[name] is None:
                    raise NoCaptionError(f"its {name} is null in {escape(group.members['json'].name)}")
                return clean_captions(fields[name])
    except BadCaptionError as error:
        raise BadSampleError(str(error)) from error
    what = "txt member and no caption in a json member" if column == "text" else f"field {column!r} in a json member"
    raise NoCaptionError(f"there is no {what}")


def _caption_members(group: Group) -> list[Member]:
    """Return the members that are captions, the one to take first."""
    plain = [group.members[ending] for ending in CAPTIONS if ending in group.members]
    return plain + [member for kind, member in group.members.items() if _is_named_after_image(kind)]


def unread_texts(group: Group, column: str, use: Use) -> Iterator[tuple[str, str]]:
    """Yield what a sample says and ``use`` does not take: the reason, and the name of the member.

    A ``.json`` member counts only with a caption, and beside another one if it differs: img2dataset writes both.
    """
    alone = "not read: the first samples are pictures alone"
    texts = _caption_members(group)
    in_json = [(group.members["json"].name, captions) for captions in _captions_in_json(group)]
    if use != "classes" and "cls" in group.members:
        yield f"class members, {alone if use == 'nothing' else 'not read beside captions'}", group.members["cls"].name
    if use != "captions":
        why = f"caption members, {alone if use == 'nothing' else 'not read beside classes'}"
        yield from ((why, name) for name in (*(text.name for text in texts), *(name for name, _ in in_json)))
    elif column != "text":
        yield from (
            (f"caption members, not read: the captions are {column!r} in .json members", text.name) for text in texts
        )
    elif texts:
        yield from (("caption members beside another one of their picture, not read", text.name) for text in texts[1:])
        with contextlib.suppress(BadSampleError):
            taken = captions_of(group, column)
            why = "captions in .json members that differ from those beside them, not read"
            yield from ((why, name) for name, captions in in_json if captions != taken)


def _captions_in_json(group: Group) -> Iterator[tuple[str, ...]]:
    """Yield the captions of the ``.json`` member, if it has some."""
    with contextlib.suppress(BadSampleError, BadCaptionError):
        fields = _fields(group)
        named = next((fields[name] for name in ("caption", "text") if fields.get(name)), None)
        if named is not None:
            yield clean_captions(named)


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
    images = _images(group)
    if len(images) == 1:
        return _content(group.members[images[0]])
    dotted = [member for kind, member in group.members.items() if "." in kind and not _is_named_after_image(kind)]
    if dotted and not images:
        raise BadSampleError(
            f"{escape(dotted[0].name)} has more than one dot in its name, but a key ends at the first dot; rename it"
        )
    if group.others and not images:
        name = group.others[0]
        raise BadSampleError(f"{escape(name)} is {not_read(ENDINGS[name.lower().rpartition('.')[2]])}")
    raise BadSampleError(f"it has {len(images)} images among its members ({', '.join(group.members)}), expected 1")


def _split(name: str, leftovers: Leftovers) -> tuple[str, str] | None:
    """Split a name at its first dot into key and extension, WebDataset's rule; None for files outside of samples.

    Images with two extensions (``1.mask.png``) are kept, to report a sample with a wrong name if it has no other image.
    """
    if within_other_program(name):
        leftovers.noted.add("hidden, or of other programs: ignored", name)
        return None
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    kind = kind.lower()
    if not stem or not dot or not (kind in KINDS or kind.rpartition(".")[2] in ENDINGS or _is_named_after_image(kind)):
        leftovers.noted.add("other members, not read", name)
        return None
    return folder + slash + stem, kind


def _is_named_after_image(kind: str) -> bool:
    """Return whether an extension such as ``png.txt`` is that of a caption."""
    image, _, ending = kind.rpartition(".")
    return image in TAKEN and ending in CAPTIONS


def _is_of_other_kind(kind: str) -> bool:
    """Return whether an extension is that of a picture of a kind that is not read."""
    ending = kind.rpartition(".")[2]
    return ending in ENDINGS and ending not in TAKEN


def _member(archive: tarfile.TarFile, header: tarfile.TarInfo, kind: str, wanted: bool) -> Member:
    member = Member(header.name)
    most = LARGEST_IMAGE if kind in TAKEN else LARGEST_TEXT
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
