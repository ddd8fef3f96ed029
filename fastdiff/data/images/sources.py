"""Recognition of a source from its command-line argument.

Kinds in the order of the checks: code of the user, ``PATH.py:NAME``, which is executed, or an installed plug-in if no
file has its name; tars, with braces (``s3://bucket/{00000..00099}.tar``) and, in paths, wildcards, or a folder of tars;
a file of metadata; a folder saved by ``datasets``; a folder of images; a folder of parquet, arrow, JSON or CSV files; a
Hugging Face hub id.
"""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fastdiff.config.networks.pretrained import HUB_ID
from fastdiff.data.images.folder import ImageFolder
from fastdiff.data.images.hugging_face import HuggingFaceSource, holds_rows, is_saved_dataset
from fastdiff.data.images.items import BadItem, ImageItem, ImageSource
from fastdiff.data.images.kinds import UNPACKED, Kind, ending_of, head_of, is_archive, kind_of_file
from fastdiff.data.images.listing import Listing
from fastdiff.data.images.metadata import LISTS, METADATA
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.user_source import UserSource
from fastdiff.data.images.walk import walk_files
from fastdiff.data.images.webdataset_tars import WebDatasetSource
from fastdiff.data.selection import Selection, Tally
from fastdiff.data.shards.remote import is_remote, list_folder, resource, shown
from fastdiff.errors import ConfigError, DataError, require
from fastdiff.plugins.user_code import installed, names_file
from fastdiff.sanitize import escape

__all__ = ["BadItem", "ImageItem", "ImageSource", "open_source"]

_MOST = 1_000_000
"""Largest number of names that braces may stand for."""


def open_source(options: SourceOptions) -> ImageSource:
    """Recognise the kind of a source, in the order that the module lists, and open it.

    Raises:
        ConfigError: A column or split does not exist, a package is missing, or the source does not read an option.
        DataError: The source does not exist, or holds both tars and images.
        StorageError: The source cannot be read.
    """
    text = options.source
    if names_file(text) or (not Path(text).exists() and text in installed("fastdiff.sources")):
        options.require_read("code")
        return UserSource(options)
    path, tars = Path(text), _tars(text)
    if tars is not None:
        options.require_read("tars")
        return WebDatasetSource(tars, options, beside=_beside(text, tars))
    if path.suffix.lower() in LISTS and path.is_file():
        options.require_read("table")
        return ImageFolder(Path(options.image_root or path.parent), options, metadata=path)
    if path.is_dir() and not is_saved_dataset(path) and not _holds_only_rows(path):
        options.require_read("folder")
        return ImageFolder(path, options)
    options.require_read("rows")
    if not path.is_dir() and (path.exists() or not re.fullmatch(HUB_ID, text)):
        raise _no_source(text)
    return HuggingFaceSource(options)


def count_images(text: str, **columns: str | None) -> int:
    """Count the images of a source, with ``columns`` of ``SourceOptions``; FastdiffError: they cannot be counted."""
    return len(open_source(SourceOptions(source=text, **columns)))  # type: ignore[arg-type]


def _no_source(text: str) -> DataError:
    hint = "; save a table with tabs as CSV with commas" if text.lower().endswith(".tsv") else ""
    return DataError(
        f"{escape(text)} is not a source{hint}: expected a folder of images, a file of metadata, a folder or hub id of "
        "Hugging Face's datasets, or tars of images (a path or address ending in .tar, with braces for several)"
    )


def _tars(text: str) -> list[str] | None:
    """Return the paths or addresses of the tars; None if the source is of another kind."""
    if re.match(r"[a-z0-9+.-]+://", text, re.IGNORECASE) and not is_remote(text):
        raise ConfigError(f"{shown(text)}: expected a path, or an address with http://, https:// or s3://")
    is_tar = (resource(text) if is_remote(text) else text).lower().endswith(".tar")
    if is_tar:
        return [text] if Path(text).is_file() else [tar for each in _expanded(text) for tar in _matching(each)]
    if is_remote(text):
        return [file for folder in _expanded(text) for file in list_folder(folder) if file.lower().endswith(".tar")]
    tars = sorted(str(path) for path in Path(text).glob("*") if path.suffix.lower() == ".tar")
    if tars and (image := next((file for file in walk_files(Path(text)) if _is_of_images(file, text)), None)):
        raise DataError(
            f"{escape(text)} holds tars ({escape(Path(tars[0]).name)}) and images ({escape(image)}): for the "
            f"tars, give {escape(text.rstrip('/'))}/*.tar (in quotes); for the images, move the tars elsewhere"
        )
    return tars or None


def _beside(text: str, tars: Sequence[str]) -> Selection:
    """Return what a folder of tars holds besides; it has no pictures that are read (``_tars``)."""
    folder, left_out, noted = Path(text), Tally(), Tally()
    if folder.is_dir():
        listing = Listing.below(folder)
        listing.count(left_out, noted)
        for file in sorted({*listing.files} - {os.path.relpath(tar, folder) for tar in tars}):
            is_tar = file.lower().endswith(".tar")
            packed = UNPACKED if is_archive(file) else "other files beside the tars"
            noted.add("tars in subfolders, not read" if is_tar else packed, file)
    return Selection(left_out=left_out.counted(), noted=noted.counted())


def _is_of_images(file: str, folder: str) -> bool:
    kind = _kind(file, folder)
    return PurePosixPath(file).name in METADATA or (kind is not None and kind.taken)


def _kind(file: str, folder: str) -> Kind | None:
    return kind_of_file(file, lambda: head_of(os.path.join(folder, file)))


def _matching(tar: str) -> list[str]:
    """Return the sorted matches of a path with wildcards; an address or existing path is returned unchanged."""
    literal = is_remote(tar) or not glob.has_magic(tar) or Path(tar).exists()
    return [tar] if literal else sorted(glob.glob(tar))


def _expanded(text: str) -> list[str]:
    from braceexpand import braceexpand

    try:
        most = _most_expansions(text)
        require(
            most <= _MOST, f"{shown(text)[:200]}: its braces stand for up to {most} names, at most {_MOST} are read"
        )
        return list(braceexpand(text, escape=False))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown(text)}: {error}; expected for example {{00000..00099}}.tar") from error


def _most_expansions(text: str) -> int:
    """Return an upper bound of the number of names that braces stand for, without writing them out."""
    most, commas = 1, [0]
    for character in text:
        if character == "{":
            commas.append(0)
        elif character == ",":
            commas[-1] += 1
        elif character == "}" and len(commas) > 1:
            most *= 1 + commas.pop()
    for low, high in re.findall(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])", text):
        ends = [ord(end) if end.isalpha() else int(end) for end in (low, high)]
        most *= abs(ends[1] - ends[0]) + 1
    return most


def _holds_only_rows(folder: Path) -> bool:
    """Return whether a folder holds files of rows and no pictures that are read; the first of these ends the walk.

    Pictures of other kinds count in a folder of pictures alone.
    """
    rows, others = [], False
    for file in walk_files(folder):
        kind = _kind(file, str(folder))
        if kind is not None and kind.taken:
            return False
        others = others or kind is not None
        if holds_rows(file) and Path(file).name not in METADATA:
            rows.append(file)
    return any(ending_of(file) in ("parquet", "arrow") for file in rows) or (bool(rows) and not others)
