"""Posteriors, flips, captions and the hard links of older shards: exact in every reader, or an error of the sample."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.index import ShardIndex
from fastdiff.data.shards.null_embedding import write_null
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.sample_files import components
from fastdiff.data.shards.tar_writer import ShardTar
from fastdiff.data.shards.verify import verify
from fastdiff.errors import DataError
from tests.support.inputs.captioned import ARRAYS, CAPTIONS, EMPTY, SIZES, encode, samples, template
from tests.support.processes import start, stop

SAMPLES = 40


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants") / "latents"
    return folder, encode(folder, SAMPLES)


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The same samples, as versions up to 0.2 wrote them."""
    folder = tmp_path_factory.mktemp("older") / "latents"
    return folder, encode(folder, SAMPLES, linked=True)


@pytest.fixture(params=["intact", "older"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def folder(older, tmp_path):
    return shutil.copytree(older[0], tmp_path / "latents")


def own(sample, array):
    """Return the sample's array for an array of the data set: captions in turn."""
    column = array.rstrip("12")
    if column in EMPTY:
        number = int(array[len(column) :] or 0) % sample.captions
        return sample.arrays[f"{column}{number or ''}"]
    return sample.arrays[array]


def index_of(folder, shard):
    return ShardIndex.from_bytes((folder / shard.name).with_suffix(".index.json").read_bytes())


def each_shard(folder, truth):
    """Shards with the samples that are in them."""
    start = 0
    for shard in DatasetInfo.read(folder).shards:
        yield shard, truth[start : start + shard.samples]
        start += shard.samples


def bucket_ids(truth, bucket):
    return np.array([number for number, sample in enumerate(truth) if sample.bucket == bucket])


def test_dataset_json_has_the_buckets_in_the_names_of_the_shards(intact):
    info = DatasetInfo.read(intact[0])
    assert info.buckets == SIZES
    assert (info.kind, info.flipped, info.captions) == ("posterior", True, CAPTIONS)
    assert set(info.null) == {"context", "pooled"}
    assert info.provenance.text_encoder_digest == "0" * 64
    for shard in info.shards:
        height, width = SIZES[shard.bucket]
        assert shard.name.endswith(f"-{height}x{width}.tar")
        assert info.columns_of(shard.bucket)["latent"].shape == (4, height, width)
    assert {shard.bucket for shard in info.shards} == {0, 1, 2}
    assert verify(intact[0]).ok


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_every_variant_comes_back(either, bucket):
    folder, truth = either
    ids = bucket_ids(truth, bucket)
    generator = np.random.default_rng(bucket)
    chosen = {"latent": generator.integers(0, 2, len(ids)), "caption": generator.random(len(ids), np.float32)}
    with LatentReader(folder) as reader:
        assert reader.bucket_of(ids) == bucket
        assert {reader.bucket_of(number) for number in ids.tolist()} == {bucket}
        first, read = reader.read(ids), reader.read(ids, reader.empty(len(ids), bucket), choice=chosen)
    for row, number in enumerate(ids):
        sample = truth[number]
        caption = int(np.float64(chosen["caption"][row]) * sample.captions) or ""
        names = ("latent_flipped" if chosen["latent"][row] else "latent", f"context{caption}", f"pooled{caption}")
        for column, name in zip(("latent", "context", "pooled", "time_ids"), (*names, "time_ids"), strict=True):
            assert read[column][row].tobytes() == sample.arrays[name].tobytes()
            assert first[column][row].tobytes() == sample.arrays[column].tobytes()


def test_each_of_the_captions_that_a_sample_has_is_equally_likely(intact):
    folder, truth = intact
    number = next(n for n, sample in enumerate(truth) if sample.captions == 2)
    largest = np.nextafter(np.float32(1), np.float32(0))
    with LatentReader(folder) as reader:
        for u, suffix in ((0.0, ""), (0.4999, ""), (0.5, "1"), (largest, "1")):
            read = reader.read([number], choice={"caption": np.array([u], np.float32)})
            assert np.array_equal(read["context"][0], truth[number].arrays[f"context{suffix}"])


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"latent": np.array([2])}, "integers from 0 to 1"),
        ({"latent": np.array([-1])}, "integers from 0 to 1"),
        ({"latent": np.array([0.5])}, "integers from 0 to 1"),
        ({"latent": np.array([0, 1])}, "1 integers"),
        ({"caption": np.array([1.0])}, r"in \[0, 1\)"),
        ({"caption": np.array([np.nan])}, r"in \[0, 1\)"),
        ({"caption": np.array([0.5, 0.5])}, "1 numbers"),
    ],
)
def test_impossible_choices_are_refused(intact, choice, problem):
    with LatentReader(intact[0]) as reader, pytest.raises(ValueError, match=problem):
        reader.read([0], choice=choice)


def test_samples_of_two_buckets_are_no_batch(intact):
    folder, truth = intact
    with LatentReader(folder) as reader:
        with pytest.raises(ValueError, match=r"buckets \(\[0, 1, 2\]\)"):
            reader.read(np.arange(SAMPLES))
        with pytest.raises(IndexError, match=r"sample 40 of 40"):
            reader.bucket_of(SAMPLES)
        with pytest.raises(IndexError, match=r"sample -1"):
            reader.keys([-1])
        with pytest.raises(ValueError, match=r"contiguous float16"):
            reader.read(bucket_ids(truth, 1)[:2], reader.empty(2, 0))


def test_shards_are_fetched_before_they_are_opened(intact, tmp_path):
    folder, truth = intact
    for path in (folder / "dataset.json", *folder.glob("null.*")):
        shutil.copy(path, tmp_path)
    fetched = []

    def fetch(shard):
        fetched.append(shard.name)
        for path in folder.glob(f"{shard.name.removesuffix('.tar')}.*"):
            shutil.copy(path, tmp_path)

    with pytest.raises(DataError, match=r"the file is missing"):
        LatentReader(tmp_path)
    ids = bucket_ids(truth, 1)
    with LatentReader(tmp_path, fetch=fetch) as reader, LatentReader(folder) as local:
        assert fetched == []
        names = [shard.name for shard in reader.info.shards if shard.bucket == 1]
        for _ in range(2):
            assert reader.read(ids)["latent"].tobytes() == local.read(ids)["latent"].tobytes()
            assert sorted(fetched) == sorted(names)  # open ones are not fetched again
        assert reader.null().keys() == EMPTY.keys()
    with LatentReader(tmp_path, open_shards=1, fetch=fetch) as reader:
        for bucket in (0, 1, 2, 0, 1, 2):  # with one shard of each bucket open
            reader.read(bucket_ids(truth, bucket)[:1])
    assert len(fetched) == len(names) + 3


def test_a_shard_that_was_fetched_cut_off_is_a_data_error(intact, tmp_path):
    shutil.copy(intact[0] / "dataset.json", tmp_path)

    def fetch(shard):
        for path in intact[0].glob(f"{shard.name.removesuffix('.tar')}.*"):
            shutil.copy(path, tmp_path)
        os.truncate(tmp_path / shard.name, 5000)

    with LatentReader(tmp_path, fetch=fetch) as reader, pytest.raises(DataError, match=r"truncated"):
        reader.read([0])


def test_each_sample_has_all_of_its_files_and_older_shards_share_them_by_links(intact, older):
    for folder, truth in (intact, older):
        assert verify(folder).ok
        for shard, own_samples in each_shard(folder, truth):
            with tarfile.open(folder / shard.name) as archive:
                kinds = [m.isreg() for m in archive if m.name.endswith(".npy")]
            distinct = {own(sample, array).tobytes() for sample in own_samples for array in ARRAYS}
            assert len(kinds) == len(ARRAYS) * shard.samples > len(distinct)
            assert kinds.count(True) == (len(kinds) if folder == intact[0] else len(distinct))


def test_tarfile_and_tar_give_every_file_of_every_sample(intact, tmp_path):
    folder, truth = intact
    for shard, own_samples in each_shard(folder, truth):
        subprocess.run(["tar", "xf", folder / shard.name, "-C", tmp_path], check=True)
        with tarfile.open(folder / shard.name) as archive:
            assert len(archive.getmembers()) == shard.samples * (len(ARRAYS) + 1)
            for sample in own_samples:
                for array in ARRAYS:
                    name = f"{sample.key}.{array}.npy"
                    content = archive.extractfile(name).read()
                    assert (tmp_path / name).read_bytes() == content
                    assert np.array_equal(np.load(io.BytesIO(content)), own(sample, array))
                assert (tmp_path / f"{sample.key}.captions").read_text() == str(sample.captions)


def test_damage_of_a_shared_array_is_named_at_every_sample_that_has_it(tmp_path):
    folder, truth = tmp_path, encode(tmp_path, SAMPLES, per_shard=SAMPLES, linked=True)
    shard = DatasetInfo.read(folder).shards[0]
    index = index_of(folder, shard)
    rows = [
        row
        for row, sample in enumerate(truth[: shard.samples])
        if np.array_equal(own(sample, "context"), EMPTY["context"])
    ]
    place = index.place("context.npy", rows[0])
    assert len(rows) > 1
    assert {index.place("context.npy", row).offset for row in rows} == {place.offset}
    content = bytearray((folder / shard.name).read_bytes())
    content[place.offset + place.length - 1] ^= 4
    (folder / shard.name).write_bytes(content)
    with LatentReader(folder) as reader:
        for row in rows:
            with pytest.raises(
                DataError, match=rf"key {index.keys[row]} \(context.npy\), offset {place.offset}: crc32"
            ):
                reader.read([row])
        others = [row for row in range(shard.samples) if row not in rows]
        assert np.array_equal(reader.read(others)["context"][0], own(truth[others[0]], "context"))
    problems = verify(folder).problems
    assert {problem.place.key for problem in problems} == {index.keys[row] for row in rows}
    assert len(problems) == 3 * len(rows)  # context, context1 and context2 of a sample without a caption


def test_a_link_that_leads_elsewhere_is_found_by_verify(folder):
    shard = DatasetInfo.read(folder).shards[0]
    with tarfile.open(folder / shard.name) as archive:
        link = next(m for m in archive.getmembers() if m.islnk())
        other = next(
            m for m in archive.getmembers() if m.isreg() and m.name != link.linkname and m.name.endswith(".npy")
        )
    key, _, component = link.name.partition(".")
    for target in (other.name, "nothing.npy"):
        changed = tarfile.TarInfo(link.name)
        changed.type, changed.linkname = tarfile.LNKTYPE, target
        content = bytearray((folder / shard.name).read_bytes())
        content[link.offset : link.offset + 512] = changed.tobuf(tarfile.USTAR_FORMAT)
        (folder / shard.name).write_bytes(content)
        [problem] = verify(folder).problems
        assert (problem.shard, problem.place.key, problem.place.component) == (shard.name, key, component)
        assert "index and tar differ" in problem.what
        assert ("no further readable component" in problem.what) == (target == "nothing.npy")


@pytest.mark.parametrize("text", [b"0", b"4", b"", b"-1", b"1.5", b"00000000000000000000000000000001"])
def test_a_wrong_number_of_captions_is_named(tmp_path, text):
    info = template(SIZES[:1])
    [sample] = samples(1, 1)
    files = components(info, 0, sample.key, sample.arrays, captions=sample.captions)
    tar = ShardTar(tmp_path / info.shard_name(0), 0)
    tar.add(sample.key, files | {"captions": text})
    replace(info, shards=(tar.publish(),), samples=1, null=write_null(tmp_path, EMPTY)).write(tmp_path)
    with LatentReader(tmp_path) as reader, pytest.raises(DataError, match=rf"key {sample.key} \(captions\), offset"):
        reader.read([0])
    [problem] = verify(tmp_path).problems
    assert "not in 1 to 3" in problem.what


def test_a_shard_of_another_bucket_is_refused(folder):
    info = DatasetInfo.read(folder)
    of_0, of_1 = (next(shard for shard in info.shards if shard.bucket == bucket) for bucket in (0, 1))
    shards = tuple(replace(shard, bucket=1) if shard == of_0 else shard for shard in info.shards)
    replace(info, shards=shards).write(folder)
    first = sum(shard.samples for shard in info.shards[: info.shards.index(of_0)])
    with LatentReader(folder) as reader, pytest.raises(DataError, match=r"npy header .* does not match Column"):
        reader.read([first])
    assert f"expected float16 {(4, *SIZES[1])}" in str(verify(folder))
    assert of_1.name not in str(verify(folder))


@pytest.mark.nightly
def test_two_processes_write_the_same_shard_without_a_conflict(tmp_path):
    encode(tmp_path / "alone", SAMPLES, per_shard=SAMPLES)
    (tmp_path / "both").mkdir()
    code = (
        "import sys, time; from pathlib import Path; from tests.support.inputs.captioned import samples, template\n"
        "from fastdiff.data.shards.sample_files import components\n"
        "from fastdiff.data.shards.tar_writer import ShardTar\n"
        "tar = ShardTar(Path(sys.argv[1]) / template().shard_name(0, 1), 1)\n"
        "for s in samples(40):\n"
        "    if s.bucket == 1: tar.add(s.key, components(template(), 1, s.key, s.arrays, captions=s.captions))\n"
        "Path(sys.argv[1], f'ready{sys.argv[2]}').touch()\n"
        "while len(list(Path(sys.argv[1]).glob('ready*'))) < 2: time.sleep(0.01)\n"
        "print(tar.publish().sha256)"
    )
    both = [start([sys.executable, "-c", code, tmp_path / "both", n]) for n in "01"]
    try:
        found = {process.communicate(timeout=240)[0].split()[-1] for process in both}
    finally:
        for process in both:
            stop(process)
    [shard] = (s for s in DatasetInfo.read(tmp_path / "alone").shards if s.bucket == 1)
    assert found == {shard.sha256}
    written = {path.name: path.read_bytes() for path in (tmp_path / "both").iterdir() if "ready" not in path.name}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "alone").glob("train-*-6x4.*")}
