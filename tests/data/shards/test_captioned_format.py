"""dataset.json and the empty prompt of captioned data: refusals, and the digest of a data set."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation
from fastdiff.data.shards.null_embedding import write_null
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.sample_files import components
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError, DataError, StorageError
from tests.support.inputs.captioned import ARRAYS, EMPTY, SIZES, encode, samples, template

SAMPLES = 20


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captioned") / "latents"
    return folder, encode(folder, SAMPLES)


@pytest.fixture
def folder(intact, tmp_path):
    return shutil.copytree(intact[0], tmp_path / "latents")


def test_the_null_condition_comes_back_exactly(intact):
    with LatentReader(intact[0]) as reader:
        null = reader.null()
    assert null.keys() == EMPTY.keys()
    for name, array in null.items():
        assert (array.dtype, array.tobytes()) == (EMPTY[name].dtype, EMPTY[name].tobytes())
        assert np.array_equal(np.load(intact[0] / f"null.{name}.npy"), EMPTY[name])
        array += 1  # the caller's own


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.unlink(), "it is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "not an npy file of float16"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "not an npy file of float16"),
        (lambda path: np.save(path, EMPTY["context"].astype(np.float32)), "not an npy file of float16"),
        (lambda path: np.save(path, EMPTY["context"] + 1), "sha256"),
    ],
)
def test_a_damaged_null_condition_is_named(folder, damage, problem):
    damage(folder / "null.context.npy")
    with LatentReader(folder) as reader, pytest.raises(DataError, match=rf"null.context.npy: .*{problem}"):
        reader.null()
    [found] = verify(folder).problems
    assert found.shard == "null.context.npy"
    assert problem in found.what


def test_a_null_condition_that_cannot_be_read_is_a_storage_error(folder):
    (folder / "null.pooled.npy").unlink()
    (folder / "null.pooled.npy").mkdir()
    with LatentReader(folder) as reader, pytest.raises(StorageError, match=r"null.pooled.npy: Is a directory"):
        reader.null()
    assert "Is a directory" in str(verify(folder))


@pytest.mark.parametrize("array", [np.ones((2, 2), np.float64), np.full(3, np.nan, np.float32)])
def test_a_malformed_null_condition_is_refused(tmp_path, array):
    with pytest.raises(DataError, match=r"the empty prompt's context"):
        write_null(tmp_path, {"context": array})
    with pytest.raises(DataError, match=r"the empty prompt's latent"):
        write_null(tmp_path, {"latent": np.ones(2, np.float32)})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda d: d.update(buckets=[[6, 4], [4, 6]]),
            "the latent column has the size (4, 6), the first bucket (6, 4)",
        ),
        (lambda d: d.update(buckets=[[4, 6], [4, 6]]), "same size"),
        (lambda d: d.update(buckets=[[4, 6], [4, 0]]), "pairs of height and width"),
        (lambda d: d.update(buckets=[[4, 6], [2**62, 2**62]]), "more than 1073741824 bytes"),
        (lambda d: d.update(buckets=[[4, 6], [4]]), "buckets.1"),
        (lambda d: d["shards"][0].update(bucket=3), "bucket 3 of 3"),
        (lambda d: d["shards"][0].update(bucket=-1), "bucket -1 of 3"),
        (lambda d: d["shards"][0].update(name="../x.tar"), "not a valid shard name"),
        (lambda d: d["shards"][0].update(samples=2**40), "samples in"),
        (lambda d: d["shards"][0].update(samples=2**40, bytes=2**60), "at most 1048576 samples"),
        (lambda d: d["shards"][0].update(samples=1, bytes=512 * 10), "for these, at least 53"),
        (lambda d: d.update(captions=0), "captions is 0"),
        (lambda d: d.update(captions=10**9), "captions is 1000000000"),
        (lambda d: d.update(flipped=1), "flipped"),
        (lambda d: d.update(kind="mode"), "kind"),
        (lambda d: d.update(null={"context": {"sha256": "0"}}), "null has the columns ['context']"),
        (lambda d: d.update(null={"../context": {"sha256": "0"}}), "null has the columns"),
        (lambda d: d["columns"].pop("context"), "null has the columns"),
        (lambda d: (d["columns"].pop("context"), d["columns"].pop("pooled"), d.update(null={})), "captions is 3"),
        (lambda d: d["columns"].update(x={"dtype": "float16", "shape": [1]}), "unknown column 'x'; expected latent"),
        (lambda d: d["columns"]["context"].update(shape=[3]), "expected [tokens, width]"),
        (lambda d: d["columns"]["pooled"].update(shape=[3, 1]), "expected [pooled_width]"),
        (lambda d: d["columns"]["time_ids"].update(shape=[4]), "time_ids"),
        (lambda d: d["columns"]["context"].update(shape=[2**40, 2**40]), "more than 1073741824 bytes"),
        (lambda d: d["normalisation"].update(shift=[0.5, -1.0, 0.5, 0.0]), "without shift"),
        (lambda d: d["normalisation"].update(scale=[2.0, 0.25, 1.0, 0.25]), "of equal scales"),
    ],
)
def test_a_broken_dataset_json_is_a_data_error(folder, change, problem):
    parsed = json.loads((folder / "dataset.json").read_bytes())
    change(parsed)
    (folder / "dataset.json").write_text(json.dumps(parsed))
    with pytest.raises(DataError, match=r"fastdiff encode") as caught:
        LatentReader(folder)
    assert problem in str(caught.value)


def test_a_posterior_has_an_even_number_of_channels():
    columns = {"latent": Column(dtype="float16", shape=(3, 2, 2))}
    scales = Normalisation(shift=(0.0,) * 3, scale=(1.0,) * 3)
    info = replace(template(()), columns=columns, normalisation=scales, captions=1)
    assert "mean and deviation of equal scales" in info.problem_of_layout()
    assert replace(info, kind="mean").problem_of_layout() is None


@pytest.mark.parametrize("value", [{"kind": "mean"}, {"flipped": False}, {"captions": 2}, {"null": {}}])
def test_the_digest_knows_every_feature(intact, value):
    info = DatasetInfo.read(intact[0])
    assert replace(info, **value).digest != info.digest
    other = replace(info.provenance, text_encoder_digest=None)
    assert replace(info, provenance=other).digest == info.digest
    moved = tuple(replace(shard, bucket=0) for shard in info.shards)
    assert replace(info, shards=moved).digest != info.digest
    assert replace(info, buckets=(*SIZES, (9, 9))).digest != info.digest


def test_a_data_set_without_new_features_has_the_bytes_and_the_digest_it_always_had(digits):
    parsed = json.loads((digits / "dataset.json").read_bytes())
    assert set(parsed) == {
        "classes", "columns", "format", "kind", "normalisation", "provenance", "samples", "sha256", "shards", "version"
    }  # fmt: skip
    assert set(parsed["shards"][0]) == {"name", "samples", "bytes", "sha256", "index_sha256"}
    assert set(parsed["provenance"]) == {
        "source", "transform", "autoencoder", "autoencoder_digest", "text_encoder", "versions"
    }  # fmt: skip
    assert DatasetInfo.read(digits).digest == DIGITS


@pytest.mark.parametrize(
    ("change", "given", "problem"),
    [
        (lambda a: a.pop("latent_flipped"), {}, "columns"),
        (lambda a: a.pop("pooled1"), {}, "columns"),
        (lambda a: a.update(context2=a["context"]), {}, "columns"),
        (
            lambda a: a.update(context1=a["context1"][:2]),
            {},
            r"context1 is float16 \(2, 2\), expected float16 \(3, 2\)",
        ),
        (
            lambda a: a.update(time_ids=a["time_ids"] + np.float32(np.inf)),
            {},
            "time_ids holds non-finite values",
        ),
        (lambda a: a.update(latent=a["latent"].swapaxes(1, 2)), {}, r"latent is float16 \(4, 6, 4\)"),
        (lambda a: None, {"captions": None}, "None captions, expected 1 to 3"),
        (lambda a: None, {"captions": 4}, "4 captions"),
        (lambda a: None, {"captions": 0}, "0 captions"),
        (lambda a: None, {"label": 1}, "class 1"),
    ],
)
def test_a_sample_that_does_not_fit_is_a_data_error(change, given, problem):
    sample = next(s for s in samples(40, 1) if s.captions == 2)
    arrays = dict(sample.arrays)
    assert set(components(template(), 0, sample.key, arrays, captions=2)) == {*(f"{a}.npy" for a in ARRAYS), "captions"}
    change(arrays)
    with pytest.raises(DataError, match=problem):
        components(template(), 0, sample.key, arrays, **{"captions": 2} | given)


def test_captions_of_a_data_set_with_one_per_sample_are_not_counted():
    [sample] = (s for s in samples(40, 1)[:4] if s.key == "000000003")
    files = components(template(captions=1), 0, sample.key, sample.arrays)
    assert list(files) == ["latent.npy", "latent_flipped.npy", "context.npy", "pooled.npy", "time_ids.npy"]
    with pytest.raises(DataError, match=r"1 captions, expected 1 to 1"):
        components(template(captions=1), 0, sample.key, sample.arrays, captions=1)


def test_shards_that_no_reader_would_take_are_not_begun(tmp_path):
    with pytest.raises(ConfigError, match=r"expected 1 to 1048576"):
        encode(tmp_path, 1, per_shard=2**20 + 1)
    assert not list(tmp_path.iterdir())


DIGITS = "7c6c79df071054c9fd2abbfb6a4b393ffd18608e377fe0a01c0bce1afcf28a6e"
