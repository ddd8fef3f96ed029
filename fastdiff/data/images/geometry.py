"""Where the pixels of a training image come from: resize and crop arithmetic, aspect-ratio buckets.

Sizes are ``(height, width)`` in pixels and offsets ``(top, left)``. Everything is integer arithmetic, so that every
decoder and every machine comes to the same placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Size = tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """Resize to ``resized``, then cut out ``size`` at ``crop``.

    Attributes:
        resized: Size of the whole image after the resize; covers ``size``.
        crop: Offset of the crop in the resized image, as SDXL's micro-conditioning counts it.
        size: Size of the crop.
        bucket: Number of the bucket that ``size`` belongs to, 0 without buckets.
    """

    resized: Size
    crop: tuple[int, int]
    size: Size
    bucket: int = 0


def area(size: Size) -> int:
    """Pixels of ``size``."""
    return size[0] * size[1]


def cover(size: Size, target: Size) -> Size:
    """Smallest size with the aspect ratio of ``size`` that covers ``target``, the longer part rounded down.

    For a square target this is torchvision's ``Resize(side)``: the short side becomes ``side``, the long one
    ``int(side * long / short)``.
    """
    (height, width), (target_height, target_width) = size, target
    if target_height * width >= target_width * height:
        return target_height, target_height * width // height
    return target_width * height // width, target_width


def center_offset(size: Size, target: Size) -> tuple[int, int]:
    """Offset of torchvision's ``CenterCrop``: half of what is too much, a half pixel rounded to the even one."""
    return round((size[0] - target[0]) / 2), round((size[1] - target[1]) / 2)


def random_offset(size: Size, target: Size, uniform: tuple[float, float]) -> tuple[int, int]:
    """Offset of a random crop from two numbers in [0, 1), each possible offset equally likely."""
    top, left = (int(u * (have - want + 1)) for u, have, want in zip(uniform, size, target, strict=True))
    return min(top, size[0] - target[0]), min(left, size[1] - target[1])  # a product may round up to the end


def adm_sizes(size: Size, side: int) -> tuple[Size, ...]:
    """Sizes that ADM's centre crop goes through: halved while both sides are at least ``2 * side``, then scaled.

    All but the last are reached with a box filter, the last one, whose short side is ``side``, with a bicubic one
    (``center_crop_arr`` of guided-diffusion, Dhariwal and Nichol 2021, which DiT and SiT train with).
    """
    sizes = []
    height, width = size
    while min(height, width) >= 2 * side:
        height, width = height // 2, width // 2
        sizes.append((height, width))
    scale = side / min(height, width)
    return *sizes, (round(height * scale), round(width * scale))


def adm_offset(size: Size, side: int) -> tuple[int, int]:
    """Offset of ADM's centre crop, a half pixel rounded down."""
    return (size[0] - side) // 2, (size[1] - side) // 2


def aspect_buckets(resolution: int, step: int = 64, ratio: float = 2.0) -> tuple[Size, ...]:
    """Sizes of about ``resolution`` squared pixels at many aspect ratios.

    For every long side that is a multiple of ``step`` the longest short side that keeps the area at most
    ``resolution ** 2``, upright and lying, as in NovelAI's aspect-ratio bucketing and SDXL (Podell et al. 2023,
    appendix I).

    Args:
        resolution: Square root of the largest area, at least ``step``.
        step: What all sides are multiples of, 1 or more.
        ratio: Largest long side over short side, at least 1.

    Returns:
        The sizes in ascending order; the square one is among them.

    Raises:
        ValueError: ``resolution``, ``step`` or ``ratio`` is smaller than that.
    """
    if step < 1 or resolution < step or not ratio >= 1:
        raise ValueError(
            f"aspect-ratio buckets of resolution {resolution}, step {step} and ratio {ratio}: expected a resolution "
            "of at least one step, a step of at least 1 and a ratio of at least 1"
        )
    found = set()
    long = resolution // step * step
    while (short := min(long, resolution**2 // long // step * step)) and long <= ratio * short:
        found |= {(short, long), (long, short)}
        long += step
    return tuple(sorted(found))


def nearest_bucket(size: Size, buckets: Sequence[Size]) -> int:
    """Number of the bucket whose aspect ratio is nearest to that of ``size``, the first one of equals.

    Near in the logarithm: by what factor one ratio must be stretched to become the other.
    """

    def stretch(bucket: Size) -> float:
        one, other = size[1] * bucket[0], size[0] * bucket[1]
        return max(one, other) / min(one, other)

    return min(range(len(buckets)), key=lambda number: stretch(buckets[number]))
