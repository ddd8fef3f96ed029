"""Online encoding gives what shards of the same transform give."""

import json
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff.batch import Batch
from fastdiff.cli.main import main
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.images.items import ImageItem
from fastdiff.data.loading import cut_captions
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.loading.online import OnlineBatches, OnlineImages
from fastdiff.data.loading.training_set import described_selection
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import UNETS, build
from fastdiff.rng import Stream
from fastdiff_kernels import philox
from tests.support.inputs.images import encode, natural

MICRO = 4
IMAGES = 12


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipelines") / "sdxl", kind="sdxl")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than they are high, with three captions each."""
    folder = tmp_path_factory.mktemp("images")
    lines = []
    for number in range(IMAGES):
        (folder / f"{number:02d}.png").write_bytes(encode(natural(40, 60, seed=number), "PNG"))
        captions = [f"picture {number}", f"the same again, {number}", "a picture"]
        lines.append(json.dumps({"file_name": f"{number:02d}.png", "text": captions}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def config(images: Path, **changes: Any) -> DataConfig:
    return replace(
        DataConfig(
            online=True, path=str(images), resolution=32, center_crop=True, random_flip=True, decode="pillow", workers=2
        ),
        **changes,
    )


def draw(reader: Any, data: DataConfig, *, count: int, start: int = 0, rank: int = 0, ranks: int = 1) -> list[Batch]:
    order = build_order(reader.info, seed=5, window_shards=16, global_batch=MICRO * ranks)
    with build_batches(
        reader, order, config=data, seed=5, device=torch.device("cpu"), start_samples=start, rank=rank, ranks=ranks,
        micro=MICRO, global_batch=MICRO * ranks,
    ) as batches:  # fmt: skip
        return [next(batches) for _ in range(count)]


def open_images(data: DataConfig, pipeline: Path, seed: int = 0) -> OnlineImages:
    return OnlineImages(
        data, Pretrained(str(pipeline)), torch.device("cpu"), torch.float32, seed=seed, takes=UNETS["sdxl"].conditions
    )


def test_online_batches_are_those_of_the_shards(images: Path, pipeline: Path, tmp_path: Path) -> None:
    """The same latents, embeddings and sizes for the same transform: flips and captions are chosen alike."""
    shards = tmp_path / "shards"
    command = ["encode", images, shards, "--pretrained", pipeline, "--resolution", "32", "--flip"]
    assert main([str(word) for word in [*command, "--decode", "pillow", "--captions", "all", "--batch", MICRO]]) == 0
    data = config(images)
    with LatentReader(shards) as reader, open_images(data, pipeline) as online:
        assert reader.info.columns == online.info.columns
        assert reader.info.normalisation == online.info.normalisation
        assert reader.info.provenance.autoencoder_digest == online.info.provenance.autoencoder_digest
        assert {name: value.tobytes() for name, value in reader.null().items()} == {
            name: value.tobytes() for name, value in online.null().items()
        }
        stored = draw(reader, DataConfig(loader="prefetch", random_flip=True), count=6)
        made = draw(online, data, count=6)
    for first, second in zip(stored, made, strict=True):
        assert torch.equal(first.position, second.position)
        assert first.condition.keys() == second.condition.keys() == {"context", "pooled", "time_ids"}
        assert torch.equal(first.condition["time_ids"], second.condition["time_ids"])
        # An image is encoded beside others than in the shards: up to one rounding to 16 bits.
        torch.testing.assert_close(first.latents, second.latents, rtol=2e-3, atol=1e-4)
        for name in ("context", "pooled"):
            torch.testing.assert_close(first.condition[name], second.condition[name], rtol=2e-3, atol=1e-4)


def test_a_large_micro_batch_is_encoded_in_parts(images: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the memory beside the step, which ``--batch.micro auto`` leaves to the encoders, is bounded."""
    pixels = torch.randint(256, (11, 32, 32, 3), dtype=torch.uint8)
    parts: list[int] = []
    with open_images(config(images), pipeline) as online:
        encode_part = online.encoder.encode
        whole = encode_part(pixels)

        def counted(part: torch.Tensor) -> torch.Tensor:
            parts.append(len(part))
            return encode_part(part)

        monkeypatch.setattr(online.encoder, "encode", counted)
        torch.testing.assert_close(online.encode(pixels), whole)
        assert parts == [8, 3]
        stored = [load_file(file) for part in ("vae", "text_*") for file in pipeline.glob(f"{part}/*.safetensors")]
        weights = sum(value.numel() * 4 for tensors in stored for value in tensors.values())
        first_block = 8 * 32 * 32 * json.loads((pipeline / "vae/config.json").read_text())["block_out_channels"][0] * 4
        assert online.encoder_bytes() >= weights / 2 + first_block  # the decoder of the autoencoder may be left out
        assert online.encoder_bytes() < weights + 10 * first_block


def test_what_is_not_taken_is_told(images: Path, pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(images, folder)
    (folder / "unlisted.png").write_bytes((folder / "00.png").read_bytes())
    (folder / "read me.md").write_text("hello")
    with open_images(config(folder), pipeline) as online:
        first, *lines = described_selection(online).splitlines()
    assert first == f"{folder}: {IMAGES + 1} pictures: {IMAGES} taken, 1 left out"
    assert [line.strip() for line in lines] == [
        "left out: 1 picture without a row in metadata.jsonl (first: unlisted.png)",
        "note: other files, which are no pictures: 1 (first: read me.md)",
    ]
    with open_images(config(folder, max_samples=5, subset="random"), pipeline) as online:
        told = described_selection(online)
    assert f"{IMAGES + 1} pictures: 5 taken, {IMAGES - 4} left out" in told
    assert f"{IMAGES - 5} pictures beyond the --data.max-samples 5 that --seed draws" in told
    tar = tmp_path / "one.tar"
    with tarfile.open(tar, "w") as archive:
        for source, name in (("00.png", "a.png"), ("metadata.jsonl", "a.txt"), ("read me.md", "b.md")):
            archive.add(folder / source, name)
    with open_images(config(tar), pipeline) as online:
        assert "note: other members, not read: 1 (first: b.md)" in described_selection(online)


def test_cut_captions_are_counted_and_told(
    images: Path, pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first one, early on, and at the end; the limit of CLIP is 77 tokens, one per character here."""
    folder = Path(shutil.copytree(images, tmp_path / "source"))
    rows = [{"file_name": f"{n:02d}.png", "text": "x" * (100 if n % 3 == 1 else 5)} for n in range(IMAGES)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(cut_captions, "_EARLY", IMAGES)
    with open_images(config(folder), pipeline) as online:
        draw(online, config(folder), count=2 * IMAGES // MICRO)
        first, *shares = (record.message for record in caplog.records if "cut" in record.message)
        assert re.search(r"\d\d\.png: its caption is longer than the 77 tokens that the text encoder reads", first)
        # Both encoders of SDXL read as many. Batches that were loaded ahead are counted, too.
        assert shares[0] == "33.3% of the captions drawn (4 of 12) were cut after 77 tokens; 100 tokens were not read"
        drawn = int(re.search(r"of (\d+)\)", shares[-1])[1])  # type: ignore[index]
        assert drawn >= 2 * IMAGES
        caplog.clear()
        draw(online, config(folder), count=IMAGES // MICRO, rank=1, ranks=2)
        draw(online, config(folder), count=IMAGES // MICRO, rank=0, ranks=2)
        told = [record.message for record in caplog.records if "drawn" in record.message]
        assert told
        assert all("drawn on rank 0 of 2 (" in line for line in told)


def test_a_random_subset_is_that_of_the_seed(images: Path, pipeline: Path) -> None:
    def names(seed: int, **changes: Any) -> list[str]:
        with open_images(config(images, max_samples=5, **changes), pipeline, seed) as online:
            assert (len(online), online.info.samples) == (5, 5)
            digests.add(online.info.shards[0].sha256)
            return [Path(name).name for name in online.keys(range(5))]

    digests: set[str] = set()
    first, again, other = (names(seed, subset="random") for seed in (1, 1, 2))
    assert first == again == sorted(set(first)), "in the order of the source, none twice"
    assert first != other
    assert names(1) == [f"{number:02d}.png" for number in range(5)] not in (first, other)
    assert len(digests) == 3, "another subset is another data set"
    with pytest.raises(ConfigError, match=r"--data\.subset random needs"):
        config(images, subset="random")


def test_crops_and_flips_change_from_epoch_to_epoch_and_not_with_the_ranks(images: Path, pipeline: Path) -> None:
    data = config(images, center_crop=False)
    with open_images(data, pipeline) as online:
        alone = draw(online, data, count=6)
        later = draw(online, data, count=1, start=4 * MICRO)
        shared = [draw(online, data, count=3, rank=rank, ranks=2) for rank in range(2)]
        order = build_order(online.info, seed=5, window_shards=16, global_batch=MICRO)
    torch.testing.assert_close(later[0].latents, alone[4].latents, rtol=0, atol=0)
    for step in range(3):
        for rank in range(2):
            torch.testing.assert_close(shared[rank][step].latents, alone[2 * step + rank].latents, rtol=0, atol=0)
    tops = torch.cat([batch.condition["time_ids"][:, 2:4] for batch in alone])
    assert (tops[:, 0] == 0).all(), "the height is used up"
    assert len(tops[:, 1].unique()) > 5
    latents = torch.cat([batch.latents for batch in alone])
    ids = order.samples(np.arange(len(latents)))
    first, again = (np.flatnonzero(ids == 3)[epoch] for epoch in range(2))
    assert not torch.equal(latents[first], latents[again])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resolution": 34}, r"--data.resolution 34: expected a multiple of 4"),
        ({"caption_column": "said"}, "said"),
        ({"decode": "dali", "image_interpolation_mode": "box"}, "box"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    images: Path, pipeline: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        open_images(config(images, **changes), pipeline)


@pytest.mark.parametrize(
    ("part", "weight", "column"),
    [
        ("vae/diffusion_pytorch_model", "quant_conv.bias", "latent"),
        ("text_encoder_2/model", "text_projection.weight", "pooled"),
    ],
)
def test_a_latent_that_is_not_finite_ends_the_run_by_name(
    images: Path, pipeline: Path, tmp_path: Path, part: str, weight: str, column: str
) -> None:
    broken = shutil.copytree(pipeline, tmp_path / "broken")
    weights = load_file(broken / f"{part}.safetensors")
    weights[weight].fill_(1e30)
    save_file(weights, broken / f"{part}.safetensors")
    message = rf"\d\d\.png: its {column} is not finite.*--performance\.precision bf16 or fp32"
    with open_images(config(images), broken) as online, pytest.raises(DataError, match=message):
        draw(online, config(images), count=1)


def test_the_caption_is_chosen_in_fp64_as_from_shards(
    images: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Just below 5/6; times six, fp32 rounds it to five.
    shares = np.full(1, 13981013 / 2**24, np.float32)
    assert (int(shares[0] * np.float32(6)), int(float(shares[0]) * 6)) == (5, 4)
    captions = ("nothing", "a", "two moons", "the third", "more than four", "q")  # no two embeddings round alike
    items = [ImageItem("0", "0", b"", captions)]
    data = config(images)
    with open_images(data, pipeline) as online:
        order = build_order(online.info, seed=5, window_shards=16, global_batch=MICRO)
        with build_batches(
            online, order, config=data, seed=5, device=torch.device("cpu"), start_samples=0, rank=0, ranks=1,
            micro=MICRO, global_batch=MICRO,
        ) as batches:  # fmt: skip
            assert isinstance(batches, OnlineBatches)
            monkeypatch.setattr(batches, "uniform", lambda stream, position: shares)
            found = batches._embed(items, torch.zeros(1, dtype=torch.int64))["pooled"]
            expected = online.encoder.embed([captions[4]])["pooled"].to(torch.float16)
            assert torch.equal(found, expected)
            assert not torch.equal(found, online.encoder.embed([captions[5]])["pooled"].to(torch.float16))


def test_tags_are_shuffled_anew_in_every_draw(images: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seed and the position alone, so the same by two ranks; a text of several images is embedded once."""
    data = config(images, shuffle_tags=True, drop_tags=0.2, keep_tokens=1, caption_prefix="a, b, c,")
    with open_images(data, pipeline) as online:
        embed, read = online.encoder.embed, []
        monkeypatch.setattr(online.encoder, "embed", lambda texts: (read.append(list(texts)), embed(texts))[1])
        alone = [each for batch in draw(online, data, count=6) for each in batch.condition["context"]]
        texts = {text for batch in read for text in batch}
        assert all(len(set(batch)) == len(batch) for batch in read)
        assert len(texts) > 15
        assert all(text.split(", ")[0] == "a" for text in texts)
        order = build_order(online.info, seed=5, window_shards=16, global_batch=MICRO)
        captions = [online.item(number).captions for number in order.samples(np.arange(24)).tolist()]  # type: ignore[union-attr]
        shares = philox.uniform(5, int(Stream.CAPTION), torch.arange(24), 1)[:, 0].tolist()
        every = [
            data.tags.variant(one[int(u * 3)], f"5/{n}")
            for n, (one, u) in enumerate(zip(captions, shares, strict=True))
        ]
        expected = embed(every)["context"].half()
        torch.testing.assert_close(torch.stack(alone), expected, rtol=2e-3, atol=1e-4)
        parts = [draw(online, data, count=3, rank=rank, ranks=2) for rank in range(2)]
        for position, found in enumerate(alone):
            step, rank, row = position // (2 * MICRO), position // MICRO % 2, position % MICRO
            torch.testing.assert_close(parts[rank][step].condition["context"][row], found, rtol=2e-3, atol=1e-4)


def test_messages_name_the_source_as_it_was_given(images: Path, pipeline: Path) -> None:
    given = f"{images.parent}//{images.name}/"
    with open_images(config(images, path=given), pipeline) as online:
        assert online.folder == given


def test_a_bad_image_ends_the_run_by_name(images: Path, pipeline: Path, tmp_path: Path) -> None:
    for path in images.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "07.png").write_bytes((images / "07.png").read_bytes()[:300])
    data = config(tmp_path)
    with open_images(data, pipeline) as online, pytest.raises(DataError, match=r"07\.png: .*repair it"):
        draw(online, data, count=3)
