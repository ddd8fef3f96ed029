"""Decoding of images: DALI and Pillow, orientation, colours and depth."""

import io
import sys
import warnings
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageOps

from fastdiff.data.dali_trial import dali_problem
from fastdiff.data.images import decode
from fastdiff.data.images.decode import FILTERS, Decoded, Decoder, ImageTransform, open_decoder
from fastdiff.data.images.decode_dali import DaliPixels, Job
from fastdiff.data.images.geometry import aspect_buckets, nearest_bucket
from fastdiff.errors import ConfigError
from tests.support.inputs import images
from tests.support.inputs.images import PIXELS, PLAIN, SIDE, SPECIAL
from tests.support.nights import by_day

Array = npt.NDArray[np.uint8]


def transform(resolution: int = SIDE, crop: str = "center", interpolation: str = "lanczos") -> ImageTransform:
    return ImageTransform(resolution, crop, interpolation)  # type: ignore[arg-type]


def one(decoder: Decoder, data: bytes, offset: tuple[float, float] | None = None) -> Decoded:
    (result,) = decoder.decode([data], offset and [offset])
    assert isinstance(result, Decoded), result
    assert result.pixels.dtype == np.uint8
    assert result.pixels.flags.c_contiguous
    return result


def by_hand(data: bytes) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transparent palettes
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.fixture(scope="module", params=["pillow", "dali"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return open_decoder(request.param, transform(), threads=2)


@pytest.fixture(scope="module")
def dali() -> Decoder:
    return open_decoder("dali", transform(), threads=2)


@pytest.mark.parametrize("name", [*PLAIN, *SPECIAL])
def test_every_kind_of_file_is_what_pillow_makes_of_it(decoder: Decoder, name: str) -> None:
    """Bit for bit where nothing is resized, with DALI as well (on the CPU)."""
    data = {**PLAIN, **SPECIAL}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Corrupt EXIF data")  # which Pillow says when it opens the file
        result = one(decoder, data)
    expected = by_hand(data)
    top, left = result.crop
    assert result.original_size == expected.shape[:2]
    if decoder.name != "dali-cuda":
        np.testing.assert_array_equal(result.pixels, expected[top : top + SIDE, left : left + SIDE])


def test_the_plain_files_go_through_dali_and_the_others_do_not(dali: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert np.abs(one(decoder, SPECIAL["jpeg cmyk"]).pixels.astype(int) - PIXELS).mean() < 3


def test_sixteen_bits_are_scaled_and_not_clipped(decoder: Decoder) -> None:
    values = np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE) * 16
    grey = one(decoder, images.png_of(values)).pixels
    np.testing.assert_array_equal(grey, np.rint(values / 257).astype(np.uint8)[..., None].repeat(3, -1))
    np.testing.assert_array_equal(one(decoder, images.encode(values, "TIFF")).pixels, grey)
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


@pytest.fixture(scope="module")
def of_all_sizes() -> list[bytes]:
    sizes = [(512, 640), (300, 401), (1000, 700), (100, 131), (150, 150), (1, 1), (1, 300), (1600, 1600)]
    return [images.png_of(images.natural(*size, seed)) for seed, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("interpolation", "mean", "largest"),
    by_day([("lanczos", 0.4, 16)], ("bicubic", 0.35, 12), ("bilinear", 0.35, 12), ("nearest", 0.2, 255)),
)
def test_dali_resizes_within_a_level_of_pillow(
    of_all_sizes: list[bytes], interpolation: str, mean: float, largest: int
) -> None:
    """On average; the numbers seen stand in dali_decode."""
    results = [
        open_decoder(name, transform(256, "center", interpolation), 2).decode(of_all_sizes)
        for name in ("dali", "pillow")
    ]
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
        # 0.999 is the last possible offset of a short way, and 0.999 of a long one.
        scale = max(height / size[0], width / size[1])
        resized = int(size[0] * scale + 1e-9), int(size[1] * scale + 1e-9)
        assert result.crop == (int(0.999 * (resized[0] - height + 1)), int(0.999 * (resized[1] - width + 1)))


def test_twenty_thousand_pixels_wide(decoder: Decoder) -> None:
    rows = zlib.compress((b"\0" + bytes(range(200)) * 300) * 300)
    result = one(decoder, images.png(20_000, 300, 8, 2, rows))
    assert result.original_size == (300, 20_000)
    assert result.crop == (0, (20_000 * SIDE // 300 - SIDE) // 2)


def test_the_choice_of_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_decoder("auto", transform(), 1).name.startswith("dali")
    for missing in (transform(crop="adm"), *(transform(interpolation=n) for n in ("box", "hamming", "nearest_exact"))):
        assert open_decoder("auto", missing, 1).name == "pillow"
        with pytest.raises(ConfigError, match=r"does not support .*use --decode pillow"):
            open_decoder("dali", missing, 1)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr(decode, "dali_problem", dali_problem.__wrapped__)  # tries again
    assert open_decoder("auto", transform(), 1).name == "pillow"
    with pytest.raises(ConfigError, match="pip install 'nvidia-dali"):
        open_decoder("dali", transform(), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resolution": 0}, "at least 1 pixel"),
        ({"crop": "top"}, "expected one of center, adm, random"),
        ({"interpolation": "cubic"}, "expected one of nearest"),
        ({"crop": "adm", "buckets": ((64, 64),)}, "only squares"),
        ({"buckets": ((64, 0),)}, "sides of at least 1"),
    ],
)
def test_a_transform_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageTransform(**{"resolution": 64, "crop": "center", "interpolation": "lanczos", **change})


def test_random_crops_need_an_offset_each(decoder: Decoder) -> None:
    for name in ("pillow", "dali"):
        with pytest.raises(ValueError, match="needs offsets"):
            open_decoder(name, transform(crop="random"), 1).decode([PLAIN["png"]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 offsets for 2 images"):
        decoder.decode([PLAIN["png"]] * 2, [(0.0, 0.0)])


def test_empty_inputs_give_empty_outputs(decoder: Decoder) -> None:
    assert decoder.decode([]) == []


@pytest.mark.gpu
def test_dali_on_a_gpu_is_near_the_cpus_decoder() -> None:
    data = [images.encode(images.natural(300 + n, 400, n), "JPEG", quality=90) for n in range(8)] + list(PLAIN.values())
    gpu = torch.device("cuda", 0)
    decoders = [open_decoder(name, transform(128, "center", "bicubic"), 2, gpu) for name in ("dali", "pillow")]
    assert decoders[0].name == "dali-cuda"
    together = decoders[0].decode(data)
    for ours, exact, item in zip(together, decoders[1].decode(data), data, strict=True):
        assert isinstance(ours, Decoded)
        assert isinstance(exact, Decoded)
        assert np.abs(ours.pixels.astype(int) - exact.pixels).mean() < 1.5
        np.testing.assert_array_equal(ours.pixels, one(decoders[0], item).pixels)
