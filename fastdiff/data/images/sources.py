"""From the text that a user gives as a source to the source."""

from __future__ import annotations

import glob
import re
from pathlib import Path, PurePosixPath

from fastdiff.data.images.folder import METADATA, ImageFolder, is_image, walk_files
from fastdiff.data.images.hugging_face import HuggingFaceSource, holds_rows, is_saved_dataset
from fastdiff.data.images.items import BadItem, ClassesFrom, ImageItem, ImageSource
from fastdiff.data.images.webdataset_tars import WebDatasetSource
from fastdiff.data.shards.remote import is_remote, list_folder, shown
from fastdiff.errors import ConfigError, DataError
from fastdiff.sanitize import escape

__all__ = ["BadItem", "ImageItem", "ImageSource", "open_source"]

_HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"


def open_source(
    text: str,
    *,
    samples_per_unit: int,
    image_column: str = "image",
    caption_column: str = "text",
    split: str = "train",
    max_samples: int | None = None,
    classes_from: ClassesFrom = "auto",
) -> ImageSource:
    """Find out what a source is, and open it.

    In this order: the address or path of one or more tars, braces expanded (``s3://bucket/{00000..00099}.tar``) and in
    a path wildcards too (``images/*.tar``), or of a folder of tars; a folder that ``datasets`` saved; a folder of
    images; a folder of parquet, arrow, JSON or CSV files; an id of the Hugging Face hub.

    Args:
        text: What the user gave.
        samples_per_unit: Images per unit where the source does not decide it; a tar is always one unit.
        image_column: Column of the images, in a data set.
        caption_column: Column or field of the captions.
        split: Which split, where there are several.
        max_samples: Only so many, the first ones.
        classes_from: Where the classes of a folder of images come from; auto: see ``ImageFolder``.

    Raises:
        ConfigError: A column or split does not exist, a package is missing, or the source cannot do what is asked.
        DataError: There is no such source, or nothing says what is on its images, or it holds tars and images.
        StorageError: It cannot be read.
    """
    if samples_per_unit < 1 or (max_samples is not None and max_samples < 1):
        raise ConfigError(f"{samples_per_unit} samples per unit and at most {max_samples} samples: from 1 on")
    tars, folder = _tars(text), Path(text)
    if tars is None and folder.is_dir() and not is_saved_dataset(folder) and not _holds_only_rows(folder):
        return ImageFolder(
            folder,
            samples_per_unit=samples_per_unit,
            caption_column=caption_column,
            split=split,
            max_samples=max_samples,
            classes_from=classes_from,
        )
    if tars is None and not folder.is_dir() and (folder.exists() or not re.fullmatch(_HUB_ID, text)):
        raise _no_source(text)
    name = shown(text) if is_remote(text) else escape(text)
    if classes_from != "auto":
        raise ConfigError(
            f"--classes-from {classes_from} is for a folder of images, and {name} is none; leave it out: tars and data "
            "sets say themselves of which class an image is"
        )
    if tars is not None:
        return WebDatasetSource(tars, name=name, caption_column=caption_column, max_samples=max_samples)
    return HuggingFaceSource(
        text,
        samples_per_unit=samples_per_unit,
        image_column=image_column,
        caption_column=caption_column,
        split=split,
        max_samples=max_samples,
    )


def _no_source(text: str) -> DataError:
    return DataError(
        f"{escape(text)} is no source: expected a folder of images, a folder or data set of Hugging Face's "
        "datasets, or tars of images (a path or address ending in .tar, with braces for several)"
    )


def _tars(text: str) -> list[str] | None:
    """Paths or addresses of the tars that are meant; None: something else is."""
    if re.match(r"[a-z0-9+.-]+://", text, re.IGNORECASE) and not is_remote(text):
        raise ConfigError(f"{shown(text)}: expected a path, or an address that begins with http://, https:// or s3://")
    is_tar = (shown(text) if is_remote(text) else text).lower().endswith(".tar")
    if is_tar:
        return [text] if Path(text).is_file() else [tar for each in _expanded(text) for tar in _matching(each)]
    if is_remote(text):
        return [file for folder in _expanded(text) for file in list_folder(folder) if file.lower().endswith(".tar")]
    tars = sorted(map(str, Path(text).glob("*.tar")))
    if tars and (image := next(filter(_is_of_images, walk_files(Path(text))), None)):
        raise DataError(
            f"{escape(text)} holds tars ({escape(Path(tars[0]).name)}) and images ({escape(image)}): for the "
            f"tars, give {escape(text.rstrip('/'))}/*.tar (in quotes); for the images, move the tars elsewhere"
        )
    return tars or None


def _is_of_images(file: str) -> bool:
    return is_image(file) or PurePosixPath(file).name in METADATA


def _matching(tar: str) -> list[str]:
    """The tars that a path with wildcards means, sorted; whatever has none stands for itself."""
    literal = is_remote(tar) or not glob.has_magic(tar) or Path(tar).exists()
    return [tar] if literal else sorted(glob.glob(tar))


def _expanded(text: str) -> list[str]:
    from braceexpand import braceexpand

    try:
        return list(braceexpand(text, escape=False))
    except ValueError as error:
        raise ConfigError(f"{shown(text)}: {error}; expected for example {{00000..00099}}.tar") from error


def _holds_only_rows(folder: Path) -> bool:
    """Whether there are files of rows and no images; an image that is met early saves the walk."""
    if any(map(is_image, walk_files(folder))):
        return False
    return any(holds_rows(file) for file in walk_files(folder) if Path(file).name not in METADATA)
