"""Masks of pictures: the weight of each pixel in the loss, from mask files or from the alpha channel.

A mask gets the orientation, resize and crop of its picture. Its grey levels, 0 to 255, are resized by the average of
the pixels that become one (a box), so that a pixel whose surroundings are black stays black, whatever filter the
picture has. Colours of a mask file count by their brightness; its own alpha is ignored.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from fastdiff.data.images.decode import (
    LARGE_PIXELS,
    BadImage,
    Decoded,
    ImageTransform,
    Offset,
    each_offset,
    upright,
)
from fastdiff.data.images.geometry import area
from fastdiff.data.images.header import RefusedImageError, read_header
from fastdiff.data.images.items import ImageItem
from fastdiff.data.images.listing import Listing
from fastdiff.data.images.stream import Chunk
from fastdiff.data.images.walk import nfc
from fastdiff.data.selection import Tally
from fastdiff.errors import ConfigError, DataError
from fastdiff.sanitize import escape

ALPHA = "alpha"
"""In place of a folder: the alpha channel of each picture is its mask."""
Origin = Literal["alpha", "files"]
WITHOUT_ALPHA = "pictures without an alpha channel, which count as a whole"


def origin_of(masks: str) -> Origin | None:
    """Return where masks come from by the option that names it; None: there are none."""
    return None if not masks else "alpha" if masks == ALPHA else "files"


class MaskFiles:
    """The mask files in a folder, by the pictures that they belong to.

    The mask of ``a/b.jpg`` is ``a/b.png`` in the folder of masks or, if that is missing, ``b.png``; the ending may be
    that of any kind that is read.

    Args:
        folder: The folder of masks.
        images: Relative paths of the pictures.

    Raises:
        ConfigError: There is no such folder.
        DataError: A picture has two masks, or none of the pictures has one.
        StorageError: The folder cannot be read.
    """

    def __init__(self, folder: Path, images: Sequence[str]) -> None:
        if not folder.is_dir():
            raise ConfigError(f"--masks {escape(str(folder))}: no such folder; expected a folder of masks, or {ALPHA}")
        self.folder = folder
        self._listing = Listing.below(folder)
        by_stem: dict[str, list[str]] = {}
        for file in self._listing.images:
            by_stem.setdefault(_stem(file), []).append(file)
        self._of: dict[str, str] = {}
        self._users: dict[str, list[str]] = {}
        for image in images:
            stem = _stem(image)
            found = by_stem.get(stem) or by_stem.get(os.path.basename(stem)) or []
            if len(found) > 1:
                raise DataError(
                    f"{escape(str(folder))} holds {len(found)} masks of {escape(image)}: "
                    f"{escape(', '.join(found[:3]))}; keep one"
                )
            if found:
                self._of[image] = found[0]
                self._users.setdefault(found[0], []).append(image)
        if images and not self._of:
            raise DataError(
                f"--masks {escape(str(folder))} holds no mask of the {len(images)} pictures: expected for example "
                f"{escape(_stem(images[0]))}.png, of the size of {escape(images[0])}"
            )

    def of(self, image: str) -> str | None:
        """Return the relative path of the mask of a picture; None: it has none."""
        return self._of.get(image)

    def count(self, noted: Tally) -> None:
        """Count the masks that several pictures share, those of no picture, and what else the folder holds."""
        for file in self._listing.images:
            users = self._users.get(file, [])
            if len(users) != 1:
                noted.add("masks that several pictures share" if users else "masks of no picture, not read", file)
        for file in self._listing.others:
            noted.add("masks of a kind that is not read (convert to PNG)", file)
        for file in self._listing.files:
            noted.add("other files in the folder of masks", file)


class MaskDecoder:
    """A decoder of the masks of decoded pictures, on several threads.

    Args:
        origin: Whether a mask is the alpha channel of its picture or the file of its item.
        transform: Resize and crop of the pictures.
        threads: CPU threads, at least 1.
    """

    def __init__(self, origin: Origin, transform: ImageTransform, threads: int) -> None:
        self.origin, self._transform = origin, transform
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mask-decode")
        self._one_large = threading.RLock()

    def decode(
        self,
        items: Sequence[ImageItem],
        decoded: Sequence[Decoded | BadImage],
        offsets: Sequence[Offset] | None = None,
    ) -> list[Decoded | BadImage]:
        """Return the decoded pictures with their masks.

        Args:
            items: The pictures.
            decoded: Result of a decoder with the same transform for each of them.
            offsets: As the decoder got them.
        """
        return list(self._pool.map(self._with_mask, items, decoded, each_offset(offsets, len(items))))

    def add(self, chunk: Chunk) -> Chunk:
        """Return the pictures of a chunk with their masks, decoded without offsets."""
        items = [item for item, _ in chunk.images if isinstance(item, ImageItem)]
        decoded = [found for item, found in chunk.images if isinstance(item, ImageItem)]
        masked = iter(self.decode(items, decoded))
        images = [(item, next(masked) if isinstance(item, ImageItem) else found) for item, found in chunk.images]
        return replace(chunk, images=images)

    def _with_mask(self, item: ImageItem, decoded: Decoded | BadImage, offset: Offset | None) -> Decoded | BadImage:
        data = item.image if self.origin == "alpha" else item.mask
        if isinstance(decoded, BadImage) or data is None:
            return decoded
        try:
            header = read_header(data)
            with self._one_large if area(header.size) > LARGE_PIXELS else nullcontext():
                mask = self._levels(header.image)
                return decoded if mask is None else self._placed(mask, decoded, offset)
        except RefusedImageError as error:
            return BadImage(f"its mask cannot be used: {error}")

    def _levels(self, image: Image.Image) -> Image.Image | None:
        """Return the upright grey levels of a mask; None: the picture has no alpha channel."""
        if self.origin == "files":
            return upright(image, "RGB").convert("L")
        return upright(image, "RGBA").getchannel("A") if image.has_transparency_data else None

    def _placed(self, mask: Image.Image, decoded: Decoded, offset: Offset | None) -> Decoded | BadImage:
        (height, width), found = decoded.original_size, (mask.height, mask.width)
        if found != (height, width):
            return BadImage(f"its mask has {mask.width}x{mask.height} pixels, the picture {width}x{height}")
        place = self._transform.place(found, offset)
        resized = mask.resize((place.resized[1], place.resized[0]), Image.Resampling.BOX)
        top, left = place.crop
        cut = resized.crop((left, top, left + place.size[1], top + place.size[0]))
        return replace(decoded, mask=np.array(cut))


def on_latents(decoded: Decoded, factor: int) -> npt.NDArray[np.float16]:
    """Return the weights of the positions of a latent, ``[H / factor, W / factor]`` from 0 to 1: means over its pixels.

    A picture without a mask has 1 everywhere.
    """
    height, width = (side // factor for side in decoded.pixels.shape[:2])
    if decoded.mask is None:
        return np.ones((height, width), np.float16)
    means = decoded.mask.reshape(height, factor, width, factor).mean(axis=(1, 3))
    weights: npt.NDArray[np.float16] = (means / 255).astype(np.float16)
    return weights


def noted_masks(decoded: Decoded, masks: str) -> Iterator[str]:
    """Yield what a user should know of the mask of a picture, in words that a count follows; ``masks``: the option."""
    if decoded.mask is not None and not decoded.mask.any():
        yield "pictures with a mask of 0 everywhere after the crop, which train nothing"
    if decoded.mask is None and masks == ALPHA:  # missing files are counted by the listing
        yield WITHOUT_ALPHA


def _stem(path: str) -> str:
    return nfc(os.path.splitext(path)[0])
