"""Files over http and S3: retries, checks and the cache of shards."""

from __future__ import annotations

import gzip
import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdiff.data.shards import remote
from fastdiff.data.shards.cache import ShardCache, open_shards_folder
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.remote import fetch, is_remote, join, list_folder, open_url, shown
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError, DataError, StorageError
from tests.support.inputs.captioned import encode as encode_captioned
from tests.support.servers.web_servers import WebServer, http_server, s3_server

CONTENT = np.random.default_rng(0).integers(0, 256, 6_000_000, np.uint8).tobytes()
# More than the 2 MiB that are read ahead, which are lost with their connection.
DROP = 2_500_000
SECRET = "sig=very-secret"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.01)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "file.bin").write_bytes(CONTENT)
    with http_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(digits: Path) -> Iterator[str]:
    shards = {f"digits/{path.name}": path.read_bytes() for path in digits.iterdir()}
    with s3_server(
        {"file.bin": CONTENT, "folder/b.tar": b"b", "folder/a.tar": b"a", "folder/x/c.tar": b"c"} | shards
    ) as url:
        yield url


def test_addresses() -> None:
    assert is_remote("http://a/b") and is_remote("HTTPS://a") and is_remote("s3://b/c")  # noqa: PT018
    assert not is_remote("/a/b") and not is_remote("gs://a") and not is_remote("https:/a")  # noqa: PT018
    assert shown(f"https://user:password@host:1/a/b.tar?{SECRET}#x") == "https://host:1/a/b.tar"
    assert join(f"https://host/a/?{SECRET}", "b.tar") == f"https://host/a/b.tar?{SECRET}"
    assert join("s3://bucket/a", "b.tar") == "s3://bucket/a/b.tar"


def test_http_is_read_in_one_request(web: WebServer) -> None:
    with open_url(f"{web.url}/file.bin") as file:
        assert file.read() == CONTENT
    assert web.requests == [("/file.bin", None)]


def test_a_dropped_connection_goes_on_where_it_was(web: WebServer) -> None:
    web.drop_after, web.drops = DROP, 3
    with open_url(f"{web.url}/file.bin") as file:
        assert file.read() == CONTENT
    ranges = [asked for _, asked in web.requests]
    assert (len(ranges), ranges[0]) == (4, None)
    starts = [int(asked.removeprefix("bytes=").removesuffix("-")) for asked in ranges[1:] if asked]
    assert 0 < starts[0] < starts[1] < starts[2]


def test_a_server_without_ranges_is_read_again_up_to_where_it_was(web: WebServer) -> None:
    web.drop_after, web.drops, web.ranges = DROP, 2, False
    with open_url(f"{web.url}/file.bin") as file:
        assert file.read() == CONTENT
    assert len(web.requests) == 3


def test_a_server_that_is_busy_is_asked_again(web: WebServer) -> None:
    web.refuse = [503, 429, 500, 503]
    with open_url(f"{web.url}/file.bin") as file:
        assert file.read() == CONTENT


@pytest.mark.fault(28)
def test_after_five_attempts_the_error_names_the_address_without_its_secrets(web: WebServer) -> None:
    web.refuse = [503] * 5
    with pytest.raises(StorageError) as caught:
        open_url(f"http://user:password@127.0.0.1:{web.port}/file.bin?{SECRET}")
    message = str(caught.value)
    assert f"{web.url}/file.bin: the server answers 503 (tried 5 times)" in message
    assert "run the same command again" in message
    assert "secret" not in message
    assert "password" not in message
    assert caught.value.__cause__ is None
    assert len(web.requests) == 5


def test_a_server_that_sends_nothing_more_is_given_up(web: WebServer) -> None:
    web.drop_after, web.drops = 0, 100
    with open_url(f"{web.url}/file.bin") as file, pytest.raises(StorageError, match=r"file.bin: .*tried 5 times"):
        file.read()


def test_a_server_that_is_not_there(web: WebServer) -> None:
    with pytest.raises(StorageError, match=r"http://127.0.0.1:9/a.tar: .*tried 5 times"):
        open_url(f"http://127.0.0.1:9/a.tar?{SECRET}")


@pytest.mark.parametrize(("status", "what"), [(404, "does not exist"), (403, "access is denied"), (410, "answers 410")])
def test_permanent_errors_are_not_retried(web: WebServer, status: int, what: str) -> None:
    web.refuse = [status]
    with pytest.raises(StorageError, match=f"{web.url}/file.bin: .*{what}"):
        open_url(f"{web.url}/file.bin")
    assert len(web.requests) == 1


def test_a_file_that_changes_while_it_is_read(web: WebServer) -> None:
    web.drop_after, web.drops = DROP, 1
    with open_url(f"{web.url}/file.bin") as file:
        file.read(10)
        web.etag = '"two"'
        with pytest.raises(StorageError, match=r"it changed after \d+ bytes"):
            file.read()


def test_a_length_that_is_not_stated_is_refused(web: WebServer) -> None:
    web.states_length = False
    with pytest.raises(StorageError, match="states no length"):
        open_url(f"{web.url}/file.bin")


@pytest.mark.fault(28)
def test_more_bytes_than_expected_are_not_asked_for(web: WebServer, tmp_path: Path) -> None:
    for read in (
        lambda: open_url(f"{web.url}/file.bin", 10),
        lambda: fetch(f"{web.url}/file.bin", tmp_path / "x", None, 10),
    ):
        with pytest.raises(DataError, match=rf"file.bin has {len(CONTENT)} bytes, expected at most 10"):
            read()
    assert not (tmp_path / "x").exists()


@pytest.mark.fault(28)
def test_compressed_responses_are_not_unpacked(web: WebServer) -> None:
    """300 kB of gzip stand for 300 MB; offsets and lengths are those of the bytes that are sent."""
    packed = gzip.compress(bytes(300 << 20), 6)
    (web.folder / "bomb.bin").write_bytes(packed)
    web.encoding = "gzip"
    with open_url(f"{web.url}/bomb.bin") as file:
        assert file.read() == packed


def test_fetch_verifies_and_leaves_nothing_behind(web: WebServer, tmp_path: Path) -> None:
    target = tmp_path / "copy.bin"
    with pytest.raises(DataError, match=f"{web.url}/file.bin has the sha256 .*, expected {'0' * 64}"):
        fetch(f"{web.url}/file.bin", target, "0" * 64)
    with pytest.raises(StorageError, match=r"cannot write .*nowhere"):
        fetch(f"{web.url}/file.bin", tmp_path / "nowhere" / "copy.bin", None)
    web.drop_after, web.drops = 0, 100
    with pytest.raises(StorageError, match="tried 5 times"):
        fetch(f"{web.url}/file.bin", target, None)
    assert [path.name for path in tmp_path.iterdir()] == ["served"]
    web.drops = 0
    fetch(f"{web.url}/file.bin", target, hashlib.sha256(CONTENT).hexdigest())
    assert target.read_bytes() == CONTENT


def test_s3(bucket: str, tmp_path: Path) -> None:
    with open_url(f"{bucket}/file.bin") as file:
        assert file.read(1000) == CONTENT[:1000]
        file.raw._hang_up()
        assert file.read() == CONTENT[1000:], "goes on with a range request"
    assert list_folder(f"{bucket}/folder/") == ["s3://bucket/folder/a.tar", "s3://bucket/folder/b.tar"]
    for missing in (f"{bucket}/missing.bin", "s3://no-such-bucket/file.bin"):
        with pytest.raises(StorageError, match=f"{missing}: it does not exist; check the address"):
            open_url(missing)
    with pytest.raises(ConfigError, match="http cannot list folders"):
        list_folder("https://host/folder")


def test_s3_is_not_there(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"s3://bucket/file.bin: .*http://127.0.0.1:9/.* \(tried 5 times\)"):
        open_url(f"{bucket}/file.bin")


def test_s3_without_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    remote._filesystem("s3").clear_instance_cache()
    with pytest.raises(StorageError, match=r"file.bin: there are no credentials; set AWS_ACCESS_KEY_ID"):
        open_url(f"{bucket}/file.bin")
    remote._filesystem("s3").clear_instance_cache()


def test_shards_come_from_http_when_they_are_used(digits: Path, tmp_path: Path) -> None:
    with http_server(digits) as server:
        folder, ensure = open_shards_folder(server.url, str(tmp_path / "cache"))
        assert ensure is not None
        reader, local = LatentReader(folder, fetch=ensure), LatentReader(digits)
        assert [path.name for path in folder.iterdir()] == ["dataset.json"]
        server.drop_after, server.drops = 3_000, 4
        np.testing.assert_array_equal(reader.read([300, 1700])["latent"], local.read([300, 1700])["latent"])
        assert sorted(path.name for path in folder.glob("*.tar")) == ["train-000001.tar", "train-000006.tar"]
        asked = len(server.requests)
        LatentReader(folder, fetch=ShardCache(server.url, tmp_path / "cache").ensure).read([300])
        assert len(server.requests) == asked + 1, "dataset.json alone is read again"
        reader.read(np.arange(len(reader)))
        assert verify(folder).problems == ()
        for path in digits.glob("train-*"):
            assert (folder / path.name).read_bytes() == path.read_bytes()


def test_shards_come_from_s3(bucket: str, digits: Path, tmp_path: Path) -> None:
    folder, ensure = open_shards_folder(f"{bucket}/digits", str(tmp_path))
    everything = np.arange(1797)
    found = LatentReader(folder, fetch=ensure).read(everything)
    for name, array in LatentReader(digits).read(everything).items():
        np.testing.assert_array_equal(found[name], array)


def test_a_folder_needs_no_cache_and_an_address_has_one(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_shards_folder(str(digits), "") == (digits, None)
    assert not list(tmp_path.iterdir())
    with http_server(digits) as server:
        folder, ensure = open_shards_folder(server.url, "")
        assert folder.parent == tmp_path / ".cache" / "fastdiff" / "shards"
        assert LatentReader(folder, fetch=ensure).read([5])["label"] == LatentReader(digits).read([5])["label"]


@pytest.mark.fault(17)
def test_a_shard_of_another_encode_is_refused(digits: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    for path in digits.iterdir():
        (served / path.name).write_bytes(path.read_bytes())
    shard = served / "train-000002.tar"
    damaged = bytearray(shard.read_bytes())
    damaged[4000] ^= 1
    shard.write_bytes(damaged)
    with http_server(served) as server:
        folder, ensure = open_shards_folder(server.url, str(tmp_path / "cache"))
        with pytest.raises(DataError, match=f"{server.url}/train-000002.tar has the sha256"):
            LatentReader(folder, fetch=ensure).read([600])
        assert not list(folder.glob("train-000002.tar*"))


def use_cache(url: str, folder: Path, queue: multiprocessing.Queue[bytes]) -> None:
    cache = ShardCache(url, folder)
    queue.put(LatentReader(cache.folder, fetch=cache.ensure).read(np.arange(1797))["latent"].tobytes())


def test_a_cache_writes_through_no_link(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    with http_server(digits) as server:
        cache = ShardCache(server.url, tmp_path / "cache")
        (cache.folder / ".train-000000.tar.lock").symlink_to(tmp_path / "mine")
        with pytest.raises(StorageError, match=r"\.train-000000\.tar\.lock"):
            cache.ensure(LatentReader(digits).info.shards[0])
    assert (tmp_path / "mine").read_text() == "years of work"


def test_two_processes_share_a_cache(digits: Path, tmp_path: Path) -> None:
    """Each shard is downloaded once, also where a killed process left a part of one."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[bytes] = context.Queue()
    with http_server(digits) as server:
        folder = ShardCache(server.url, tmp_path).folder
        leftover = folder / "train-000000.tar.1-0000dead.tmp"
        leftover.write_bytes(b"half of a shard")
        (folder / "train-000000.notes.tmp").write_text("years of work")
        users = [context.Process(target=use_cache, args=(server.url, tmp_path, queue), daemon=True) for _ in range(2)]
        for user in users:
            user.start()
        found = [queue.get(timeout=240) for _ in users]
        for user in users:
            user.join()
    assert found == [LatentReader(digits).read(np.arange(1797))["latent"].tobytes()] * 2
    tars = [path for path, _ in server.requests if path.endswith(".tar")]
    assert len(tars) == len(set(tars)) == 8
    assert not leftover.exists()
    assert (folder / "train-000000.notes.tmp").read_text() == "years of work"
    assert os.listdir(tmp_path) == [folder.name]


def test_the_cache_brings_the_empty_prompt_and_mends_a_cut_shard(tmp_path: Path) -> None:
    encode_captioned(tmp_path / "served", 12)
    local = LatentReader(tmp_path / "served")
    with http_server(tmp_path / "served") as server:
        folder, ensure = open_shards_folder(server.url, str(tmp_path / "cache"))
        reader = LatentReader(folder, fetch=ensure)
        for name, array in local.null().items():
            np.testing.assert_array_equal(reader.null()[name], array)
        reader.read([0])
        reader.close()
        shard = folder / local.info.shards[0].name
        os.truncate(shard, 1000)
        np.testing.assert_array_equal(reader.read([0])["latent"], local.read([0])["latent"])
