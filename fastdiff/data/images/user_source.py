"""A source of images that is a user's code: ``PATH.py:NAME``, a class or function that returns a sequence.

Item ``i`` of the sequence is a dict: ``image``, a PIL image, an array ``[H, W]`` or ``[H, W, 3]`` uint8, a path, or the
content of an image file; and ``label``, a class, or ``caption``, a text or several. All items have the same fields.
With labels the sequence has an attribute ``classes``, their number, and may have ``class_names``.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from fastdiff.data.images.items import (
    LARGEST_IMAGE,
    BadCaptionError,
    BadItem,
    ImageItem,
    ImageSource,
    clean_captions,
    digest_of,
)
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.selection import Selection, Tally
from fastdiff.errors import ConfigError, require
from fastdiff.files import read_bounded
from fastdiff.plugins.user_code import Plugin, load
from fastdiff.sanitize import escape


class UserSource(ImageSource):
    """The images of a user's sequence, read by number.

    Args:
        options: the source is ``PATH.py:NAME``, or the name of an installed plug-in.

    Raises:
        ConfigError: it cannot be opened, or item 0 or the last item is not as described, or differs when it is read
            again.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.name = options.name
        self._plugin: Plugin = load(options.source, "fastdiff.sources", "source")
        self._per_partition, max_samples = options.samples_per_shard, options.max_samples
        with self._plugin.blamed(self.name):
            self._items: Any = self._plugin.found() if callable(self._plugin.found) else self._plugin.found
            self._count = len(self._items)
        require(self._count > 0, f"{self.name}: it has no items")
        left_out = Tally()
        if max_samples is not None and (more := self._count - max_samples) > 0:
            left_out.add(f"beyond --max-samples {max_samples}", count=more)
            self._count = max_samples
        first = self._raw(0)
        self.captioned = "caption" in first
        if not self.captioned:
            self._read_classes(first)
        for index in {0, self._count - 1}:
            self._check(index)
        facts = [self._plugin.identity, self._count]
        self.selection = Selection(left_out=left_out.counted())
        self.digest = digest_of(f"plug-in, {self._per_partition} per unit", facts)

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> ImageItem | BadItem:
        """Return an image by number; a ``BadItem`` also if the user's code raises an exception."""
        key, name = f"{index:09d}", f"{self.name}[{index}]"
        try:
            item = self._raw(index)
        except ConfigError as error:
            return BadItem(key, name, str(error))
        try:
            image = self._bytes_of(item["image"], name)
            if self.captioned:
                return ImageItem(key, name, image, clean_captions(item.get("caption")))
            label = item.get("label")
            if self.classes is None:
                return ImageItem(key, name, image)
            if not isinstance(label, int | np.integer) or not 0 <= label < self.classes:
                return BadItem(key, name, f"its label is {label!r}, expected 0 to {self.classes - 1}")
            return ImageItem(key, name, image, label=int(label))
        except (BadCaptionError, OSError, ValueError) as error:
            return BadItem(key, name, str(error))

    def most_captions(self, partition: int) -> int:
        """Return the largest number of captions per image in a partition."""
        items = self.items(partition) if self.captioned else ()
        return max((len(item.captions) for item in items if isinstance(item, ImageItem)), default=0)

    def _read_classes(self, first: dict[str, Any]) -> None:
        if "label" not in first:
            return
        self.classes = getattr(self._items, "classes", None)
        require(
            type(self.classes) is int and self.classes >= 1,
            f"{self.name}: its items have a label, so it needs an attribute classes, their number; it is "
            f"{self.classes!r}",
        )
        self.class_names = tuple(escape(str(name)) for name in getattr(self._items, "class_names", ()))
        require(
            not self.class_names or len(self.class_names) == self.classes,
            f"{self.name}: {len(self.class_names)} class_names for {self.classes} classes",
        )

    def _raw(self, index: int) -> dict[str, Any]:
        with self._plugin.blamed(f"{self.name}[{index}]"):
            item = self._items[index]
        fields = set(item) if isinstance(item, dict) else set()
        if "image" not in fields or fields - {"image", "label", "caption"} or {"label", "caption"} <= fields:
            shown = f"a dict of {', '.join(map(str, item))}" if isinstance(item, dict) else f"a {type(item).__name__}"
            raise ConfigError(
                f"{self.name}[{index}] is {shown}, expected a dict with an image, and a label or a caption"
            )
        found: dict[str, Any] = item
        return found

    def _check(self, index: int) -> None:
        """Require that an item can be read, and is the same when it is read again: it follows from its number."""
        self._raw(index)  # its errors are told as they are
        once, again = self.item(index), self.item(index)
        if isinstance(once, BadItem):
            raise ConfigError(f"{once.name}: {once.reason}")
        require(
            once == again,
            f"{once.name} is another image, label or caption when it is read again; an item must follow from its "
            "number alone (random crops and flips are made by the encoding and the training)",
        )

    def _bytes_of(self, image: Any, name: str) -> bytes:
        """Return the file of an image; one in memory becomes a PNG, which loses nothing."""
        if isinstance(image, str | Path):
            return read_bounded(Path(image), LARGEST_IMAGE)
        if isinstance(image, bytes):
            return image
        from PIL import Image as pillow

        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.shape[2:] not in ((), (1,), (3,)) or image.ndim not in (2, 3):
                raise ValueError(f"its image is {image.dtype} {image.shape}, expected uint8 [H, W] or [H, W, 3]")
            image = pillow.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
        if not isinstance(image, pillow.Image):
            raise ValueError(f"its image is a {type(image).__name__}, expected a PIL image, an array, a path or bytes")
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()
