"""Data sets with masks of the loss: both loaders, mirrored samples, buckets, the format and the checks of a run."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastdiff.batch import Batch
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.data.loading.batches import empty_batch
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.loading.fit import require_masks, trains_masked
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, DataError

LOADERS = ("dali", "prefetch")
CPU = torch.device("cpu")
SIZES = ((4, 6), (6, 4))


def template(*, flipped: bool, buckets: tuple[tuple[int, int], ...] = (), dtype: Any = "float16") -> DatasetInfo:
    height, width = SIZES[0]
    normalisation = (
        Normalisation.of_pixels(2) if dtype == "uint8" else Normalisation(shift=(0.0,) * 2, scale=(1.0,) * 2)
    )
    return DatasetInfo(
        columns={
            "latent": Column(dtype=dtype, shape=(2, height, width)),
            "loss_mask": Column(dtype="float16", shape=(height, width)),
        },
        normalisation=normalisation,
        provenance=Provenance(source="test", transform="none"),
        flipped=flipped,
        buckets=buckets,
    )


def encode(folder: Path, info: DatasetInfo, samples: int = 24) -> None:
    """The first channel of a latent is its mask times 8, so that they must move alike."""
    with ShardWriter(folder, info, samples_per_shard=6) as writer:
        for number in range(samples):
            bucket = number % 2 if info.buckets else 0
            height, width = info.buckets[bucket] if info.buckets else SIZES[0]
            mask = np.arange(height * width).reshape(height, width) * 2 + number
            latent = np.stack([mask, np.full_like(mask, number)])
            arrays = {"latent": latent.astype(info.latent.numpy), "loss_mask": (mask / 128).astype(np.float16)}
            if info.flipped:
                arrays["latent_flipped"] = np.ascontiguousarray(arrays["latent"][..., ::-1])
            writer.add(f"{number:09d}", arrays, bucket=bucket)


def batches(folder: Path, loader: Any, count: int = 6) -> list[Batch]:
    with LatentReader(folder) as reader:
        order = build_order(reader.info, seed=3, window_shards=4, global_batch=4)
        with build_batches(
            reader, order, config=DataConfig(loader=loader, random_flip=True), seed=3, device=CPU, start_samples=0,
            rank=0, ranks=1, micro=4, global_batch=4,
        ) as stream:  # fmt: skip
            return list(itertools.islice(stream, count))


@pytest.mark.parametrize("kind", ["latents", "buckets", "pixels"])
@pytest.mark.parametrize("loader", LOADERS)
def test_masks_are_mirrored_with_their_latents(tmp_path: Path, kind: str, loader: str) -> None:
    dtype = "uint8" if kind == "pixels" else "float16"
    encode(tmp_path, template(flipped=kind != "pixels", buckets=SIZES if kind == "buckets" else (), dtype=dtype))
    assert verify(tmp_path).ok
    mirrored = []
    for batch in batches(tmp_path, loader):
        assert batch.condition == {}
        assert batch.mask is not None
        assert batch.mask.dtype == torch.float16
        assert torch.equal(batch.mask.float() * 128, batch.latents[:, 0].float())
        mirrored += (batch.mask[:, 0, 0] > batch.mask[:, 0, -1]).tolist()
    assert 0 < sum(mirrored) < len(mirrored)


def test_a_batch_without_data_counts_whole_pictures(tmp_path: Path) -> None:
    info = template(flipped=True, buckets=SIZES)
    mask = empty_batch(info, 1, 3, CPU).mask
    assert mask is not None
    assert mask.shape == (3, 6, 4)
    assert mask.min() == 1


def test_masks_of_another_size_or_range_are_refused(tmp_path: Path) -> None:
    info = template(flipped=False)
    wrong = replace(info, columns=info.columns | {"loss_mask": Column(dtype="float16", shape=(6, 4))})
    assert "loss_mask" in str(wrong.problem_of_layout())
    assert info.problem_of_layout() is None
    arrays = {"latent": np.zeros((2, 4, 6), np.float16), "loss_mask": np.full((4, 6), 1.5, np.float16)}
    with ShardWriter(tmp_path, info, samples_per_shard=6) as writer:
        with pytest.raises(DataError, match="key a: loss_mask holds values outside of 0 to 1"):
            writer.add("a", arrays)
        writer.add("b", arrays | {"loss_mask": np.ones((4, 6), np.float16)})
    written = json.loads((tmp_path / "dataset.json").read_text())
    assert written["columns"]["loss_mask"] == {"dtype": "float16", "shape": [4, 6]}


def test_the_flag_decides_and_what_it_cannot_do_is_refused() -> None:
    masked = template(flipped=False)
    plain = replace(masked, columns={"latent": masked.latent})
    found = {
        (info is masked, flag): trains_masked(DdpmConfig(masked=flag), info)
        for info in (masked, plain)
        for flag in (None, True, False)
        if info is masked or not flag
    }
    assert [key for key, value in found.items() if value] == [(True, None), (True, True)]
    require_masks(DdpmConfig(), "data/x", plain)
    with pytest.raises(ConfigError, match=r"--objective.masked True: data/x holds no masks; encode with --masks"):
        require_masks(DdpmConfig(masked=True), "data/x", plain)
    own = DdpmConfig(plugin="loss.py:loss")
    with pytest.raises(ConfigError, match=r"--objective.plugin loss.py:loss: data/x holds masks.*masked False"):
        require_masks(own, "data/x", masked)
    require_masks(replace(own, masked=False), "data/x", masked)
