"""Captions in shards, of T5-, Gemma- and CLIP-like encoders: masks, lengths, embeddings, and bytes after kills."""

import random
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.encode_ranks import CALLS, begin, finish, killed
from tests.support.forked import fork_server
from tests.support.inputs import text_pipelines
from tests.support.inputs.encoding import captioned, encode, files
from tests.support.nights import by_day

IMAGES, PER_SHARD, BATCH = 51, 17, 2
"""A partition has more batches than are embedded together, so that it has two groups of captions."""
LONG = "one two three four five six seven eight nine ten " * 9
CAPTIONS = ["A small Cat ", "", LONG, "Été", "the red house"]
TOKENS = {"t5": 300, "gemma": 300, "clip": 77}
KINDS = {"t5": "PixArtSigmaPipeline", "gemma": "SanaPipeline"}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    found = {"clip": build(folder / "clip")}
    for kind, pipeline in KINDS.items():
        part = getattr(text_pipelines, kind)()
        found[kind] = text_pipelines.write(folder / kind, pipeline, {"text_encoder": part}, found["clip"])
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of which some have the same caption, within a shard and in several."""
    captions = [CAPTIONS[number % 5] + "!" * (number % 7 < 2 and number % 5 != 1) for number in range(IMAGES)]
    return captioned(tmp_path_factory.mktemp("sources") / "images", captions)


@torch.no_grad()
def padded(kind: str, pipeline: Path, captions: list[str]) -> tuple[Tensor, Tensor]:
    """The embeddings ``[N, L, D]`` and masks ``[N, L]`` of diffusers, which pads every caption to the maximum."""
    import diffusers

    if kind == "clip":
        whole = diffusers.StableDiffusionPipeline.from_pretrained(pipeline)
        context = whole.encode_prompt(captions, "cpu", 1, False)[0]
        return context, torch.ones(context.shape[:2])
    model, tokenizer = getattr(text_pipelines, kind)()
    published = getattr(diffusers, KINDS[kind])(tokenizer, model, None, None, None)
    options: dict[str, Any] = {"clean_caption": False}
    if kind == "gemma":
        import inspect

        lines = inspect.signature(published.__call__).parameters["complex_human_instruction"].default
        options["complex_human_instruction"] = lines
    context, mask, *_ = published.encode_prompt(captions, False, device="cpu", **options)
    return context, mask


@pytest.mark.parametrize("kind", TOKENS)
def test_a_shard_holds_the_rows_of_a_caption_and_a_reader_pads_them(
    tmp_path: Path, source: Path, pipelines: dict[str, Path], kind: str
) -> None:
    """Exact masks and lengths; trimmed embeddings equal those of padded captions to 1e-6 of the largest value."""
    encode(source, tmp_path / "out", pipelines[kind], dtype="float32", samples_per_shard=PER_SHARD, batch=BATCH)
    assert not verify(tmp_path / "out").problems
    with LatentReader(tmp_path / "out") as reader:
        found, captions = reader.read(range(IMAGES)), list(_captions(tmp_path / "out"))
    unique = list(dict.fromkeys(captions))
    context, mask = (each[[unique.index(one) for one in captions]] for each in padded(kind, pipelines[kind], unique))
    assert found["context"].shape == context.shape == (IMAGES, TOKENS[kind], text_pipelines.WIDTH)
    lengths = mask.sum(1).int().tolist()
    assert _rows(tmp_path / "out") == lengths
    if kind == "clip":
        assert "context_mask" not in found
    else:
        np.testing.assert_array_equal(found["context_mask"], mask.numpy())
        assert max(lengths) == TOKENS[kind] > len(set(lengths)) > 3, "a caption is cut, others are of several lengths"
    expected = (context * mask[..., None]).numpy()
    assert np.abs(found["context"] - expected).max() <= 1e-6 * np.abs(expected).max()
    assert not found["context"][mask.numpy() == 0].any()


def _captions(folder: Path) -> Iterator[str]:
    import json

    for name, content in _members(folder):
        if name.endswith(".json"):
            yield json.loads(content)["captions"][0]


def _rows(folder: Path) -> list[int]:
    return [len(np.load(BytesIO(content))) for name, content in _members(folder) if name.endswith(".context.npy")]


def _members(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                yield member.name, file.read()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield fork_server()


@pytest.mark.fault(9)
@pytest.mark.parametrize(
    ("kind", "count"),
    by_day(
        [("t5", 3), ("gemma", 2)], ("t5", 1), ("t5", 2), ("gemma", 1), ("gemma", 3), ("clip", 1), ("clip", 2),
        ("clip", 3),
    ),
)  # fmt: skip
def test_killed_ranks_write_the_bytes_of_one_process(
    tmp_path: Path, source: Path, pipelines: dict[str, Path], ranks: Any, kind: str, count: int, nightly: bool
) -> None:
    """Each rank is killed at a call of its own, by night twice, and then all go on."""
    flags = ["--resolution=32", f"--samples-per-shard={PER_SHARD}", f"--batch={BATCH}", "--decode=pillow"]
    command = ["encode", str(source), f"--pretrained={pipelines[kind]}", "--dtype=float32", "--workers=1", *flags]
    assert finish(begin(ranks, command, tmp_path / "undisturbed", 1)) == [0]
    for trial in range(4 if nightly else 1):
        out, calls = tmp_path / f"out{trial}", random.Random(f"{kind}, {count}, {trial}")
        for _ in range(1 + nightly):
            numbers = [calls.randrange(1, CALLS) for _ in range(count)]
            assert killed(ranks, command, out, numbers) == [-9] * count
            assert not (out / "dataset.json").exists()
        assert finish(begin(ranks, command, out, count)) == [0] * count
        assert files(out) == files(tmp_path / "undisturbed")
