"""Every kind of shard that we write, read by the webdataset package, by DALI and by our pipeline, field by field."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from nvidia.dali import Pipeline, fn, types

import fastdiff
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.sample_files import sample_bytes
from fastdiff.errors import DataError
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.independent_reader import shards
from tests.support.inputs.captioned import encode as encode_captioned
from tests.support.inputs.encoding import captioned, encode, picture
from tests.support.processes import ROOT

SIZES = [(32, 64), (32, 32), (64, 32)]
CAPTIONS = [["a cat", "a tabby"], "a dog", ["a cat", "a cat"], "", "a dog", ["a cat"], "a seven"]


def classes(folder: Path) -> Path:
    for number in range(7):
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    return folder / "images"


def texts(folder: Path, **options: Any) -> Path:
    """An encode of captions that repeat, by the pipeline of this kind."""
    pipeline = build(folder / "pipeline", kind=options.pop("kind", "sd15"))
    source = captioned(folder / "images", CAPTIONS, [SIZES[number % 3] for number in range(7)])
    encode(source, folder / "out", pipeline, **{"decode": "pillow"} | options)
    return folder / "out"


def pixels(folder: Path) -> Path:
    from fastdiff.data.encoding.images import encode_images

    out, source = folder / "out", str(classes(folder))
    options = EncodeOptions(source=source, out=out, autoencoder="identity", resolution=16, samples_per_shard=3)
    encode_images(options, lambda _: None)
    return out


def posteriors(folder: Path) -> Path:
    encode(classes(folder), folder / "out", build(folder / "pipeline"), flip=True)
    return folder / "out"


def means(folder: Path) -> Path:
    encode_digits(folder / "out", split="test", samples_per_shard=100)
    return folder / "out"


KINDS: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "means, classes": (means, {"latent.npy", "cls"}),
    "posteriors, flipped, classes": (posteriors, {"latent.npy", "latent_flipped.npy", "cls", "json"}),
    "pixels, classes": (pixels, {"latent.npy", "cls", "json"}),
    "a caption": (texts, {"latent.npy", "context.npy", "json"}),
    "captions, SDXL, buckets": (
        lambda folder: texts(folder, kind="sdxl", captions="all", buckets=True, bucket_step=16, flip=True),
        {
            "latent.npy", "latent_flipped.npy", "context.npy", "context1.npy", "pooled.npy", "pooled1.npy",
            "time_ids.npy", "captions", "json",
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    write, fields = KINDS[request.param]
    return write(tmp_path_factory.mktemp("kind")), fields


def samples_of(folder: Path) -> dict[str, dict[str, dict[str, bytes]]]:
    """By shard and key: the fields of each sample, as Python's tarfile reads them."""
    found: dict[str, dict[str, dict[str, bytes]]] = {}
    for shard, members in shards(folder).items():
        for member, content in members.items():
            key, _, field = member.partition(".")
            found.setdefault(shard, {}).setdefault(key, {})[field] = content
    return found


def test_webdataset_reads_every_field_of_every_sample(kind: tuple[Path, set[str]]) -> None:
    folder, fields = kind
    expected = [(key, sample) for samples in samples_of(folder).values() for key, sample in samples.items()]
    paths = [str(folder / shard.name) for shard in DatasetInfo.read(folder).shards]
    found = list(webdataset.WebDataset(paths, shardshuffle=False))
    assert [sample["__key__"] for sample in found] == [key for key, _ in expected]
    for sample, (_, truth) in zip(found, expected, strict=True):
        assert {name: content for name, content in sample.items() if not name.startswith("__")} == truth
        assert truth.keys() == fields


def test_dali_reads_every_field_of_every_sample(kind: tuple[Path, set[str]]) -> None:
    folder, fields = kind
    names = sorted(fields)
    for shard, samples in samples_of(folder).items():
        pipeline = Pipeline(batch_size=len(samples), num_threads=1, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            found = fn.readers.webdataset(
                paths=[str(folder / shard)], index_paths=[str((folder / shard).with_suffix(".idx"))], ext=names,
                dtypes=[types.UINT8] * len(names), missing_component_behavior="error",
            )  # fmt: skip
            pipeline.set_outputs(*found)
        for name, read in zip(names, pipeline.run(), strict=True):
            assert [read.at(row).tobytes() for row in range(len(samples))] == [s[name] for s in samples.values()]


def test_the_python_interface_gives_decoded_samples(kind: tuple[Path, set[str]]) -> None:
    folder, fields = kind
    info = DatasetInfo.read(folder)
    expected = [sample for samples in samples_of(folder).values() for sample in samples.values()]
    found = list(fastdiff.webdataset(folder))
    assert len(found) == info.samples
    for sample, truth in zip(found, expected, strict=True):
        assert fields <= sample.keys()
        for name in fields:
            if name.endswith(".npy"):
                assert np.array_equal(sample[name], np.load(io.BytesIO(truth[name])))
            else:
                assert type(sample[name]) is (dict if name == "json" else int)
    assert found[0]["latent.npy"].dtype == info.latent.dtype


def test_the_size_of_a_data_set_is_known_before(kind: tuple[Path, set[str]]) -> None:
    """Of a sample without padding of the tar, in the largest bucket; a class data set of digits has no notes."""
    folder, fields = kind
    info = DatasetInfo.read(folder)
    largest = max(
        sum(512 + -(-len(content) // 512) * 512 for content in sample.values())
        for samples in samples_of(folder).values()
        for sample in samples.values()
    )
    assert sample_bytes(info) - (0 if "json" in fields else 1024) == largest


_LOADER = """
import sys
import fastdiff
from torch.utils.data import DataLoader
pipeline = fastdiff.webdataset(sys.argv[1], shardshuffle=2).to_tuple("latent.npy", "cls").batched(8)
batches = list(DataLoader(pipeline, batch_size=None, num_workers=2))
print(sum(len(label) for _, label in batches), tuple(batches[0][0].shape))
"""


def test_a_pipeline_of_the_python_interface_goes_through_a_loader_of_torch(tmp_path: Path) -> None:
    folder = means(tmp_path)
    # In a process of its own: that of the tests may be too large for the loader to fork it.
    done = subprocess.run(
        [sys.executable, "-c", _LOADER, folder], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == ["382", "(8,", "1,", "8,", "8)"], done.stderr


def test_the_python_interface_loses_and_unpickles_nothing(tmp_path: Path) -> None:
    encode_captioned(tmp_path / "older", 20, linked=True)
    with pytest.raises(DataError, match=r"key \d+: no (context|pooled).*hard links"):
        list(fastdiff.webdataset(tmp_path / "older"))
    folder = means(tmp_path)
    shard = folder / "train-000000.tar"
    array = io.BytesIO()
    np.save(array, np.array([print], object), allow_pickle=True)
    with shard.open("r+b") as file:  # an npy of objects in place of the first sample's
        file.seek(512)
        file.write(array.getvalue()[:256])
    with pytest.raises(
        DataError, match=r"train-000000\.tar, key 000001415: a field cannot be decoded .*allow_pickle=False"
    ):
        list(fastdiff.webdataset(folder))
    with pytest.raises(DataError, match=r"dataset\.json is missing"):
        fastdiff.webdataset(tmp_path)
