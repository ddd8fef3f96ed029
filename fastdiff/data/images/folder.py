"""Images in a folder, with captions from a table or caption files, with classes, or alone."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fastdiff.data.images.caption_files import CaptionFiles, captions_in, endings_of, expected, is_like_captions
from fastdiff.data.images.items import (
    LARGEST_IMAGE,
    LARGEST_TEXT,
    BadCaptionError,
    BadItem,
    ImageItem,
    ImageSource,
    clean_captions,
    digest_of,
    stamp,
)
from fastdiff.data.images.kinds import READ, UNPACKED, is_archive
from fastdiff.data.images.listing import Listing
from fastdiff.data.images.masks import MaskFiles
from fastdiff.data.images.metadata import LISTS, METADATA, Table, read_table
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.references import ReferenceFiles
from fastdiff.data.images.walk import Names, is_folder, nfc, unreadable, visible
from fastdiff.data.selection import Selection, Tally
from fastdiff.errors import ConfigError, DataError, require
from fastdiff.sanitize import escape

_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
_UNREAD_TABLES = "tables, not read; a .json, .jsonl or .csv is read as the source, a .parquet in a folder of its own"
_TABLES = (*LISTS, ".tsv", ".parquet", ".arrow")
_REPEATED = re.compile(r"[1-9]\d{0,3}_(.+)", re.DOTALL)
"""A folder of kohya's sd-scripts: repeats, underscore, caption or class."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A listed image: its relative path, captions and class."""

    path: str
    captions: list[Any] | None = None
    """Unchecked captions; None: they are in ``text``, if the images have captions at all."""
    text: str | None = None
    """Relative path of its caption file."""
    label: int | None = None
    references: tuple[str, ...] = ()
    """Paths of the pictures that it refers to, relative to their folder."""
    mask: str | None = None
    """Relative path of its mask in the folder of masks."""


class ImageFolder(ImageSource):
    """A folder of images; by default its content decides the source of captions or classes.

    With ``metadata.jsonl`` or ``metadata.csv`` (Hugging Face's imagefolder), captions come from its rows, sorted by
    ``file_name``; several rows of a file are several captions. Otherwise, if any image has a caption file
    (``caption_files``), each of its non-empty lines is a caption. Otherwise each subfolder is a class. Images without
    subfolders have neither. An empty caption is the empty prompt. ``selection`` counts everything that is not taken.

    Classes are numbered in the order of their names in NFC, or of their numbers if all names are whole numbers; a class
    without images keeps its number.

    ``classes_from`` ignores captions and takes classes from: ``folder``, the subfolders as above; ``prefix``, the part
    of each file name before its first ``_``, in any subfolder (as improved-diffusion, Nichol and Dhariwal 2021,
    arXiv:2102.09672); ``none``, no classes.

    Args:
        folder: The folder, or its parent if that holds only splits.
        options: What is read. ``image_column`` is the column of the metadata with the path of an image, absolute or
            below ``folder``, if it has no ``file_name``. ``caption_from`` ``folder``: the name without the repeats of
            kohya's ``10_sks dog``. References are in a folder outside of ``folder`` (``references.py``), or, by
            ``reference_column``, below it or ``folder``. Mask files are in a folder outside of it (``masks.py``).
        metadata: File of metadata of images in ``folder``, instead of one in it; also a .json file with a list of rows.

    Raises:
        ConfigError: The metadata has no such column, or the folder holds only other splits.
        DataError: The folder holds no images, images beside class folders, metadata that are not readable, or no
            reference of any image.
        StorageError: A folder or file cannot be read.
    """

    def __init__(self, folder: Path, options: SourceOptions, *, metadata: Path | None = None) -> None:
        self.root = folder if metadata else _root(folder, options.split)
        self.name = f"images {f'of {escape(str(metadata))} ' if metadata else ''}in {escape(str(self.root))}"
        self.captioned = False
        self._options, self._per_partition = options, options.samples_per_shard
        self._names = Names(self.root)
        self._left_out, self._noted = Tally(), Tally()
        self._note_splits(folder)
        self._substitute = _substitute(self.root, options)
        self._reference_root = Path(options.references).absolute() if options.references else self.root
        entries = self._with_references(sorted(self._list(metadata), key=lambda entry: entry.path))
        max_samples = options.max_samples
        self.classes = len(self.class_names) or None
        self._entries = self._substituted(self._with_masks(entries)[:max_samples])
        for entry in self._entries if options.mask_folder else ():
            if entry.mask is None:
                self._noted.add("pictures without a mask, which count as a whole", entry.path)
        for entry in entries[max_samples:] if max_samples is not None else ():
            self._left_out.add(f"beyond --max-samples {max_samples}", entry.path)
        self._note_repeats(entries)
        self.selection = Selection(left_out=self._left_out.counted(), noted=self._noted.counted())
        facts = ([e.path, e.captions, e.label, *e.references, *_given(e.mask)] for e in self._entries)
        kind = "" if self.captioned or self.classes else ", no captions"
        self.digest = digest_of(f"folder, {self._per_partition} per unit, {self.classes} classes{kind}", facts)

    def __len__(self) -> int:
        """Return the number of listed images, missing ones included."""
        return len(self._entries)

    def stamps(self, partition: int) -> dict[str, Any] | None:
        """See ``ImageSource``."""
        entries = [self._entries[number] for number in self._numbers(partition)]
        facts = ([e.path, e.captions, e.text, e.label, *e.references, *_given(e.mask)] for e in entries)
        listed = digest_of("listed", facts)
        files = {file for entry in entries for file in self._files(entry)}
        return {"": listed} | {file: stamp(self.root / file) for file in sorted(files)}

    def _files(self, entry: _Entry) -> list[str]:
        """Return the relative paths of an image and its caption file, and the paths of its references and its mask."""
        reads_text = (
            self.captioned and self._options.needs_captions and entry.captions is None and entry.text is not None
        )
        references = [self._reference_root / reference for reference in entry.references]
        others = map(str, [*references, *_given(self._mask_path(entry))])
        return [entry.path, *([str(entry.text)] if reads_text else []), *others]

    def item(self, index: int) -> ImageItem | BadItem:
        """Return an image by number; StorageError if the storage fails."""
        entry, key = self._entries[index], f"{index:09d}"
        path = self.root / entry.path
        name = escape(str(path))
        try:
            _require_inside(entry.path)
            image = self._image(entry.path)
            captions = self._captions(entry)
            references = self._references(entry)
            mask = self._mask(entry)
        except (BadCaptionError, _BadFileError) as error:
            return BadItem(key, name, str(error))
        return ImageItem(key, name, image, captions, entry.label, references, mask)

    def most_captions(self, partition: int) -> int:
        """Return the largest number of captions per image in a partition, without reading images."""
        most = 0
        for number in self._numbers(partition):
            with contextlib.suppress(BadCaptionError, _BadFileError):  # reported by ``item``
                most = max(most, len(self._captions(self._entries[number])))
        return most

    def _image(self, path: str) -> bytes:
        try:
            return _read(self.root / path, LARGEST_IMAGE)
        except _MissingError as error:
            other = self._names.like(path)
            hint = f"; its folder has {escape(other)}" if other and other != os.path.basename(path) else ""
            raise _BadFileError(f"{error}{hint}") from error

    def _references(self, entry: _Entry) -> tuple[bytes, ...]:
        if len(entry.references) < self.references:
            stem = os.path.splitext(os.path.basename(entry.path))[0]
            raise _BadFileError(
                f"it has {len(entry.references)} references, others {self.references}: expected {escape(stem)}.png, "
                f"{escape(stem)}_1.png and so on in the folder of --references, or more in --reference-column"
            )
        for reference in entry.references:
            _require_inside(reference)
        return tuple(_read(self._reference_root / reference, LARGEST_IMAGE) for reference in entry.references)

    def _mask_path(self, entry: _Entry) -> Path | None:
        folder = self._options.mask_folder
        return None if folder is None or entry.mask is None else folder.absolute() / entry.mask

    def _mask(self, entry: _Entry) -> bytes | None:
        path = self._mask_path(entry)
        return None if path is None else _read(path, LARGEST_IMAGE)

    def _captions(self, entry: _Entry) -> tuple[str, ...]:
        if not (self.captioned and self._options.needs_captions):
            return ()
        if entry.captions is not None:
            return clean_captions(entry.captions)
        if entry.text is None:
            raise _BadFileError(f"it has no caption: expected {escape(self._expected(entry.path))}; or use --caption")
        return clean_captions(_lines(self.root / entry.text))

    def _expected(self, image: str) -> str:
        return expected(image, endings_of(self._options.caption_extension))

    def _list(self, metadata: Path | None) -> list[_Entry]:
        """List the images, count what is left out, and set ``captioned`` and ``class_names``."""
        if metadata is not None:
            table = self._table(metadata)
            listing = Listing.beside(self.root, table.captions)
            return self._by_table(metadata, table, listing)
        listing, classes_from = self._below(), self._options.classes_from
        described = [name for name in METADATA if name in listing.files] if classes_from == "auto" else []
        if len(described) > 1:
            raise DataError(f"{self.root} holds {' and '.join(described)}; keep only one")
        if described:
            path = self.root / described[0]
            return self._by_table(path, self._table(path), listing)
        if not listing.images:
            raise DataError(_no_images(listing))
        if classes_from == "auto":
            return self._described(listing)
        why = f"caption files, not read because of --classes-from {classes_from}"
        self._count_files(listing, [], lambda file: why)
        if classes_from == "folder":
            return self._by_folder(listing.images)
        return self._by_prefix(listing.images) if classes_from == "prefix" else list(map(_Entry, listing.images))

    def _below(self) -> Listing:
        """List the folder, with its subfolders unless only images directly in it count."""
        if not self._options.directly:
            return Listing.below(self.root)
        for image in Listing.below(self.root).images:
            if "/" in image:
                self._left_out.add("in subfolders, which kohya does not read", image)
        return Listing.beside(self.root, [""])

    def _table(self, path: Path) -> Table:
        options = self._options
        needed = options.needs_captions and self._substitute is None
        columns = options.caption_column, options.image_column
        column = options.reference_column
        return read_table(path, *columns, self.root, self._names, needs_captions=needed, reference_column=column)

    def _by_table(self, path: Path, table: Table, listing: Listing) -> list[_Entry]:
        self.captioned = table.captioned or self._substitute is not None
        own = os.path.relpath(path, self.root)
        entries = [
            _Entry(name, values, references=self._named(table.references[name]))
            for name, values in table.captions.items()
        ]
        rows = {os.path.normpath(row) for row in table.captions}
        if not self._options.references:
            rows |= {os.path.normpath(reference) for entry in entries for reference in entry.references}
        for image in listing.images:
            if image not in rows:
                self._left_out.add(f"without a row in {escape(path.name)}", image)
        listing.others = {file: kind for file, kind in listing.others.items() if file not in rows}
        why = f"caption files, not read because {escape(path.name)} has the captions"
        self._count_files(listing, [own], lambda file: why)
        return entries

    def _named(self, references: list[Any]) -> tuple[str, ...]:
        """Return the paths of references in a table as they are on the disk."""
        if wrong := [each for each in references if not isinstance(each, str) or not each.strip()]:
            raise DataError(f"the reference {wrong[0]!r} in {self._options.reference_column}: expected a path")
        names, top = Names(self._reference_root), self._reference_root.absolute()
        paths = (PurePosixPath(each) for each in references)
        return tuple(names.find(str(path.relative_to(top) if path.is_relative_to(top) else path)) for path in paths)

    def _with_references(self, entries: list[_Entry]) -> list[_Entry]:
        """Give each image its references, set their number, and count what their folder holds besides."""
        options = self._options
        if options.references and not options.reference_column:
            own, folder = (Path(os.path.realpath(path)) for path in (self.root, options.references))
            require(
                own not in (folder, *folder.parents),
                f"--references {options.references} is in the folder of the pictures, so that the references would be "
                "pictures, too; move it, or name them in a column of a file of metadata with --reference-column",
            )
            files = ReferenceFiles(Path(options.references), [entry.path for entry in entries])
            entries = [replace(entry, references=files.of(entry.path)) for entry in entries]
            files.count(self._noted)
        self.references = max((len(entry.references) for entry in entries), default=0)
        if (options.references or options.reference_column) and not self.references:
            stem = os.path.splitext(entries[0].path)[0] if entries else "NAME"
            raise DataError(
                f"none of the {len(entries)} pictures has a reference; expected for example {escape(stem)}.png in "
                f"{escape(str(self._reference_root))}, or the column of a file of metadata with --reference-column"
            )
        return entries

    def _described(self, listing: Listing) -> list[_Entry]:
        """List the images with captions if there are any, otherwise with classes by subfolder, otherwise alone."""
        if nested := [file for file in listing.files if PurePosixPath(file).name in METADATA]:
            inner = (self.root / nested[0]).parent
            raise DataError(f"{inner} has its own metadata; give a folder with metadata as the source: {inner}")
        texts = CaptionFiles(listing.files, listing.images, endings_of(self._options.caption_extension))
        self.captioned = bool(texts) or self._substitute is not None
        self._count_files(listing, texts.read, texts.why_unread)
        for text in texts.shared:
            self._noted.add("caption files that several pictures share", text)
        if self.captioned:
            return [_Entry(image, text=texts.of(image)) for image in listing.images]
        if any("/" in image for image in listing.images):
            return self._by_folder(listing.images)
        return list(map(_Entry, listing.images))

    def _count_files(self, listing: Listing, used: Iterable[str], why: Callable[[str], str]) -> None:
        """Count all files that are not read; ``why`` gives the reason for those that may hold captions."""
        listing.count(self._left_out, self._noted)
        taken = set(used)
        beside = {*listing.images, *(os.path.splitext(image)[0] for image in listing.images)}
        for file in listing.files:
            if file in taken:
                continue
            stem, ending = os.path.splitext(file)
            if is_archive(file):
                self._noted.add(UNPACKED, file)
            elif ending.lower() in _TABLES and stem not in beside:
                self._noted.add(_UNREAD_TABLES, file)
            elif is_like_captions(file):
                self._noted.add(why(file), file)
            else:
                self._noted.add("other files, which are no pictures", file)

    def _by_prefix(self, images: list[str]) -> list[_Entry]:
        prefixes = []
        for image in images:
            prefix, underscore, _ = os.path.basename(image).partition("_")
            if not underscore:
                raise DataError(
                    f"{escape(str(self.root / image))} has no class before an underscore in its name, such as "
                    "cat_17.png; rename or remove it, or use --classes-from folder or none"
                )
            prefixes.append(nfc(prefix))
        numbers = self._number(prefixes)
        return [_Entry(image, label=numbers[prefix]) for image, prefix in zip(images, prefixes, strict=True)]

    def _by_folder(self, images: list[str]) -> list[_Entry]:
        alone = [image for image in images if "/" not in image]
        if alone:
            raise DataError(
                f"{escape(str(self.root / alone[0]))} has neither caption nor class: expected metadata.jsonl or "
                "metadata.csv in the folder, a caption file per image (NAME.txt or NAME.caption), one subfolder per "
                "class, or no subfolders; or use --caption, or --classes-from prefix (of the file name) or none"
            )
        numbers = self._number(nfc(entry.name) for entry in visible(self.root) if is_folder(entry))
        entries = [_Entry(image, label=numbers[nfc(image.partition("/")[0])]) for image in images]
        full = {entry.label for entry in entries}
        for name, number in numbers.items():
            if number not in full:
                self._noted.add("class folders without pictures, which keep their numbers", name)
        return entries

    def _number(self, names: Iterable[str]) -> dict[str, int]:
        """Number the classes, and set their names."""
        found = set(names)
        order: Callable[[str], Any] = str
        if all(name.isascii() and name.isdecimal() for name in found):
            order = lambda name: (int(name), name)  # noqa: E731
        ordered = sorted(found, key=order)
        self.class_names = tuple(map(escape, ordered))
        return {name: number for number, name in enumerate(ordered)}

    def _substituted(self, entries: list[_Entry]) -> list[_Entry]:
        """Give each image without a caption of its own that of ``caption`` or ``caption_from``."""
        if self._substitute is None:
            return entries
        found = []
        for entry in entries:
            has_none = entry.text is None if entry.captions is None else all(each is None for each in entry.captions)
            if has_none:
                self._noted.add("pictures with the caption of --caption or --caption-from", entry.path)
                found.append(replace(entry, captions=[self._substitute(entry.path)]))
            else:
                self._noted.add(
                    "pictures with a caption of their own, which goes before --caption and --caption-from", entry.path
                )
                found.append(entry)
        return found

    def _with_masks(self, entries: list[_Entry]) -> list[_Entry]:
        """Give each image its mask file, if masks are files, and count what the folder of masks holds besides."""
        folder = self._options.mask_folder
        if folder is None:
            return entries
        own, masks = (Path(os.path.realpath(path)) for path in (self.root, folder))
        require(
            own not in (masks, *masks.parents),
            f"--masks {folder} is in the folder of the pictures, so that the masks would be pictures, too; move it",
        )
        files = MaskFiles(folder, [entry.path for entry in entries])
        files.count(self._noted)
        return [replace(entry, mask=files.of(entry.path)) for entry in entries]

    def _note_splits(self, folder: Path) -> None:
        if self.root.parent == folder:
            for image in Listing.beside(folder, [""]).images:
                self._left_out.add("beside the folders of the splits", image)
            for entry in visible(folder):
                if entry.name != self.root.name and is_folder(entry):
                    self._noted.add("splits beside the one of --split, not read", entry.name)

    def _note_repeats(self, entries: list[_Entry]) -> None:
        folders = dict.fromkeys(os.path.dirname(entry.path) for entry in entries)
        for folder in [self.root.name, *folders]:
            if _REPEATED.fullmatch(os.path.basename(folder)) and not self._options.directly:
                self._noted.add("folders named as with kohya's repeats: each picture counts once, not repeated", folder)


class _BadFileError(Exception):
    """A file cannot be used as image or caption; the message gives the reason."""


class _MissingError(_BadFileError):
    """A file is missing."""


def _given(value: Any) -> list[Any]:
    return [] if value is None else [value]


def without_repeats(name: str) -> str:
    """Return the name of a folder without kohya's repeats: ``sks dog`` of ``10_sks dog``."""
    found = _REPEATED.fullmatch(name)
    return found[1].strip() if found else name


def _substitute(root: Path, options: SourceOptions) -> Callable[[str], str] | None:
    """Return the caption by path of images that have none; None: there is none."""
    if options.caption_from == "folder":
        own = os.path.basename(os.path.abspath(root))
        return lambda path: without_repeats(os.path.basename(os.path.dirname(path)) or own)
    return (lambda path: options.caption) if options.caption else None


def _no_images(listing: Listing) -> str:
    others = listing.described_others()
    files = len(listing.files) + len(listing.others)
    packed = next(filter(is_archive, listing.files), None)
    told = [others, f"{UNPACKED} (first: {escape(packed)})" if packed else ""]
    why = "; ".join(filter(None, told))
    return f"{listing.root} holds no images ({READ}) among its {files} files{f': {why}' if why else ''}"


def _require_inside(path: str) -> None:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
        raise _BadFileError("its path in the metadata leads out of the folder")


def _root(folder: Path, split: str) -> Path:
    """Return the folder, or its subfolder ``split`` if it holds only splits; ConfigError if it holds only others."""
    entries = visible(folder)
    folders = {nfc(entry.name): entry.name for entry in entries if is_folder(entry)}
    if not folders or not set(folders) <= _SPLITS | {nfc(split)} or {entry.name for entry in entries} & set(METADATA):
        return folder
    if nfc(split) not in folders:
        if Listing.beside(folder, [""]).images:
            return folder
        raise ConfigError(
            f"{folder} has no split {split!r}, only {', '.join(sorted(folders))}; choose one of these with --split, or "
            "give its folder as the source"
        )
    return folder / folders[nfc(split)]


def _lines(path: Path) -> list[str]:
    """Return the captions in a caption file."""
    try:
        text = _read(path, LARGEST_TEXT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _BadFileError(f"{escape(path.name)} is not UTF-8 ({error.reason} at byte {error.start})") from error
    return captions_in(text)


def _read(path: Path, most: int) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _BadFileError(f"{escape(path.name)} is not a file")
        if status.st_size > most:
            raise _BadFileError(f"{escape(path.name)} has {status.st_size} bytes, expected at most {most}")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _MissingError(f"{escape(path.name)} is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _BadFileError(f"{escape(path.name)} is a link to itself") from error
        raise unreadable(path, error) from error
