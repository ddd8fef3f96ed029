"""What is taken of a folder, a table or a tar, and what is left out and counted."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.images.items import ImageSource
from fastdiff.data.images.sources import open_source
from fastdiff.data.selection import Counted, Selection, Tally
from fastdiff.errors import ConfigError, DataError
from tests.data.images.test_image_sources import contents, dataset, everything, picture, reasons, source, write
from tests.data.images.test_image_tars import Members, tar

TABLES_UNREAD = "tables, not read; a .json, .jsonl or .csv is read as the source, a .parquet in a folder of its own"

Form = Callable[[str], str]
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)


def for_pixels(folder: Path) -> ImageSource:
    """A source for a data set in pixel space, which reads no captions."""
    return open_source(EncodeOptions(source=str(folder), out=folder.parent / "out", autoencoder="identity"))


def left_out(found: ImageSource) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {each.reason: (each.count, each.first) for each in whole(found).left_out}


def noted(found: ImageSource) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {each.reason: (each.count, each.first) for each in whole(found).noted}


def whole(found: ImageSource) -> Selection:
    """What the listing and the partitions left out."""
    everything(found)
    return found.selection.and_then(found.found_in(partition) for partition in range(found.partitions))


def names(found: ImageSource) -> list[str]:
    return [Path(item.name).name for item in everything(found)]


def not_read(kind: str) -> str:
    return f"of kind {kind}, which is not read (convert to JPEG or PNG)"


@pytest.mark.parametrize(
    ("name", "content", "taken"),
    [
        *((f"a.{ending}", picture(1, kind), True) for ending, kind in [
            ("JPG", "jpeg"), ("jfif", "jpeg"), ("Jpe", "jpeg"), ("bmp", "bmp"), ("tif", "tiff"), ("TIFF", "tiff"),
            ("gif", "gif"), ("avif", "avif"), ("webp", "jpeg"), ("png", "jpeg"), ("heic", "jpeg"), ("xyz", "png"),
        ]),
        ("without-ending", picture(1), True),
        ("a.heic", HEIC, False),
        ("a.dng", picture(1, "tiff"), False),
        ("a.svg", b"<?xml version='1.0'?><svg/>", False),
        ("a.psd", b"8BPS", False),
        ("a.xyz", b"\0\0\0\x0cjP  \r\n\x87\n", False),
        ("a.txt", picture(1), None),
        ("a.mov", picture(1), None),
    ],
)  # fmt: skip
def test_pictures_are_known_by_their_first_bytes(tmp_path: Path, name: str, content: bytes, taken: bool | None) -> None:
    """Taken, counted as a picture of another kind, or no picture."""
    write(tmp_path, {"z.jpg": picture(0), name: content})
    found = source(tmp_path)
    assert len(contents(found)) == 1 + bool(taken)
    assert sum(count for count, _ in left_out(found).values()) == (taken is False)
    assert bool(noted(found)) == (taken is None)


def test_kinds_that_are_left_out_are_counted_with_their_first_names(tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.heic": HEIC for n in range(5)})
    write(tmp_path, {"a.svg": b"", "a.jpg": picture(1), "clip.mov": b"-"})
    found = source(tmp_path)
    assert left_out(found) == {not_read("HEIC"): (5, ("0.heic", "1.heic", "2.heic")), not_read("SVG"): (1, ("a.svg",))}
    assert noted(found) == {"other files, which are no pictures": (1, ("clip.mov",))}
    assert whole(found).lines(taken=1)[:2] == [
        "7 pictures: 1 taken, 6 left out",
        "  left out: 5 pictures of kind HEIC, which is not read (convert to JPEG or PNG) "
        "(first: 0.heic, 1.heic, 2.heic)",
    ]
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(DataError, match=r"holds no images .* 7 files: 5 pictures of kind HEIC, which is not read"):
        source(tmp_path)


@pytest.mark.parametrize(
    "foreign",
    [
        "@eaDir/a.jpg", "__MACOSX/._a.jpg", ".ipynb_checkpoints/a.jpg", "lost+found/a.jpg", "$RECYCLE.BIN/a.jpg",
        "Thumbs.db", "._x.jpg", ".DS_Store", "System Volume Information/a.jpg", "desktop.ini", "#recycle/a.jpg",
    ],
)  # fmt: skip
@pytest.mark.parametrize("below", ["", "cat/"])
def test_files_of_other_programs_are_no_data(tmp_path: Path, below: str, foreign: str) -> None:
    write(tmp_path, {"cat/1.jpg": picture(1), "dog/1.jpg": picture(2), below + foreign: b"-"})
    found = source(tmp_path)
    assert (found.class_names, len(found)) == (("cat", "dog"), 2)
    name = below + foreign.partition("/")[0]
    assert noted(found) == {"hidden, or of other programs: ignored": (1, (name,))}
    assert left_out(found) == {}


def test_hidden_pictures_are_counted_and_splits_are_told(tmp_path: Path) -> None:
    write(tmp_path, {"train/1.jpg": picture(1), "train/.2.jpg": b"", "test/1.jpg": b"", "__MACOSX/1.jpg": b""})
    found = source(tmp_path)
    assert left_out(found) == {"hidden": (1, (".2.jpg",))}
    assert noted(found) == {"splits beside the one of --split, not read": (1, ("test",))}


@pytest.mark.parametrize("ending", ["txt", "TXT", "caption", "Caption", "png.txt", "png.caption"])
def test_a_caption_file_has_one_of_several_names(tmp_path: Path, ending: str) -> None:
    write(tmp_path, {"10_sks dog/0.png": picture(0, "png"), f"10_sks dog/0.{ending}": "a dog"})
    found = source(tmp_path)
    assert [captions for _, captions, _ in contents(found)] == [("a dog",)]
    assert noted(found) == {
        "folders named as with kohya's repeats: each picture counts once, not repeated": (1, ("10_sks dog",))
    }


def test_caption_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": picture(1), "a.txt": "taken", "a.caption": "-", "a.jpg.txt": "-", "orphan.txt": "-"})
    write(tmp_path, {"a.json": "{}", "b.jpg": picture(2), "b.TXT": "b", "b.png": picture(3), "list.csv": "-"})
    found = source(tmp_path)
    assert [captions for _, captions, _ in contents(found)] == [("taken",), ("b",), ("b",)]
    assert noted(found) == {
        "caption files beside another one of their picture, not read": (2, ("a.caption", "a.jpg.txt")),
        "files that may hold captions, not read (a caption file is NAME.txt or NAME.caption)": (1, ("a.json",)),
        TABLES_UNREAD: (1, ("list.csv",)),
        "caption files of no picture, not read": (1, ("orphan.txt",)),
        "caption files that several pictures share": (1, ("b.TXT",)),
    }
    why = "caption files, not read because of --classes-from none"
    assert noted(source(tmp_path, classes_from="none"))[why][0] == 6
    write(tmp_path, {"metadata.csv": "file_name,text\na.jpg,x\n"})
    found = source(tmp_path)
    assert noted(found)["caption files, not read because metadata.csv has the captions"][0] == 6
    assert left_out(found) == {"without a row in metadata.csv": (2, ("b.jpg", "b.png"))}


def test_pictures_beyond_the_rows_of_a_list_are_counted(tmp_path: Path) -> None:
    files = {f"{folder}/{n}.jpg": picture(n) for folder in ("in", "out") for n in range(3)}
    rows = [{"file_name": "in/1.jpg", "text": "x"}, {"file_name": "in/photo.heic", "text": "y"}]
    write(tmp_path, {**files, "in/photo.heic": HEIC, "train.json": json.dumps(rows)})
    found = source(tmp_path / "train.json")
    assert left_out(found) == {"without a row in train.json": (2, ("in/0.jpg", "in/2.jpg"))}, "only its folders"
    assert left_out(source(tmp_path, max_samples=2, classes_from="none"))["beyond --max-samples 2"][0] == 4


def test_an_empty_caption_is_the_empty_prompt_and_no_caption_is_refused(tmp_path: Path) -> None:
    """In folders, tables and tars alike."""
    images = {f"{n}.jpg": picture(n) for n in range(3)}
    write(tmp_path / "texts", {**images, "0.txt": "", "1.txt": "a"})
    rows = [{"file_name": f"{n}.jpg", "text": text} for n, text in enumerate(["", "a", None])]
    write(tmp_path / "rows", {**images, "metadata.jsonl": "\n".join(map(json.dumps, rows))})
    write(tmp_path / "csv", {**images, "metadata.csv": 'file_name,text\n0.jpg,\n1.jpg,a\n2.jpg,""\n'})
    members: Members = [("0.jpg", picture(0)), ("0.txt", b""), ("1.jpg", picture(1)), ("1.caption", b"a")]
    (tmp_path / "s.tar").write_bytes(tar([*members, ("2.jpg", picture(2)), ("2.json", b'{"caption": null}')]))
    for name in ("texts", "rows", "s.tar"):
        items = everything(source(tmp_path / name))
        assert [item.captions for item in items[:2]] == [("",), ("a",)], name  # type: ignore[union-attr]
        assert len(reasons(source(tmp_path / name))) == 1, name
    assert [captions for _, captions, _ in contents(source(tmp_path / "csv"))] == [("",), ("a",), ("",)]
    pixels = for_pixels(tmp_path / "rows")
    assert len(contents(pixels)) == 3, "pixels need no captions"


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


@pytest.mark.parametrize(("there", "written"), [(nfd, str), (str, nfd)])
def test_names_in_another_unicode_form_are_found(tmp_path: Path, there: Form, written: Form) -> None:
    for folder in ("rows", "texts", "classes"):
        write(tmp_path / folder, {there("Müll/café.jpg"): picture(1)})
    row = json.dumps({"file_name": written("Müll/café.jpg"), "text": "a cup"}, ensure_ascii=False)
    write(tmp_path / "rows", {"metadata.jsonl": row})
    write(tmp_path / "texts", {there("Müll/") + written("café.txt"): "a cup"})
    write(tmp_path, {"list.jsonl": row})
    listed = source(tmp_path / "list.jsonl", image_root=str(tmp_path / "rows"))
    for found in (source(tmp_path / "rows"), source(tmp_path / "texts"), listed):
        assert contents(found) == [(picture(1), ("a cup",), None)]
        assert left_out(found) == {}
    assert source(tmp_path / "classes").class_names == ("Müll",)
    write(tmp_path / "splits", {there("müll/a.jpg"): picture(1)})
    assert len(source(tmp_path / "splits", split=written("müll"))) == 1


def test_what_lies_beside_tars_and_beyond_the_limit_is_counted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("0.tar", "1.TAR", "2.tar", "sub/3.tar"):
        (tmp_path / name).write_bytes(tar([(f"{number}.jpg", picture(number)) for number in range(3)]))
    (tmp_path / "4.tar.gz").write_bytes(b"")
    (tmp_path / "notes.md").write_text("")
    beside = {"archives, not read (only .tar is): unpack them": (1, ("4.tar.gz",)),
              "other files beside the tars": (1, ("notes.md",)),
              "tars in subfolders, not read": (1, ("sub/3.tar",))}  # fmt: skip
    whole = source(tmp_path)
    assert (whole.partitions, noted(whole)) == (3, beside)
    some = source(tmp_path, max_samples=4)
    assert left_out(some) == {"beyond --max-samples 4": (2, ())}
    assert noted(some) == {"tars, not read because of --max-samples 4": (1, ("2.tar",))} | beside


def test_pictures_beside_the_splits_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"train/a.jpg": picture(1), "b.jpg": picture(2)})
    assert left_out(source(tmp_path)) == {"beside the folders of the splits": (1, ("b.jpg",))}


def test_a_table_without_captions_serves_where_none_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": picture(1), "b.jpg": picture(2), "metadata.csv": "file_name,label\na.jpg,3\n"})
    found = for_pixels(tmp_path)
    assert (len(found), found.captioned) == (1, False)
    assert left_out(found) == {"without a row in metadata.csv": (1, ("b.jpg",))}


def test_rows_of_windows_are_found_and_another_case_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"sub/A.JPG": picture(1), "metadata.csv": "file_name,text\nsub\\A.JPG,x\nsub/a.jpg,y\n"})
    assert reasons(source(tmp_path)) == {"a.jpg": "a.jpg is missing; its folder has A.JPG"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("file_name,text\na.jpg,x\nb.jpg,red, on a table\n", r"line 3: 3 fields \(b.jpg,red, on a table\), .*quotes"),
        ('file_name,text\na.jpg, "x, y"\n', r"line 2: 3 fields .* without a blank before"),
        ("file_name,text\na.jpg\n", r"line 2: 1 field \(a.jpg\), its header has 2"),
        ("file_name;text\na.jpg;x\n", r"line 1: its columns are separated by semicolons \('file_name;text'\)"),
        ("file_name;text\na.jpg;red, on a table\n", r"line 1: its columns are separated by semicolons"),
        ("a/a.jpg,x\n", "line 1: 'a/a.jpg', 'x' is no header"),
        ("file_name\ttext\na.jpg\tx\n", "line 1: its columns are separated by tabs"),
        ("a.jpg,x\nb.jpg,y\n", "line 1: 'a.jpg', 'x' is no header; expected a first line such as file_name,text"),
        ("file_name,text,text\na.jpg,x,y\n", "line 1: the column 'text' is there twice"),
        ("filename,text\na.jpg,x\n", "no column 'file_name' of images; .*use --image-column filename"),
        ("File_Name,text\na.jpg,x\n", "use --image-column File_Name"),
        ("file_name, Caption\na.jpg,x\n", "no caption column 'text'; .*; use --caption-column ' Caption'"),
        ("\ufefffile_name,caption\na.jpg,x\n", "use --caption-column caption"),
    ],
)  # fmt: skip
def test_tables_that_would_lose_captions_are_refused(tmp_path: Path, table: str, message: str) -> None:
    write(tmp_path, {"a.jpg": picture(1), "metadata.csv": table})
    with pytest.raises((ConfigError, DataError), match=message):
        source(tmp_path)


def test_empty_fields_at_the_end_are_those_of_a_spreadsheet(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": picture(1), "metadata.csv": '\ufefffile_name,text,,\r\na.jpg,"x, y",,\r\n'})
    assert contents(source(tmp_path)) == [(picture(1), ("x, y",), None)]
    write(tmp_path, {"metadata.csv": "picture,text\na.jpg,x\n"})
    assert contents(source(tmp_path, image_column="picture")) == [(picture(1), ("x",), None)]
    (tmp_path / "metadata.csv").write_text("file_name,text\na.jpg,x\n", encoding="utf-16")
    with pytest.raises(DataError, match="is UTF-16, expected UTF-8"):
        source(tmp_path)


def test_classes_of_numbers_are_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    folders = write(tmp_path / "folders", {f"{n}/a.jpg": picture(n) for n in (0, 1, 2, 10, 11)})
    assert source(folders).class_names == ("0", "1", "2", "10", "11")
    assert [label for _, _, label in contents(source(folders))] == [0, 1, 3, 4, 2], "images by path: 0 1 10 11 2"
    flat = write(tmp_path / "flat", {f"{n}_a.jpg": picture(n) for n in (2, 10)})
    assert source(flat, classes_from="prefix").class_names == ("2", "10")
    write(folders, {"ten/a.jpg": picture(3)})
    assert source(folders).class_names == ("0", "1", "10", "11", "2", "ten"), "as torchvision's ImageFolder"


def test_a_class_without_pictures_keeps_its_number(tmp_path: Path) -> None:
    write(tmp_path, {"cat/1.heic": HEIC, "dog/1.jpg": picture(1)})
    found = source(tmp_path)
    assert (found.class_names, [label for _, _, label in contents(found)]) == (("cat", "dog"), [1])
    assert noted(found) == {"class folders without pictures, which keep their numbers": (1, ("cat",))}


def test_captions_of_the_command_line(tmp_path: Path) -> None:
    write(tmp_path, {"10_sks dog/a.jpg": picture(1), "10_sks dog/b.jpg": picture(2), "10_sks dog/b.txt": "own"})
    found = source(tmp_path, caption="a dog")
    assert [captions for _, captions, _ in contents(found)] == [("a dog",), ("own",)]
    told = noted(found)
    assert told["pictures with the caption of --caption or --caption-from"] == (1, ("10_sks dog/a.jpg",))
    own = "pictures with a caption of their own, which goes before --caption and --caption-from"
    assert told[own] == (1, ("10_sks dog/b.jpg",))
    for text in (tmp_path, tmp_path / "10_sks dog"):
        folders = source(text, caption_from="folder")
        assert [captions for _, captions, _ in contents(folders)] == [("sks dog",), ("own",)]
    assert found.digest != source(tmp_path, caption="a cat").digest
    write(tmp_path, {"metadata.jsonl": '{"file_name": "10_sks dog/a.jpg", "text": null}'})
    assert [captions for _, captions, _ in contents(source(tmp_path, caption="a dog"))] == [("a dog",)]


def test_a_data_set_of_images_alone(tmp_path: Path) -> None:
    rows = dataset({"image": [{"bytes": picture(k), "path": None} for k in range(3)]})
    rows.save_to_disk(tmp_path / "alone")  # type: ignore[attr-defined]
    found = source(tmp_path / "alone")
    assert (found.captioned, found.classes, len(contents(found))) == (False, None, 3)
    assert [captions for _, captions, _ in contents(source(tmp_path / "alone", caption="x"))] == [("x",)] * 3
    assert left_out(source(tmp_path / "alone", max_samples=2)) == {"beyond --max-samples 2": (1, ())}
    with pytest.raises(ConfigError, match="--caption-from folder needs a folder of images; use --caption"):
        source(tmp_path / "alone", caption_from="folder")


def test_members_of_a_tar_that_no_sample_uses_are_counted(tmp_path: Path) -> None:
    members: Members = [
        ("0.jfif", picture(0)), ("0.txt", b"zero"), ("__MACOSX/._0.jpg", b"-"), ("@eaDir/0.jpg", b"-"),
        ("1.jpg", picture(1)), ("1.gif", picture(2)), ("1.caption", b"one"), ("1.heic", b"-"),
        ("2.png", picture(3)), ("2.png.txt", b"two"), ("2.npy", b"-"),
        ("3.mask.png", b"-"), ("3.png", picture(4)), ("3.TXT", b"three"), ("logo.svg", b"-"),
        (nfd("é.jpg"), picture(5)), ("é.txt", b"four"),
    ]  # fmt: skip
    (tmp_path / "s.tar").write_bytes(tar(members))
    found = source(tmp_path / "s.tar")
    images = [picture(0), picture(1), picture(3), picture(4), picture(5)]
    assert [item[:2] for item in contents(found)] == [
        (image, (text,)) for image, text in zip(images, ("zero", "one", "two", "three", "four"), strict=True)
    ]
    assert left_out(found) == {
        not_read("HEIC"): (1, ("1.heic",)),
        "beside the picture of their sample": (2, ("1.gif", "3.mask.png")),
        not_read("SVG"): (1, ("logo.svg",)),
    }
    assert noted(found) == {
        "hidden, or of other programs: ignored": (2, ("__MACOSX/._0.jpg", "@eaDir/0.jpg")),
        "other members, not read": (1, ("2.npy",)),
    }
    (tmp_path / "s.tar").write_bytes(tar([*members[:2], ("1.heic", b"-"), ("1.txt", b"-")]))
    assert reasons(source(tmp_path / "s.tar")) == {"s.tar!1": f"1.heic is {not_read('HEIC')}"}


@pytest.mark.parametrize("name", ["a.png", "a.bmp"])
def test_rows_beside_pictures_are_told(tmp_path: Path, name: str) -> None:
    """The package datasets takes of such a folder what has more files, and says nothing."""
    Image.new("RGB", (16, 16)).save(tmp_path / name)
    rows = dataset({"image": [{"bytes": picture(1), "path": None}]})
    rows.to_parquet(tmp_path / "rows.parquet")  # type: ignore[attr-defined]
    found = source(tmp_path)
    assert len(contents(found)) == 1
    assert noted(found) == {TABLES_UNREAD: (1, ("rows.parquet",))}


def test_archives_are_told(tmp_path: Path) -> None:
    (tmp_path / "more.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"among its 1 files: archives, not read .*: unpack them \(first: more.zip\)"):
        source(tmp_path)
    (tmp_path / "a.png").write_bytes(picture(0))
    (tmp_path / "s.tar.gz").write_bytes(b"-")
    assert noted(source(tmp_path)) == {"archives, not read (only .tar is): unpack them": (2, ("more.zip", "s.tar.gz"))}


def test_texts_of_a_tar_that_are_not_read_are_counted(tmp_path: Path) -> None:
    """The first sample with a text decides what is read."""
    other, same = (json.dumps({"caption": text}).encode() for text in ("other", "a"))
    as_captions: Members = [
        ("0.jpg", picture(0)), ("0.txt", b"a"), ("0.caption", b"b"), ("0.json", other),
        ("1.jpg", picture(1)), ("1.txt", b"a"), ("1.json", same), ("1.cls", b"1"),
    ]  # fmt: skip
    as_classes: Members = [
        ("0.jpg", picture(0)), ("0.cls", b"0"),
        ("1.jpg", picture(1)), ("1.cls", b"1"), ("1.txt", b"a"), ("1.json", b"{}"),
        ("2.jpg", picture(2)), ("2.cls", b"1"), ("2.json", other),
    ]  # fmt: skip
    alone: Members = [(f"{n}.jpg", picture(n % 8)) for n in range(100)]
    late: Members = [("a.jpg", picture(0)), ("a.txt", b"a"), ("b.jpg", picture(1)), ("b.cls", b"1")]
    found = [_noted_in(tmp_path, members) for members in (as_captions, as_classes, [*alone, *late])]
    assert found == [
        {
            "caption members beside another one of their picture, not read": (1, ("0.caption",)),
            "captions in .json members that differ from those beside them, not read": (1, ("0.json",)),
            "class members, not read beside captions": (1, ("1.cls",)),
        },
        {"caption members, not read beside classes": (2, ("1.txt", "2.json"))},
        {
            "caption members, not read: the first samples are pictures alone": (1, ("a.txt",)),
            "class members, not read: the first samples are pictures alone": (1, ("b.cls",)),
        },
    ]


def test_captions_beside_a_chosen_column_are_counted(tmp_path: Path) -> None:
    fields = json.dumps({"alt": "b"}).encode()
    members: Members = [("0.jpg", picture(0)), ("0.txt", b"a"), ("0.json", fields)]
    (tmp_path / "s.tar").write_bytes(tar(members))
    found = source(tmp_path / "s.tar", caption_column="alt")
    assert [captions for _, captions, _ in contents(found)] == [("b",)]
    assert noted(found) == {"caption members, not read: the captions are 'alt' in .json members": (1, ("0.txt",))}


def _noted_in(folder: Path, members: Members) -> dict[str, tuple[int, tuple[str, ...]]]:
    (folder / "s.tar").write_bytes(tar(members))
    found = source(folder / "s.tar")
    contents(found)
    return noted(found)


def test_a_tar_of_images_alone(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar([(f"{n}.jpg", picture(n)) for n in range(2)]))
    found = source(tmp_path / "s.tar")
    assert (found.captioned, found.classes, len(contents(found))) == (False, None, 2)
    assert [captions for _, captions, _ in contents(source(tmp_path / "s.tar", caption="x"))] == [("x",)] * 2
    with pytest.raises(DataError, match=r"none of the first 2 samples has a caption .* field 'alt'"):
        source(tmp_path / "s.tar", caption_column="alt")


def test_counts_add_up_in_their_order() -> None:
    tally = Tally()
    for name in ("a\n", "b", "c", "d"):
        tally.add("files", name)
    first = Selection(noted=tally.counted(), left_out=(Counted(reason="x", count=1),))
    assert first.noted == (Counted(reason="files", count=4, first=("a\\x0a", "b", "c")),)
    both = first.and_then([Selection(noted=(Counted(reason="y", count=2), Counted(reason="files", count=1)))])
    assert [(each.reason, each.count) for each in both.noted] == [("files", 5), ("y", 2)]
    assert both.lines(taken=0)[0] == "1 picture: 0 taken, 1 left out"
