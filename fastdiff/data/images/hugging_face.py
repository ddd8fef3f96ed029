"""Images of a Hugging Face ``datasets`` data set, from a local folder or the hub."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.data.images.items import (
    LARGEST_IMAGE,
    BadCaptionError,
    BadItem,
    ImageItem,
    ImageSource,
    clean_captions,
    digest_of,
    stamp,
)
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.selection import Selection, Tally
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.files import read_bounded
from fastdiff.optional_packages import pip_install
from fastdiff.sanitize import escape
from fastdiff.terminal import redraws

if TYPE_CHECKING:
    from datasets import Dataset

_LABEL = "label"
_OF_ADDRESSES = frozenset({"url", "urls", "image_url"})
"""Columns with addresses of pictures, in lower case."""


class HuggingFaceSource(ImageSource):
    """A split of a data set with an image column, and a caption column or otherwise a ``label`` column of classes.

    With an image column alone, the images have neither.

    Args:
        options: The source is a folder written by ``save_to_disk``, a folder of parquet, arrow, JSON or CSV files, or a
            hub id. ``image_column`` holds images as bytes or paths, and ``reference_column`` those that each refers
            to, one or a list; they are not decoded here.

    Raises:
        ConfigError: ``datasets`` is not installed, or the split or a column does not exist.
        DataError: The data set does not exist or cannot be read.
    """

    def __init__(self, options: SourceOptions) -> None:
        path, config, split = options.source, options.dataset_config, options.split
        image_column, caption_column, caption = options.image_column, options.caption_column, options.caption
        self.name = f"data set {path}{f', configuration {config}' if config else ''}, split {split}"
        found = _load(path, split, config)
        import datasets

        if len(found) == 0:
            raise DataError(f"{self.name} holds no rows")
        self._image, self._caption, self._needs_captions = image_column, caption_column, options.needs_captions
        self._reference = options.reference_column
        # Rows may refer only to files that were downloaded with them or lie next to their folder.
        self._folders = [*_around(Path(path)), *(Path(str(each)).resolve() for each in _downloads(datasets.config))]
        self._has_column, self._substitute = caption_column in found.column_names, caption
        self.captioned = self._has_column or bool(caption)
        label = found.features.get(_LABEL)
        if not self.captioned and isinstance(label, datasets.ClassLabel):
            self.classes = label.num_classes
            self.class_names = tuple(map(escape, label.names))
        self._require_columns(found.features)
        described = caption_column if self._has_column else _LABEL if self.classes else None
        used = [image_column, *([described] if described else []), *([self._reference] if self._reference else [])]
        total, noted = len(found), Tally()
        if options.max_samples is not None:
            found = found.select(range(min(options.max_samples, len(found))))
        self._rows = self._undecoded(found.select_columns(used), image_column)
        if self._reference:
            self._rows = self._undecoded(self._rows, self._reference)
        self._in_arrow = self._rows.with_format("arrow")
        self._per_partition = options.samples_per_shard
        self.references = self._most_references() if self._reference else 0
        if total > len(found):
            noted.add(f"beyond --max-samples {options.max_samples}", count=total - len(found))
        self.selection = Selection(left_out=noted.counted())
        kind = f"datasets, {split}, {image_column}, {self._per_partition} per unit{f', {caption}' if caption else ''}"
        kind += f", {self.references} references in {self._reference}" if self._reference else ""
        self.digest = digest_of(kind, self._facts(described))

    def __len__(self) -> int:
        return len(self._rows)

    def stamps(self, partition: int) -> dict[str, Any] | None:
        """See ``ImageSource``: the fingerprint of ``datasets``, and the pictures that the rows name by path."""
        block = self._in_arrow[self._numbers(partition)]
        paths = [path for column in filter(None, (self._image, self._reference)) for path in _paths(block[column])]
        listed = {"": [self._rows._fingerprint, partition, self._per_partition]}
        return listed | {path: stamp(path) for path in sorted(paths)}

    def item(self, index: int) -> ImageItem | BadItem:
        """Return a row by number; StorageError if it cannot be read."""
        key, name = f"{index:09d}", f"{self.name}, row {index}"
        try:
            row: dict[str, Any] = self._rows[index]
        except OSError as error:
            raise StorageError(f"cannot read {name}: {error}; check its disk or network") from error
        try:
            image, references = self._bytes_of(row[self._image]), self._references_of(row)
            if self.captioned:
                captions = self._captions(row) if self._needs_captions else ()
                return ImageItem(key, name, image, captions, references=references)
            if self.classes is None:
                return ImageItem(key, name, image, references=references)
            label = row[_LABEL]
            if label is None or not 0 <= label < self.classes:
                raise _NoImageError(f"its class is {label}, expected 0 to {self.classes - 1}")
            return ImageItem(key, name, image, label=int(label), references=references)
        except (BadCaptionError, _NoImageError) as error:
            return BadItem(key, name, str(error))

    def most_captions(self, partition: int) -> int:
        """Return the largest number of captions per row in a partition, without reading images."""
        if not self._has_column:
            return int(self.captioned)
        try:
            cells = self._rows.select_columns([self._caption])[self._numbers(partition)][self._caption]
        except OSError as error:
            raise StorageError(f"cannot read {self.name}: {error}; check its disk or network") from error
        most = 0
        for cell in cells:
            with contextlib.suppress(BadCaptionError):  # reported by ``item``
                most = max(most, len(clean_captions(cell)))
        return most

    def _captions(self, row: dict[str, Any]) -> tuple[str, ...]:
        caption = row[self._caption] if self._has_column else None
        return clean_captions(self._substitute if caption is None and self._substitute else caption)

    def _undecoded(self, rows: Dataset, column: str) -> Dataset:
        """Return the rows with the files of a column of images, or of lists of them, instead of pixels."""
        import datasets

        image = datasets.Image(decode=False)
        of_lists = isinstance(rows.features[column], datasets.List | datasets.LargeList)
        try:
            return rows.cast_column(column, datasets.List(image) if of_lists and column == self._reference else image)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise DataError(
                f"{self.name}: column {column!r} does not hold images ({str(error)[:200]}); expected datasets.Image, "
                "bytes or paths"
            ) from error

    def _most_references(self) -> int:
        import pyarrow.compute  # type: ignore[import-untyped]

        if not hasattr(self._rows.features[self._reference], "feature"):
            return 1
        blocks = self._in_arrow.select_columns([self._reference]).iter(batch_size=10_000)
        most = [
            pyarrow.compute.max(pyarrow.compute.list_value_length(block[self._reference])).as_py() for block in blocks
        ]
        found = max((count or 0 for count in most), default=0)
        if not found:
            raise DataError(f"{self.name}: no row has a reference in the column {self._reference!r}")
        return found

    def _references_of(self, row: dict[str, Any]) -> tuple[bytes, ...]:
        if not self._reference:
            return ()
        cell = row[self._reference]
        cells = [each for each in (cell if isinstance(cell, list) else [cell]) if each is not None]
        if len(cells) < self.references:
            raise _NoImageError(f"it has {len(cells)} references in {self._reference}, others {self.references}")
        return tuple(map(self._bytes_of, cells))

    def _bytes_of(self, cell: dict[str, Any] | None) -> bytes:
        """Return the image file of a cell: its bytes, or the content of its path."""
        content, path = (None, "") if cell is None else (cell.get("bytes"), cell.get("path") or "")
        if content is None and not path:
            raise _NoImageError("its image is missing")
        if content is None:
            content = self._file(path)
        if len(content) > LARGEST_IMAGE:
            raise _NoImageError(f"its image has more than {LARGEST_IMAGE} bytes")
        return bytes(content)

    def _file(self, name: str) -> bytes:
        try:
            path = Path(name).resolve()
            if not any(path.is_relative_to(folder) for folder in self._folders):
                raise _NoImageError(f"its image {escape(name)} is outside the data set")
            return read_bounded(path, LARGEST_IMAGE)
        except FileNotFoundError as error:
            raise _NoImageError(f"its image {escape(name)} is missing") from error
        except OSError as error:
            where = escape(name)
            raise StorageError(f"cannot read {where}: {error.strerror}; check its disk or network") from error
        except ValueError as error:
            raise _NoImageError(f"its image {escape(name)} cannot be used: {error}") from error

    def _require_columns(self, features: Mapping[str, Any]) -> None:
        if self._image == self._caption:
            raise ConfigError(f"captions and images cannot both be in the column {self._image!r} of {self.name}")
        given = f"{self.name} has the columns {', '.join(features)}"
        if self._image not in features:
            addresses = any(name.lower() in _OF_ADDRESSES for name in features)
            hint = "; pictures are not fetched from addresses: download them first, for example with img2dataset"
            raise ConfigError(
                f"{given}, but no image column {self._image!r}; name it with --image-column{hint * addresses}"
            )
        if self._reference and self._reference not in features:
            raise ConfigError(f"{given}, but no column {self._reference!r} of references (--reference-column)")
        texts = [name for name, feature in features.items() if name != self._image and _holds_texts(feature)]
        alone = self._caption == "text" and not texts and _LABEL not in features
        if not self.captioned and self.classes is None and not alone:
            instead = f"; name that of the captions with --caption-column {texts[0]}" if texts else ""
            raise ConfigError(
                f"{given}, but no caption column {self._caption!r} and no ClassLabel column {_LABEL!r}{instead}"
            )

    def _facts(self, column: str | None) -> Iterator[object]:
        """Yield the content of the digest: captions or classes of all rows, read in blocks without images."""
        if column is None:
            yield ["nothing", len(self)]
            return
        yield [str(self._rows.features[column]), len(self)]
        for block in self._rows.select_columns([column]).iter(batch_size=10_000):
            yield block[column]


def _paths(cells: Any) -> list[str]:
    """Return the paths of the images without bytes in a column of arrow, of structs or of lists of them."""
    import pyarrow  # type: ignore[import-untyped]

    cells = cells.combine_chunks() if isinstance(cells, pyarrow.ChunkedArray) else cells
    cells = cells.flatten() if pyarrow.types.is_list(cells.type) else cells
    parts = dict(zip((part.name for part in cells.type), cells.flatten(), strict=True))
    return [path for path in parts["path"].filter(parts["bytes"].is_null()).to_pylist() if path]


def _holds_texts(feature: Any) -> bool:
    """Return whether a column holds texts or lists of texts."""
    return "string" in str(getattr(getattr(feature, "feature", feature), "dtype", ""))


class _NoImageError(Exception):
    """A row cannot be used; the message gives the reason."""


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of ``datasets`` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def holds_rows(file: str) -> bool:
    """Return whether the extension belongs to a file of rows."""
    return file.lower().endswith((".parquet", ".arrow", ".jsonl", ".json", ".csv"))


def _load(path: str, split: str, config: str | None) -> Dataset:
    """Load a split of a data set, from the cache of ``datasets`` if possible.

    Raises:
        ConfigError: ``datasets`` is not installed, or the split does not exist.
        DataError: The data set does not exist or cannot be read.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"reading the data set {path} needs the package datasets; {pip_install('datasets')}"
        ) from error
    if not redraws(sys.stderr):
        datasets.disable_progress_bars()
    folder = Path(path)
    if config is not None and is_saved_dataset(folder):
        raise ConfigError(f"{path} was saved as one data set, without configurations; leave {config} out")
    try:
        found = datasets.load_from_disk(path) if is_saved_dataset(folder) else datasets.load_dataset(path, config)
    except Exception as error:  # any kind: hub, network, parquet, JSON
        what = "its files are not a data set" if folder.is_dir() else "it is neither a local path nor an id of the hub"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError(f"cannot load the data set {path}: {what} ({reason})") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ConfigError(f"{path} has no split {split!r}; it has {', '.join(found)}")
        found = found[split]
    return found


def _around(folder: Path) -> list[Path]:
    """Return the parent of a local data set's folder, or the folder itself if the parent contains the home folder."""
    if not folder.is_dir():
        return []
    own = folder.resolve()
    return [own if Path.home().resolve().is_relative_to(own.parent) else own.parent]


def _downloads(config: Any) -> tuple[Any, ...]:
    """Return the folders of downloaded and unpacked files of ``datasets``, without the folder of the hub's token."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE
