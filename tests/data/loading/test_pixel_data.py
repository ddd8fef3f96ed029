"""Data sets in pixel space: from files of images to uint8 batches, and to the steps of a run."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from fastdiff.batch import Batch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.shards.format import DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, DataError
from fastdiff.evaluation.likelihood import read_clean
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, uniform
from fastdiff.training.loop import train
from fastdiff_kernels.noising import dequantised
from tests.support.inputs.encoding import captioned, files, picture
from tests.support.inputs.images import natural
from tests.support.runs import hexes, launch, losses, tiny

SIDE = 16
SIZES = [(16, 16), (40, 52), (70, 33), (13, 90), (128, 64), (31, 32), (10, 12)]
CLASSES = ["dog", "cat", "dog", "ant", "Zebra", "cat", "dog"]
LOADERS = ("dali", "prefetch")


def adm_crop(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """The centre crop of Dhariwal & Nichol 2021, ``[3, side, side]``: halve with a box, scale bicubically, cut."""
    image = Image.fromarray(pixels)
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = side / min(image.size)
    width, height = (round(edge * factor) for edge in image.size)
    scaled = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    top, left = (height - side) // 2, (width - side) // 2
    return scaled[top : top + side, left : left + side].transpose(2, 0, 1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PNG files named after their classes, in two folders that mean nothing."""
    folder = tmp_path_factory.mktemp("sources") / "images"
    for number, (name, size) in enumerate(zip(CLASSES, SIZES, strict=True)):
        path = folder / f"part{number % 2}" / f"{name}_{number}_x.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(natural(*size, seed=number)).save(path)
    return folder


def expected(images: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """By file name, the pixels that must be stored."""
    return {path.name: adm_crop(np.asarray(Image.open(path)), SIDE) for path in images.rglob("*.png")}


def encode(source: Path, out: Path, **options: Any) -> list[str]:
    said: list[str] = []
    defaults: dict[str, Any] = {"resolution": SIDE, "crop": "adm", "samples_per_shard": 2, "workers": 1}
    encode_images(EncodeOptions(source=str(source), out=out, autoencoder="identity", **defaults | options), said.append)
    return said


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    out = tmp_path_factory.mktemp("encoded") / "pixels"
    encode(images, out, classes_from="prefix")
    return out


def stored(folder: Path) -> dict[str, Any]:
    with LatentReader(folder) as reader:
        return reader.read(range(len(reader)))


def test_pixels_are_those_of_adms_crop_and_classes_those_of_the_prefixes(images: Path, encoded: Path) -> None:
    assert not verify(encoded).problems
    found, wanted = stored(encoded), expected(images)
    names = sorted((path.relative_to(images) for path in images.rglob("*.png")), key=str)
    assert found["latent"].dtype == np.uint8
    assert np.array_equal(found["latent"], np.stack([wanted[path.name] for path in names]))
    classes = ["Zebra", "ant", "cat", "dog"]
    assert found["label"].tolist() == [classes.index(path.name.split("_")[0]) for path in names]
    info = DatasetInfo.read(encoded)
    assert (info.classes, info.class_names) == (4, tuple(classes))
    assert (info.latent.dtype, info.latent.shape, info.in_pixels) == ("uint8", (3, SIDE, SIDE), True)
    assert (info.normalisation.shift, info.normalisation.scale) == ((127.5,) * 3, (1 / 127.5,) * 3)
    made = info.provenance
    assert (made.autoencoder, made.autoencoder_digest, made.text_encoder) == ("identity", None, None)
    assert "x0 = pixel / 127.5 - 1" in made.transform


def test_classes_come_from_where_they_are_said_to_come_from(images: Path, tmp_path: Path) -> None:
    for source, options, classes in (
        (images, {"classes_from": "none"}, ()),
        (images, {"classes_from": "folder"}, ("part0", "part1")),
        (images, {}, ("part0", "part1")),
    ):
        out = tmp_path / f"{options.get('classes_from', 'default')}"
        encode(source, out, **options)
        info = DatasetInfo.read(out)
        assert (info.class_names, info.classes) == (classes, len(classes) or None)
        assert ("label" in stored(out)) == bool(classes)
    chosen, default = files(tmp_path / "folder"), files(tmp_path / "default")
    assert chosen.pop("encode.json") != default.pop("encode.json"), "the options that were given"
    assert chosen == default
    assert DatasetInfo.read(tmp_path / "none").digest != DatasetInfo.read(tmp_path / "folder").digest


def test_captions_are_left_out_and_classes_found_beside_them(tmp_path: Path) -> None:
    source = captioned(tmp_path / "images", ["a cat", "a dog"])
    (source / "000.png").rename(source / "cat_000.png")
    (source / "001.png").rename(source / "dog_001.png")
    encode(source, tmp_path / "classes", classes_from="prefix")
    assert DatasetInfo.read(tmp_path / "classes").class_names == ("cat", "dog")
    text = (source / "metadata.jsonl").read_text()
    (source / "metadata.jsonl").write_text(text.replace("000.png", "cat_000.png").replace("001.png", "dog_001.png"))
    said = encode(source, tmp_path / "captions")
    assert said[0].endswith("are not read: a data set in pixel space has no embeddings")
    assert set(stored(tmp_path / "captions")) == {"latent"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip": True}, r"--flip needs a pipeline.*--data\.random_flip"),
        ({"pretrained": "somewhere"}, "--pretrained needs a pipeline, but --autoencoder identity has none"),
        ({"precision": "bf16"}, "--precision needs a pipeline"),
        ({"dtype": "float32"}, "--dtype needs a pipeline"),
        ({"captions": "all"}, "--captions needs a pipeline"),
    ],
)
def test_options_of_a_pipeline_are_refused(images: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode(images, tmp_path / "out", **options)


def test_sources_without_classes(images: Path, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    picture(0).save(tmp_path / "plain.png")
    picture(1).save(tmp_path / "class" / "a_1.png")
    with pytest.raises(DataError, match=r"plain\.png.*--classes-from prefix"):
        encode(tmp_path, tmp_path.with_name("out"))
    with pytest.raises(DataError, match=r"plain\.png has no class before an underscore.*--classes-from folder or none"):
        encode(tmp_path, tmp_path.with_name("out"), classes_from="prefix")
    (tmp_path / "images.tar").touch()
    with pytest.raises(
        ConfigError, match=r"--classes-from prefix needs a folder of images, which .*images\.tar is not"
    ):
        encode(tmp_path / "images.tar", tmp_path.with_name("out"), classes_from="prefix")


def take(folder: Path, loader: Any, count: int, *, flip: bool = False, seed: int = 5, **reader: Any) -> list[Batch]:
    with LatentReader(folder, **reader) as opened:
        order = build_order(opened.info, seed=seed, window_shards=2, global_batch=4)
        with build_batches(
            opened, order, config=DataConfig(loader=loader, random_flip=flip), seed=seed, device=torch.device("cpu"),
            start_samples=0, rank=0, ranks=1, micro=4, global_batch=4,
        ) as batches:  # fmt: skip
            return list(itertools.islice(batches, count))


def samples_of(folder: Path, batch: Batch, seed: int = 5) -> dict[str, Any]:
    with LatentReader(folder) as reader:
        order = build_order(reader.info, seed=seed, window_shards=2, global_batch=4)
        return reader.read(order.samples(batch.position.numpy()))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_batch_is_what_is_in_the_files(encoded: Path, loader: str) -> None:
    for batch in take(encoded, loader, 6):
        wanted = samples_of(encoded, batch)
        assert batch.latents.dtype == torch.uint8
        assert batch.latents.is_contiguous()
        assert np.array_equal(batch.latents.numpy(), wanted["latent"])
        assert np.array_equal(batch.condition["label"].numpy(), wanted["label"])


@pytest.mark.parametrize("loader", LOADERS)
def test_half_of_the_samples_are_mirrored_by_their_positions(encoded: Path, loader: str) -> None:
    mirrored = 0
    for batch in take(encoded, loader, 12, flip=True):
        flips = uniform(5, Stream.FLIP, batch.position, 1)[:, 0] < 0.5
        wanted = samples_of(encoded, batch)["latent"]
        wanted = np.where(flips[:, None, None, None], wanted[..., ::-1], wanted)
        assert np.array_equal(batch.latents.numpy(), wanted)
        mirrored += int(flips.sum())
    assert 12 < mirrored < 36


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"normalisation": Normalisation(shift=(0.0,) * 3, scale=(1.0,) * 3)},
            "shift 127.5 and scale 1 / 127",
        ),
        ({"flipped": True}, "pixels, which are mirrored at reading"),
        ({"class_names": ("one",)}, "1 class names for 4 classes"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(
    encoded: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    info = DatasetInfo.read(encoded)
    replace(info, **changes).write(tmp_path)
    with pytest.raises(DataError, match=message):
        DatasetInfo.read(tmp_path)


def test_the_names_of_the_classes_are_no_part_of_what_a_run_reads(encoded: Path) -> None:
    info = DatasetInfo.read(encoded)
    assert replace(info, class_names=()).digest == info.digest
    assert "class_names" in json.loads((encoded / "dataset.json").read_text())


# --- in a run --------------------------------------------------------------------------------------------------------


def in_pixels(folder: Path, first: int) -> Path:
    source = folder.with_name(folder.name + "-images")
    source.mkdir()
    for number in range(first, first + 48):
        Image.fromarray(natural(12, 8, seed=number)).save(source / f"{number % 10}_{number}.png")
    encode(source, folder, classes_from="prefix", resolution=8, samples_per_shard=16)
    return folder


def test_the_likelihood_is_measured_on_x0(encoded: Path) -> None:
    with LatentReader(encoded) as reader:
        index = np.arange(len(reader))
        found = list(read_clean(reader, index, (), torch.device("cpu"), seed=0))
        wanted = dequantised(torch.from_numpy(reader.read(index)["latent"]))
    assert torch.equal(torch.cat([batch.latents for batch in found]), wanted)


def in_fp32(pixels: Path, folder: Path) -> Path:
    """The same data set with x0 stored in fp32."""
    info, arrays = DatasetInfo.read(pixels), stored(pixels)
    template = DatasetInfo(
        columns={"latent": replace(info.latent, dtype="float32")},
        normalisation=Normalisation(shift=(0.0,) * 3, scale=(1.0,) * 3),
        provenance=Provenance(source="test", transform="none"),
        classes=info.classes,
    )
    clean = dequantised(torch.from_numpy(arrays["latent"])).numpy()
    with ShardWriter(folder, template, samples_per_shard=16) as writer:
        for number, (latent, label) in enumerate(zip(clean, arrays["label"].tolist(), strict=True)):
            writer.add(f"{number:09d}", {"latent": latent}, label)
    return folder


HYBRID = {
    "objective__prediction": "epsilon",
    "objective__variance": "learned_range",
    "objective__loss": "rescaled_mse",
    "objective__schedule": "cosine",
    "objective__timesteps": 10,  # so that some samples are at the last step, whose likelihood reads the clean latents
}


@pytest.mark.parametrize("objective", [pytest.param({}, marks=pytest.mark.nightly), HYBRID], ids=["v", "hybrid"])
def test_a_run_on_pixels_is_one_on_their_values_in_fp32(
    world: World, tmp_path: Path, objective: dict[str, Any]
) -> None:
    """The noise-add, the loss, which needs the clean latents for v or for the bound, and the validation loss."""
    pixels = in_pixels(tmp_path / "pixels", 0), in_pixels(tmp_path / "held-out", 1000)
    floats = in_fp32(pixels[0], tmp_path / "fp32"), in_fp32(pixels[1], tmp_path / "held-out-fp32")
    found, validated = [], []
    for name, (data, held_out) in (("u8", pixels), ("f32", floats)):
        model = DiTConfig(
            depth=2, hidden=32, heads=2, patch=2, channels=3, size=8, classes=10, learn_sigma=bool(objective)
        )
        config = tiny(
            data, tmp_path / name, model=model, validation__data=str(held_out), validation__every=3, **objective
        )
        train(config, launch(), world)
        found.append(losses(tmp_path / name))
        lines = (tmp_path / name / "validation.jsonl").read_text().splitlines()
        validated.append([json.loads(line)["val_loss"] for line in lines])
    assert hexes(found[0]) == hexes(found[1])
    assert hexes(validated[0]) == hexes(validated[1])
    assert len(validated[0]) == 2
    assert all(0 < loss < 10 and math.isfinite(loss) for loss in found[0] + validated[0]), "pixels of 0 to 255 are more"
