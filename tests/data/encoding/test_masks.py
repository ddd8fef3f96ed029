"""Masks of the loss, from the files of pictures to shards, online batches and a run."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageDraw, ImageOps

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.images.decode import BadImage, ImageTransform, PillowDecoder
from fastdiff.data.images.items import ImageItem
from fastdiff.data.images.masks import MaskDecoder
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.loading.online import OnlineImages
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import UNETS, build
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.inputs.encoding import captioned, encode, picture
from tests.support.inputs.images import encode as as_file
from tests.support.processes import run_ranks
from tests.support.runs import hexes, launch, losses, tiny

CAPTIONS = ["a cat", "a dog", "a seven", "a cat", "a dog"]
SIZES = [(32, 32), (48, 32), (64, 96), (32, 40), (32, 32)]
SIDE = 32

Levels = npt.NDArray[np.uint8]


def drawn(size: tuple[int, int], number: int = 0) -> Image.Image:
    """A white shape off the centre of a black mask of this height and width."""
    mask = Image.new("L", (size[1], size[0]))
    ImageDraw.Draw(mask).rectangle((size[1] // 4, size[0] // 4, size[1] // 4 + 8 + number, size[0] // 2 + 3), fill=255)
    return mask


def expected(mask: Image.Image, factor: int, side: int = SIDE) -> npt.NDArray[np.float16]:
    """The short side to ``side`` by a box, the centre of it, and the mean of each latent position."""
    scale = side / min(mask.size)
    small = mask.resize((int(mask.width * scale), int(mask.height * scale)), Image.Resampling.BOX)
    left, top = round((small.width - side) / 2), round((small.height - side) / 2)
    levels = np.asarray(small, np.float64)[top : top + side, left : left + side] / 255
    return levels.reshape(side // factor, factor, -1, factor).mean(axis=(1, 3)).astype(np.float16)


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipelines") / "sd15")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return captioned(tmp_path / "photos", CAPTIONS, SIZES)


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    """Masks of the first four pictures, one of no picture, and a note."""
    folder = tmp_path / "masks"
    folder.mkdir()
    for number, size in enumerate(SIZES[:4]):
        drawn(size, number).save(folder / f"{number:03d}.{('png', 'webp', 'bmp', 'tiff')[number]}", lossless=True)
    drawn((8, 8)).save(folder / "other.png")
    (folder / "notes.txt").write_text("by hand")
    return folder


def factor_of(pipeline: Path) -> int:
    return Pretrained(str(pipeline)).latent_space.factor


def stored(out: Path) -> npt.NDArray[np.float16]:
    assert verify(out).ok
    with LatentReader(out) as reader:
        found: npt.NDArray[np.float16] = reader.read(range(len(reader)))["loss_mask"]
    return found


def test_mask_files_are_resized_cropped_and_reduced_with_their_pictures(
    tmp_path: Path, source: Path, masks: Path, sd: Path
) -> None:
    said = encode(source, tmp_path / "out", sd, masks=str(masks))
    found, factor = stored(tmp_path / "out"), factor_of(sd)
    for number, size in enumerate(SIZES[:4]):
        assert np.array_equal(found[number], expected(drawn(size, number), factor))
        assert 0 < found[number].astype(float).mean() < 1
    assert (found[4] == 1).all()
    for line in (
        "  note: pictures without a mask, which count as a whole: 1 (first: 004.png)",
        "  note: masks of no picture, not read: 1 (first: other.png)",
        "  note: other files in the folder of masks: 1 (first: notes.txt)",
    ):
        assert line in said
    without = encode(source, tmp_path / "plain", sd)
    assert not any(" mask" in line for line in without)
    assert "loss_mask" not in DatasetInfo.read(tmp_path / "plain").columns
    with LatentReader(tmp_path / "out") as reader, LatentReader(tmp_path / "plain") as plain:
        assert np.array_equal(reader.read(range(5))["latent"], plain.read(range(5))["latent"])


def test_buckets_and_the_alpha_channel(tmp_path: Path, sd: Path) -> None:
    """The colours under a mask stay, and every kind of transparency counts; a picture without any counts as a whole."""
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = [picture(number, (48, 80)) for number in range(4)]
    alpha = drawn((48, 80))
    for number, image in enumerate(pixels):
        image.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a cat")
    encode(folder, tmp_path / "opaque", sd, buckets=True, bucket_step=8)
    cut = pixels[0].copy()
    cut.putalpha(alpha)
    cut.save(folder / "0.png")
    hidden = pixels[1].copy()
    hidden.putalpha(Image.new("L", hidden.size))
    hidden.save(folder / "1.png")
    palette = pixels[2].quantize(16)
    palette.save(folder / "2.png", transparency=3)
    said = encode(folder, tmp_path / "out", sd, buckets=True, bucket_step=8, masks="alpha")
    assert "  note: pictures without an alpha channel, which count as a whole: 1 (first: 3.png)" in said
    assert "  note: pictures with a mask of 0 everywhere after the crop, which train nothing: 1 (first: 1.png)" in said
    found, factor = stored(tmp_path / "out"), factor_of(sd)
    with LatentReader(tmp_path / "out") as reader, LatentReader(tmp_path / "opaque") as opaque:
        latents, plain = reader.read(range(4))["latent"], opaque.read(range(4))["latent"]
    assert np.array_equal(latents[[0, 1, 3]], plain[[0, 1, 3]])
    height, width = found.shape[1:]
    assert (height * factor, width * factor) == (24, 40)
    levels = np.asarray(alpha.resize((width * factor, height * factor), Image.Resampling.BOX), np.float64) / 255
    means = levels.reshape(height, factor, width, factor).mean(axis=(1, 3))
    assert np.array_equal(found[0], means.astype(np.float16))
    assert not found[1].any()
    assert (found[3] == 1).all()
    seen = np.asarray(palette) != 3
    assert 0.5 < seen.mean() < 1
    assert abs(found[2].astype(float).mean() - seen.mean()) < 1e-3


def test_masks_of_one_name_serve_subfolders_and_two_of_a_picture_are_refused(tmp_path: Path, sd: Path) -> None:
    for number, name in enumerate(("10_cats/a.jpg", "10_cats/b.jpg", "2_dogs/a.jpg")):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
        path.with_suffix(".txt").write_text("an animal")
    masks = tmp_path / "masks"
    (masks / "2_dogs").mkdir(parents=True)
    drawn((32, 32), 1).save(masks / "b.png")
    drawn((32, 32), 2).save(masks / "2_dogs" / "a.png")
    drawn((32, 32), 3).save(masks / "a.png")
    encode(tmp_path / "photos", tmp_path / "out", sd, masks=str(masks))
    factor = factor_of(sd)
    for found, number in zip(stored(tmp_path / "out"), (3, 1, 2), strict=True):
        assert np.array_equal(found, expected(drawn((32, 32), number), factor))
    (masks / "2_dogs" / "a.png").unlink()
    said = encode(tmp_path / "photos", tmp_path / "shared", sd, masks=str(masks))
    assert "  note: masks that several pictures share: 1 (first: a.png)" in said
    drawn((32, 32)).save(masks / "b.webp")
    with pytest.raises(DataError, match=r"masks holds 2 masks of 10_cats/b.jpg: b.png, b.webp; keep one"):
        encode(tmp_path / "photos", tmp_path / "two", sd, masks=str(masks))


def test_unusable_masks_are_named_or_refused(tmp_path: Path, source: Path, masks: Path, sd: Path) -> None:
    drawn((32, 31)).save(masks / "000.png")
    (masks / "001.webp").write_bytes((masks / "001.webp").read_bytes()[:40])
    with pytest.raises(DataError, match=r"000.png cannot be used: its mask has 31x32 pixels, the picture 32x32"):
        encode(source, tmp_path / "out", sd, masks=str(masks))
    encode(source, tmp_path / "skipped", sd, masks=str(masks), bad="skip")
    bad = [json.loads(line) for line in (tmp_path / "skipped" / "bad_images.jsonl").read_text().splitlines()]
    assert [Path(each["name"]).name for each in bad] == ["000.png", "001.png"]
    assert bad[1]["reason"].startswith("its mask cannot be used: ")
    assert len(stored(tmp_path / "skipped")) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", r"--masks .*nowhere: no such folder; expected a folder of masks, or alpha"),
        ("empty", r"--masks .*empty holds no mask of the 5 pictures: expected for example 000.png, of the size of 000"),
        ("photos/masks", r"--masks .* is in the folder of the pictures"),
        ("photos", r"--masks .* is in the folder of the pictures"),
    ],
)
def test_wrong_folders_of_masks_are_refused(tmp_path: Path, source: Path, sd: Path, given: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (source / "masks").mkdir()
    with pytest.raises((ConfigError, DataError), match=message):
        encode(source, tmp_path / "out", sd, masks=str(tmp_path / given))


def test_other_sources_have_masks_in_their_pictures_alone(tmp_path: Path, masks: Path, sd: Path) -> None:
    image = picture(0)
    image.putalpha(drawn((32, 32)))
    image.save(tmp_path / "1.png")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "1.png", "1.png")
        tar.addfile(tarfile.TarInfo("1.txt"))
    encode(tmp_path / "photos.tar", tmp_path / "out", sd, masks="alpha", decode="auto")
    assert np.array_equal(stored(tmp_path / "out")[0], expected(drawn((32, 32)), factor_of(sd)))
    with pytest.raises(ConfigError, match=r"--masks .* of a folder, which .*photos.tar is not.*--masks alpha"):
        encode(tmp_path / "photos.tar", tmp_path / "files", sd, masks=str(masks))


def test_an_edited_mask_is_encoded_anew(tmp_path: Path, source: Path, masks: Path, sd: Path) -> None:
    encode(source, tmp_path / "out", sd, masks=str(masks))
    said = encode(source, tmp_path / "out", sd, masks=str(masks))
    assert "already complete" in said[0]
    drawn(SIZES[1], 7).save(masks / "001.webp", lossless=True)
    drawn(SIZES[4], 5).save(masks / "004.png")
    said = encode(source, tmp_path / "out", sd, masks=str(masks))
    assert "the source has changed" in said[0]
    found, factor = stored(tmp_path / "out"), factor_of(sd)
    assert np.array_equal(found[1], expected(drawn(SIZES[1], 7), factor))
    assert np.array_equal(found[4], expected(drawn(SIZES[4], 5), factor))
    with pytest.raises(ConfigError, match="already holds a data set with another source or other options"):
        encode(source, tmp_path / "out", sd)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("crop", ["center", "random", "adm"])
def test_a_mask_follows_every_crop_and_rotation(crop: Any, orientation: int) -> None:
    """A picture that is its own mask, decoded by both, is the same but for the filter, which a crop does not need."""
    levels = np.random.default_rng(0).integers(0, 256, (48, 80), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    side = 48
    transform = ImageTransform(side, crop, "box")
    item = as_file(np.stack([levels] * 3, axis=2), "PNG", exif=exif)
    offsets = [(0.3, 0.7)]
    decoded = PillowDecoder(transform, 1).decode([item], offsets)
    items = [ImageItem("0", "0", item, mask=item)]
    [found] = MaskDecoder("files", transform, 1).decode(items, decoded, offsets)
    assert not isinstance(found, BadImage)
    assert found.mask is not None
    assert found.mask.shape == (side, side)
    assert np.array_equal(found.mask, found.pixels[..., 1])


@pytest.mark.parametrize("kind", ["files", "alpha"])
def test_online_batches_have_the_masks_of_the_shards_mirrored_with_them(
    tmp_path: Path, source: Path, masks: Path, sd: Path, kind: str
) -> None:
    given = str(masks)
    if kind == "alpha":
        given = "alpha"
        for number, size in enumerate(SIZES[:4]):
            image = picture(number, size)
            image.putalpha(drawn(size, number))
            image.save(source / f"{number:03d}.png")
    encode(source, tmp_path / "out", sd, masks=given, flip=True, samples_per_shard=64)
    online = DataConfig(
        online=True, path=str(source), resolution=SIDE, center_crop=True, random_flip=True, decode="pillow", workers=1,
        masks=given,
    )  # fmt: skip
    sets = []
    with (
        LatentReader(tmp_path / "out") as reader,
        OnlineImages(
            online, Pretrained(str(sd)), torch.device("cpu"), torch.float32, takes=UNETS["sd15"].conditions
        ) as images,
    ):
        assert reader.info.columns == images.info.columns
        for opened, config in ((reader, DataConfig(loader="prefetch", random_flip=True)), (images, online)):
            order = build_order(opened.info, seed=5, window_shards=16, global_batch=5)
            with build_batches(
                opened, order, config=config, seed=5, device=torch.device("cpu"), start_samples=0, rank=0, ranks=1,
                micro=5, global_batch=5,
            ) as batches:  # fmt: skip
                sets.append([next(batches) for _ in range(4)])
    turned = 0
    plain = {mask.tobytes() for mask in stored(tmp_path / "out")}
    for shard, made in zip(*sets, strict=True):
        assert shard.mask is not None
        assert made.mask is not None
        assert torch.equal(shard.mask, made.mask)
        turned += sum(mask.numpy().tobytes() not in plain for mask in made.mask)
    assert 0 < turned < 20


# --- in a run --------------------------------------------------------------------------------------------------------


_STILL = 1e-30
"""A learning rate at which the network stays the same, so that the losses of several runs can be compared."""


def digits_with_alpha(folder: Path, masks: list[Image.Image | None]) -> Path:
    """48 pictures with these alpha channels in turn; in shards of pixels."""
    source = folder.with_name(folder.name + "-images")
    source.mkdir()
    for number in range(48):
        image = picture(number, (8, 8))
        if (mask := masks[number % len(masks)]) is not None:
            image.putalpha(mask)
        image.save(source / f"{number % 10}_{number}.png")
    options = EncodeOptions(
        source=str(source), out=folder, autoencoder="identity", resolution=8, classes_from="prefix", masks="alpha",
        samples_per_shard=16, decode="pillow", workers=1,
    )  # fmt: skip
    encode_images(options, lambda text: None)
    return folder


def pixel_run(data: Path, folder: Path, **changes: Any) -> RunConfig:
    model = DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=3, size=8, classes=10)
    return tiny(data, folder, model=model, data__random_flip=True, **changes)


def half() -> Image.Image:
    mask = Image.new("L", (8, 8))
    mask.paste(255, (0, 0, 3, 8))
    return mask


def test_a_run_counts_what_the_masks_leave_and_says_so(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses of a mask and of its complement add up to those without; black masks train nothing."""
    left, right = half(), ImageOps.invert(half())
    found: dict[str, list[float]] = {}
    plain = digits_with_alpha(tmp_path / "plain", [None])
    for name, masks in {
        "left": [left],
        "right": [right],
        "black": [Image.new("L", (8, 8))],
        "mixed": [None, left],
    }.items():
        data = digits_with_alpha(tmp_path / name, masks)
        rate = 1e-2 if name == "black" else _STILL
        train(pixel_run(data, tmp_path / f"run-{name}", optim__lr=rate), launch(), world)
        found[name] = losses(tmp_path / f"run-{name}")
    assert sum("its masks weight the loss" in line for line in caplog.messages) == 4
    caplog.clear()
    config = pixel_run(tmp_path / "left", tmp_path / "run-plain", optim__lr=_STILL, objective__masked=False)
    train(config, launch(), world)
    assert not any("its masks weight the loss" in line for line in caplog.messages)
    whole = losses(tmp_path / "run-plain")
    for name, parts in {"left": found["left"], "right": found["right"], "mixed": found["mixed"]}.items():
        assert all(0 < part < all_ for part, all_ in zip(parts, whole, strict=True)), name
    assert np.allclose(np.add(found["left"], found["right"]), whole, rtol=1e-5)
    assert set(found["black"]) == {0.0}
    info = DatasetInfo.read(plain)
    assert info.selection is not None
    assert [each.count for each in info.selection.noted if "alpha" in each.reason] == [48]


def without_masks(data: Path, folder: Path) -> Path:
    """Other samples of the same form without masks."""
    info = DatasetInfo.read(data)
    columns = {name: column for name, column in info.columns.items() if name != "loss_mask"}
    with (
        LatentReader(data) as reader,
        ShardWriter(folder, replace(info, columns=columns, shards=(), samples=0), samples_per_shard=16) as writer,
    ):
        found = reader.read(range(16))
        for number in range(16):
            writer.add(f"{number}", {"latent": found["latent"][number]}, int(found["label"][number]))
    return folder


def test_a_flag_that_asks_for_masks_needs_them_in_the_validation_too(world: World, tmp_path: Path) -> None:
    data = digits_with_alpha(tmp_path / "data", [half()])
    changes = {"validation__data": str(without_masks(data, tmp_path / "held-out")), "validation__every": 2}
    config = pixel_run(data, tmp_path / "run", objective__masked=True, **changes)
    with pytest.raises(ConfigError, match=r"--objective.masked True: .*held-out holds no masks"):
        train(config, launch(), world)


def train_and_go_on(world: World, data: Path, folder: Path) -> list[float]:
    """Six steps in a row, and three with a checkpoint, from which a second start goes on."""
    changes = {"output__checkpoint_every": 3, "validation__data": str(data.with_name("held")), "validation__every": 6}
    train(pixel_run(data, folder / "whole", steps=6, **changes), launch(), world)
    train(pixel_run(data, folder / "parts", steps=3, **changes), launch(), world)
    train(pixel_run(data, folder / "parts", steps=6, **changes), launch(), world)
    first, second = (losses(folder / name) for name in ("whole", "parts"))
    assert hexes(first) == hexes(second)
    return first


def test_masks_survive_a_resume_and_two_ranks(tmp_path: Path) -> None:
    """ZeRO-3, every parameter partitioned; the validation loss is masked, too, and its record says so."""
    data = digits_with_alpha(tmp_path / "data", [half(), ImageOps.invert(half()), None])
    digits_with_alpha(tmp_path / "held", [half()])
    found = {}
    for ranks in (1, 2):
        (tmp_path / f"{ranks}").mkdir()
        found[ranks] = run_ranks(train_and_go_on, data, tmp_path / f"{ranks}", ranks=ranks)[0]
    np.testing.assert_allclose(found[1], found[2], rtol=1e-4)
    for ranks in (1, 2):
        lines = (tmp_path / f"{ranks}" / "whole" / "validation.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["unit"].endswith(", masked")
