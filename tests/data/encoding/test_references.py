"""Reference pictures of edited pictures: found by name or column, encoded as their pictures, mirrored with them."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff.config.sections.data import DataConfig
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.rng import Stream, uniform
from tests.support.encode_ranks import CALLS, begin, finish, killed
from tests.support.forked import fork_server
from tests.support.inputs.encoding import captioned, encode, files, picture
from tests.support.nights import by_day

COUNT = 5
SIZES = [(32, 32), (32, 64), (64, 32), (32, 32), (32, 64)]


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipelines") / "sd15")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return captioned(tmp_path / "images", [f"make it number {number}" for number in range(COUNT)], SIZES)


@pytest.fixture
def references(tmp_path: Path) -> Path:
    """Two of each picture; their names have numbers, as those of the pictures do."""
    folder = tmp_path / "references"
    folder.mkdir()
    for number in range(COUNT):
        reference(number, 0).save(folder / f"{number:03d}.png")
        reference(number, 1).save(folder / f"{number:03d}_7.png")
    return folder


def reference(number: int, which: int) -> Image.Image:
    """The second is larger, of the same shape."""
    height, width = SIZES[number]
    return picture(100 + 10 * which + number, (height * (1 + which), width * (1 + which)))


def means(pipeline: Path, image: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """The means of the posterior of diffusers, normalised, of an image scaled to cover a size, and cropped."""
    import diffusers

    vae = diffusers.AutoencoderKL.from_pretrained(pipeline, subfolder="vae")
    scale = max(size[0] / image.height, size[1] / image.width)
    resized = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)
    left, top = round((resized.width - size[1]) / 2), round((resized.height - size[0]) / 2)
    pixels = np.asarray(resized.crop((left, top, left + size[1], top + size[0])))
    with torch.no_grad():
        inputs = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        return vae.encode(inputs).latent_dist.mean[0] * vae.config.scaling_factor  # type: ignore[no-any-return]


def batches_of(folder: Path, count: int, *, flip: bool) -> Iterator[Any]:
    with LatentReader(folder) as reader:
        order = build_order(reader.info, seed=5, window_shards=1, global_batch=1)
        with build_batches(
            reader, order, config=DataConfig(loader="prefetch", random_flip=flip), seed=5, device=torch.device("cpu"),
            start_samples=0, rank=0, ranks=1, micro=1, global_batch=1,
        ) as batches:  # fmt: skip
            for _ in range(count):
                batch = next(batches)
                yield int(order.samples(batch.position.numpy())[0]), batch


@pytest.mark.parametrize("buckets", [False, True])
def test_references_are_encoded_as_their_pictures(
    tmp_path: Path, source: Path, references: Path, sd: Path, buckets: bool
) -> None:
    """With the resize and crop of the picture, normalised as its latents, and mirrored with them."""
    options = {"buckets": True, "bucket_step": 16} if buckets else {}
    out = tmp_path / "out"
    encode(source, out, sd, references=str(references), dtype="float32", flip=True, samples_per_shard=9, **options)
    info = DatasetInfo.read(out)
    assert not verify(out).problems
    assert info.columns["reference"].shape == (2, 4, *info.latent.shape[1:])
    assert info.kind == "posterior"
    flips = uniform(5, Stream.FLIP, torch.arange(12), 1)[:, 0] < 0.5
    mirrored = []
    for position, (number, batch) in enumerate(batches_of(out, 12, flip=True)):
        number = _number_of(out, number)  # samples are counted over the shards, one per bucket
        found = batch.condition["reference"][0]
        size = tuple(4 * side for side in found.shape[2:])
        for which in range(2):
            image = reference(number, which)
            if flips[position]:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            torch.testing.assert_close(found[which], means(sd, image, size), rtol=1e-4, atol=1e-4)
        mirrored.append(bool(flips[position]))
    assert len(set(mirrored)) == 2


def _number_of(folder: Path, sample: int) -> int:
    with LatentReader(folder) as reader:
        return int(reader.keys([sample])[0].partition(":")[2])


def test_references_by_column(tmp_path: Path, source: Path, references: Path, sd: Path) -> None:
    """Relative to their folder, one or a list; the pictures beside them are no pictures of the data set."""
    encode(source, tmp_path / "by-name", sd, references=str(references))
    lines = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["before"] = [f"{number:03d}.png", f"{references}/{number:03d}_7.png"]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    encode(source, tmp_path / "by-column", sd, references=str(references), reference_column="before")
    found = [LatentReader(tmp_path / name).read(range(COUNT))["reference"] for name in ("by-name", "by-column")]
    assert np.array_equal(*found)
    for path in references.iterdir():
        path.rename(source / f"before-{path.name}")
    for number, line in enumerate(lines):
        line["before"] = [f"before-{number:03d}.png", f"before-{number:03d}_7.png"]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = encode(source, tmp_path / "beside", sd, reference_column="before")
    assert np.array_equal(LatentReader(tmp_path / "beside").read(range(COUNT))["reference"], found[0])
    assert not any("left out" in line or "without a row" in line for line in said)


def test_missing_references_are_named(tmp_path: Path, source: Path, references: Path, sd: Path) -> None:
    (references / "001_7.png").unlink()
    (references / "003_7.png").write_bytes(b"no picture")
    (references / "other.png").write_bytes((references / "000.png").read_bytes())
    message = r"001\.png cannot be used: it has 1 references, others 2: expected 001\.png, 001_1\.png"
    with pytest.raises(DataError, match=message):
        encode(source, tmp_path / "fail", sd, references=str(references))
    said = encode(source, tmp_path / "out", sd, references=str(references), bad="skip")
    assert any("references of no picture, not read: 1 (first: other.png)" in line for line in said)
    bad = [json.loads(line) for line in (tmp_path / "out" / "bad_images.jsonl").read_text().splitlines()]
    assert [Path(each["name"]).name for each in bad] == ["001.png", "003.png"]
    assert DatasetInfo.read(tmp_path / "out").samples == COUNT - 2


def test_an_edited_reference_is_encoded_anew(tmp_path: Path, source: Path, references: Path, sd: Path) -> None:
    out = tmp_path / "out"
    encode(source, out, sd, references=str(references), samples_per_shard=1)
    before = files(out)
    reference(4, 0).save(references / "002.png")
    said = encode(source, out, sd, references=str(references), samples_per_shard=1)
    assert any("002.png): 1 of 5 shards are encoded anew" in line for line in said), said
    changed = {name for name, content in files(out).items() if content != before.get(name)}
    assert {name for name in changed if name.endswith(".tar")} == {"train-000002.tar"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"references": "nowhere"}, ConfigError, "--references nowhere: no such folder"),
        ({"references": "images/inside"}, ConfigError, "is in the folder of the pictures"),
        ({"references": "empty"}, DataError, "none of the 5 pictures has a reference; expected for example 000.png"),
        ({"reference_column": "before"}, ConfigError, "has no column 'before' of references"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, source: Path, sd: Path, options: dict[str, Any], error: type[Exception], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    (source / "inside").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        encode(source, tmp_path / "out", sd, **options)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield fork_server()


@pytest.mark.fault(9)
@pytest.mark.parametrize("count", by_day([3], 1, 2))
def test_killed_ranks_write_the_bytes_of_one_process(
    tmp_path: Path, source: Path, references: Path, sd: Path, ranks: Any, count: int
) -> None:
    flags = ["--resolution=32", "--samples-per-shard=2", "--batch=2", "--decode=pillow", "--workers=1", "--flip"]
    command = ["encode", str(source), f"--pretrained={sd}", f"--references={references}", *flags]
    assert finish(begin(ranks, command, tmp_path / "undisturbed", 1)) == [0]
    calls = random.Random(count)
    numbers = [calls.randrange(1, CALLS) for _ in range(count)]
    assert killed(ranks, command, tmp_path / "out", numbers) == [-9] * count
    assert finish(begin(ranks, command, tmp_path / "out", count)) == [0] * count
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")
