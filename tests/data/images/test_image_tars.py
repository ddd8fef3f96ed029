"""Tars of images as a source, on disk and over the network."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdiff.data.images.items import BadItem, ImageItem
from fastdiff.data.shards import remote
from fastdiff.errors import ConfigError, DataError, StorageError
from tests.data.images.test_image_sources import contents, everything, picture, reasons, source
from tests.support.servers.web_servers import http_server, s3_server

Members = list[tuple[str, bytes]]


def tar(members: Members, format: int = tarfile.PAX_FORMAT) -> bytes:
    blocks = []
    for name, content in members:
        header = tarfile.TarInfo(name)
        header.size = len(content)
        blocks += [header.tobuf(format), content, bytes(-len(content) % 512)]
    return b"".join([*blocks, bytes(1024)])


def img2dataset(shard: int, samples: int) -> Members:
    """Return the files that img2dataset writes."""
    members: Members = []
    for number in range(samples):
        key = f"{shard:05d}{number:04d}"
        fields = {"caption": f"caption of {key}", "key": key, "width": 16, "status": "success", "alt": [key, "other"]}
        members.append((f"{key}.jpg", picture(shard * 10 + number)))
        members.append((f"{key}.json", json.dumps(fields).encode()))
        members.append((f"{key}.txt", f"caption of {key}".encode()))
    return members


def expected(shards: int, samples: int) -> list[tuple[bytes, tuple[str, ...], None]]:
    pairs = [(shard, number) for shard in range(shards) for number in range(samples)]
    return [(picture(s * 10 + n), (f"caption of {s:05d}{n:04d}",), None) for s, n in pairs]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        (folder / f"{shard:05d}.tar").write_bytes(tar(img2dataset(shard, 4)))
        (folder / f"{shard:05d}_stats.json").write_text("{}")
    return folder


def test_local_tars(shards: Path) -> None:
    for text in (shards, shards / "{00000..00002}.tar"):
        found = source(text)
        assert (found.captioned, found.classes, found.partitions) == (True, None, 3)
        assert contents(found) == expected(3, 4)
        assert len(found) == 12
    assert contents(source(shards / "00001.tar")) == expected(2, 4)[4:]
    assert contents(source(shards, max_samples=6)) == expected(3, 4)[:6]
    assert source(shards, max_samples=6).partitions == 2
    assert contents(source(shards, caption_column="alt"))[0][1] == ("000000000", "other")
    with pytest.raises(DataError, match=r"00003.tar is missing, and 1 more of 5 tars"):
        source(shards / "{00000..00004}.tar")
    with pytest.raises(DataError, match=r"none of the first 12 samples has a caption .* field 'nothing'"):
        source(shards, caption_column="nothing")


def test_a_folder_of_tars_and_images_must_say_which(shards: Path) -> None:
    for stray in ("train/a.jpg", "metadata.csv"):
        path = shards / stray
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"-")
        with pytest.raises(
            DataError, match=rf"holds tars \(00000.tar\) and images \({stray}\): .* give .*shards/\*\.tar"
        ):
            source(shards)
        assert contents(source(shards / "*.tar")) == expected(3, 4)
        path.unlink()
    assert source(shards / "0000[12].tar").partitions == 2
    with pytest.raises(DataError, match="there are no tars"):
        source(shards / "1*.tar")
    (shards / "[0].tar").write_bytes((shards / "00000.tar").read_bytes())
    assert contents(source(shards / "[0].tar")) == expected(1, 4)


def test_captions_are_counted_without_reading_images(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    extract = tarfile.TarFile.extractfile

    def spy(archive: tarfile.TarFile, member: tarfile.TarInfo) -> object:
        read.append(member.name.rpartition(".")[2])
        return extract(archive, member)

    for options, most in (({}, 1), ({"caption_column": "alt"}, 2)):
        found = source(shards, max_samples=6, **options)
        monkeypatch.setattr(tarfile.TarFile, "extractfile", spy)
        assert [found.most_captions(partition) for partition in range(2)] == [most, most]
        assert set(read) == {"json", "txt"}
        assert len(read) == 2 * 6
        read.clear()
        monkeypatch.undo()


def everything_of_remote(text: str) -> list[object]:
    return [(item.image, item.captions, item.label) for item in everything(source(text)) if isinstance(item, ImageItem)]


def test_tars_over_http_and_s3(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)
    with http_server(shards) as server:
        text = f"{server.url}/{{00000..00002}}.tar?sig=secret"
        server.drop_after, server.drops = 4000, 2
        server.refuse = [503]
        assert everything_of_remote(text) == expected(3, 4)
        found = source(text)
        assert "secret" not in found.name
        assert next(found.items(1)).name == f"{server.url}/00001.tar!000010000"
        for refused in (lambda: source(text, max_samples=2), lambda: len(found), lambda: found.item(0)):
            with pytest.raises(ConfigError, match=rf"all headers of {server.url}/00000.tar, .* download"):
                refused()
        with pytest.raises(StorageError, match=f"{server.url}/00003.tar: it does not exist"):
            list(source(f"{server.url}/{{00002..00003}}.tar").items(1))
        with pytest.raises(ConfigError, match="http cannot list folders"):
            source(server.url)
    with s3_server({f"images/{path.name}": path.read_bytes() for path in shards.iterdir()}) as bucket:
        for text in (f"{bucket}/images/{{00000..00002}}.tar", f"{bucket}/images"):
            assert everything_of_remote(text) == expected(3, 4)


def one(tmp_path: Path, members: Members, **options: object) -> object:
    """A source of one tar, whose first sample is good."""
    path = tmp_path / "odd.tar"
    path.write_bytes(tar([("0.jpg", picture(0)), ("0.txt", b"good"), *members]))
    return source(path, **options)


def test_samples_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    image = picture(1)
    found = one(
        tmp_path,
        [
            ("no-image.txt", b"x"),
            ("no-caption.jpg", image),
            *[("two.jpg", image), ("two.png", image), ("two.txt", b"x")],
            *[("long.jpg", image), ("long.txt", b"x" * 10_000_000)],
            *[("huge.jpg", image), ("huge.json", b'{"caption": "' + b"x" * 11_000_000 + b'"}')],
            *[("latin.jpg", image), ("latin.txt", "é".encode("latin-1"))],
            *[("json.jpg", image), ("json.json", b"[" * 100_000)],
            *[("list.jpg", image), ("list.json", b"[]")],
            *[("number.jpg", image), ("number.json", b'{"caption": 7}')],
            *[("b.v2.jpg", image), ("b.v2.txt", b"x")],
            *[("c.v2.jpg", image), ("c.v3.JPG", image), ("c.txt", b"x")],
        ],
    )
    members = "among its members"
    assert reasons(found) == {  # type: ignore[arg-type]
        "odd.tar!no-image": f"it has 0 images {members} (txt), expected 1",
        "odd.tar!no-caption": "there is no txt member and no caption in a json member",
        "odd.tar!two": f"it has 2 images {members} (jpg, png, txt), expected 1",
        "odd.tar!long": "its caption has 10000000 bytes, expected at most 100000",
        "odd.tar!huge": "huge.json has 11000015 bytes, expected at most 10485760",
        "odd.tar!latin": "latin.txt is not UTF-8 (unexpected end of data at byte 0)",
        "odd.tar!json": reasons(found)["odd.tar!json"],  # type: ignore[arg-type]
        "odd.tar!list": "list.json is not a JSON object",
        "odd.tar!number": "its caption is '7', expected a string or a list of strings",
        "odd.tar!b": "b.v2.jpg has more than one dot in its name, but a key ends at the first dot; rename it",
        "odd.tar!c": "c.v2.jpg has more than one dot in its name, but a key ends at the first dot; rename it",
    }
    assert "json.json is not valid JSON" in reasons(found)["odd.tar!json"]  # type: ignore[arg-type]


def test_members_that_are_not_of_a_sample_do_no_harm(tmp_path: Path) -> None:
    odd: Members = [
        ("deep/folder.d/1.mask.png", b"mask"),
        ("deep/folder.d/1.JPG", picture(1)),
        ("deep/folder.d/1.pyd", b"cos\nsystem\n(S'touch pwned'\ntR."),
        ("deep/folder.d/1.txt", "\ufeff\x1b[31mred\u2028line\x00 ".encode()),
        ("._2.jpg", b"of macOS"),
        ("README", b""),
        ("long-" * 60 + ".png", picture(2, "png")),
        ("long-" * 60 + ".json", b'{"caption": "a\\ud800b"}'),
        ("0.jpg", picture(3)),
        ("0.json", b'{"text": "the key comes again"}'),
    ]
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tmp_path / f"{format}.tar"
        path.write_bytes(tar([("0.jpg", picture(0)), ("0.txt", b"two\nlines"), *odd], format))
        assert contents(source(path)) == [
            (picture(0), ("two lines",), None),
            (picture(1), ("[31mred line",), None),
            (picture(2, "png"), ("a b",), None),
            (picture(3), ("the key comes again",), None),
        ]


@pytest.mark.fault(28)
def test_links_and_large_images_are_refused(tmp_path: Path) -> None:
    good = tar([("0.jpg", picture(0)), ("0.txt", b"good")])
    good = good[: good.index(b"good") + 512]
    link = tarfile.TarInfo("1.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    path = tmp_path / "links.tar"
    path.write_bytes(good + link.tobuf() + tar([("1.txt", b"x")]))
    assert reasons(source(path)) == {
        "links.tar!1": "1.jpg is a link or a sparse file; repack the tar with regular files"
    }
    large = tarfile.TarInfo("1.jpg")
    large.size = (256 << 20) + 512
    path = tmp_path / "large.tar"
    with path.open("wb") as file:
        file.write(good + large.tobuf())
        file.seek(large.size, 1)
        file.write(tar([("1.txt", b"x"), ("2.jpg", picture(2)), ("2.txt", b"behind")]))
    found = source(path)
    assert reasons(found) == {"large.tar!1": "1.jpg has 268435968 bytes, expected at most 268435456"}
    last = found.item(2)
    assert isinstance(last, ImageItem)
    assert last.captions == ("behind",)


def test_classes(tmp_path: Path) -> None:
    members = [(f"{n}.{kind}", content) for n in range(4) for kind, content in classed(n)]
    path = tmp_path / "classes.tar"
    path.write_bytes(tar(members))
    found = source(path)
    assert (found.captioned, found.classes) == (False, 7)
    assert [label for _, _, label in contents(found)] == [0, 2, 4, 6]
    path.write_bytes(tar([*members, ("x.jpg", picture(1)), ("x.cls", b"-1"), ("y.jpg", picture(1))]))
    assert reasons(source(path)) == {
        "classes.tar!x": "its class is '-1', expected a non-negative integer",
        "classes.tar!y": "there is no cls member",
    }
    with http_server(tmp_path) as server, pytest.raises(ConfigError, match="finding the number of classes needs all"):
        source(f"{server.url}/classes.tar")


def classed(number: int) -> Members:
    return [("jpg", picture(number)), ("cls", f"{2 * number}\n".encode())]


def damaged() -> Iterator[tuple[str, bytes, int, str]]:
    """A name, a tar of four samples with damage in or after the third, samples before it, and the message."""
    whole = tar(img2dataset(0, 4))
    third = whole.index(b"000000002.jpg")
    yield "in a member", whole[: third + 600], 2, "unexpected end of data, after offset"
    yield "between members", whole[:third], 1, "empty header, after offset"
    yield "in a header", whole[: third + 100], 1, "truncated header, after offset"
    yield "garbled", whole[:third] + b"\xff" * 512 + whole[third + 512 :], 1, "bad checksum, after offset"
    yield "zeros", whole[:third] + bytes(512) + whole[third + 512 :], 2, "data after the zero block"
    negative = tarfile.TarInfo("000000002.jpg")
    header = bytearray(negative.tobuf())
    header[124:136] = b"\xff" * 12  # base-256, minus one
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(header))[0]  # type: ignore[attr-defined]
    yield "negative", whole[:third] + bytes(header) + whole[third + 512 :], 1, "negative size"
    bomb = tarfile.TarInfo("pax")
    bomb.type, bomb.size = tarfile.XHDTYPE, 1 << 40
    yield "extended", whole[:third] + bomb.tobuf(tarfile.GNU_FORMAT), 1, "an extended header of 1099511627776 bytes"


@pytest.mark.fault(28)
@pytest.mark.parametrize(("content", "before", "what"), [pytest.param(*rest, id=name) for name, *rest in damaged()])
def test_a_damaged_tar_gives_what_was_before_the_damage(tmp_path: Path, content: bytes, before: int, what: str) -> None:
    path = tmp_path / "damaged.tar"
    path.write_bytes(content)
    found = source(path)
    items: list[ImageItem | BadItem] = []
    with pytest.raises(DataError, match=rf"damaged.tar is damaged: .*{what}"):
        items.extend(found.items(0))
    assert [item.image for item in items if not isinstance(item, BadItem)] == [picture(k) for k in range(before)]
    with pytest.raises(DataError, match=r"damaged.tar is damaged"):
        len(found)


def test_files_that_are_no_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.tar"
    for content in (b"<html>not found</html>" * 100, b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"page.tar is damaged: .* offset 0"):
            source(path)
