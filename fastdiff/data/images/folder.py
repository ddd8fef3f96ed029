"""Images in a folder, with captions from a metadata file or text files, or with classes."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fastdiff.data.images.items import (
    IMAGE_EXTENSIONS,
    LARGEST_IMAGE,
    LARGEST_TEXT,
    BadCaptionError,
    BadItem,
    ClassesFrom,
    ImageItem,
    clean_captions,
    digest_of,
    unit_count,
)
from fastdiff.data.selection import Selection
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.sanitize import escape

METADATA = ("metadata.jsonl", "metadata.csv")
LISTS = (".json", ".jsonl", ".csv")
"""Extensions of files of metadata that are a source by themselves."""

_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A listed image: its relative path, captions and class."""

    path: str
    captions: list[Any] | None = None
    """Unchecked values of the metadata; None: captions are in the image's text file, if any."""
    label: int | None = None


class ImageFolder:
    """A folder of images; by default its content decides the source of captions or classes.

    With ``metadata.jsonl`` or ``metadata.csv`` (Hugging Face's imagefolder), captions come from its rows, sorted by
    ``file_name``; several rows of a file are several captions. Otherwise, if any image has a text file of the same name
    (``a.jpg``, ``a.txt``), each of its non-empty lines is a caption. Otherwise each subfolder is a class, numbered in
    the order of the sorted names. Hidden files and files other than images are ignored.

    ``classes_from`` ignores captions and takes classes from: ``folder``, the subfolders as above; ``prefix``, the part
    of each file name before its first ``_``, numbered in sorted order, in any subfolder (as improved-diffusion, Nichol
    and Dhariwal 2021, arXiv:2102.09672); ``none``, no classes.

    Args:
        folder: The folder, or its parent if that holds only splits.
        samples_per_unit: Images per unit.
        caption_column: Column of the metadata with a caption or a list of captions.
        split: Name of the subfolder, if ``folder`` holds only splits.
        max_samples: Use only the first images, up to this number.
        classes_from: See above.
        metadata: File of metadata of images in ``folder``, instead of one in it; also a .json file with a list of rows.
        image_column: Column of ``metadata`` with the path of an image, absolute or below ``folder``, if it has no
            ``file_name``.

    Raises:
        ConfigError: The metadata has no such column, or the folder holds only other splits.
        DataError: The folder holds no images, or no captions or classes, or its metadata is not readable.
        StorageError: A folder or file cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        samples_per_unit: int,
        caption_column: str = "text",
        split: str = "train",
        max_samples: int | None = None,
        classes_from: ClassesFrom = "auto",
        metadata: Path | None = None,
        image_column: str = "file_name",
    ) -> None:
        self.root = folder if metadata else _root(folder, split)
        self.name = f"images {f'of {escape(str(metadata))} ' if metadata else ''}in {escape(str(self.root))}"
        self.class_names: tuple[str, ...] = ()
        self.captioned = False
        self._per_unit = samples_per_unit
        if metadata is not None:
            self.captioned = True
            entries = _rows(metadata, caption_column, image_column, self.root)
        else:
            entries = self._described(caption_column) if classes_from == "auto" else self._classified(classes_from)
        self.classes = len(self.class_names) or None
        self._entries = sorted(entries, key=lambda entry: entry.path)[:max_samples]
        facts = ([entry.path, entry.captions, entry.label] for entry in self._entries)
        kind = "" if self.captioned or self.classes else ", no captions"
        self.selection = Selection()
        self.digest = digest_of(f"folder, {samples_per_unit} per unit, {self.classes} classes{kind}", facts)

    @property
    def units(self) -> int:
        """Number of units."""
        return unit_count(len(self), self._per_unit)

    def __len__(self) -> int:
        """Return the number of listed images, missing ones included."""
        return len(self._entries)

    def found_in(self, unit: int) -> Selection:
        """See ``ImageSource``."""
        return Selection()

    def items(self, unit: int) -> Iterator[ImageItem | BadItem]:
        """Yield the images of a unit; StorageError if the storage fails."""
        for index in range(unit * self._per_unit, min((unit + 1) * self._per_unit, len(self))):
            yield self.item(index)

    def item(self, index: int) -> ImageItem | BadItem:
        """Return an image by number; StorageError if the storage fails."""
        entry, key = self._entries[index], f"{index:09d}"
        path = self.root / entry.path
        name = escape(str(path))
        try:
            _require_inside(entry.path)
            image = _read(path, LARGEST_IMAGE)
            captions = self._captions(entry)
        except (BadCaptionError, _BadFileError) as error:
            return BadItem(key, name, str(error))
        return ImageItem(key, name, image, captions, entry.label)

    def most_captions(self, unit: int) -> int:
        """Return the largest number of captions per image in a unit, without reading images."""
        most = 0
        for entry in self._entries[unit * self._per_unit : (unit + 1) * self._per_unit]:
            with contextlib.suppress(BadCaptionError, _BadFileError):  # reported by ``item``
                most = max(most, len(self._captions(entry)))
        return most

    def _captions(self, entry: _Entry) -> tuple[str, ...]:
        if not self.captioned:
            return ()
        text = (self.root / entry.path).with_suffix(".txt")
        return clean_captions(_lines(text) if entry.captions is None else entry.captions)

    def _described(self, caption_column: str) -> list[_Entry]:
        """List the images with captions if there are any, otherwise with classes by subfolder."""
        described = [name for name in METADATA if (self.root / name).is_file()]
        if len(described) > 1:
            raise DataError(f"{self.root} holds {' and '.join(described)}; keep only one")
        if described:
            self.captioned = True
            return _rows(self.root / described[0], caption_column)
        files, images = self._walk()
        if nested := [file for file in files if PurePosixPath(file).name in METADATA]:
            inner = (self.root / nested[0]).parent
            raise DataError(f"{inner} has its own metadata; give a folder with metadata as the source: {inner}")
        texts = {os.path.splitext(file)[0] for file in files if file.endswith(".txt")}
        if any(os.path.splitext(image)[0] in texts for image in images):
            self.captioned = True
            return [_Entry(image) for image in images]
        return self._by_folder(images)

    def _classified(self, classes_from: ClassesFrom) -> list[_Entry]:
        """List all images with classes by subfolder, by name prefix, or without classes."""
        _, images = self._walk()
        if classes_from == "folder":
            return self._by_folder(images)
        return self._by_prefix(images) if classes_from == "prefix" else [_Entry(image) for image in images]

    def _walk(self) -> tuple[list[str], list[str]]:
        """Return all files, and the images among them (at least one)."""
        files = sorted(walk_files(self.root))
        images = [file for file in files if is_image(file)]
        if not images:
            kinds = ", ".join(sorted(IMAGE_EXTENSIONS))
            raise DataError(f"{self.root} holds no images ({kinds}) among its {len(files)} files")
        return files, images

    def _by_prefix(self, images: list[str]) -> list[_Entry]:
        prefixes = []
        for image in images:
            prefix, underscore, _ = os.path.basename(image).partition("_")
            if not underscore:
                raise DataError(
                    f"{escape(str(self.root / image))} has no class before an underscore in its name, such as "
                    "cat_17.png; rename or remove it, or use --classes-from folder or none"
                )
            prefixes.append(prefix)
        names = sorted(set(prefixes))
        numbers = {name: number for number, name in enumerate(names)}
        self.class_names = tuple(map(escape, names))
        return [_Entry(image, label=numbers[prefix]) for image, prefix in zip(images, prefixes, strict=True)]

    def _by_folder(self, images: list[str]) -> list[_Entry]:
        names = sorted(entry.name for entry in _visible(self.root) if _is_folder(entry))
        numbers = {name: number for number, name in enumerate(names)}
        alone = [image for image in images if "/" not in image]
        if alone:
            raise DataError(
                f"{escape(str(self.root / alone[0]))} has neither caption nor class: expected metadata.jsonl or "
                "metadata.csv in the folder, a text file per image, or one subfolder per class; or use --classes-from "
                "prefix (of the file name) or none"
            )
        entries = [_Entry(image, label=numbers[image.partition("/")[0]]) for image in images]
        if empty := set(numbers.values()) - {entry.label for entry in entries}:
            name = escape(names[min(empty)])
            raise DataError(f"{self.root} has one subfolder per class, but {name} holds no images; fill or remove it")
        self.class_names = tuple(map(escape, names))
        return entries


class _BadFileError(Exception):
    """A file cannot be used as image or caption; the message gives the reason."""


def _require_inside(path: str) -> None:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
        raise _BadFileError("its path in the metadata leads out of the folder")


def is_image(path: str) -> bool:
    """Return whether the extension is an image's."""
    return os.path.splitext(path)[1][1:].lower() in IMAGE_EXTENSIONS


def walk_files(root: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder, unordered, except hidden ones; follow links, but no cycles.

    Raises:
        StorageError: A folder cannot be read.
    """
    folders: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]  # with the inodes of all parents
    while folders:
        prefix, above = folders.pop()
        status = (root / prefix).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            continue
        for entry in _visible(root / prefix):
            if _is_folder(entry):
                folders.append((f"{prefix}{entry.name}/", above | {identity}))
            else:
                yield prefix + entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link to itself


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from error


def _root(folder: Path, split: str) -> Path:
    """Return the folder, or its subfolder ``split`` if it holds only splits.

    Raises:
        ConfigError: It holds only other splits.
    """
    entries = _visible(folder)
    folders = {entry.name for entry in entries if _is_folder(entry)}
    if not folders or not folders <= _SPLITS | {split} or {entry.name for entry in entries} & set(METADATA):
        return folder
    if split not in folders:
        if any(is_image(entry.name) for entry in entries):
            return folder
        raise ConfigError(
            f"{folder} has no split {split!r}, only {', '.join(sorted(folders))}; choose one of these with --split, or "
            "give its folder as the source"
        )
    return folder / split


def _rows(path: Path, caption_column: str, image_column: str = "file_name", root: Path | None = None) -> list[_Entry]:
    """Read the entries of a metadata file, one per image; absolute paths below ``root`` become relative to it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    rows = list(_READERS[path.suffix.lower()](path, text))
    columns = list(dict.fromkeys(name for _, row in rows for name in row if name is not None))
    if not rows:
        raise DataError(f"{path} holds no rows")
    if caption_column not in columns:
        raise ConfigError(f"{path} has no caption column {caption_column!r}; its columns: {', '.join(columns)}")
    captions: dict[str, list[Any]] = {}
    top = None if root is None else os.path.abspath(root)
    for line, row in rows:
        column = "file_name" if "file_name" in row else image_column
        name = row.get(column)
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{path}, line {line}: {column} is {name!r}, expected the path of an image")
        value, image = row.get(caption_column), PurePosixPath(name)
        if top is not None and image.is_absolute() and image.is_relative_to(top):
            image = image.relative_to(top)
        captions.setdefault(str(image), []).extend(value if isinstance(value, list) else [value])
    return [_Entry(name, values) for name, values in captions.items()]


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: not valid JSON ({str(error)[:200]})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object with file_name, found {line[:80]!r}")
            yield number, row


def _json_list(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of one list, numbered from 1."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({str(error)[:200]})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a list of objects, each with the path of an image and a caption")
    yield from enumerate(rows, start=1)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    # A caption beyond csv's limit must only make its own image unusable.
    limit = csv.field_size_limit(max(len(text), 1))
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)


_READERS = {".json": _json_list, ".jsonl": _json_rows, ".csv": _csv_rows}


def _lines(path: Path) -> list[str]:
    """Return the non-empty lines of an image's text file, its captions."""
    try:
        text = _read(path, LARGEST_TEXT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _BadFileError(f"{path.name} is not UTF-8 ({error.reason} at byte {error.start})") from error
    lines = [line for line in re.split(r"\r\n|\r|\n", text) if line.strip()]
    if not lines:
        raise _BadFileError(f"{path.name} holds no caption")
    return lines


def _read(path: Path, most: int) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _BadFileError(f"{escape(path.name)} is not a file")
        if status.st_size > most:
            raise _BadFileError(f"{escape(path.name)} has {status.st_size} bytes, expected at most {most}")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _BadFileError(f"{escape(path.name)} is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _BadFileError(f"{escape(path.name)} is a link to itself") from error
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    where = escape(str(error.filename or path))
    return StorageError(f"cannot read {where}: {error.strerror}; check its permissions and its disk or network")
