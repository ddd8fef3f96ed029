"""Image files to RGB pixels of the training's size, by Pillow or NVIDIA DALI.

The Pillow decoder is the reference: what torchvision's transforms of diffusers' ``train_text_to_image`` make of the
same file (``convert("RGB")``, ``Resize``, ``CenterCrop`` or ``RandomCrop``), apart from two kinds of image that they
get wrong: those that EXIF says are rotated are turned upright, and 16-bit grey ones are scaled and not clipped.

- JPEG, PNG and WebP are read; the first frame of an animated one.
- CMYK is converted without a profile, Adobe's inversion undone; ICC profiles are ignored.
- Alpha is dropped and not composited, as ``convert("RGB")`` does; palettes are looked up.
- 16-bit grey is ``round(v / 257)``; of 16-bit colour Pillow keeps the high byte, at most one level from that.
- An image smaller than the target is enlarged, one of a single pixel too.

A bad image is a ``BadImage`` with the reason, never an exception. Bytes that are changed in the middle of a JPEG or a
lossy WebP show as wrong pixels, as in every decoder: these formats have no checksum.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

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
"""torchvision's names; on Pillow's images its two nearest neighbours are the same."""

LARGE_PIXELS = 2**25
"""Images above that are decoded one at a time, else as many of them as there are threads would be in memory."""

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
    """Resize and crop.

    Attributes:
        resolution: Side of the square result in pixels; without meaning if there are buckets.
        crop: ``center`` and ``random`` resize the short side to the resolution, or so that the bucket is covered;
            ``adm`` is ADM's centre crop, which brings its own filters.
        interpolation: A name in ``FILTERS``.
        buckets: Sizes (h, w) in pixels, of which each image gets the one of the nearest aspect ratio.

    Raises:
        ConfigError: A value that is none of these, or ``adm`` with buckets.
    """

    resolution: int
    crop: Crop
    interpolation: str
    buckets: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        require(self.resolution >= 1, f"resolution {self.resolution}: expected at least one pixel")
        require(self.crop in get_args(Crop), f"crop {self.crop!r}: expected one of {', '.join(get_args(Crop))}")
        require(
            self.interpolation in FILTERS,
            f"interpolation {self.interpolation!r}: expected one of {', '.join(FILTERS)}",
        )
        require(
            not (self.buckets and self.crop == "adm"),
            "crop adm makes squares only: use crop center or random with aspect-ratio buckets",
        )
        require(all(min(size) >= 1 for size in self.buckets), f"buckets {self.buckets}: expected at least one pixel")

    def place(self, size: Size, offset: Offset | None) -> Placement:
        """Where the result lies in an upright image of ``size``.

        Args:
            size: Height and width in pixels.
            offset: For a random crop, top and left in [0, 1).

        Raises:
            RefusedImageError: The resized image would be too large: the image is too long for its width.
            ValueError: A random crop without an offset.
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
    """An image, ready for the VAE.

    Attributes:
        pixels: ``[H, W, 3]`` RGB uint8, C-contiguous.
        original_size: Height and width in pixels of the upright image in the file.
        crop: Top and left of the crop in pixels of the resized image.
        bucket: Number of the transform's bucket, 0 without buckets.
    """

    pixels: Pixels
    original_size: Size
    crop: tuple[int, int]
    bucket: int


@dataclass(frozen=True)
class BadImage:
    """An image that cannot be used, and why."""

    reason: str


class Decoder(Protocol):
    """Turns files into pixels; one thread at a time may use it.

    Attributes:
        name: ``pillow``, ``dali`` or ``dali-cuda``; each gives the same bytes on every run, not those of another.
    """

    name: str

    def decode(self, images: Sequence[bytes], offsets: Sequence[Offset] | None = None) -> list[Decoded | BadImage]:
        """Decode, resize and crop.

        Args:
            images: Files.
            offsets: Of the random crops, two numbers in [0, 1) for each image; other crops need none.

        Returns:
            One result per image, which does not depend on the other images.
        """


class PillowDecoder:
    """The reference, on several threads (Pillow lets go of the interpreter lock while it computes)."""

    name = "pillow"

    def __init__(self, transform: ImageTransform, threads: int) -> None:
        self._transform = transform
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="image-decode")
        self._one_large = threading.RLock()

    def decode(self, images: Sequence[bytes], offsets: Sequence[Offset] | None = None) -> list[Decoded | BadImage]:
        """See ``Decoder``."""
        return self.decode_each(list(zip(images, _each(offsets, len(images)), strict=True)))

    def decode_each(self, jobs: Sequence[tuple[bytes, Offset | None]]) -> list[Decoded | BadImage]:
        """Decode pairs of a file and the offset of its random crop."""
        return list(self._pool.map(self._decode, *zip(*jobs, strict=True))) if jobs else []

    def _decode(self, data: bytes, offset: Offset | None) -> Decoded | BadImage:
        try:
            header = read_header(data)
            with self._turn(header.size):
                image = _upright_rgb(header.image)
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
    """DALI for plain images, Pillow for those of which decoders make different pixels."""

    def __init__(self, transform: ImageTransform, threads: int) -> None:
        from fastdiff.data.images.decode_dali import DaliPixels

        self._transform = transform
        self._dali = DaliPixels(transform.interpolation, threads)
        self._pillow = PillowDecoder(transform, threads)
        self.name = self._dali.name

    def decode(self, images: Sequence[bytes], offsets: Sequence[Offset] | None = None) -> list[Decoded | BadImage]:
        """See ``Decoder``."""
        from fastdiff.data.images.decode_dali import Job

        each = _each(offsets, len(images))
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
        rest = (number for number, result in enumerate(results) if result is None)
        by_pillow = iter(self._pillow.decode_each([(images[number], each[number]) for number in rest]))
        return [next(by_pillow) if result is None else result for result in results]


def open_decoder(name: Literal["auto", "dali", "pillow"], transform: ImageTransform, threads: int) -> Decoder:
    """Choose a decoder.

    Args:
        name: ``auto`` is DALI where it is installed and has the crop and the filter, else Pillow.
        transform: Resize and crop.
        threads: CPU threads, at least 1.

    Raises:
        ConfigError: DALI is asked for and is not installed, or does not have the crop or the filter.
    """
    if name == "pillow":
        return PillowDecoder(transform, threads)
    try:
        from fastdiff.data.images.decode_dali import can_resize
    except ModuleNotFoundError:
        missing = "NVIDIA DALI is not installed; pip install 'nvidia-dali-cuda130>=2.4,<3' or"
    else:
        if transform.crop != "adm" and can_resize(transform.interpolation):
            return DaliDecoder(transform, threads)
        what = "crop adm" if transform.crop == "adm" else f"interpolation {transform.interpolation}"
        missing = f"DALI has nothing equal to {what};"
    require(name == "auto", f"--decode dali: {missing} use --decode pillow")
    return PillowDecoder(transform, threads)


def _each(offsets: Sequence[Offset] | None, images: int) -> Sequence[Offset | None]:
    if offsets is None:
        return [None] * images
    if len(offsets) != images:
        raise ValueError(f"{len(offsets)} offsets for {images} images")
    return offsets


def _upright_rgb(image: Image.Image) -> Image.Image:
    """Decode the pixels, turn them upright, 8-bit RGB.

    Raises:
        RefusedImageError: The data is damaged.
    """
    try:
        image.load()
        turn = _UPRIGHT.get(orientation(image))  # after load: a PNG may have its EXIF behind the pixels
        if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
            grey = (np.asarray(image).astype(np.uint32) + 128) // 257
            image = Image.fromarray(grey.astype(np.uint8))
        if image.mode != "RGB":
            image.info.pop("transparency", None)  # dropped as alpha is; Pillow warns of it in palettes
            image = image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # on damaged bytes Pillow raises nearly anything
        raise RefusedImageError(f"cannot be decoded: {describe(error)}") from error
    return image if turn is None else image.transpose(turn)


def _resize(image: Image.Image, size: Size, transform: ImageTransform) -> Image.Image:
    """Resize to height and width ``size``, on ADM's way there if that is the crop."""
    last = FILTERS[transform.interpolation]
    if transform.crop == "adm":
        for height, width in adm_sizes((image.height, image.width), transform.resolution)[:-1]:
            image = image.resize((width, height), Image.Resampling.BOX)
        last = Image.Resampling.BICUBIC
    return image.resize((size[1], size[0]), last)
