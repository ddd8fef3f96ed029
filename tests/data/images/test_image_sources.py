"""Sources of images: folders, metadata files, classes, saved data sets and parquet."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from fastdiff.data.images.items import BadItem, ImageItem, ImageSource
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.sources import open_source
from fastdiff.errors import ConfigError, DataError
from fastdiff.optional_packages import pip_install


def picture(number: int, kind: str = "jpeg") -> bytes:
    """A file of its own for each number."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number * 7 % 256, 100, 200)).save(file, kind)
    return file.getvalue()


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def source(text: object, **options: object) -> ImageSource:
    return open_source(SourceOptions(source=str(text), **({"samples_per_shard": 2} | options)))  # type: ignore[arg-type]


def everything(found: ImageSource) -> list[ImageItem | BadItem]:
    """All items, read both ways where both are possible; keys are checked on the way."""
    items = [item for partition in range(found.partitions) for item in found.items(partition)]
    assert len({item.key for item in items}) == len(items)
    return items


def contents(found: ImageSource) -> list[tuple[bytes, tuple[str, ...], int | None]]:
    items = everything(found)
    assert items == [found.item(index) for index in range(len(found))]
    assert all(isinstance(item, ImageItem) for item in items), items
    return [(item.image, item.captions, item.label) for item in items if isinstance(item, ImageItem)]


def reasons(found: ImageSource) -> dict[str, str]:
    """Why items are bad, by their name without the folder."""
    bad = [item for item in everything(found) if isinstance(item, BadItem)]
    return {os.path.basename(item.name): item.reason for item in bad}


ROWS: list[dict[str, object]] = [
    {"file_name": "sub/b.PNG", "text": ["two", " a\x00pair\n "]},
    {"file_name": "./a.jpg", "text": "eins, „one“"},
    {"file_name": "a.jpg", "text": "once more"},
]
PICTURES = {"a.jpg": picture(1), "sub/b.PNG": picture(2, "png"), "not-listed.webp": picture(3, "webp"), "c.gif": b"-"}
EXPECTED = [
    (PICTURES["a.jpg"], ("eins, „one“", "once more"), None),
    (PICTURES["sub/b.PNG"], ("two", "a pair"), None),
]


@pytest.mark.parametrize("below", ["", "train/"])
def test_metadata_jsonl(tmp_path: Path, below: str) -> None:
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    files = {f"{below}{name}": content for name, content in PICTURES.items()}
    others: dict[str, bytes | str] = {"test/x.jpg": picture(9)} if below else {}
    write(tmp_path, {**files, **others, f"{below}metadata.jsonl": "\ufeff" + lines})
    found = source(tmp_path)
    assert (found.captioned, found.classes, found.partitions, len(found)) == (True, None, 1, 2)
    assert contents(found) == EXPECTED


def test_metadata_csv(tmp_path: Path) -> None:
    table = io.StringIO()
    rows = [["file_name", "other", "words"], ["sub/b.PNG", "1", "two"], ["a.jpg", "2", 'a "quoted", long\ncaption']]
    csv.writer(table).writerows(rows)
    write(tmp_path, {**PICTURES, "metadata.csv": table.getvalue()})
    found = source(tmp_path, caption_column="words", samples_per_shard=1)
    assert [captions for _, captions, _ in contents(found)] == [('a "quoted", long caption',), ("two",)]
    assert found.partitions == 2
    with pytest.raises(ConfigError, match=r"metadata.csv has no caption column 'text'.*: file_name, other, words"):
        source(tmp_path)


@pytest.mark.parametrize("column", ["file_name", "image"])
def test_one_list_of_images_that_lie_elsewhere(tmp_path: Path, column: str) -> None:
    write(tmp_path / "pictures", PICTURES)
    rows = [{column: "sub/b.PNG", "text": ["two", "a pair"]}, {column: f"{tmp_path}/pictures/a.jpg", "text": "eins"}]
    outside = {column: "../lists/x.jpg", "text": "out"}
    write(tmp_path / "lists", {"train.json": json.dumps(rows), "outside.json": json.dumps([*rows, outside])})
    root = str(tmp_path / "pictures")
    found = source(tmp_path / "lists" / "train.json", image_root=root)
    assert contents(found) == [(PICTURES["a.jpg"], ("eins",), None), (PICTURES["sub/b.PNG"], ("two", "a pair"), None)]
    assert "lists/train.json in" in found.name
    bad = reasons(source(tmp_path / "lists" / "outside.json", image_root=root))
    assert bad == {"x.jpg": "its path in the metadata leads out of the folder"}
    beside = reasons(source(tmp_path / "lists" / "train.json"))
    assert beside.pop("b.PNG") == "b.PNG is missing", "without a root they lie beside the list"
    with pytest.raises(ConfigError, match="--image-root x is for a file of metadata"):
        source(tmp_path / "pictures", image_root="x")
    with pytest.raises(ConfigError, match="--dataset-config small is for a data set of Hugging Face"):
        source(tmp_path / "lists" / "train.json", dataset_config="small")
    with pytest.raises(ConfigError, match=r"--image-root https://host/x: an address, expected a path of this machine"):
        source(tmp_path / "lists" / "train.json", image_root="https://user:secret@host/x")
    write(tmp_path / "lists", {"other.json": '{"a": 1}'})
    with pytest.raises(DataError, match=r"other\.json: expected a list of objects"):
        source(tmp_path / "lists" / "other.json")


@pytest.mark.parametrize("root", ["pictures", ""])
def test_a_root_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """A name that begins as the root does is below it, too."""
    monkeypatch.chdir(tmp_path)
    top = Path(root or ".")
    write(top, PICTURES)
    write(top / "pictures", {"a.jpg": PICTURES["sub/b.PNG"]})
    rows = [{"file_name": "pictures/a.jpg", "text": "below"}, {"file_name": f"{tmp_path}/{top}/a.jpg", "text": "above"}]
    Path("train.json").write_text(json.dumps(rows))
    found = source(Path("train.json"), image_root=root)
    assert contents(found) == [(PICTURES["a.jpg"], ("above",), None), (PICTURES["sub/b.PNG"], ("below",), None)]
    with pytest.raises(ConfigError, match="--image-root nowhere: no such folder"):
        source(Path("train.json"), image_root="nowhere")


@pytest.mark.fault(28)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    rows = [
        {"file_name": "missing.jpg", "text": "x"},
        {"file_name": "../outside.jpg", "text": "x"},
        {"file_name": str(tmp_path / "absolute.jpg"), "text": "x"},
        {"file_name": "a.jpg", "text": None},
        {"file_name": "long.jpg", "text": "x" * 10_000_000},
        {"file_name": "pipe.jpg", "text": "x"},
        {"file_name": "loop.jpg", "text": "x"},
        {"file_name": "large.jpg", "text": "x"},
    ]
    write(tmp_path / "data", {**PICTURES, "long.jpg": picture(1), "metadata.jsonl": "\n".join(map(json.dumps, rows))})
    os.mkfifo(tmp_path / "data" / "pipe.jpg")
    (tmp_path / "data" / "loop.jpg").symlink_to("loop.jpg")
    with (tmp_path / "data" / "large.jpg").open("wb") as file:
        file.truncate((256 << 20) + 1)
    found = reasons(source(tmp_path / "data"))
    assert found.pop("outside.jpg") == found.pop("absolute.jpg") == "its path in the metadata leads out of the folder"
    assert found == {
        "missing.jpg": "missing.jpg is missing",
        "a.jpg": 'its caption is null; give one, or an empty one ("") for the empty prompt',
        "long.jpg": "its caption has 10000000 bytes, expected at most 100000",
        "pipe.jpg": "pipe.jpg is not a file",
        "loop.jpg": "loop.jpg is a link to itself",
        "large.jpg": "large.jpg has 268435457 bytes, expected at most 268435456",
    }


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected an object"),
        ('{"text": "x"}', "line 2: file_name is None"),
    ],
)
def test_lines_that_are_no_metadata_are_named(tmp_path: Path, line: str, what: str) -> None:
    write(tmp_path, {"metadata.jsonl": f'{{"file_name": "a.jpg", "text": "x"}}\n{line}\n'})
    with pytest.raises(DataError, match=f"{tmp_path}/metadata.jsonl, {what}"):
        source(tmp_path)


def test_text_files_beside_images(tmp_path: Path) -> None:
    write(tmp_path, {"b.jpg": picture(1), "b.txt": "\ufefffirst\r\n \nse\tcond\n", "x/a.b.WebP": picture(2, "webp")})
    write(tmp_path, {"x/a.b.txt": "third", "notes.md": "-", ".hidden.jpg": b"", ".trash/a.jpg": b""})
    (tmp_path / "x" / "up").symlink_to(tmp_path)
    found = source(tmp_path)
    assert contents(found) == [
        (picture(1), ("first", "se cond"), None),
        (picture(2, "webp"), ("third",), None),
    ]
    write(tmp_path, {"c.jpg": picture(1), "d.jpg": picture(1), "d.txt": "\n", "e.jpg": b"", "e.txt": b"\xff"})
    assert reasons(source(tmp_path)) == {
        "c.jpg": "it has no caption: expected c.txt, c.caption or c.jpg.txt; or use --caption",
        "e.jpg": "e.txt is not UTF-8 (invalid start byte at byte 0)",
    }
    assert source(tmp_path).digest != found.digest


def test_class_folders(tmp_path: Path) -> None:
    write(tmp_path, {f"{name}/{k}.jpg": picture(k) for name in ("zebra", "ape", "train") for k in range(2)})
    write(tmp_path, {"ape/deep/9.png": picture(9, "png"), ".git/x": b""})
    found = source(tmp_path)
    assert (found.captioned, found.classes, found.partitions) == (False, 3, 4)
    assert [label for _, _, label in contents(found)] == [0, 0, 0, 1, 1, 2, 2]
    assert [label for _, _, label in contents(source(tmp_path, max_samples=4))] == [0, 0, 0, 1]
    assert source(tmp_path, max_samples=4).classes == 3


def test_a_split_that_the_folder_does_not_have_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {f"{split}/{k}/{k}.jpg": picture(k) for split in ("train", "validation") for k in (1, 2)})
    assert source(tmp_path, split="validation").classes == 2
    with pytest.raises(ConfigError, match=r"has no split 'val', only train, validation; choose one of these"):
        source(tmp_path, split="val")
    (tmp_path / "train").rename(tmp_path / "test")
    with pytest.raises(ConfigError, match=r"has no split 'train', only test, validation"):
        source(tmp_path)
    write(tmp_path, {"a.jpg": picture(1), "a.txt": "beside the folders", "test/1/1.txt": "one"})
    assert len(source(tmp_path)) == 5


def test_captions_are_counted_without_reading_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pyarrow.parquet

    rows = [{"file_name": f"{k}.jpg", "text": text} for k, text in enumerate(["a", ["b", "c", "d"], ["e", 7], "f"])]
    write(tmp_path / "rows", {"metadata.jsonl": "\n".join(map(json.dumps, rows))})  # there are no images at all
    found = source(tmp_path / "rows")
    assert [found.most_captions(partition) for partition in range(found.partitions)] == [3, 1]
    write(tmp_path / "texts", {"1.jpg": b"", "1.txt": "a\n\nb", "2.jpg": b"", "2.txt": b"\xff", "3.jpg": b""})
    found = source(tmp_path / "texts")
    for image in (tmp_path / "texts").glob("*.jpg"):
        image.unlink()
    assert [found.most_captions(partition) for partition in range(found.partitions)] == [2, 0]
    write(tmp_path / "classes", {"one/1.jpg": picture(1)})
    assert source(tmp_path / "classes").most_captions(0) == 0
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [{"bytes": None, "path": f"/no/such-{k}.jpg"} for k in range(3)]
    rows = dataset({"image": images, "text": [["a"], ["b", "c"], None]})
    (tmp_path / "parquet").mkdir()
    pyarrow.parquet.write_table(rows.data.table, tmp_path / "parquet" / "train.parquet")  # type: ignore[attr-defined]
    found = source(tmp_path / "parquet")
    assert [found.most_captions(partition) for partition in range(found.partitions)] == [2, 0]


def test_folders_that_are_no_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no images \(JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF\) among its 0 files"):
        source(tmp_path)
    write(tmp_path, {"a.jpg": picture(1), "class/b.jpg": picture(2)})
    with pytest.raises(DataError, match=r"a.jpg has neither caption nor class: expected metadata.jsonl"):
        source(tmp_path)
    write(tmp_path, {"sub/metadata.jsonl": "{}"})
    with pytest.raises(DataError, match=f"give a folder with metadata as the source: {tmp_path}/sub"):
        source(tmp_path)
    write(tmp_path, {"metadata.jsonl": "{}", "metadata.csv": ""})
    with pytest.raises(DataError, match=r"metadata.jsonl and metadata.csv"):
        source(tmp_path)
    for text in (tmp_path / "a.jpg", tmp_path / "none", "a b"):
        with pytest.raises(DataError, match="is not a source: expected a folder of images"):
            source(text)
    with pytest.raises(ConfigError, match=r"gs://bucket/a.tar: expected a path, or an address"):
        source("gs://bucket/a.tar")


def test_the_digest_is_of_what_is_listed(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"a/1.jpg": picture(1), "b/1.jpg": picture(2)})
    second = write(tmp_path / "second", {"b/1.jpg": picture(2), "a/1.jpg": picture(1)})
    assert source(first).digest == source(second).digest
    assert source(first).digest != source(first, samples_per_shard=3).digest
    write(second, {"b/2.jpg": picture(1)})
    assert source(first).digest != source(second).digest


# --- data sets of Hugging Face ---


def dataset(columns: dict[str, list[object]]) -> object:
    import datasets

    rows = datasets.Dataset.from_dict(columns)
    return rows.cast_column("image", datasets.Image())


def test_a_saved_data_set(tmp_path: Path) -> None:
    import datasets

    images = [{"bytes": picture(k), "path": None} for k in range(3)]
    rows = dataset({"image": images, "text": ["zero", "o\x01ne", "two"]})
    rows.save_to_disk(tmp_path / "plain")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="columns image, text, but no column 'before' of references"):
        source(tmp_path / "plain", reference_column="before")
    found = source(tmp_path / "plain")
    assert (found.captioned, found.classes, found.partitions) == (True, None, 2)
    assert contents(found) == [(picture(k), (("zero", "o ne", "two")[k],), None) for k in range(3)]
    assert len(contents(source(tmp_path / "plain", max_samples=2))) == 2
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    assert source(tmp_path / "splits").digest == found.digest
    with pytest.raises(ConfigError, match=r"no split 'val'; it has train, test"):
        source(tmp_path / "splits", split="val")
    with pytest.raises(ConfigError, match="columns image, text, but no image column 'pixels'"):
        source(tmp_path / "plain", image_column="pixels")
    datasets.Dataset.from_dict({"URL": ["http://a/b.jpg"], "TEXT": ["x"]}).save_to_disk(tmp_path / "laion")
    with pytest.raises(ConfigError, match="pictures are not fetched from addresses"):
        source(tmp_path / "laion")
    with pytest.raises(ConfigError, match="no caption column 'caption' and no ClassLabel column"):
        source(tmp_path / "plain", caption_column="caption")
    with pytest.raises(ConfigError, match="captions and images cannot both be in the column 'text'"):
        source(tmp_path / "plain", image_column="text")
    numbers = datasets.Dataset.from_dict({"image": [1.0, 2.0], "text": ["a", "b"]})
    numbers.save_to_disk(tmp_path / "numbers")
    with pytest.raises(DataError, match="'image' does not hold images"):
        source(tmp_path / "numbers")


@pytest.mark.parametrize("several", [False, True])
def test_references_in_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """One image in each row, or a list; some lists are shorter, and an image may be a path."""
    import datasets
    import pyarrow.parquet

    image = datasets.Image()
    path = write(tmp_path / "rows", {"kept.png": picture(9, "png")}) / "kept.png"
    cells: list[object] = [{"bytes": picture(10 + k), "path": None} for k in range(2)]
    cells.append({"bytes": None, "path": str(path)})
    before = [[cells[0], cells[1]], [cells[1], cells[2]], [cells[2]]] if several else [cells[1], cells[2], None]
    after = [{"bytes": picture(k), "path": None} for k in range(3)]
    columns = datasets.Features({"image": image, "before": datasets.List(image) if several else image})
    rows = datasets.Dataset.from_dict({"image": after, "before": before}, columns)
    folder = tmp_path / "rows" / "parquet"
    folder.mkdir()
    pyarrow.parquet.write_table(rows.data.table, folder / "train-00000-of-00001.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = source(folder, reference_column="before", caption="x")
    first, second, third = everything(found)
    assert isinstance(first, ImageItem)
    assert isinstance(second, ImageItem)
    assert isinstance(third, BadItem)
    own = [picture(10), picture(11), picture(9, "png")]
    assert found.references == 1 + several
    assert first.references == tuple(own[:2] if several else own[1:2])
    assert second.references == tuple(own[1:] if several else own[2:])
    assert third.reason == f"it has {int(several)} references in before, others {1 + several}"
    stamps = [stamp for number in range(found.partitions) for stamp in found.stamps(number) or ()]
    assert str(path) in stamps
    assert found.digest != source(folder, caption="x").digest


def test_parquet_with_classes_and_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pyarrow.parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = write(tmp_path, {"kept.png": picture(5, "png")}) / "kept.png"
    images = [{"bytes": picture(0), "path": None}, {"bytes": None, "path": str(path)}, None]
    rows = dataset({"image": [*images, {"bytes": None, "path": "/no/such.jpg"}], "label": [1, 0, 1, 1]})
    rows = rows.cast_column("label", datasets.ClassLabel(names=["x", "y"]))  # type: ignore[attr-defined]
    (tmp_path / "rows").mkdir()
    pyarrow.parquet.write_table(rows.data.table, tmp_path / "rows" / "train-00000-of-00001.parquet")
    found = source(tmp_path / "rows")
    assert (found.captioned, found.classes, found.class_names, len(found)) == (False, 2, ("x", "y"), 4)
    first, second, third, fourth = everything(found)
    assert isinstance(first, ImageItem)
    assert isinstance(second, ImageItem)
    assert (first.image, first.label) == (picture(0), 1)
    assert (second.image, second.label) == (picture(5, "png"), 0)
    assert isinstance(third, BadItem)
    assert third.reason == "its image is missing"
    assert isinstance(fourth, BadItem)
    assert fourth.reason == "its image /no/such.jpg is outside the data set"
    assert fourth.name.endswith("rows, split train, row 3")


def test_a_configuration_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    front = "---\nconfigs:\n" + "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("few", "many"))
    rows = [json.dumps({"image": str(tmp_path / "data" / "a.jpg"), "text": f"row {number}"}) for number in range(3)]
    files = {"README.md": f"{front}---\n", "few.jsonl": rows[0], "many.jsonl": "\n".join(rows)}
    write(tmp_path / "data", files)
    assert len(source(tmp_path / "data", dataset_config="few")) == 1
    assert len(source(tmp_path / "data", dataset_config="many")) == 3
    with pytest.raises(DataError, match="cannot load the data set"):
        source(tmp_path / "data", dataset_config="none")


def test_packages_that_are_not_installed_are_named(tmp_path: Path) -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(["s3fs", "aiohttp", "datasets"]))  # None: as if not installed
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.sources import open_source
from fastdiff.optional_packages import pip_install
from fastdiff.errors import ConfigError
for text in ("https://host/a.tar", "s3://bucket/a.tar", "some/data-set"):
    try:
        open_source(SourceOptions(source=text))
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    http, s3, hub = done.stdout.splitlines()
    assert http.startswith("reading from http needs a package")
    assert s3.startswith("reading from s3 needs a package")
    assert http.endswith(pip_install("s3fs", "aiohttp"))
    assert s3.endswith(pip_install("s3fs", "aiohttp"))
    assert hub.endswith(f"needs the package datasets; {pip_install('datasets')}")


def test_an_id_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot load the data set no/such-data: it is neither a local path nor an id"):
        source("no/such-data")


def test_rows_are_stamped_by_the_files_that_they_name(tmp_path: Path) -> None:
    """Not by those inside of the rows, which the fingerprint covers; a name that is none is told when it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "rows").mkdir()
    beside = tmp_path / "beside.png"
    beside.write_bytes(picture(1))
    cells = [{"bytes": picture(0), "path": "0.png"}, {"bytes": None, "path": str(beside)}, {"path": "a\0b"}, None]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(cells, kind), "text": ["a"] * 4})
    pq.write_table(table, tmp_path / "rows" / "rows.parquet")
    found = source(tmp_path / "rows")
    stamps = [found.stamps(partition) or {} for partition in range(found.partitions)]
    names = {name for each in stamps for name in each}
    assert names == {"", str(beside), "a\0b"}
    assert sorted(reason for reason in reasons(found).values()) == [
        "its image a\\x00b cannot be used: embedded null byte",
        "its image is missing",
    ]
