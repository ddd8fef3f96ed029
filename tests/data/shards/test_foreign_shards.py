"""Shards of a faulty or hostile encoder with correct digests, and shards that change while they are open."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.sample_files import components
from fastdiff.data.shards.tar_writer import ShardTar
from fastdiff.data.shards.verify import verify
from fastdiff.errors import DataError

SHAPE, PER_SHARD, SAMPLES = (2, 4, 4), 8, 24


def shard_of(folder: Path, number: int) -> Path:
    return folder / f"train-{number:06d}.tar"


def write_shards(folder: Path, change: Callable[[int, dict[str, bytes]], None]) -> Path:
    """Two shards of four samples each; ``change`` alters the components of a sample before it is written."""
    folder.mkdir()
    info = DatasetInfo(
        columns={"latent": Column(dtype="float16", shape=SHAPE)},
        normalisation=Normalisation(shift=(0.0, 0.0), scale=(1.0, 1.0)),
        provenance=Provenance(source="test", transform="none"),
        classes=7,
    )
    shards = []
    for number in range(2):
        tar = ShardTar(folder / info.shard_name(number))
        for row in range(4):
            sample = 4 * number + row
            content = components(info, 0, f"{sample:09d}", {"latent": np.full(SHAPE, sample, np.float16)}, sample % 7)
            change(sample, content)
            tar.add(f"{sample:09d}", content)
        shards.append(tar.publish())
    dataclasses.replace(info, shards=tuple(shards), samples=8).write(folder)
    return folder


def npy_member(dtype: Any, shape: tuple[int, ...]) -> bytes:
    return Column(dtype=dtype, shape=shape).header + np.zeros(shape, dtype).tobytes()


WRONG = {
    "dtype": ("latent.npy", npy_member("float32", (1, 4, 4)), "npy header"),  # of as many bytes
    "shape": ("latent.npy", npy_member("float16", (4, 4, 2)), "npy header"),
    "longer": ("latent.npy", npy_member("float16", (2, 4, 5)), "208 bytes, expected 192"),
    "class": ("cls", b"7", "none of the 7 classes"),
    "text": ("cls", b"1e3", "none of the 7 classes"),
    "nothing": ("cls", b"", "none of the 7 classes"),
    "number": ("cls", b"9" * 5000, "5000 bytes, expected a number"),
}  # fmt: skip


@pytest.mark.fault(18)
@pytest.mark.parametrize("kind", WRONG)
def test_a_component_of_another_kind_is_refused_or_replaced(tmp_path: Path, kind: str) -> None:
    name, content, what = WRONG[kind]
    folder = write_shards(tmp_path / "data", lambda sample, parts: parts.update({name: content} if sample == 5 else {}))
    with LatentReader(folder) as reader:
        assert (reader.read([4])["latent"] == 4).all()
        with pytest.raises(DataError, match=what) as caught:
            reader.read([5])
    assert "train-000001.tar, key 000000005" in str(caught.value)
    assert "train-000001.tar, key 000000005" in str(verify(folder))
    with LatentReader(folder, substitute=True) as reader:
        read = reader.read([4, 5, 6, 7], positions=np.arange(4))
        assert read["latent"][:, 0, 0, 0].tolist() == [4, 6, 6, 7]
        assert read["label"].tolist() == [4, 6, 6, 0]
        assert list(reader.substituted) == [1]


def redeclared(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the index of the second shard, and let dataset.json fit it."""
    path = shard_of(folder, 1).with_suffix(".index.json")
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    info = DatasetInfo.read(folder)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    shards = (info.shards[0], dataclasses.replace(info.shards[1], index_sha256=digest))
    dataclasses.replace(info, shards=shards).write(folder)
    return folder


INDICES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "component": (lambda index: index["components"].pop("cls"), "no cls components"),
    "one": (lambda index: index["components"]["cls"]["offset"].pop(), "differs in length from the keys"),
    "duplicate": (lambda index: index.update(keys=["a", "b", "a", "c"]), "a duplicate key"),
    "key": (lambda index: index.update(keys=["a", "b", "\x1b]0;x\x07", "c"]), "a key or component is not 1 to 80"),
    "path": (lambda index: index["components"].update({"../x": index["components"].pop("cls")}), "is not 1 to 80"),
    "negative": (lambda index: index["components"]["cls"].update(offset=[-1, 0, 0, 0]), "a negative number"),
    "large": (lambda index: index["components"]["cls"].update(length=[2**70] * 4), "not an index of fastdiff"),
}  # fmt: skip


@pytest.mark.fault(18)
@pytest.mark.parametrize("kind", INDICES)
def test_an_index_that_lies_is_refused_or_its_shard_replaced(tmp_path: Path, kind: str) -> None:
    change, what = INDICES[kind]
    folder = redeclared(write_shards(tmp_path / "data", lambda sample, parts: None), change)
    with LatentReader(folder) as reader, pytest.raises(DataError, match=what) as caught:
        reader.read([5])
    assert "train-000001" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert "train-000001" in str(verify(folder))
    with LatentReader(folder, substitute=True) as reader:
        read = reader.read([0, 5], positions=np.array([8, 9]))
        assert read["latent"][:, 0, 0, 0].tolist() == [0, 1], "the same row of the other shard"
        assert list(reader.substituted) == [9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    encode_synthetic(tmp_path / "latents", SHAPE, SAMPLES, classes=7, samples_per_shard=PER_SHARD)
    return tmp_path / "latents"


@pytest.fixture
def truth(folder: Path) -> dict[str, npt.NDArray[Any]]:
    with LatentReader(folder) as reader:
        return reader.read(np.arange(SAMPLES))


@pytest.mark.fault(19)
@pytest.mark.parametrize("substitute", [False, True])
def test_a_shard_replaced_while_it_is_open_is_read_as_it_was(
    folder: Path, truth: dict[str, npt.NDArray[Any]], substitute: bool
) -> None:
    """A new file under its name; the open one stays. The next start finds that index and shard do not fit."""
    with LatentReader(folder, substitute=substitute) as reader:
        reader.read([PER_SHARD])
        shutil.copy(shard_of(folder, 2), folder / "new")
        (folder / "new").rename(shard_of(folder, 1))
        own = np.arange(PER_SHARD, 2 * PER_SHARD)
        assert reader.read(own, positions=own)["latent"].tobytes() == truth["latent"][own].tobytes()
        assert not reader.substituted
    with LatentReader(folder) as reader, pytest.raises(DataError, match=r"train-000001\.tar, key .*crc32"):
        reader.read([PER_SHARD])


@pytest.mark.fault(19)
@pytest.mark.parametrize("change", ["truncated", "overwritten"])
def test_a_shard_changed_in_place_while_it_is_open_is_a_clean_error_or_replaced(
    folder: Path, truth: dict[str, npt.NDArray[Any]], change: str
) -> None:
    """No mapping, so no SIGBUS: the bytes are not there, or have another checksum."""
    own = np.arange(PER_SHARD, 2 * PER_SHARD)
    with LatentReader(folder) as plain, LatentReader(folder, substitute=True) as reader:
        for each in (plain, reader):
            each.read(own)
        if change == "truncated":
            os.truncate(shard_of(folder, 1), 4096)
        else:
            with shard_of(folder, 1).open("r+b") as file:
                file.write(shard_of(folder, 2).read_bytes())
        with pytest.raises(DataError, match=r"ends after|crc32"):
            plain.read(own)
        read = reader.read(own, positions=own)
    assert reader.substituted
    for row, number in enumerate(own.tolist()):
        entry = reader.substituted.get(number)
        source = number if entry is None else int(entry.by.partition(":")[2])
        assert read["latent"][row].tobytes() == truth["latent"][source].tobytes()
