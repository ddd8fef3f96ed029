"""Reading and verifying: exact samples, or an error that names shard, key and offset; never another sample."""

import hashlib
import json
import os
import re
import resource
import shutil
import threading
from itertools import product

import numpy as np
import pytest

from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.data.shards.format import DatasetInfo, canonical_json
from fastdiff.data.shards.index import ShardIndex
from fastdiff.data.shards.integrity import check_index
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.errors import DataError, StorageError

SHAPE, SAMPLES, PER_SHARD = (2, 4, 4), 24, 8
BAD = "train-000001.tar"
FIRST = PER_SHARD  # number of the first sample of the damaged shard


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    out = tmp_path_factory.mktemp("reader") / "intact"
    encode_synthetic(out, SHAPE, SAMPLES, classes=7, samples_per_shard=PER_SHARD)
    return out


@pytest.fixture
def folder(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "latents")


@pytest.fixture(scope="module")
def truth(intact):
    with LatentReader(intact) as reader:
        return reader.read(np.arange(SAMPLES))


def index_of(folder, shard=BAD):
    return ShardIndex.from_bytes((folder / shard).with_suffix(".index.json").read_bytes())


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def assert_named(message, place, shard=BAD):
    assert shard in message
    assert re.search(rf"key {place.key}\b", message), message
    assert re.search(rf"offset {place.offset}\b", message), message


def assert_all_others_are_exact(folder, truth, bad):
    """Each sample is either exact or a DataError; ``bad`` are exactly those that are errors."""
    errors = []
    with LatentReader(folder) as reader:
        for number in range(SAMPLES):
            try:
                read = reader.read([number])
            except DataError:
                errors.append(number)
                continue
            assert read["latent"][0].tobytes() == truth["latent"][number].tobytes()
            assert read["label"][0] == truth["label"][number]
    assert errors == bad


def assert_found_by_verify(folder, place, shard=BAD):
    report = verify(folder)
    assert not report.ok
    assert_named("\n".join(str(problem) for problem in report.problems), place, shard)
    assert {problem.shard for problem in report.problems} == {shard}
    return report


def test_read_gives_the_stored_bytes_in_any_order(intact, truth):
    ids = np.random.default_rng(0).integers(0, SAMPLES, 100)
    with LatentReader(intact, open_shards=2) as reader:
        read = reader.read(ids)
    assert read["latent"].tobytes() == truth["latent"][ids].tobytes()
    assert read["label"].tolist() == truth["label"][ids].tolist()
    assert read["label"].dtype == np.int64
    for number, place in enumerate(index_of(intact).place("latent.npy", row) for row in range(PER_SHARD)):
        stored = (intact / BAD).read_bytes()[place.offset : place.offset + place.length]
        assert stored.endswith(truth["latent"][FIRST + number].tobytes())


def test_read_into_given_arrays(intact, truth):
    with LatentReader(intact) as reader:
        out = reader.empty(3)
        read = reader.read([5, 20, 5], out)
        assert read["latent"] is out["latent"]
        assert out["latent"].tobytes() == truth["latent"][[5, 20, 5]].tobytes()
        with pytest.raises(ValueError, match=r"contiguous float16"):
            reader.read([5], {**out, "latent": np.empty((1, *SHAPE), np.float32)})
        with pytest.raises(ValueError, match=r"'label'"):
            reader.read([5], {"latent": np.empty((1, *SHAPE), np.float16)})
        with pytest.raises(IndexError, match=r"24 samples"):
            reader.read([SAMPLES])
        assert reader.read([])["latent"].shape == (0, *SHAPE)


def test_keys_name_shard_and_key(intact):
    with LatentReader(intact) as reader:
        assert reader.keys([0, 9, 23]) == [
            "train-000000.tar:000000000", "train-000001.tar:000000009", "train-000002.tar:000000023"
        ]  # fmt: skip


def test_few_descriptors_are_open_and_none_after_close(intact):
    def count():
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and os.readlink(link).startswith(str(intact)) for link in links)

    reader = LatentReader(intact, open_shards=2)
    assert count() == 0
    reader.read(np.arange(SAMPLES))
    assert count() == 2
    reader.close()
    assert count() == 0


def test_threads_share_a_reader(intact, truth):
    wrong = []
    with LatentReader(intact, open_shards=1) as reader:

        def work(seed):
            for ids in np.random.default_rng(seed).integers(0, SAMPLES, (20, 16)):
                if reader.read(ids)["latent"].tobytes() != truth["latent"][ids].tobytes():
                    wrong.append(ids)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_read_that_brings_less_than_was_asked_for_is_continued(intact, truth, monkeypatch):
    preadv, calls = os.preadv, []

    def seven_bytes(descriptor, buffers, offset):
        calls.append(offset)
        first = next(buffer for buffer in buffers if len(buffer))
        return preadv(descriptor, [first[:7]], offset)

    monkeypatch.setattr(os, "preadv", seven_bytes)
    with LatentReader(intact) as reader:
        read = reader.read(np.arange(SAMPLES))
    assert read["latent"].tobytes() == truth["latent"].tobytes()
    assert read["label"].tolist() == truth["label"].tolist()
    # 128 bytes of header, 64 of values, 1 of the class; no piece crosses a buffer.
    assert len(calls) == SAMPLES * (19 + 10 + 1)


def test_a_read_that_ends_inside_the_header_is_continued_there(intact, truth, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, _first(buffers, 150), offset))
    with LatentReader(intact) as reader:
        assert reader.read(np.arange(SAMPLES))["latent"].tobytes() == truth["latent"].tobytes()


def _first(buffers, count):
    taken = []
    for buffer in buffers:
        taken.append(buffer[:count])
        count -= len(taken[-1])
    return taken


def test_a_shard_is_streamed_in_when_it_is_opened(intact, truth, monkeypatch):
    advice = []

    def refuse(descriptor, *what):
        advice.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), *what))
        raise OSError(22, "Invalid argument")  # a file system that takes no advice must not matter

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with LatentReader(intact) as reader:
        for _ in range(2):
            assert reader.read(np.arange(SAMPLES))["latent"].tobytes() == truth["latent"].tobytes()
    assert advice == [(f"train-00000{number}.tar", 0, 0, os.POSIX_FADV_WILLNEED) for number in range(3)]


def test_too_many_open_files_name_the_setting(tmp_path):
    encode_synthetic(tmp_path, SHAPE, 40, samples_per_shard=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with LatentReader(tmp_path, open_shards=64) as reader:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 20, before[1]))
        try:
            with pytest.raises(StorageError, match=r"Too many open files; lower --data.shuffle_shards .*ulimit -n"):
                reader.read(np.arange(40))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_closing_does_not_wait_for_a_read_that_hangs(intact, monkeypatch):
    monkeypatch.setattr("fastdiff.data.shards.reader._CLOSE_SECONDS", 0.05)
    reader = LatentReader(intact)
    reader.read([0])
    with reader._lock:
        reader.close()
    assert len(reader._open) == 1
    reader.close()
    assert not reader._open


def test_an_intact_data_set_has_no_problems(intact):
    report = verify(intact)
    assert report.ok
    assert report.samples == SAMPLES
    assert report.bytes == sum(path.stat().st_size for path in intact.glob("*.tar"))
    assert "no problems" in str(report)


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("component", "row", "where"),
    [*product(["latent.npy"], [0, 3, PER_SHARD - 1], [0, 9, 20, 127, 128, 150, 128 + 63]), ("cls", 4, 0)],
)
def test_a_flipped_bit_is_named(folder, truth, component, row, where):
    place = index_of(folder).place(component, row)
    flip(folder / BAD, place.offset + where)
    with (
        LatentReader(folder) as reader,
        pytest.raises(DataError, match=r"crc32 \w{8}, expected \w{8}") as caught,
    ):
        reader.read(np.arange(SAMPLES))
    assert_named(str(caught.value), place)
    assert "fastdiff verify" in str(caught.value)
    assert_all_others_are_exact(folder, truth, [FIRST + row])
    assert len(assert_found_by_verify(folder, place).problems) == 1


def test_verify_lists_all_damage(folder):
    places = [index_of(folder).place("latent.npy", row) for row in (1, 2, 6)]
    for place in places:
        flip(folder / BAD, place.offset + 140)
    (folder / "train-000000.idx").unlink()
    (folder / "train-000002.tar").unlink()
    report = verify(folder)
    assert [(p.shard, p.place) for p in report.problems] == [
        ("train-000000.tar", None), *((BAD, place) for place in places), ("train-000002.tar", None)
    ]  # fmt: skip
    for place in places:
        assert_named(str(report), place)


@pytest.mark.parametrize("unreadable", [BAD, "train-000001.index.json", "train-000001.idx"])
def test_verify_goes_on_after_a_file_that_cannot_be_read(folder, unreadable):
    damaged = [index_of(folder, f"train-00000{n}.tar").place("latent.npy", 2) for n in (0, 2)]
    for number, place in zip((0, 2), damaged, strict=True):
        flip(folder / f"train-00000{number}.tar", place.offset + 140)
    (folder / unreadable).unlink()
    (folder / unreadable).mkdir()  # reading it is an OSError, also for root
    problems = verify(folder).problems
    assert [problem.shard for problem in problems] == ["train-000000.tar", BAD, "train-000002.tar"]
    assert [problems[0].place, problems[2].place] == damaged
    assert re.search(rf"cannot read .*{unreadable}: Is a directory; check its permissions", problems[1].what)


def test_a_shard_that_cannot_be_read_is_not_taken_for_an_empty_one(folder):
    info = DatasetInfo.read(folder).shards[1]
    (folder / BAD).unlink()
    (folder / BAD).mkdir()
    for damage in (b"", b'{"format": "another"}', None):
        index = (folder / BAD).with_suffix(".index.json")
        index.unlink() if damage is None else index.write_bytes(damage)
        with pytest.raises(StorageError, match=rf"cannot read .*{BAD}: Is a directory"):
            check_index(folder / BAD, info)
    with pytest.raises(StorageError, match=rf"cannot read .*{BAD}"):
        LatentReader(folder)
    (folder / BAD).rmdir()
    _, problem = check_index(folder / BAD, info)
    assert problem.what == "train-000001.index.json is missing"


def test_damage_beside_the_samples_is_found_by_verify(folder):
    place = index_of(folder).place("latent.npy", 2)
    flip(folder / BAD, place.offset - 512 + 3)  # the name in the tar header
    assert_found_by_verify(folder, place)
    flip(folder / BAD, place.offset - 512 + 3)
    assert verify(folder).ok
    flip(folder / BAD, place.offset + place.length + 5)  # the padding
    [problem] = verify(folder).problems
    assert "padding" in problem.what


@pytest.mark.fault(17)
@pytest.mark.parametrize(("row", "size"), [(0, None), (4, None), (PER_SHARD - 1, None), (0, 0), (0, 100), (0, 512)])
def test_a_truncated_shard_is_named_at_open(folder, row, size):
    """One byte before the end of a latent, or where it has hardly begun."""
    place = index_of(folder).place("latent.npy", row)
    os.truncate(folder / BAD, place.offset + place.length - 1 if size is None else size)
    with pytest.raises(DataError, match=r"truncated") as caught:
        LatentReader(folder)
    assert_named(str(caught.value), place)
    report = assert_found_by_verify(folder, place)
    for later in range(row, PER_SHARD):
        assert_named(str(report), index_of(folder).place("latent.npy", later))


@pytest.mark.fault(17)
@pytest.mark.parametrize("change", [-512, 512])
def test_a_changed_end_of_the_archive_is_named(folder, change):
    place = index_of(folder).place("cls", PER_SHARD - 1)
    os.truncate(folder / BAD, (folder / BAD).stat().st_size + change)
    with pytest.raises(DataError, match=r"all samples are present") as caught:
        LatentReader(folder)
    assert_named(str(caught.value), place)
    assert_found_by_verify(folder, place)


def rewrite_index(folder, part, row, change):
    path = (folder / BAD).with_suffix(".index.json")
    content = json.loads(path.read_bytes())
    content["components"]["latent.npy"][part][row] += change
    path.write_text(json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n")


@pytest.mark.fault(17)
@pytest.mark.parametrize("part", ["offset", "length", "crc32"])
@pytest.mark.parametrize("row", [0, 5])
def test_one_wrong_number_in_an_index_is_named(folder, truth, part, row):
    place = index_of(folder).place("latent.npy", row)
    rewrite_index(folder, part, row, 1)
    wrong = index_of(folder).place("latent.npy", row)
    with LatentReader(folder) as reader, pytest.raises(DataError, match=r"index and tar differ") as caught:
        reader.read([FIRST])
    assert_named(str(caught.value), wrong)
    assert f"offset {place.offset}" in str(caught.value)
    assert_all_others_are_exact(folder, truth, list(range(FIRST, FIRST + PER_SHARD)))
    assert_found_by_verify(folder, wrong)


@pytest.mark.fault(17)
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"format": "fastdiff-shard-index"'])
def test_an_unreadable_index_is_named(folder, content):
    place = index_of(folder).place("latent.npy", 0)
    (folder / BAD).with_suffix(".index.json").write_bytes(content)
    with (
        LatentReader(folder) as reader,
        pytest.raises(DataError, match=r"index.json is not a valid index") as caught,
    ):
        reader.read([FIRST])
    assert_named(str(caught.value), place)
    assert_found_by_verify(folder, place)


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("suffixes", "problem"),
    [
        (["tar"], "crc32"),
        (["index.json"], "index and tar differ"),
        (["tar", "index.json", "idx"], "from another encode"),
    ],
)
def test_a_shard_replaced_by_another_valid_one_is_named(folder, truth, suffixes, problem):
    for suffix in suffixes:
        shutil.copy(folder / f"train-000002.{suffix}", folder / f"train-000001.{suffix}")
    place = index_of(folder).place("latent.npy", 0)
    with LatentReader(folder) as reader, pytest.raises(DataError, match=problem) as caught:
        reader.read(np.arange(SAMPLES))
    assert_named(str(caught.value), place)
    assert_all_others_are_exact(folder, truth, list(range(FIRST, FIRST + PER_SHARD)))
    assert_found_by_verify(folder, place)


def test_a_changed_idx_is_found_by_verify(folder):
    idx = (folder / BAD).with_suffix(".idx")
    lines = idx.read_text().splitlines(keepends=True)
    idx.write_text("".join([*lines[:4], lines[4].replace("192", "193"), *lines[5:]]))
    assert "wds2idx" in str(assert_found_by_verify(folder, index_of(folder).place("latent.npy", 3)))


def declare(folder, **changes):
    """Make dataset.json fit a changed index, as a faulty encoder would."""
    path = (folder / BAD).with_suffix(".index.json")
    info = json.loads((folder / "dataset.json").read_bytes())
    info["shards"][1]["index_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    info.update(changes)
    del info["sha256"]
    info["sha256"] = hashlib.sha256(canonical_json(info)).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(info))


@pytest.mark.fault(18)
def test_a_shard_with_another_count_than_declared_is_refused(folder):
    shards = json.loads((folder / "dataset.json").read_bytes())["shards"]
    shards[0]["samples"], shards[1]["samples"] = 7, 9
    declare(folder, shards=shards)
    with LatentReader(folder) as reader, pytest.raises(DataError, match=r"8 samples, expected 7"):
        reader.read([0])
    assert "8 samples, expected 9" in str(verify(folder))
    assert DatasetInfo.read(folder).samples == SAMPLES
