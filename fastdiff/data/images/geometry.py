"""Geometry of resize and crop, and aspect-ratio buckets.

Sizes are ``(height, width)`` in pixels, offsets are ``(top, left)``. All arithmetic is in integers, so that every
decoder and every machine gets the same placement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Size = tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """A resize to ``resized`` and a crop of ``size`` at ``crop``.

    Attributes:
        resized: Size of the whole image after the resize; covers ``size``.
        crop: Offset of the crop in the resized image, as in SDXL's micro-conditioning.
        size: Size of the crop.
        bucket: Number of the bucket of ``size``, 0 without buckets.
    """

    resized: Size
    crop: tuple[int, int]
    size: Size
    bucket: int = 0


def area(size: Size) -> int:
    """Return the number of pixels of ``size``."""
    return size[0] * size[1]


def cover(size: Size, target: Size) -> Size:
    """Return the smallest size that covers ``target`` with the aspect ratio of ``size``; its long side is rounded down.

    For a square target this is torchvision's ``Resize(side)``: the short side becomes ``side``, the long one
    ``int(side * long / short)``.
    """
    (height, width), (target_height, target_width) = size, target
    if target_height * width >= target_width * height:
        return target_height, target_height * width // height
    return target_width * height // width, target_width


def center_offset(size: Size, target: Size) -> tuple[int, int]:
    """Return the offset of torchvision's ``CenterCrop``: half of the excess, rounded half to even."""
    return round((size[0] - target[0]) / 2), round((size[1] - target[1]) / 2)


def random_offset(size: Size, target: Size, uniform: tuple[float, float]) -> tuple[int, int]:
    """Return the offset of a random crop for two numbers in [0, 1); all possible offsets are equally likely."""
    top, left = (int(u * (have - want + 1)) for u, have, want in zip(uniform, size, target, strict=True))
    return min(top, size[0] - target[0]), min(left, size[1] - target[1])  # the product may round up to the end


def adm_sizes(size: Size, side: int) -> tuple[Size, ...]:
    """Return the sizes of ADM's centre crop: halved while both sides are at least ``2 * side``, then scaled.

    The halvings use a box filter. The last size, with a short side of ``side``, uses a bicubic filter
    (``center_crop_arr`` of guided-diffusion, Dhariwal and Nichol 2021, also used by DiT and SiT).
    """
    sizes = []
    height, width = size
    while min(height, width) >= 2 * side:
        height, width = height // 2, width // 2
        sizes.append((height, width))
    scale = side / min(height, width)
    return *sizes, (round(height * scale), round(width * scale))


def adm_offset(size: Size, side: int) -> tuple[int, int]:
    """Return the offset of ADM's centre crop, rounded down."""
    return (size[0] - side) // 2, (size[1] - side) // 2


def buckets_within(resolution: int, step: int, sides: tuple[int, int]) -> tuple[Size, ...]:
    """Return sizes of at most ``resolution ** 2`` pixels whose sides are multiples of ``step`` within limits.

    For each side its other one is the longest within area and limits, in both orientations: the resolutions of kohya's
    sd-scripts for ``min_bucket_reso`` and ``max_bucket_reso``.

    Args:
        resolution: Square root of the largest area.
        step: Divisor of all sides, at least 1.
        sides: Shortest and longest side; the first is rounded down to a multiple of ``step``, the second up.

    Returns:
        The sizes in ascending order, a square included.

    Raises:
        ValueError: The limits do not contain ``resolution``, or leave no side.
    """
    least, most = sides[0] // step * step, -(-sides[1] // step) * step
    if not 1 <= least <= resolution <= most or resolution < step:
        raise ValueError(
            f"--bucket-sides {sides[0]} {sides[1]}: expected limits in multiples of {step}, with {resolution} "
            "between them"
        )
    square = resolution // step * step
    found = {(square, square)}
    for one in range(least, most + 1, step):
        other = min(most, resolution**2 // one // step * step)
        if other >= least:
            found |= {(one, other), (other, one)}
    return tuple(sorted(found))


def aspect_buckets(resolution: int, step: int = 64, ratio: float = 2.0) -> tuple[Size, ...]:
    """Return sizes of about ``resolution ** 2`` pixels at many aspect ratios.

    Each long side is a multiple of ``step``; its short side is the longest with an area of at most ``resolution ** 2``.
    Both orientations are included, as in NovelAI's aspect-ratio bucketing and SDXL (Podell et al. 2023, appendix I).

    Args:
        resolution: Square root of the largest area, at least ``step``.
        step: Divisor of all sides, at least 1.
        ratio: Largest ratio of long to short side, at least 1.

    Returns:
        The sizes in ascending order, a square included.

    Raises:
        ValueError: ``resolution``, ``step`` or ``ratio`` is too small.
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
    """Return the number of the bucket with the aspect ratio nearest to ``size``; the first of equals.

    The distance is the quotient of the two ratios, that is, their difference in the logarithm.
    """

    def stretch(bucket: Size) -> float:
        one, other = size[1] * bucket[0], size[0] * bucket[1]
        return max(one, other) / min(one, other)

    return min(range(len(buckets)), key=lambda number: stretch(buckets[number]))
