"""The encoder of a partition: rounding of its pixels, and the embeddings that it keeps."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastdiff.data.encoding import partition
from fastdiff.data.encoding.autoencoder import LatentEncoder
from fastdiff.data.encoding.embedded_texts import EmbeddedTexts
from fastdiff.data.encoding.partition import PartitionEncoder
from fastdiff.data.images.decode import Decoded
from fastdiff.data.images.items import ImageItem
from fastdiff.data.images.stream import Stopwatch
from fastdiff.data.shards.format import LATENT, Column, DatasetInfo, Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.inputs.images import natural

# Each of them is forgotten before it comes again, if no more than a batch of them is kept.
CAPTIONS = ["one", "two", "one", "three", "four", "one", "five", "two", "one"]
BATCH = 2


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    return Pretrained(str(build(tmp_path_factory.mktemp("pipelines") / "sd15")))


def open_encoder(pretrained: Pretrained, dtype: torch.dtype = torch.float32) -> LatentEncoder:
    return LatentEncoder(pretrained, torch.device("cpu"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pixels_are_rounded_once(pretrained: Pretrained, dtype: torch.dtype) -> None:
    encoder = open_encoder(pretrained, dtype)
    every = torch.arange(256, dtype=torch.uint8).repeat(2 * 32 * 32 * 3 // 256).view(2, 32, 32, 3)
    seen: list[torch.Tensor] = []
    encoder._autoencoder.module.encoder.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    encoder.encode(every)
    assert seen[0].dtype == dtype
    assert torch.equal(seen[0], (every.permute(0, 3, 1, 2).float() / 127.5 - 1).to(dtype))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def encode(out: Path, encoder: LatentEncoder) -> tuple[list[int], PartitionEncoder]:
    """Encode a partition; how many embeddings were kept after each image."""
    null = encoder.null()
    info = DatasetInfo(
        columns={
            LATENT: Column(dtype="float32", shape=(encoder.channels, 8, 8)),
            "context": Column(dtype="float32", shape=tuple(null["context"].shape)),
        },
        normalisation=encoder.normalisation,
        provenance=Provenance(source="test", transform="none"),
        kind="posterior",
    )
    out.mkdir()
    kept = []
    with ThreadPoolExecutor(1) as threads:
        partition = PartitionEncoder(
            out,
            info,
            0,
            encoder=encoder,
            threads=threads,
            batch=BATCH,
            stopwatch=Stopwatch(),
            bad=pytest.fail,
            sums=None,
            texts=EmbeddedTexts(),
        )
        for number, caption in enumerate(CAPTIONS):
            pixels = natural(32, 32, seed=number)
            partition.add(ImageItem(f"{number}", f"{number}", b"", (caption,)), Decoded(pixels, (32, 32), (0, 0), 0))
            kept.append(len(partition._embeddings))
        shards = partition.finish()
    replace(info, shards=shards, samples=len(CAPTIONS)).write(out)
    return kept, partition


def count_embedded(encoder: LatentEncoder, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    embed = encoder.embed

    def spy(captions: Any) -> Any:
        asked.extend(captions)
        return embed(captions)

    monkeypatch.setattr(encoder, "embed", spy)
    return asked


def test_few_embeddings_are_kept_and_later_captions_embedded_again(
    tmp_path: Path, pretrained: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = open_encoder(pretrained)
    asked = count_embedded(encoder, monkeypatch)
    encode(tmp_path / "all", encoder)
    assert asked == ["one", "two", "three", "four", "five"]
    asked.clear()
    monkeypatch.setattr(partition, "_KEPT_EMBEDDINGS", 3)
    kept, _ = encode(tmp_path / "few", encoder)
    assert max(kept) == 3
    assert asked == ["one", "two", "three", "four", "five", "two"], "the one that was used last is kept"
    encode(tmp_path / "again", encoder)
    name = "train-000000.tar"
    assert (tmp_path / "few" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    for folder in ("all", "few"):
        with LatentReader(tmp_path / folder) as reader:
            found = reader.read(range(len(CAPTIONS)))["context"]
        np.testing.assert_allclose(found, encoder.embed(CAPTIONS)["context"].numpy(), atol=1e-5)


def test_a_batch_may_have_more_captions_than_are_kept(
    tmp_path: Path, pretrained: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "_KEPT_EMBEDDINGS", 1)
    encoder = open_encoder(pretrained)
    kept, _ = encode(tmp_path / "out", encoder)
    assert max(kept) == BATCH
    with LatentReader(tmp_path / "out") as reader:
        found = reader.read(range(len(CAPTIONS)))["context"]
    np.testing.assert_allclose(found, encoder.embed(CAPTIONS)["context"].numpy(), atol=1e-5)


def test_kept_embeddings_hold_no_memory_of_their_batch(tmp_path: Path, pretrained: Pretrained) -> None:
    _, partition = encode(tmp_path / "out", open_encoder(pretrained))
    assert {value.base is None for arrays in partition._embeddings.values() for value in arrays.values()} == {True}
