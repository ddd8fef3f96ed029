"""Resizing, cropping and buckets: sizes and offsets."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.data.images.geometry import (
    adm_offset,
    adm_sizes,
    aspect_buckets,
    center_offset,
    cover,
    nearest_bucket,
    random_offset,
)

SIDES = st.integers(1, 20_000)
SIZES = st.tuples(SIDES, SIDES)


@settings(deadline=None)
@given(SIZES, st.integers(1, 2048))
def test_a_square_target_is_torchvisions_resize(size: tuple[int, int], side: int) -> None:
    short, long = min(size), max(size)
    expected = int(side * long / short)
    assert cover(size, (side, side)) == ((side, expected) if size[0] <= size[1] else (expected, side))


@settings(deadline=None)
@given(SIZES, SIZES)
def test_cover_covers_and_fits_one_side(size: tuple[int, int], target: tuple[int, int]) -> None:
    height, width = cover(size, target)
    assert height >= target[0]
    assert width >= target[1]
    assert height == target[0] or width == target[1]
    scale = max(target[0] / size[0], target[1] / size[1])
    assert abs(height - size[0] * scale) < 1
    assert abs(width - size[1] * scale) < 1


def test_center_offset_rounds_halves_to_even() -> None:
    assert [center_offset((256 + n, 256), (256, 256))[0] for n in range(7)] == [0, 0, 1, 2, 2, 2, 3]
    assert center_offset((256, 341), (256, 256)) == (0, 42)


def test_random_offset_reaches_every_offset_equally_often_and_none_outside() -> None:
    counts = [0] * 4
    for k in range(1000):
        counts[random_offset((259, 256), (256, 256), (k / 1000, 0.5))[0]] += 1
    assert counts == [250] * 4
    almost_one = math.nextafter(1.0, 0.0)
    assert random_offset((10**9, 256), (256, 256), (almost_one, almost_one)) == (10**9 - 256, 0)
    assert random_offset((2, 256), (1, 256), (almost_one, 0.0)) == (1, 0)


def test_adm_sizes_halve_then_scale() -> None:
    assert adm_sizes((1030, 2051), 256) == ((515, 1025), (257, 512), (256, 510))
    assert adm_sizes((511, 511), 256) == ((256, 256),)
    assert adm_sizes((512, 512), 256) == ((256, 256), (256, 256))
    assert adm_sizes((100, 50), 256) == ((512, 256),)
    assert adm_offset((256, 341), 256) == (0, 42)
    assert adm_offset((257, 256), 256) == (0, 0)


def test_buckets_of_1024_hold_the_ones_of_sdxl() -> None:
    buckets = aspect_buckets(1024)
    assert {(1024, 1024), (896, 1152), (832, 1216), (768, 1344), (1344, 768)} <= set(buckets)
    assert (640, 1536) not in buckets
    assert (640, 1536) in aspect_buckets(1024, ratio=2.5)


@settings(deadline=None)
@given(st.integers(64, 2048), st.sampled_from([8, 16, 64]), st.floats(1, 4))
def test_buckets_are_multiples_within_the_area_and_symmetric(resolution: int, step: int, ratio: float) -> None:
    buckets = aspect_buckets(resolution, step, ratio)
    assert list(buckets) == sorted(set(buckets))
    square = resolution // step * step
    assert (square, square) in buckets
    for height, width in buckets:
        assert height % step == width % step == 0
        assert height * width <= resolution**2
        assert max(height, width) <= ratio * min(height, width)
        assert (width, height) in buckets


@pytest.mark.parametrize("bad", [(63, 64, 2.0), (512, 0, 2.0), (512, 64, 0.9), (512, 64, math.nan)])
def test_buckets_that_cannot_be_are_refused(bad: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="expected a resolution of at least one step"):
        aspect_buckets(*bad)


@settings(deadline=None)
@given(SIZES)
def test_the_bucket_is_the_nearest_in_the_logarithm(size: tuple[int, int]) -> None:
    buckets = aspect_buckets(512)
    distances = [abs(math.log(size[1] / size[0]) - math.log(w / h)) for h, w in buckets]
    assert distances[nearest_bucket(size, buckets)] == pytest.approx(min(distances), abs=1e-12)


def test_the_first_of_two_equally_near_buckets_is_taken() -> None:
    assert nearest_bucket((100, 100), ((128, 64), (64, 128))) == 0
    assert nearest_bucket((100, 101), ((128, 64), (64, 128))) == 1
