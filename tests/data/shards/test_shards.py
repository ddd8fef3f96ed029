"""The shard format: WebDataset, DALI and wds2idx read it; how shards are written."""

import hashlib
import io
import json
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset

from fastdiff.data.encoding.builtin import encode_digits, encode_synthetic, pixels_template, synthetic
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance, canonical_json
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, DataError, StorageError
from tests.support.injected.tiny_disk import tiny_disk

TEMPLATE = pixels_template((1, 2, 2), 3, Provenance(source="test", transform="none"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("shards") / "digits"
    encode_digits(out, samples_per_shard=600)
    return out


@pytest.fixture(params=[None, True], ids=["as_this_user_may", "stand_in"])
def disk(request, tmp_path):
    with tiny_disk(tmp_path / "disk", 0.375, stand_in=request.param) as folder:
        yield folder


def write(folder, count, per_shard=2, template=TEMPLATE):
    with ShardWriter(folder, template, samples_per_shard=per_shard) as writer:
        for number in range(count):
            writer.add(f"{number:09d}", {"latent": np.full((1, 2, 2), number, np.float16)}, number % 3)


def write_all(folder, *samples):
    with ShardWriter(folder, TEMPLATE, samples_per_shard=5) as writer:
        for sample in samples:
            writer.add(*sample)


def read_or_refusal(folder):
    try:
        return DatasetInfo.read(folder), None
    except DataError as error:
        return None, str(error)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_digits_are_the_pixels_of_scikit_learn(folder):
    from sklearn.datasets import load_digits

    with LatentReader(folder) as reader:
        read = reader.read(np.arange(len(reader)))
    assert read["latent"].dtype == np.float16
    assert read["latent"].shape == (1797, 1, 8, 8)
    assert np.array_equal((read["latent"][:, 0].astype(np.float64) + 1) * 8, load_digits().images)
    assert np.array_equal(read["label"], load_digits().target)


def test_idx_is_what_wds2idx_writes(folder, tmp_path):
    tool = Path(sysconfig.get_path("scripts")) / "wds2idx"
    for shard in DatasetInfo.read(folder).shards:
        subprocess.run([sys.executable, tool, folder / shard.name, tmp_path / "idx"], check=True, capture_output=True)
        assert (tmp_path / "idx").read_bytes() == (folder / shard.name).with_suffix(".idx").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(4, 32, 32), (1, 8, 8), (77, 768), (768,)])
def test_the_npy_header_is_that_of_numpy(dtype, shape):
    array = np.zeros(shape, dtype)
    saved = io.BytesIO()
    np.save(saved, array)
    assert Column(dtype=dtype, shape=shape).header + array.tobytes() == saved.getvalue()


def test_two_encodes_are_byte_identical(folder, tmp_path):
    encode_digits(tmp_path / "again", samples_per_shard=600)
    assert contents(tmp_path / "again") == contents(folder)
    assert set(contents(folder)) == {
        "dataset.json",
        *(f"train-{n:06d}.{e}" for n in range(3) for e in ("tar", "idx", "index.json")),
    }


def test_dataset_json_describes_the_shards(folder):
    info = DatasetInfo.read(folder)
    assert [shard.samples for shard in info.shards] == [600, 600, 597]
    assert info.samples == 1797
    assert info.provenance.autoencoder == "identity"
    for shard in info.shards:
        content = (folder / shard.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (shard.bytes, shard.sha256)
        index = (folder / shard.name).with_suffix(".index.json").read_bytes()
        assert hashlib.sha256(index).hexdigest() == shard.index_sha256


def test_digest_is_that_of_what_a_run_reads_and_not_of_how_it_was_made(folder):
    info = DatasetInfo.read(folder)
    other_numpy = replace(info.provenance, versions={"numpy": "3.0"})
    assert replace(info, provenance=other_numpy).digest == info.digest
    shard = info.shards[0]
    changes = [
        {"normalisation": Normalisation(shift=(0.0,), scale=(3.0,))},
        {"columns": {"latent": Column(dtype="float32", shape=(1, 8, 8))}},
        {"classes": 11},
        {"kind": "mean_std"},
        {"shards": info.shards[::-1]},
        *({"shards": (replace(shard, **{name: value}),)} for name, value in (("name", "x.tar"), ("sha256", "0" * 64))),
        *({"shards": (replace(shard, **{name: 1}),)} for name in ("samples", "bytes")),
    ]
    digests = [info.digest, *(replace(info, **change).digest for change in changes)]
    assert len(set(digests)) == 1 + len(changes)


def test_a_changed_byte_of_dataset_json_is_refused(folder, tmp_path):
    before, path = DatasetInfo.read(folder), tmp_path / "dataset.json"
    content = (folder / "dataset.json").read_bytes()
    generator = np.random.default_rng(0)
    for offset in range(0, len(content), 2):
        changed = bytearray(content)
        changed[offset] ^= int(generator.integers(1, 256))
        path.write_bytes(changed)
        read, refusal = read_or_refusal(tmp_path)
        if read is None:
            assert refusal.startswith(f"{path} is not usable (")
            assert "fastdiff encode" in refusal
        else:
            assert json.loads(changed) == json.loads(content), f"offset {offset}"
            assert read == before


def test_the_sha256_of_dataset_json_is_that_of_its_other_fields(folder):
    fields = json.loads((folder / "dataset.json").read_bytes())
    declared = fields.pop("sha256")
    assert declared == hashlib.sha256(canonical_json(fields)).hexdigest()
    # The canonical text, spelled out: another encoder must be able to write it.
    assert canonical_json({"b": (1.0, None), "a": "ä"}) == b'{"a":"\\u00e4","b":[1.0,null]}'


def test_all_columns_and_meta_come_back(tmp_path):
    template = replace(
        TEMPLATE,
        columns={**TEMPLATE.columns, "pooled": Column(dtype="float32", shape=(3,))},
        classes=None,
        normalisation=Normalisation(shift=(0.5,), scale=(2.0,)),
    )
    pooled = np.arange(3, dtype=np.float32)
    with ShardWriter(tmp_path / "out", template, samples_per_shard=1) as writer:
        writer.add("a-b_1", {"latent": np.ones((1, 2, 2), np.float16), "pooled": pooled}, meta={"caption": "ä"})
    assert DatasetInfo.read(tmp_path / "out").normalisation == template.normalisation
    [sample] = webdataset.WebDataset(str(tmp_path / "out" / "train-000000.tar"), shardshuffle=False)
    assert json.loads(sample["json"]) == {"caption": "ä"}
    with LatentReader(tmp_path / "out") as reader:
        read = reader.read([0])
    assert np.array_equal(read["pooled"], pooled[None])
    assert "label" not in read
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("columns"), "columns"),
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.update(kind="mean_std"), "kind"),
        (lambda d: d.update(samples=d["samples"] + 1), "samples"),
        (lambda d: d.update(samples="1797"), "samples"),
        (lambda d: d["normalisation"].update(scale=[0.0]), "scale of 0"),
        (lambda d: d["normalisation"].update(shift=[0.0, 0.0]), "one per channel"),
        (lambda d: d["columns"]["latent"].update(dtype="int16"), "dtype"),
        (lambda d: d["columns"]["latent"].update(dtype="int8"), "need latent_limits of float32 [2, 1]"),
        (lambda d: d.update(normalisations={"latent": d["normalisation"]}), "normalisations has latent"),
        (lambda d: d["columns"]["latent"].update(shape=[8, 8]), "[C, H, W]"),
        (lambda d: d["shards"][0].update(name="../../etc/passwd.tar"), "not a valid shard name"),
        (lambda d: d["shards"][1].update(name="train-000000.tar"), "same name"),
        (lambda d: d.update(shards=[], samples=0), "0 shards"),
        (lambda d: d.pop("sha256"), "sha256 is None"),
        (lambda d: d.update(note=float("nan")), "not JSON compliant"),
    ],
)
def test_a_broken_dataset_json_is_a_data_error(folder, tmp_path, change, problem):
    parsed = json.loads((folder / "dataset.json").read_bytes())
    change(parsed)
    (tmp_path / "dataset.json").write_text(json.dumps(parsed))
    with pytest.raises(DataError, match=r"fastdiff encode") as caught:
        DatasetInfo.read(tmp_path)
    assert problem in str(caught.value)


def test_a_cut_or_missing_dataset_json_is_a_data_error(folder, tmp_path):
    with pytest.raises(DataError, match=r"run `fastdiff encode` first"):
        DatasetInfo.read(tmp_path)
    (tmp_path / "dataset.json").write_bytes((folder / "dataset.json").read_bytes()[:100])
    with pytest.raises(DataError, match=r"JSON"):
        LatentReader(tmp_path)


def test_a_published_data_set_is_never_rewritten(folder):
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"already holds a data set"):
        encode_digits(folder)
    assert contents(folder) == before


@pytest.mark.fault(27)
def test_a_second_encode_into_one_folder_is_refused(tmp_path):
    with ShardWriter(tmp_path, TEMPLATE, samples_per_shard=1) as writer:
        writer.add("0", {"latent": np.zeros((1, 2, 2), np.float16)}, 0)
        with pytest.raises(ConfigError, match=r"another `fastdiff encode`"):
            write(tmp_path, 2)
    assert verify(tmp_path).ok


@pytest.mark.fault(9)
def test_an_interrupted_encode_is_no_data_set_and_can_be_repeated(tmp_path):
    def interrupted():
        with ShardWriter(tmp_path, TEMPLATE, samples_per_shard=2) as writer:
            for number in range(3):
                writer.add(f"{number}", {"latent": np.zeros((1, 2, 2), np.float16)}, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(contents(tmp_path)) == [
        ".encoding", "train-000000.idx", "train-000000.index.json", "train-000000.tar"
    ]  # fmt: skip
    write(tmp_path, 1)
    assert sorted(contents(tmp_path)) == [
        "dataset.json", "train-000000.idx", "train-000000.index.json", "train-000000.tar"
    ]  # fmt: skip
    assert verify(tmp_path).ok


@pytest.mark.fault(8)
def test_a_full_disk_is_a_storage_error_and_the_next_run_replaces_what_was_written(disk):
    out = disk / "out"
    with pytest.raises(StorageError, match=rf"{out}/train-\d+.*No space left on device; free some space") as caught:
        encode_synthetic(out, (4, 32, 32), 100, samples_per_shard=8)
    assert "replaces the files written so far" in str(caught.value)
    assert not (out / "dataset.json").exists()
    assert not list(out.glob("*.tmp"))
    assert (out / "train-000000.tar").exists()
    with pytest.raises(DataError, match=r"fastdiff encode"):
        LatentReader(out)
    encode_synthetic(out, (4, 32, 32), 10, samples_per_shard=8)
    assert verify(out).ok


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/out"):
        write(tmp_path / "file" / "out", 1)


@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("a.b", {"latent": np.zeros((1, 2, 2), np.float16)}, 0), "a dot"),
        (("../a", {"latent": np.zeros((1, 2, 2), np.float16)}, 0), "key"),
        (("a", {"latent": np.zeros((1, 2, 3), np.float16)}, 0), r"\(1, 2, 3\)"),
        (("a", {"latent": np.zeros((1, 2, 2), np.float32)}, 0), "float32"),
        (("a", {"latent": np.full((1, 2, 2), np.nan, np.float16)}, 0), "non-finite"),
        (("a", {"latents": np.zeros((1, 2, 2), np.float16)}, 0), "columns"),
        (("a", {"latent": np.zeros((1, 2, 2), np.float16)}, 3), "class 3"),
        (("a", {"latent": np.zeros((1, 2, 2), np.float16)}, None), "class None"),
        (("first", {"latent": np.zeros((1, 2, 2), np.float16)}, 0), "duplicate key"),
    ],
)
def test_a_sample_that_does_not_fit_is_a_data_error(tmp_path, arguments, problem):
    first = ("first", {"latent": np.zeros((1, 2, 2), np.float16)}, 0)
    with pytest.raises(DataError, match=problem):
        write_all(tmp_path, first, arguments)
    assert not (tmp_path / "dataset.json").exists()


def test_meta_for_some_samples_only_is_a_data_error(tmp_path):
    latent = {"latent": np.zeros((1, 2, 2), np.float16)}
    with pytest.raises(DataError, match=r"differ in their components"):
        write_all(tmp_path, ("a", latent, 0, {"x": 1}), ("b", latent, 0))
    assert sorted(contents(tmp_path)) == [".encoding"]


def test_an_empty_source_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match=r"no samples"):
        write(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"expected 1 to"):
        write(tmp_path, 1, per_shard=0)


def test_synthetic_is_a_function_of_its_seed():
    first, again, other = (list(synthetic((4, 8, 8), 20, 10, seed)) for seed in (5, 5, 6))
    assert all(np.array_equal(a.latent, b.latent) and a.label == b.label for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a.latent, b.latent) for a, b in zip(first, other, strict=True))
    values = np.stack([sample.latent for sample in first]).astype(np.float64)
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05
