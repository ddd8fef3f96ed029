"""Decoding of image files to RGB pixels of the training size, by Pillow or NVIDIA DALI.

The Pillow decoder is the reference. It gives the pixels of torchvision's transforms in diffusers'
``train_text_to_image`` (``convert("RGB")``, ``Resize``, ``CenterCrop`` or ``RandomCrop``) with two corrections: EXIF
rotations are applied, and 16-bit grey images are scaled instead of clipped.

- JPEG, PNG, WebP, GIF, BMP, TIFF and, with a Pillow that reads it, AVIF are supported; the first frame of an animation
  and the first page of a file count.
- CMYK is converted without a profile, with Adobe's inversion undone; ICC profiles are ignored.
- Alpha is dropped without compositing, as ``convert("RGB")`` does; palettes are resolved.
- 16-bit grey becomes ``round(v / 257)``; for 16-bit colour Pillow keeps the high byte, which differs by at most one
  level. TIFFs of 32-bit or floating-point levels are refused.
- An image smaller than the target is enlarged, even a single pixel.

A bad image gives a ``BadImage`` with the reason, never an exception. Changed bytes within a JPEG or lossy WebP give
wrong pixels, as in every decoder: these formats have no checksum.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from fastdiff.data.dali_trial import dali_problem
from fastdiff.data.images.geometry import (
    Placement,
    Size,
    adm_offset,
    adm_sizes,
    area,
    center_offset,
    cover,
    nearest_bucket,
    random_offset,
)
from fastdiff.data.images.header import RefusedImageError, check_pixels, describe, orientation, read_header
from fastdiff.errors import require

if TYPE_CHECKING:
    import torch

Pixels = npt.NDArray[np.uint8]
Crop = Literal["center", "adm", "random"]
Offset = tuple[float, float]

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "nearest_exact": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "lanczos": Image.Resampling.LANCZOS,
}
"""Filters by torchvision's names; for Pillow images its two nearest-neighbour filters are equal."""

LARGE_PIXELS = 2**25
"""Larger images are decoded one at a time, which limits the memory; otherwise each thread would hold one."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class ImageTransform:
    """The resize and crop of an image.

    Attributes:
        resolution: Side of the square result in pixels; unused with buckets.
        crop: ``center`` and ``random`` resize the short side to the resolution, or the image to cover its bucket;
            ``adm`` is ADM's centre crop with its own filters.
        interpolation: A name in ``FILTERS``.
        buckets: Sizes (h, w) in pixels; each image gets the nearest aspect ratio.

    Raises:
        ConfigError: A value is invalid, or ``adm`` is combined with buckets.
    """

    resolution: int
    crop: Crop
    interpolation: str
    buckets: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        require(self.resolution >= 1, f"resolution {self.resolution}: expected at least 1 pixel")
        require(self.crop in get_args(Crop), f"crop {self.crop!r}: expected one of {', '.join(get_args(Crop))}")
        require(
            self.interpolation in FILTERS, f"interpolation {self.interpolation!r}: expected one of {', '.join(FILTERS)}"
        )
        require(
            not (self.buckets and self.crop == "adm"),
            "crop adm makes only squares: use crop center or random with aspect-ratio buckets",
        )
        require(all(min(size) >= 1 for size in self.buckets), f"buckets {self.buckets}: expected sides of at least 1")

    def place(self, size: Size, offset: Offset | None) -> Placement:
        """Return the resize and crop of an upright image of ``size``.

        Args:
            size: Height and width in pixels.
            offset: Top and left in [0, 1) for a random crop.

        Raises:
            RefusedImageError: The resized image would be too large, because the aspect ratio is extreme.
            ValueError: A random crop has no offset.
        """
        bucket = nearest_bucket(size, self.buckets) if self.buckets else 0
        target = self.buckets[bucket] if self.buckets else (self.resolution, self.resolution)
        resized = adm_sizes(size, self.resolution)[-1] if self.crop == "adm" else cover(size, target)
        check_pixels(resized, f" after the resize of {size[1]}x{size[0]}")
        if self.crop == "adm":
            crop = adm_offset(resized, self.resolution)
        elif self.crop == "center":
            crop = center_offset(resized, target)
        elif offset is None:
            raise ValueError("a random crop needs offsets")
        else:
            crop = random_offset(resized, target, offset)
        return Placement(resized, crop, target, bucket)


@dataclass(frozen=True, eq=False)
class Decoded:
    """A decoded, resized and cropped image.

    Attributes:
        pixels: ``[H, W, 3]`` RGB uint8, C-contiguous.
        original_size: Height and width in pixels of the upright original.
        crop: Top and left of the crop in pixels of the resized image.
        bucket: Number of the transform's bucket, 0 without buckets.
        references: Of the pictures that it refers to, as ``pixels``.
        mask: ``[H, W]`` uint8, weight of each pixel in the loss times 255 (``masks.py``); None: it has no mask.
    """

    pixels: Pixels
    original_size: Size
    crop: tuple[int, int]
    bucket: int
    references: tuple[Pixels, ...] = ()
    mask: Pixels | None = None


@dataclass(frozen=True)
class BadImage:
    """The reason why an image cannot be used."""

    reason: str


class Decoder(Protocol):
    """A decoder of image files; not thread-safe.

    Attributes:
        name: ``pillow``, ``dali`` or ``dali-cuda``; each is reproducible, but their pixels differ.
        by_pillow: Images that Pillow decoded in its stead.
    """

    name: str
    by_pillow: int

    def decode(self, images: Sequence[bytes], offsets: Sequence[Offset] | None = None) -> list[Decoded | BadImage]:
        """Decode, resize and crop.

        Args:
            images: Content of the files.
            offsets: Top and left of each random crop, in [0, 1); unused by other crops.

        Returns:
            One result per image, independent of the other images.
        """


class PillowDecoder:
    """The reference decoder, on several threads (Pillow releases the GIL)."""

    name = "pillow"
    by_pillow = 0

    def __init__(self, transform: ImageTransform, threads: int) -> None:
        self._transform = transform
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="image-decode")
        self._one_large = threading.RLock()

    def decode(self, images: Sequence[bytes], offsets: Sequence[Offset] | None = None) -> list[Decoded | BadImage]:
        """See ``Decoder``."""
        return self.decode_each(list(zip(images, each_offset(offsets, len(images)), strict=True)))

    def decode_each(self, jobs: Sequence[tuple[bytes, Offset | None]]) -> list[Decoded | BadImage]:
        """Decode pairs of a file and the offset of its random crop."""
        return list(self._pool.map(self._decode, *zip(*jobs, strict=True))) if jobs else []

    def _decode(self, data: bytes, offset: Offset | None) -> Decoded | BadImage:
        try:
            header = read_header(data)
            with self._turn(header.size):
                image = upright(header.image, "RGB")
                size = image.height, image.width
                place = self._transform.place(size, offset)
                with self._turn(place.resized):
                    image = _resize(image, place.resized, self._transform)
                top, left = place.crop
                image = image.crop((left, top, left + place.size[1], top + place.size[0]))
                return Decoded(np.array(image), size, place.crop, place.bucket)
        except RefusedImageError as error:
            return BadImage(str(error))

    def _turn(self, size: Size) -> AbstractContextManager[object]:
        return self._one_large if area(size) > LARGE_PIXELS else nullcontext()


class DaliDecoder:
    """The DALI decoder for plain images; Pillow decodes images for which decoders differ."""

    def __init__(self, transform: ImageTransform, threads: int, *, on_cuda: bool = False) -> None:
        from fastdiff.data.images.decode_dali import DaliPixels

        self._transform = transform
        self._dali = DaliPixels(transform.interpolation, threads, on_cuda=on_cuda)
        self._pillow = PillowDecoder(transform, threads)
        self.name = self._dali.name
        self.by_pillow = 0

    def decode(self, images: Sequence[bytes], offsets: Sequence[Offset] | None = None) -> list[Decoded | BadImage]:
        """See ``Decoder``."""
        from fastdiff.data.images.decode_dali import Job

        each = each_offset(offsets, len(images))
        results: list[Decoded | BadImage | None] = [None] * len(images)
        jobs: dict[int, Job] = {}
        for number, data in enumerate(images):
            try:
                header = read_header(data)
                if header.plain:
                    jobs[number] = Job(data, header.size, self._transform.place(header.size, each[number]))
            except RefusedImageError as error:
                results[number] = BadImage(str(error))
        for (number, job), pixels in zip(jobs.items(), self._dali.decode(list(jobs.values())), strict=True):
            if pixels is not None:
                results[number] = Decoded(pixels, job.size, job.placement.crop, job.placement.bucket)
        rest = [number for number, result in enumerate(results) if result is None]
        self.by_pillow += len(rest)
        by_pillow = iter(self._pillow.decode_each([(images[number], each[number]) for number in rest]))
        return [next(by_pillow) if result is None else result for result in results]


def open_decoder(
    name: Literal["auto", "dali", "pillow"], transform: ImageTransform, threads: int, device: torch.device | None = None
) -> Decoder:
    """Open a decoder.

    Args:
        name: Decoder; ``auto`` is DALI if it works here and supports the crop and the filter, otherwise Pillow.
        transform: Resize and crop.
        threads: CPU threads, at least 1.
        device: GPU on which DALI decodes; None: the CPU.

    Raises:
        ConfigError: DALI is requested and does not work here, or does not support the crop or the filter.
    """
    if name == "pillow":
        return PillowDecoder(transform, threads)
    on_cuda = device is not None and device.type == "cuda"
    missing = dali_problem(on_cuda) or _unsupported(transform)
    if missing is None:
        return DaliDecoder(transform, threads, on_cuda=on_cuda)
    require(name == "auto", f"--decode dali: {missing}; or use --decode pillow")
    return PillowDecoder(transform, threads)


def _unsupported(transform: ImageTransform) -> str | None:
    """Return what DALI does not support, where it is installed."""
    from fastdiff.data.images.decode_dali import can_resize

    if transform.crop == "adm":
        return "DALI does not support crop adm"
    if not can_resize(transform.interpolation):
        return f"DALI does not support interpolation {transform.interpolation}"
    return None


def each_offset(offsets: Sequence[Offset] | None, images: int) -> Sequence[Offset | None]:
    """Return the offset of each of so many images; ValueError: their numbers differ."""
    if offsets is None:
        return [None] * images
    if len(offsets) != images:
        raise ValueError(f"{len(offsets)} offsets for {images} images")
    return offsets


def upright(image: Image.Image, mode: Literal["RGB", "RGBA"]) -> Image.Image:
    """Decode the pixels to upright 8-bit RGB, without or with alpha; RefusedImageError if the data are damaged."""
    try:
        image.load()
        turn = _UPRIGHT.get(orientation(image))  # after load: a PNG may store EXIF after the pixels
        if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
            grey = (np.asarray(image).astype(np.uint32) + 128) // 257
            image = Image.fromarray(grey.astype(np.uint8))
        if image.mode != mode:
            if mode == "RGB":
                image.info.pop("transparency", None)  # dropped like alpha; Pillow warns about it in palettes
            image = image.convert(mode)
    except MemoryError:
        raise
    except Exception as error:  # on damaged bytes Pillow raises nearly anything
        raise RefusedImageError(f"cannot be decoded: {describe(error)}") from error
    return image if turn is None else image.transpose(turn)


def _resize(image: Image.Image, size: Size, transform: ImageTransform) -> Image.Image:
    """Resize to height and width ``size``; for crop ``adm`` in ADM's steps."""
    last = FILTERS[transform.interpolation]
    if transform.crop == "adm":
        for height, width in adm_sizes((image.height, image.width), transform.resolution)[:-1]:
            image = image.resize((width, height), Image.Resampling.BOX)
        last = Image.Resampling.BICUBIC
    return image.resize((size[1], size[0]), last)
