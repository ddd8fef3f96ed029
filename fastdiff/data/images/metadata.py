"""Tables of images and their captions: ``metadata.jsonl``, ``metadata.csv``, or a file that is a source by itself.

A .json file holds a list of rows, or the metadata of kohya's sd-scripts: an object by image with ``caption`` and
``tags``. Lines of a .jsonl with ``image_path`` and one of these are kohya's, too.
"""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fastdiff.data.images.kinds import kind_of_name
from fastdiff.data.images.walk import Names, unreadable
from fastdiff.errors import ConfigError, DataError
from fastdiff.sanitize import escape

METADATA = ("metadata.jsonl", "metadata.csv")
LISTS = (".json", ".jsonl", ".csv")
"""Endings of tables that are a source by themselves."""
FILE_NAME = "file_name"

_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_Row = tuple[int, dict[str, Any]]
"""Line, or number in a list, and values by column."""


@dataclass(frozen=True, slots=True)
class Table:
    """The images of a table in the order of their first rows, and their captions, unchecked.

    Attributes:
        captions: By relative path as it is on the disk, or as in the table if no such file is there.
        captioned: Whether it has the column of captions.
        references: By the same paths, those in the column of references, unchecked.
    """

    captions: dict[str, list[Any]]
    captioned: bool
    references: dict[str, list[Any]]


def read_table(
    path: Path,
    caption_column: str,
    image_column: str,
    root: Path,
    names: Names,
    *,
    needs_captions: bool = True,
    reference_column: str = "",
) -> Table:
    """Read a table.

    Args:
        path: The file.
        caption_column: Column with a caption, or a list of them; several rows of one image are several captions.
        image_column: Column with the path of an image, absolute or below ``root``, if there is no ``file_name``.
        root: Folder of the images.
        names: Finds files below it.
        needs_captions: Whether a table without the column of captions is refused.
        reference_column: Column with the path of a reference, or a list of paths; empty: none.

    Raises:
        ConfigError: It has no column of images, of captions or of references.
        DataError: It is damaged: with the line.
        StorageError: It cannot be read.
    """
    rows = list(_READERS[path.suffix.lower()](path, _text(path)))
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    if not rows:
        raise DataError(f"{path} holds no rows")
    image_column = FILE_NAME if FILE_NAME in columns else image_column
    captioned = caption_column in columns
    if image_column not in columns:
        raise _no_images(path, columns)
    if not captioned and needs_captions:
        raise ConfigError(
            f"{path} has no caption column {caption_column!r}; its columns: {', '.join(columns)}"
            f"{_instead('--caption-column', columns, _LIKE_CAPTIONS)}"
        )
    if reference_column and reference_column not in columns:
        raise ConfigError(f"{path} has no column {reference_column!r} of references; its columns: {', '.join(columns)}")
    captions: dict[str, list[Any]] = {}
    references: dict[str, list[Any]] = {}
    top = os.path.abspath(root)
    for line, row in rows:
        name = row.get(image_column)
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{path}, line {line}: {image_column} is {name!r}, expected the path of an image")
        value, image = row.get(caption_column), PurePosixPath(name)
        if image.is_absolute() and image.is_relative_to(top):
            image = image.relative_to(top)
        found = names.picture(str(image))
        captions.setdefault(found, []).extend(value if isinstance(value, list) else [value])
        given = row.get(reference_column) or []
        given = given if isinstance(given, list) else [given]
        if references.setdefault(found, given) != given:
            raise DataError(f"{path}, line {line}: {name} has other references in an earlier row; give the same in all")
    return Table(captions, captioned, references)


_LIKE_IMAGES = ("filename", "file", "image", "images", "img", "image_path", "imagepath", "path", "image_file", "name")
_LIKE_CAPTIONS = ("text", "caption", "captions", "prompt", "description", "tags", "label", "title", "alt_text")


def _no_images(path: Path, columns: Sequence[str]) -> ConfigError | DataError:
    """Return the error for a table without a column of images: a wrong separator, no header, or another name."""
    if wrong := _wrong_header(path, columns):
        return wrong
    return ConfigError(
        f"{path} has no column {FILE_NAME!r} of images; its columns: {_shown(columns)}"
        f"{_instead('--image-column', columns, _LIKE_IMAGES) or '; name that of the images with --image-column'}"
    )


def _shown(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns[:8]))


def _wrong_header(path: Path, columns: Sequence[str]) -> DataError | None:
    """Return the error for a first line with another separator, or with the values of a row; None: it has names."""
    if len(columns) == 1 and (found := [mark for mark in _SEPARATORS if mark in columns[0]]):
        return DataError(
            f"{path}, line 1: its columns are separated by {_SEPARATORS[found[0]]} ({columns[0][:80]!r}), expected "
            "commas; save it as CSV with commas, and with quotes around captions that hold commas"
        )
    if any(kind_of_name(name.strip()) for name in columns):
        return DataError(
            f"{path}, line 1: {_shown(columns)} is no header; expected a first line such as {FILE_NAME},text"
        )
    return None


def _instead(flag: str, columns: Sequence[str], alike: Sequence[str]) -> str:
    """Return the flag with the column that was probably meant; empty if none is alike."""
    plain = {re.sub(r"[\s_-]", "", name).lower(): name for name in reversed(columns)}
    found = next((plain[key] for key in (each.replace("_", "") for each in alike) if key in plain), None)
    if found is None:
        return ""
    return f"; use {flag} {found!r}" if re.search(r"[^\w.-]", found) else f"; use {flag} {found}"


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16, expected UTF-8; convert it (in Excel: save as CSV UTF-8)")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error


def _json_rows(path: Path, text: str) -> Iterator[_Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: not valid JSON ({str(error)[:200]})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object with file_name, found {line[:80]!r}")
            yield number, _row_of_kohya(row["image_path"], row) | row if _is_line_of_kohya(row) else row


def _json_list(path: Path, text: str) -> Iterator[_Row]:
    """Yield the rows of one list, numbered from 1."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({str(error)[:200]})") from error
    if isinstance(rows, dict) and rows and all(map(_is_of_kohya, rows.values())):
        yield from enumerate(_rows_of_kohya(rows), start=1)
        return
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a list of objects, each with the path of an image and a caption")
    yield from enumerate(rows, start=1)


def _is_of_kohya(value: Any) -> bool:
    """Return whether a value is that of an image in the metadata of kohya's sd-scripts: captions and tags as texts."""
    return isinstance(value, dict) and all(isinstance(value.get(name, ""), str | None) for name in _OF_KOHYA)


def _rows_of_kohya(metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of metadata by image; the tags follow the caption behind a comma, as there."""
    for name, value in metadata.items():
        yield _row_of_kohya(name, value)


def _row_of_kohya(name: Any, value: dict[str, Any]) -> dict[str, Any]:
    parts = [value.get(part) or "" for part in _OF_KOHYA]
    return {FILE_NAME: name, "text": ",".join(filter(None, parts)).split("\n")[0]}


def _is_line_of_kohya(row: dict[str, Any]) -> bool:
    named = "image_path" in row and not row.keys() & {FILE_NAME, "text"}
    return named and bool(row.keys() & {*_OF_KOHYA}) and _is_of_kohya(row)


_OF_KOHYA = ("caption", "tags")


def _csv_rows(path: Path, text: str) -> Iterator[_Row]:
    # A caption beyond csv's limit must only make its own image unusable.
    limit = csv.field_size_limit(max(len(text), 1))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = _without_empty_end(next(reader, []))
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise DataError(f"{path}, line 1: the column {twice[0]!r} is there twice; rename or remove one")
        if wrong := _wrong_header(path, header):
            raise wrong
        for values in reader:
            if values:
                yield reader.line_num, dict(zip(header, _fitting(path, reader.line_num, header, values), strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _fitting(path: Path, line: int, header: Sequence[str], values: Sequence[str]) -> Sequence[str]:
    """Return one value per column; DataError if the row has more or fewer."""
    if len(values) > len(header):
        values = [*values[: len(header)], *_without_empty_end(values[len(header) :])]
    if len(values) == len(header):
        return values
    shown = escape(",".join(values))[:120]
    remedy = "add the missing ones, an empty one as nothing between two commas"
    if len(values) > len(header):
        remedy = 'put quotes around a caption with commas, without a blank before them: 1.jpg,"a red shoe, on a table"'
    fields = "1 field" if len(values) == 1 else f"{len(values)} fields"
    names = ",".join(header)
    raise DataError(f"{path}, line {line}: {fields} ({shown}), its header has {len(header)} ({names}); {remedy}")


def _without_empty_end(values: Sequence[str]) -> list[str]:
    """Return the fields without the empty ones at the end, which spreadsheets append."""
    kept = list(values)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


_READERS = {".json": _json_list, ".jsonl": _json_rows, ".csv": _csv_rows}
