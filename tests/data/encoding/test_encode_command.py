"""``fastdiff encode``: its command line, and the messages of its processes."""

import dataclasses
import fcntl
import itertools
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from fastdiff.cli.main import main
from fastdiff.data.encoding import builtin
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.encoding.plan import EncodeFolder
from fastdiff.data.selection import Selection
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import StorageError
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.inputs.encoding import captioned


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captioned(tmp_path_factory.mktemp("sources") / "images", [["a cat", "a pet"], "a dog", "a cat"])


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipelines") / "sd15")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "images",
            ["--samples", "1"],
            "--samples is for the source synthetic, and the source is {}; use --max-samples",
        ),
        ("images", ["--classes", "7"], "--classes is for the source synthetic"),
        ("images", ["--shape", "4,8,8"], "--shape is for the source synthetic"),
        ("digits", ["--resolution", "512"], "--resolution is for images, and digits is none"),
        ("digits", ["--flip"], "--flip is for images"),
        ("digits", ["--pretrained", "x"], "./digits"),
        ("digits", ["--samples", "7"], "--samples is for the source synthetic, and the source is digits; leave it out"),
        ("synthetic", ["--max-samples", "7"], "--max-samples is for images, and synthetic is none"),
        ("synthetic", ["--bucket-step", "8"], "as ./synthetic"),
        ("synthetic", ["--split", "train"], "--split is for images"),
        ("digits", ["--split", "dev"], "--split dev: the digits have the splits all, train, test"),
    ],
)
def test_options_of_another_source_are_refused(
    images: Path,
    pipeline: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    options: list[str],
    message: str,
) -> None:
    source = str(images) if source == "images" else source
    own = ["--pretrained", str(pipeline)] if source == str(images) else []
    assert main(["encode", source, str(tmp_path / "out"), *own, *options]) == 2
    assert message.format(images) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_digits_have_a_part_to_measure_on(tmp_path: Path) -> None:
    infos = {}
    for split in ("all", "train", "test"):
        assert main(["encode", "digits", str(tmp_path / split), "--split", split]) == 0
        infos[split] = DatasetInfo.read(tmp_path / split)
    assert [info.samples for info in infos.values()] == [1797, 1415, 382]
    assert infos["test"].provenance.source == "scikit-learn load_digits, test"
    names = {split: _names(tmp_path / split) for split in infos}
    assert names["train"] + names["test"] == names["all"]


def _names(folder: Path) -> list[str]:
    names = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as archive:
            names += archive.getnames()
    return names


def test_the_options_of_synthetic_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "2,4,4", "--samples", "5", "--classes", "3"]
    assert main(["encode", "synthetic", str(tmp_path / "out"), *options]) == 0
    assert f"5 samples; check it with `fastdiff verify {tmp_path / 'out'}`" in capsys.readouterr().out
    info = DatasetInfo.read(tmp_path / "out")
    assert (info.latent.shape, info.samples, info.classes) == ((2, 4, 4), 5, 3)


def test_an_interrupted_synthetic_set_is_told_as_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> Iterator[builtin.Sample]:
        yield from itertools.islice(synthetic((2, 4, 4), 5, 3, 0), 2)
        raise KeyboardInterrupt

    synthetic = builtin.synthetic
    command = ["encode", "synthetic", str(tmp_path / "out"), "--shape", "2,4,4", "--samples", "5"]
    with monkeypatch.context() as patch:
        patch.setattr(builtin, "synthetic", interrupted)
        assert main(command) == 75
    said = capsys.readouterr().err
    assert f"interrupted; {tmp_path / 'out'} is not complete, and the same command begins anew" in said
    assert main(command) == 0


def test_a_rank_says_that_it_waits_for_the_count_of_captions(images: Path, pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".encoding").mkdir(parents=True)
    said: list[str] = []
    with (tmp_path / "out" / ".encoding" / "plan.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def say(text: str) -> None:
            said.append(text)
            fcntl.flock(other, fcntl.LOCK_UN)

        deadline = threading.Timer(240, lambda: say("nobody has said anything"))
        deadline.daemon = True
        deadline.start()
        encode_images(
            EncodeOptions(
                source=str(images), out=tmp_path / "out", pretrained=str(pipeline), resolution=32, decode="pillow",
                captions="all", workers=1,
            ),
            say,
        )  # fmt: skip
        deadline.cancel()
    assert said[0] == f"rank 0: waiting while another rank counts the captions of images in {images}"
    assert DatasetInfo.read(tmp_path / "out").captions == 2


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_folder(tmp_path: Path) -> None:
    def count() -> int:
        return len((tmp_path / "captions.txt").read_bytes())

    with pytest.raises(FileNotFoundError):
        EncodeFolder(tmp_path / "out", {}, 1, count)
    folder = EncodeFolder(tmp_path / "out", {}, 1, lambda: 1)
    with pytest.raises(StorageError, match="cannot write to"), folder.storage():
        (tmp_path / "out" / "missing" / "shard.tar").open("wb")


def test_what_was_left_out_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In partitions of one image, by a rank and by the one that finishes, as by one process."""
    for number, ending in enumerate(["png", "bmp", "jfif", "tif"]):
        path = tmp_path / "photos" / str(number) / f"a.{ending}"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(path, "JPEG" if ending == "jfif" else None)
    (tmp_path / "photos" / "1" / "b.heic").write_bytes(b"")
    (tmp_path / "photos" / "2" / "b.png").write_bytes(b"damaged")
    command = ["encode", str(tmp_path / "photos"), str(tmp_path / "out"), "--autoencoder", "identity"]
    assert main([*command, "--resolution", "16", "--bad", "skip", "--samples-per-shard", "1"]) == 0
    said = capsys.readouterr().out
    assert "6 pictures: 4 taken, 2 left out" in said
    assert "  left out: 1 picture of kind HEIC, which is not read (convert to JPEG or PNG) (first: 1/b.heic)" in said
    assert "  left out: 1 picture unusable, listed in bad_images.jsonl (first: b.png)" in said
    assert "  4 classes: 0 = 0, 1 = 1, 2 = 2, 3 = 3" in said
    assert "2 of them decoded by pillow, as dali would give other pixels or none" in said
    kept = json.loads((tmp_path / "out" / "dataset.json").read_text())["selection"]
    assert [each["count"] for each in kept["left_out"]] == [1, 1]
    assert DatasetInfo.read(tmp_path / "out").selection is not None


def test_old_data_sets_have_no_selection_and_the_same_digest(tmp_path: Path) -> None:
    assert main(["encode", "synthetic", str(tmp_path / "out"), "--shape", "2,4,4", "--samples", "5"]) == 0
    info = DatasetInfo.read(tmp_path / "out")
    assert info.selection is None
    assert "selection" not in json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert dataclasses.replace(info, selection=Selection()).digest == info.digest


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (
            ["a.png", "captions.csv"],
            [],
            "have no captions (tables, not read; a .json, .jsonl or .csv is read as the source",
        ),
        (
            ["a.png"],
            ["--classes-from", "none"],
            "give one caption for all with --caption 'a photo of sks dog' or",
        ),
        (
            ["10_sks dog/a.png"],
            ["--layout", "plain"],
            "--caption 'sks dog', that of the folders with --caption-from folder or a caption",
        ),
        (["1_cat/a.png", "1_dog/a.png"], ["--layout", "plain"], "(for a network of classes: --classes-from folder)"),
        (["a.png"], ["--caption", "x", "--caption-from", "folder"], "--caption and --caption-from folder both give"),
        (
            ["a.png"],
            ["--caption", "x", "--classes-from", "none"],
            "--caption needs captions, which --classes-from",
        ),
    ],
)
def test_images_that_no_text_network_can_train_on_are_refused(
    pipeline: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    files: list[str],
    options: list[str],
    message: str,
) -> None:
    for name in files:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32)).save(path, "PNG")
    command = ["encode", str(tmp_path / "images"), str(tmp_path / "out"), "--resolution", "32"]
    assert main([*command, "--pretrained", str(pipeline), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_images_alone_are_an_unconditional_data_set_or_have_one_caption(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "images" / "a.png")
    command = ["encode", str(tmp_path / "images"), str(tmp_path / "out"), "--resolution", "32"]
    assert main(command) == 2
    assert "--pretrained is missing" in capsys.readouterr().err
    assert main([*command[:2], str(tmp_path / "one"), *command[3:], "--autoencoder", "identity"]) == 0
    assert main([*command[:2], str(tmp_path / "two"), *command[3:], "--pretrained", str(pipeline / "vae")]) == 0
    said = capsys.readouterr()
    assert said.out.count("no captions and no classes, so this is an unconditional data set") == 2
    assert said.err.count(f"loading the autoencoder of {pipeline / 'vae'}") == 1, "pixels need none"
    assert main([*command, "--pretrained", str(pipeline / "vae"), "--caption", "x"]) == 2
    assert f"have captions, but {pipeline / 'vae'} has no text encoder; give a pipeline" in capsys.readouterr().err
    assert main([*command, "--pretrained", str(pipeline), "--caption", "a photo of sks dog"]) == 0
    assert {"context"} <= DatasetInfo.read(tmp_path / "out").columns.keys()
    assert "pictures with the caption of --caption or --caption-from: 1 (first: a.png)" in capsys.readouterr().out
    assert main([*command[:2], str(tmp_path / "three"), "--autoencoder", "identity", "--caption", "x"]) == 2
    assert "--caption needs a pipeline, but --autoencoder identity has none" in capsys.readouterr().err
