"""Data sets of kohya's sd-scripts, from their folders or a configuration to the shares of an epoch."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.cli.main import main
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.encoding.several import encode_several
from fastdiff.data.encoding.teacher_features import BASIS_FILE
from fastdiff.data.images.geometry import buckets_within
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.joined.reading import open_shards, read_info
from fastdiff.data.kohya.dataset_config import read_dataset_config
from fastdiff.data.kohya.parts import is_layout, parts_of_config, parts_of_folders
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError, Preempted
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.inputs.teachers import tiny_teacher


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("pipeline") / "sd"))


def pictures(folder: Path, count: int, size: tuple[int, int] = (40, 40), seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for n in range(count):
        pixels = generator.integers(0, 256, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{n}.png")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two folders of pictures, one with a caption file of each ending, and one of regularisation pictures."""
    root = tmp_path / "train"
    pictures(root / "10_sks dog", 3)
    pictures(root / "2_sks cat", 2, seed=1)
    pictures(root / "2_sks cat" / "more", 1, seed=2)
    (root / "10_sks dog" / "0.txt").write_text("sks dog, on a lawn\nunread")
    (root / "10_sks dog" / "1.caption").write_text("sks dog, asleep")
    pictures(tmp_path / "reg" / "1_dog", 7, seed=3)
    return root


def captions(folder: Path) -> list[str]:
    with LatentReader(folder) as reader:
        return sorted(reader.captions(range(len(reader))))


def joined(folder: Path) -> JoinedInfo:
    info = read_info(DataConfig(path=str(folder)))
    assert isinstance(info, JoinedInfo)
    return info


def test_folders_become_data_sets_with_their_repeats(
    photos: Path, pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by their names; an epoch has as many regularisation pictures as others. The training takes the whole."""
    out, reg = tmp_path / "out", photos.parent / "reg"
    command = ["encode", str(photos), str(out), "--pretrained", pipeline, "--resolution", "32", "--flip"]
    main([*command, "--regularisation", str(reg), "--prior-loss-weight", "0.5"])
    told = capsys.readouterr().out
    assert f"{out} is complete: 3 data sets; train on all with `--data.path {out}`" in told
    assert "1 picture in subfolders, which kohya does not read (first: more/0.png)" in told
    assert captions(out / "10_sks dog") == ["sks dog", "sks dog, asleep", "sks dog, on a lawn"]
    assert captions(out / "2_sks cat") == ["sks cat"] * 2
    assert captions(out / "reg_1_dog") == ["dog"] * 7
    info = joined(out)
    shares = [(each.name, each.samples, each.per_epoch, each.loss_weight) for each in info.sets]
    assert shares == [("10_sks_dog", 3, 30, 1.0), ("2_sks_cat", 2, 4, 1.0), ("reg_1_dog", 7, 34, 0.5)]
    main(["verify", str(out)])
    assert capsys.readouterr().out.count("no problems") == 3
    flags = f"--preset sd15-lora --epochs 2 --batch.samples 4 --pretrained.path {pipeline} --data.path {out}"
    _, config = parse(flags.split())
    assert config.samples == 2 * 68
    with open_shards(config.data) as reader:
        assert len(reader) == 12
    main(command)  # without regularisation; the rest is kept
    assert [each.per_epoch for each in joined(out).sets] == [30, 4]


def test_the_ending_of_caption_files_is_that_given(photos: Path, pipeline: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f"encode {photos} {out} --pretrained {pipeline} --resolution 32 --caption-extension .caption"
    main(command.split())
    assert captions(out / "10_sks dog") == ["sks dog", "sks dog", "sks dog, asleep"]
    noted = DatasetInfo.read(out / "10_sks dog").selection
    assert noted is not None
    assert any("a caption file is NAME.caption" in each.reason for each in noted.noted)


def test_only_folders_of_kohya_are_taken_for_them(photos: Path, tmp_path: Path) -> None:
    assert is_layout(photos)
    assert not is_layout(photos / "10_sks dog")
    pictures(photos / "5", 1)
    assert not is_layout(photos), "a number alone may be a class"
    pictures(photos / "3_below" / "more", 1)
    pictures(photos / "others", 1)
    found = parts_of_folders(photos, None, 1.0)
    assert [(part.listed.repeats, part.options["caption"]) for part in found.parts] == [
        (10, "sks dog"), (2, "sks cat"), (5, ""),
    ]  # fmt: skip
    assert found.told == (
        f"left out: {photos / '3_below'}: it holds no pictures, but in subfolders, which kohya does not read",
        f"left out: {photos / 'others'}: no repeats in its name, expected N_name",
    )
    with pytest.raises(ConfigError, match="holds no folder N_name with pictures"):
        parts_of_folders(photos / "others", None, 1.0)


_TOML = """
[general]
caption_extension = ".txt"
enable_bucket = true
min_bucket_reso = 16
max_bucket_reso = 64
bucket_reso_steps = 8

[[datasets]]
resolution = 32
batch_size = 2

  [[datasets.subsets]]
  image_dir = "{root}/10_sks dog"
  class_tokens = "a dog"
  num_repeats = 5
  caption_dropout_rate = 0.2
  flip_aug = true
  shuffle_caption = true
  keep_tokens = 1
  caption_suffix = ", photo"

  [[datasets.subsets]]
  image_dir = "{root}/../reg/1_dog"
  class_tokens = "dog"
  is_reg = true

[[datasets]]
resolution = [48, 48]
batch_size = 2

  [[datasets.subsets]]
  image_dir = "{root}/10_sks dog"
  class_tokens = "a dog"
"""


def test_a_configuration_becomes_its_subsets(
    photos: Path, pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each subset with its own options, of sizes that a step does not mix; regularisation matches its data set."""
    config, out = tmp_path / "data.toml", tmp_path / "out"
    config.write_text(_TOML.format(root=photos))
    command = f"encode {config} {out} --pretrained {pipeline} --shuffle-tags 3 --prior-loss-weight 2 --resolution 64"
    main(command.split())
    told = capsys.readouterr().out
    assert f"--resolution changes nothing: {config} decides it for all data sets" in told
    assert "--shuffle-tags changes nothing" not in told, "one data set shuffles"
    assert "batch_size: train with --batch.micro 2" in told
    assert "flip_aug: train with --data.random-flip" in told
    info = joined(out)
    assert [(each.name, each.per_epoch, each.flipped, each.loss_weight) for each in info.sets] == [
        ("10_sks_dog", 15, True, 1.0),
        ("reg_1_dog", 15, False, 2.0),
        ("10_sks_dog_2", 3, False, 1.0),
    ]
    assert [each.condition_dropout for each in info.sets] == [0.2, 0.0, 0.0]
    first = DatasetInfo.read(out / "10_sks dog")
    assert (first.captions, info.captions) == (3, 3)
    assert set(info.buckets) == {
        (height // 4, width // 4)
        for resolution in (32, 48)
        for height, width in buckets_within(resolution, 8, (16, 64))
    }
    content = json.loads((out / "10_sks dog" / "encode.json").read_text())
    assert content["caption_suffix"] == ", photo"


def test_a_loss_weight_without_regularisation_pictures_is_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "data.toml"
    config.write_text(f"[[datasets]]\nresolution = 32\n[[datasets.subsets]]\nimage_dir = '{photos}/10_sks dog'\n")
    for source, layout in ((config, ""), (photos, "--layout kohya"), (photos, "--layout plain")):
        options = f"--pretrained any --prior-loss-weight 2 {layout}"
        assert main(["encode", str(source), str(tmp_path / "out"), *options.split()]) == ConfigError.exit_code
        assert f"--prior-loss-weight: {source} has no regularisation pictures" in " ".join(
            capsys.readouterr().err.split()
        )


def test_the_buckets_are_those_of_kohya() -> None:
    """For 512 pixels, sides of 256 to 1024 and steps of 64, by hand: 262,144 / side, rounded down to a step."""
    upright = {(256, 832), (256, 896), (256, 960), (256, 1024), (320, 704), (320, 768), (384, 640), (448, 576)}
    found = buckets_within(512, 64, (256, 1024))
    assert set(found) == upright | {(width, height) for height, width in upright} | {(512, 512)}
    assert buckets_within(512, 64, (300, 1000)) == found
    with pytest.raises(ValueError, match="--bucket-sides 576 1024: expected limits in multiples of 64, with 512"):
        buckets_within(512, 64, (576, 1024))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("color_aug = true", "pictures are encoded once, in their own colours"),
        ("batch_size = 4", r"batch_size = \[2, 4\]: a run has one for all data sets"),
        ("caption_tag_dropout_rate = 0.1", "tags are dropped of shuffled captions alone"),
    ],
)
def test_a_key_without_counterpart_ends_the_encode(photos: Path, tmp_path: Path, changed: str, message: str) -> None:
    config = tmp_path / "data.toml"
    changed_set = changed.startswith("batch_size")
    text = _TOML.format(root=photos)
    config.write_text(text.replace("batch_size = 2", changed, 1) if changed_set else f"{text}  {changed}\n")
    with pytest.raises(ConfigError, match=message):
        parts_of_config(read_dataset_config(config), 1.0)


def test_a_killed_encode_of_several_is_not_taken_for_complete(photos: Path, pipeline: str, tmp_path: Path) -> None:
    """The list is written last."""
    out, found = tmp_path / "out", parts_of_folders(photos, None, 1.0)
    options = {"out": out, "pretrained": pipeline, "resolution": 32}

    def killed(text: str) -> None:
        if "2_sks cat: 2 x" in text:
            raise Preempted("killed")

    with pytest.raises(Preempted):
        encode_several(found, options, killed)
    assert (out / "10_sks dog" / "dataset.json").exists()
    assert not (out / "sets.json").exists()
    encode_several(found, options)
    assert [each.per_epoch for each in joined(out).sets] == [30, 4]


def test_what_is_measured_is_that_of_the_first_data_set(photos: Path, pipeline: str, tmp_path: Path) -> None:
    """Statistics and maps of their own would give the same pictures other values."""
    out, teacher = tmp_path / "out", tiny_teacher(tmp_path / "teacher", "dinov2")
    command = f"encode {photos} {out} --pretrained {pipeline} --resolution 32"
    main([*command.split(), "--statistics", "measured", "--teacher", str(teacher), "--teacher-width", "6"])
    one, other = (DatasetInfo.read(out / name) for name in ("10_sks dog", "2_sks cat"))
    assert one.normalisation == other.normalisation == joined(out).normalisation
    assert one.normalisations == other.normalisations == joined(out).normalisations
    maps = {(out / name / BASIS_FILE).read_bytes() for name in ("10_sks dog", "2_sks cat")}
    assert len(maps) == 1
    assert other.provenance.statistics == f"per channel, of {out / '10_sks dog'}"
    assert main([*command.split(), "--max-samples", "3"]) == 2


def test_metadata_of_kohya_is_a_table_with_tags(photos: Path, pipeline: str, tmp_path: Path) -> None:
    rows = {
        "0": {"caption": "a dog", "tags": "sks, lawn", "train_resolution": [64, 64]},  # as without --full_path
        str(photos / "10_sks dog" / "1.png"): {"tags": "sks, asleep"},
        "2.png": {"caption": "sits"},
    }
    (tmp_path / "meta.json").write_text(json.dumps(rows))
    config = tmp_path / "data.toml"
    subset = f"image_dir = '{photos / '10_sks dog'}'\nmetadata_file = '{tmp_path / 'meta.json'}'\nnum_repeats = 4"
    config.write_text(f"\ufeff[[datasets]]\nresolution = 32\n[[datasets.subsets]]\n{subset}\n")
    main(["encode", str(config), str(tmp_path / "out"), "--pretrained", pipeline])
    assert captions(tmp_path / "out" / "meta.json") == ["a dog,sks, lawn", "sits", "sks, asleep"]
    assert [each.per_epoch for each in joined(tmp_path / "out").sets] == [12]
    lines = [json.dumps({"image_path": name} | row) for name, row in rows.items()]
    (tmp_path / "meta.jsonl").write_text("\n".join(lines))
    subset = {"image_dir": str(photos / "10_sks dog"), "metadata_file": str(tmp_path / "meta.json")}
    in_json = {"datasets": [{"resolution": 32, "subsets": [subset]}]}
    (tmp_path / "data.json").write_text("\ufeff" + json.dumps(in_json))
    main(["encode", str(tmp_path / "data.json"), str(tmp_path / "json"), "--pretrained", pipeline])
    assert captions(tmp_path / "json" / "meta.json") == ["a dog,sks, lawn", "sits", "sks, asleep"]
    config.write_text(config.read_text().replace("meta.json", "meta.jsonl"))
    main(["encode", str(config), str(tmp_path / "lines"), "--pretrained", pipeline])
    assert captions(tmp_path / "lines" / "meta.jsonl") == ["a dog,sks, lawn", "sits", "sks, asleep"]
    config.write_text(config.read_text().replace("num_repeats", "caption_separator = ';'\nnum_repeats"))
    with pytest.raises(ConfigError, match="tags of a metadata_file follow its caption behind a comma"):
        parts_of_config(read_dataset_config(config), 1.0)


def weights(folder: Path) -> list[float]:
    """The mean weight in the loss of each picture of an encoded folder; none without masks."""
    with LatentReader(folder) as reader:
        found = reader.read(range(len(reader)))
    return found["loss_mask"].astype(float).mean(axis=(1, 2)).round(3).tolist() if "loss_mask" in found else []


def masks(folder: Path, count: int, level: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        Image.new("L", (40, 40), level).save(folder / f"{n}.png")


def test_masks_are_those_of_each_folder_and_none_of_regularisation_pictures(
    photos: Path, pipeline: str, tmp_path: Path
) -> None:
    """By folder name, or all in one; a configuration names them by subset, or takes the alpha channel."""
    masks(tmp_path / "masks", 2, 51)
    masks(tmp_path / "masks" / "10_sks dog", 2, 0)
    options = f"--pretrained {pipeline} --resolution 32 --masks {tmp_path / 'masks'}"
    main(["encode", str(photos), str(tmp_path / "out"), *options.split(), "--regularisation", str(tmp_path / "reg")])
    assert weights(tmp_path / "out" / "10_sks dog") == [0.0, 0.0, 1.0]
    assert weights(tmp_path / "out" / "2_sks cat") == [0.2, 0.2]
    assert weights(tmp_path / "out" / "reg_1_dog") == []
    with open_shards(DataConfig(path=str(tmp_path / "out"))) as reader:
        joined_masks = reader.read(range(len(reader)))["loss_mask"].astype(float).mean(axis=(1, 2)).round(3)
    assert joined_masks.tolist() == [0.0, 0.0, 1.0, 0.2, 0.2, *[1.0] * 7]
    pictures(photos / "1_sks bird", 1)
    (photos / "1_sks bird" / "0.png").rename(photos / "1_sks bird" / "other.png")
    main(["encode", str(photos), str(tmp_path / "out"), *options.split()])
    assert weights(tmp_path / "out" / "1_sks bird") == [], "the folder of masks has none of its pictures"
    assert main(["encode", str(photos), str(tmp_path / "none"), *options.split()[:-1], str(photos)]) == 2
    config = tmp_path / "data.toml"
    rows = f"""
      [[datasets.subsets]]
      image_dir = "{photos}/10_sks dog"
      class_tokens = "a dog"
      conditioning_data_dir = "{tmp_path}/masks"
      [[datasets.subsets]]
      image_dir = "{photos}/2_sks cat"
      class_tokens = "a cat"
      alpha_mask = true
    """
    config.write_text(f"[[datasets]]\nresolution = 32\n{rows}")
    assert main(["encode", str(config), str(tmp_path / "toml"), *options.split()]) == ConfigError.exit_code
    main(["encode", str(config), str(tmp_path / "toml"), "--pretrained", pipeline])
    assert weights(tmp_path / "toml" / "10_sks dog") == [0.2, 0.2, 1.0]
    assert weights(tmp_path / "toml" / "2_sks cat") == [1.0, 1.0]
