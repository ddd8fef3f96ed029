from __future__ import annotations

import io
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path

import images
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

from fastdiff.data.dali_decode import DaliPixels, Job
from fastdiff.data.geometry import Placement, aspect_buckets, nearest_bucket
from fastdiff.data.image_decode import FILTERS, BadImage, Decoded, Decoder, ImageTransform, open_decoder
from fastdiff.errors import ConfigError

Array = npt.NDArray[np.uint8]
SIDE = 64


def transform(resolution: int = SIDE, crop: str = "center", interpolation: str = "lanczos") -> ImageTransform:
    return ImageTransform(resolution, crop, interpolation)  # type: ignore[arg-type]


def one(decoder: Decoder, data: bytes, offset: tuple[float, float] | None = None) -> Decoded:
    (result,) = decoder.decode([data], offset and [offset])
    assert isinstance(result, Decoded), result
    assert result.pixels.dtype == np.uint8
    assert result.pixels.flags.c_contiguous
    return result


def by_hand(data: bytes) -> Array:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


PIXELS = images.natural(SIDE, SIDE)
PLAIN = {
    "jpeg": images.encode(PIXELS, "JPEG"),
    "jpeg 4:4:4": images.encode(PIXELS, "JPEG", subsampling=0),
    "jpeg progressive": images.encode(PIXELS, "JPEG", progressive=True),
    "jpeg rgb": images.encode(PIXELS, "JPEG", keep_rgb=True),
    "jpeg grey": images.encode(PIXELS[..., 0], "JPEG"),
    "jpeg mpo": images.encode(PIXELS, "MPO", save_all=True, append_images=[Image.fromarray(PIXELS[::-1])]),
    "png": images.encode(PIXELS, "PNG"),
    "png grey": images.encode(PIXELS[..., 0], "PNG"),
    "png gamma": images.png_of(PIXELS, before=[(b"gAMA", b"\0\0\x75\x30"), (b"sBIT", b"\5\5\5")]),
    "png text": images.png_of(PIXELS, before=[(b"tEXt", b"k\0" + b"A" * 12_000_000)]),
    "webp": images.encode(PIXELS, "WebP"),
    "webp lossless": images.encode(PIXELS, "WebP", lossless=True),
}
SPECIAL = {
    "jpeg cmyk": images.encode(PIXELS, "JPEG", mode="CMYK"),
    "png rgba": images.encode(np.dstack([PIXELS, PIXELS[..., :1]]), "PNG"),
    "png grey alpha": images.encode(PIXELS[..., :2], "PNG", mode="LA") if False else images.encode(PIXELS, "PNG", mode="LA"),
    "png palette": images.encode(PIXELS, "PNG", mode="P"),
    "png palette transparent": images.encode(PIXELS, "PNG", mode="P", transparency=bytes(range(256))),
    "png bit": images.encode(PIXELS, "PNG", mode="1"),
    "png exif behind": images.png_of(PIXELS, after=[(b"eXIf", b"II*\0\x08\0\0\0\x01\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0")]),
    "png animated": images.animated("PNG", [PIXELS, PIXELS[::-1].copy()]),
    "webp alpha": images.encode(np.dstack([PIXELS, PIXELS[..., :1]]), "WebP", lossless=True, exact=True),
    "webp animated": images.animated("WebP", [PIXELS, PIXELS[::-1].copy()]),
    **{f"jpeg exif {n}": images.with_orientation(images.natural(SIDE, 96), "JPEG", n) for n in range(2, 9)},
    "webp exif": images.with_orientation(PIXELS, "WebP", 6),
}  # fmt: skip


@pytest.fixture(scope="module", params=["pillow", "dali"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return open_decoder(request.param, transform(), threads=2)


@pytest.fixture(scope="module")
def dali() -> Decoder:
    return open_decoder("dali", transform(), threads=2)


@pytest.mark.parametrize("name", [*PLAIN, *SPECIAL])
def test_every_kind_of_file_is_what_pillow_makes_of_it(decoder: Decoder, name: str) -> None:
    """Bit for bit where nothing is resized, with DALI as well (on the CPU), and also as the one image of a batch."""
    data = {**PLAIN, **SPECIAL}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = one(decoder, data)
    expected = by_hand(data)
    top, left = result.crop
    assert result.original_size == expected.shape[:2]
    if decoder.name != "dali-cuda":
        np.testing.assert_array_equal(result.pixels, expected[top : top + SIDE, left : left + SIDE])


def test_the_plain_files_go_through_dali_and_the_others_do_not(
    dali: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    run = DaliPixels._run

    def spy(self: DaliPixels, batch: list[Job]) -> list[Array]:
        seen.extend(job.image for job in batch)
        return run(self, batch)

    monkeypatch.setattr(DaliPixels, "_run", spy)
    dali.decode([*PLAIN.values(), *SPECIAL.values()])
    assert seen == list(PLAIN.values())


def test_orientation_swaps_the_original_size_too(decoder: Decoder) -> None:
    result = one(decoder, SPECIAL["jpeg exif 6"])
    assert result.original_size == (96, SIDE)
    assert result.crop == (16, 0)


def test_adobe_cmyk_has_the_colours_of_its_source(decoder: Decoder) -> None:
    assert np.abs(one(decoder, SPECIAL["jpeg cmyk"]).pixels.astype(int) - PIXELS).mean() < 6


def test_sixteen_bits_are_scaled_and_not_clipped(decoder: Decoder) -> None:
    values = np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE) * 16
    grey = one(decoder, images.png_of(values)).pixels
    np.testing.assert_array_equal(grey, np.rint(values / 257).astype(np.uint8)[..., None].repeat(3, -1))
    color = one(decoder, images.png_of(np.dstack([values, values, values]))).pixels
    assert np.abs(color.astype(int) - grey).max() <= 1


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("size", [(150, 211), (211, 150), (40, 31), (64, 64), (1, 1), (65, 64)])
def test_pillow_is_torchvision_on_pillow(interpolation: str, size: tuple[int, int]) -> None:
    pixels = images.natural(*size)
    resample = getattr(Image.Resampling, interpolation.removesuffix("_exact").upper())
    short, long = min(size), max(size)
    height, width = (SIDE, int(SIDE * long / short)) if size[0] <= size[1] else (int(SIDE * long / short), SIDE)
    resized = np.asarray(Image.fromarray(pixels).resize((width, height), resample))
    data = images.png_of(pixels)

    top, left = round((height - SIDE) / 2.0), round((width - SIDE) / 2.0)
    result = one(open_decoder("pillow", transform(interpolation=interpolation), 1), data)
    assert (result.crop, result.original_size, result.bucket) == ((top, left), size, 0)
    np.testing.assert_array_equal(result.pixels, resized[top : top + SIDE, left : left + SIDE])

    top, left = int(0.7 * (height - SIDE + 1)), int(0.2 * (width - SIDE + 1))
    result = one(open_decoder("pillow", transform(crop="random", interpolation=interpolation), 1), data, (0.7, 0.2))
    assert result.crop == (top, left)
    np.testing.assert_array_equal(result.pixels, resized[top : top + SIDE, left : left + SIDE])


def test_adm_halves_with_a_box_filter_then_scales_bicubically() -> None:
    pixels = images.natural(257, 513)
    image = Image.fromarray(pixels).resize((256, 128), Image.Resampling.BOX).resize((128, 64), Image.Resampling.BOX)
    expected = np.asarray(image.resize((128, 64), Image.Resampling.BICUBIC))[:, 32:96]
    result = one(open_decoder("auto", transform(crop="adm"), 1), images.png_of(pixels))
    np.testing.assert_array_equal(result.pixels, expected)
    assert result.crop == (0, 32)
    pixels = images.natural(100, 90)
    expected = np.asarray(Image.fromarray(pixels).resize((64, 71), Image.Resampling.BICUBIC))[3:67]
    np.testing.assert_array_equal(
        one(open_decoder("auto", transform(crop="adm"), 1), images.png_of(pixels)).pixels, expected
    )


@pytest.mark.parametrize(
    ("interpolation", "mean", "largest"),
    [("lanczos", 0.4, 16), ("bicubic", 0.35, 12), ("bilinear", 0.35, 12), ("nearest", 0.2, 255)],
)
def test_dali_resizes_within_a_level_of_pillow(interpolation: str, mean: float, largest: int) -> None:
    """On average; the numbers seen stand in dali_decode."""
    sizes = [(512, 640), (300, 401), (1000, 700), (100, 131), (150, 150), (1, 1), (1, 300), (1600, 1600)]
    data = [images.png_of(images.natural(*size, seed)) for seed, size in enumerate(sizes)]
    results = [open_decoder(name, transform(256, "center", interpolation), 2).decode(data) for name in ("dali", "pillow")]
    total = 0.0
    for ours, exact in zip(*results, strict=True):
        assert isinstance(ours, Decoded)
        assert isinstance(exact, Decoded)
        assert (ours.crop, ours.original_size) == (exact.crop, exact.original_size)
        distance = np.abs(ours.pixels.astype(int) - exact.pixels)
        assert distance.mean() < mean
        assert distance.max() <= largest
        total += distance.sum()
    assert total > 0, "else DALI did not run"


@pytest.mark.parametrize("name", ["pillow", "dali"])
def test_buckets(name: str) -> None:
    buckets = aspect_buckets(128, step=32)
    decoder = open_decoder(name, ImageTransform(128, "random", "bicubic", buckets), 2)  # type: ignore[arg-type]
    sizes = [(200, 200), (300, 150), (150, 300), (90, 140), (20, 500)]
    data = [images.png_of(images.natural(*size)) for size in sizes]
    for size, result in zip(sizes, decoder.decode(data, [(0.999, 0.999)] * len(data)), strict=True):
        assert isinstance(result, Decoded)
        assert result.bucket == nearest_bucket(size, buckets)
        height, width = buckets[result.bucket]
        assert result.pixels.shape == (height, width, 3)
        scale = max(height / size[0], width / size[1])
        assert result.crop == (int(size[0] * scale + 1e-9) - height, int(size[1] * scale + 1e-9) - width)


BAD = {
    "empty": (b"", "empty file"),
    "text": (b"not an image\n" * 20, "neither JPEG, PNG nor WebP"),
    "gif": (images.encode(PIXELS, "GIF"), "neither JPEG, PNG nor WebP: it starts with b'GIF89a"),
    "jpeg of three bytes": (b"\xff\xd8\xff", "damaged JPEG"),
    "truncated jpeg": (PLAIN["jpeg"][:-200], "truncated"),
    "truncated progressive": (PLAIN["jpeg progressive"][:-200], "truncated"),
    "truncated png": (PLAIN["png"][:2000], "truncated"),
    "png header only": (PLAIN["png"][:20], "damaged PNG"),
    "png of a wrong crc": (images.damaged(PLAIN["png"]), "cannot be decoded"),
    "truncated webp": (PLAIN["webp"][:300], "damaged WebP"),
    "webp header only": (PLAIN["webp"][:25], "truncated WebP header"),
    "webp of another kind": (b"RIFF\0\0\0\0WEBPJUNK" + bytes(20), "first chunk is b'JUNK'"),
    "webp of damaged pixels": (PLAIN["webp"][:40] + bytes(len(PLAIN["webp"]) - 40), "cannot be decoded"),
    "huge text": (images.png_of(PIXELS, before=[(b"zTXt", b"k\0\0" + zlib.compress(bytes(20_000_000)))]), "too large"),
    "too long": (images.png_of(images.natural(2, 20_000)[:1]), "1280000x64 pixels after the resize"),
    "scans": (images.jpeg_of_scans(5000), "progressive JPEG of 50.. scans, more than 256"),
}  # fmt: skip


def _widest() -> bytes:
    return images.png(20_000, 1, 8, 2, zlib.compress(b"\0" + bytes(60_000)))
