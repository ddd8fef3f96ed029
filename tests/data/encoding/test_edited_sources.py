"""A source that was edited: a later call encodes what changed, and ends with the bytes of a fresh encode."""

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastdiff.config.run_record import claim
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.encoding.plan import EncodeFolder
from fastdiff.data.shards.usage import USERS, note_use
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.inputs.encoding import encode, encode_part, files, picture
from tests.support.nights import by_day
from tests.support.servers.web_servers import s3_server

IMAGES, PER_SHARD = 6, 2


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipelines") / "sd15")


def with_texts(folder: Path) -> Path:
    folder.mkdir()
    for number in range(IMAGES):
        picture(number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return folder


def with_table(folder: Path) -> Path:
    with_texts(folder)
    rows = [{"file_name": f"{number}.png", "text": f"picture {number}"} for number in range(IMAGES)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def with_rows(folder: Path) -> Path:
    """A table of a data set whose pictures lie beside it."""
    import datasets

    pictures = with_texts(folder.with_name("pictures"))
    paths = [str(pictures / f"{number}.png") for number in range(IMAGES)]
    rows = datasets.Dataset.from_dict({"image": paths, "text": [f"picture {number}" for number in range(IMAGES)]})
    folder.mkdir()
    rows.to_parquet(folder / "rows.parquet")
    return folder


def write(path: Path, number: int) -> None:
    picture(number).save(path)


def replace_row(folder: Path) -> None:
    table = folder / "metadata.jsonl"
    table.write_text(table.read_text().replace("picture 3", "a new caption"))


def without_times(folder: Path) -> None:
    """As ``cp -r``."""
    shutil.copytree(folder, folder.with_name("copy"), copy_function=shutil.copyfile)
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))


def add(folder: Path) -> None:
    write(folder / "6.png", 6)
    (folder / "6.txt").write_text("six")


def rename(folder: Path) -> None:
    for ending in ("png", "txt"):
        (folder / f"4.{ending}").rename(folder / f"4a.{ending}")


EDITS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object], int, str]] = {
    "a caption": (with_texts, lambda f: (f / "0.txt").write_text("a new caption"), 1, "0.png (its caption or class)"),
    "a picture": (with_texts, lambda f: write(f / "3.png", 77), 1, "3.png"),
    "a row": (with_table, replace_row, 1, "3.png (its caption or class)"),
    "a picture of a row": (with_rows, lambda f: write(f.with_name("pictures") / "3.png", 77), 1, "row 3"),
    "a picture added": (with_texts, add, 1, "6.png (new)"),
    "a picture removed": (with_texts, lambda f: (f / "5.png").unlink(), 1, "5.png (gone)"),
    "a picture renamed": (with_texts, rename, 1, "4a.png (new)"),
    "the first removed": (with_texts, lambda f: (f / "0.png").unlink(), 3, "0.png (gone)"),
    "a touch": (with_texts, lambda f: os.utime(f / "1.png"), 0, ""),
    "a copy": (with_texts, without_times, 0, ""),
    "a copy of a table": (with_table, without_times, 0, ""),
    "nothing": (with_texts, lambda f: None, 0, ""),
}  # fmt: skip


BY_DAY = ("a caption", "a picture of a row", "a picture added", "the first removed", "a copy of a table")


@pytest.mark.parametrize("edit", by_day(BY_DAY, *(edit for edit in EDITS if edit not in BY_DAY)))
def test_a_later_call_encodes_what_changed(tmp_path: Path, sd: Path, edit: str) -> None:
    make, change, stale, named = EDITS[edit]
    source, out = make(tmp_path / "photos"), tmp_path / "out"
    encode(source, out, sd, samples_per_shard=PER_SHARD)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    shards = {path.name: path.read_bytes() for path in out.glob("*.tar")}
    change(source)
    said = encode(source, out, sd, samples_per_shard=PER_SHARD)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    kept = before.items() & after.items()
    if stale:
        assert f"{stale} of" in said[0]
        assert named in said[0]
    else:
        assert said == [f"{out} is already complete"]
        assert {path.name: path.read_bytes() for path in out.glob("*.tar")} == shards
    assert len(kept) == max(3 - stale, 0) or edit == "a picture added"
    encode(source, tmp_path / "fresh", sd, samples_per_shard=PER_SHARD)
    assert files(out) == files(tmp_path / "fresh")
    assert not verify(out).problems
    assert encode(source, out, sd, samples_per_shard=PER_SHARD) == [f"{out} is already complete"]


def test_a_copy_is_read_once_and_its_times_are_noted(tmp_path: Path, sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = with_texts(tmp_path / "photos"), tmp_path / "out"
    encode(source, out, sd)
    without_times(source)
    encode(source, out, sd)
    for path in source.glob("*.png"):
        os.chmod(path, 0)
    monkeypatch.setattr("fastdiff.data.images.folder.ImageFolder.items", None)  # root may read them
    assert encode(source, out, sd) == [f"{out} is already complete"]


@pytest.mark.parametrize(
    "edit", by_day(["a caption", "the first removed"], "a picture", "a row", "a picture added", "a copy")
)
def test_a_killed_encode_does_not_mix_old_and_new(tmp_path: Path, sd: Path, edit: str) -> None:
    make, change, stale, _ = EDITS[edit]
    source, out = make(tmp_path / "photos"), tmp_path / "out"
    encode_part(source, out, sd, 2, samples_per_shard=PER_SHARD)
    change(source)
    said = encode(source, out, sd, samples_per_shard=PER_SHARD)
    assert any("the source has changed since it was encoded" in line for line in said) == bool(stale)
    encode(source, tmp_path / "fresh", sd, samples_per_shard=PER_SHARD)
    assert files(out) == files(tmp_path / "fresh")


def test_a_kill_while_a_data_set_is_withdrawn_loses_nothing(
    tmp_path: Path, sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = with_texts(tmp_path / "photos"), tmp_path / "out"
    encode(source, out, sd, samples_per_shard=PER_SHARD)
    (source / "0.txt").write_text("a new caption")
    for step in ("_withdraw", "_drop"):
        with monkeypatch.context() as patch:
            original = getattr(EncodeFolder, step)

            def then_die(*given: object, original: Callable[..., None] = original) -> None:
                original(*given)
                raise KeyboardInterrupt

            patch.setattr(EncodeFolder, step, then_die)
            with pytest.raises(KeyboardInterrupt):
                encode(source, out, sd, samples_per_shard=PER_SHARD)
        assert not (out / "dataset.json").exists()
    encode(source, out, sd, samples_per_shard=PER_SHARD)
    encode(source, tmp_path / "fresh", sd, samples_per_shard=PER_SHARD)
    assert files(out) == files(tmp_path / "fresh")


def test_other_processes_of_the_same_encode_are_not_overtaken(tmp_path: Path, sd: Path) -> None:
    source, out = with_texts(tmp_path / "photos"), tmp_path / "out"
    encode_part(source, out, sd, 1, samples_per_shard=PER_SHARD)
    plan = json.loads((out / ".encoding" / "plan.json").read_bytes())
    plan.pop("captions_per_image")
    other = EncodeFolder(out, plan, 3, lambda: 1)
    write(source / "9.png", 9)
    with pytest.raises(ConfigError, match="the source has changed since other processes began"):
        encode(source, out, sd, samples_per_shard=PER_SHARD)
    other.close()
    encode(source, out, sd, samples_per_shard=PER_SHARD, bad="skip")
    late = json.loads((out / "encode.json").read_bytes())
    assert late["source_listing"] != plan["source_listing"]


def test_an_edited_tar_is_encoded_anew(tmp_path: Path, sd: Path) -> None:
    photos, tars = with_texts(tmp_path / "photos"), tmp_path / "tars"
    tars.mkdir()

    def pack(number: int) -> None:
        with tarfile.open(tars / f"{number}.tar", "w") as archive:
            for name in (f"{number}.png", f"{number}.txt"):
                archive.add(photos / name, name)

    for number in range(2):
        pack(number)
    encode(tars, tmp_path / "out", sd)
    os.utime(tars / "0.tar", (10**9, 10**9))
    assert encode(tars, tmp_path / "out", sd) == [f"{tmp_path / 'out'} is already complete"]
    (photos / "1.txt").write_text("a new caption")
    pack(1)
    said = encode(tars, tmp_path / "out", sd)
    assert "1 of 2 shards are encoded anew" in said[0]
    encode(tars, tmp_path / "fresh", sd)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


def in_pixels(source: str, out: Path, **options: Any) -> list[str]:
    said: list[str] = []
    given = {"resolution": 32, "decode": "pillow", "samples_per_shard": 4, "workers": 1} | options
    encode_images(EncodeOptions(source=source, out=out, autoencoder="identity", **given), said.append)
    return said


def test_an_encode_that_failed_before_its_first_shard_has_nothing_to_encode_anew(tmp_path: Path) -> None:
    source = tmp_path / "pictures"
    for name in ("a", "b"):
        (source / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(source / name / "0.png")
    (source / "a" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n, cut")
    with pytest.raises(DataError, match="cannot be used"):
        in_pixels(str(source), tmp_path / "out")
    (source / "a" / "1.png").unlink()
    said = in_pixels(str(source), tmp_path / "out")
    assert not any("encoded anew" in line for line in said)
    in_pixels(str(source), tmp_path / "fresh")
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


OWN = """
import numpy as np

class Own:
    classes = 2

    def __len__(self):
        return {items}

    def __getitem__(self, index):
        return {{"image": np.full((32, 32, 3), 9 * index + {shift}, np.uint8), "label": index % 2}}
"""


def test_nothing_is_kept_of_a_source_that_cannot_be_compared(tmp_path: Path) -> None:
    """Code and tars at an address say nothing of their files, so another listing of them means another source."""
    code = tmp_path / "own.py"
    code.write_text(OWN.format(items=6, shift=0))
    own = f"{code}:Own"
    in_pixels(own, tmp_path / "out")
    code.write_text(OWN.format(items=7, shift=1))
    assert "2 of 2 shards are encoded anew" in in_pixels(own, tmp_path / "out")[0]
    in_pixels(own, tmp_path / "fresh")
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


def test_a_tar_between_others_at_an_address_is_neither_lost_nor_doubled(tmp_path: Path) -> None:
    tars = {}
    for number in range(3):
        picture(number).save(tmp_path / "picture.png")
        (tmp_path / "picture.txt").write_text(f"picture {number}")
        with tarfile.open(tmp_path / "one.tar", "w") as archive:
            for name in ("picture.png", "picture.txt"):
                archive.add(tmp_path / name, name)
        tars[f"tars/{number}.tar"] = (tmp_path / "one.tar").read_bytes()
    with s3_server(dict(tars)) as bucket:
        import boto3

        client, source = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]), f"{bucket}/tars/"
        client.delete_object(Bucket="bucket", Key="tars/1.tar")
        in_pixels(source, tmp_path / "out")
        client.put_object(Bucket="bucket", Key="tars/1.tar", Body=tars["tars/1.tar"])
        assert "3 of 3 shards are encoded anew" in in_pixels(source, tmp_path / "out")[0]
        in_pixels(source, tmp_path / "fresh")
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


def test_a_partition_of_which_nothing_was_noted_is_told(tmp_path: Path, sd: Path) -> None:
    source, out = with_texts(tmp_path / "photos"), tmp_path / "out"
    encode(source, out, sd)
    (out / "train-000000.source.json").unlink()
    (source / "0.txt").write_text("a new caption")
    [said] = encode(source, out, sd)
    assert said.endswith("was edited since cannot be seen")


def test_an_option_without_effect_on_the_listing_changes_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        write(tmp_path / "classes" / name / "0.png", 0)
    in_pixels(str(tmp_path / "classes"), tmp_path / "out")
    before = files(tmp_path / "out")
    [said] = in_pixels(str(tmp_path / "classes"), tmp_path / "out", classes_from="folder")
    assert said.endswith("is already complete")
    assert files(tmp_path / "out") == before


def test_a_data_set_of_an_older_version_stays_usable(tmp_path: Path, sd: Path) -> None:
    source, out = with_texts(tmp_path / "photos"), tmp_path / "out"
    encode(source, out, sd)
    for path in (out / "encode.json", *out.glob("*.source.json")):
        path.unlink()
    before = files(out)
    (source / "0.txt").write_text("a new caption")
    [said] = encode(source, out, sd)
    assert said.endswith(f"is already complete; whether images in {source} was edited since cannot be seen")
    assert files(out) == before
    with pytest.raises(ConfigError, match="already holds a data set with another source or other options;"):
        encode(source, out, sd, batch=2)


def test_a_data_set_that_a_run_uses_is_refused_with_the_way_out(tmp_path: Path, sd: Path) -> None:
    source, out, run = with_texts(tmp_path / "photos"), tmp_path / "out", tmp_path / "run"
    encode(source, out, sd)
    note_use(out, run)
    note_use(out, run)
    assert (out / USERS).read_text().count("\n") == 1
    (source / "0.txt").write_text("a new caption")
    before = files(out)
    release = claim(run)  # it has no checkpoint yet
    with pytest.raises(ConfigError, match=rf"0\.png.*the run {run} has used {out}.*encode into another folder"):
        encode(source, out, sd)
    release()
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has used"):
        encode(source, out, sd)
    assert files(out) == before
    encode(source, tmp_path / "other", sd)
    shutil.rmtree(run)
    assert "1 of 2 shards are encoded anew" in encode(source, out, sd)[0]
    assert {name: content for name, content in files(out).items() if name != USERS} == files(tmp_path / "other")
