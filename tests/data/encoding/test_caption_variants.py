"""Variants of captions in shards: shuffled tags, dropped tags and dropped captions, with embeddings of all of them."""

import json
import random
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3Model

from fastdiff.batch import from_stored, without_padding
from fastdiff.cli.main import main
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.data.encoding.autoencoder import LatentEncoder
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.sample_files import sample_bytes
from fastdiff.data.shards.verify import verify
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.tags import Tags
from tests.support.encode_ranks import CALLS, begin, finish, killed
from tests.support.forked import fork_server
from tests.support.inputs import text_pipelines
from tests.support.inputs.encoding import captioned, encode, files
from tests.support.nights import by_day

CAPTIONS = [
    ["sks, dog, red, small, old, in a park", "sks, a dog, gray"],
    "sks, cat, on a lawn, blue",
    "",
    "sks",
    "sks, cat, on a lawn, blue",
]
VARIANTS, SEED = 4, 11
TAGS = Tags(shuffle_tags=True, keep_tokens=1, drop_tags=0.25)
OPTIONS = {"shuffle_tags": VARIANTS, "keep_tokens": 1, "drop_tags": 0.25, "seed": SEED, "captions": "all"}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pipelines by text encoder; they share an autoencoder."""
    folder = tmp_path_factory.mktemp("pipelines")
    parts = {
        "t5": ("PixArtSigmaPipeline", text_pipelines.t5()),
        "klein": ("Flux2KleinPipeline", text_pipelines.qwen3(Qwen3ForCausalLM, layers=28)),
        "z-image": ("ZImagePipeline", text_pipelines.qwen3(Qwen3Model)),
        "qwen": ("QwenImagePipeline", text_pipelines.qwen_vl()),
    }
    found = {"clip": build(folder / "clip")}
    for name, (pipeline, part) in parts.items():
        found[name] = text_pipelines.write(folder / name, pipeline, {"text_encoder": part}, found["clip"])
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captioned(tmp_path_factory.mktemp("sources") / "images", CAPTIONS)


def texts_of(number: int) -> list[str]:
    """The variants of a picture, by the rule that the module documents."""
    captions = [CAPTIONS[number]] if isinstance(CAPTIONS[number], str) else CAPTIONS[number]
    return [
        TAGS.variant(caption, f"{SEED}/{number:09d}/{which}/{variant}")
        for which, caption in enumerate(captions)
        for variant in range(VARIANTS)
    ]


def test_variants_are_embedded_once_each_and_drawn_by_position(
    tmp_path: Path, source: Path, pipelines: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: Counter[str] = Counter()
    embed = LatentEncoder.embed
    monkeypatch.setattr(LatentEncoder, "embed", lambda self, texts: (embedded.update(texts), embed(self, texts))[1])
    encode(source, tmp_path / "out", pipelines["clip"], dtype="float32", samples_per_shard=9, **OPTIONS)
    every = [texts_of(number) for number in range(len(CAPTIONS))]
    assert len(set(every[0])) > VARIANTS
    assert embedded == Counter(dict.fromkeys({text for texts in every for text in texts}, 1))
    assert not verify(tmp_path / "out").problems
    text = Pretrained(str(pipelines["clip"])).text()
    with LatentReader(tmp_path / "out") as reader:
        assert reader.info.captions == 2 * VARIANTS
        assert reader.captions([0, 1, 3]) == [
            "sks, dog, red, small, old, in a park",
            "sks, cat, on a lawn, blue",
            "sks",
        ]
        for share in (0.0, 0.3, 0.99):
            found = reader.read(range(len(CAPTIONS)), choice={"caption": np.full(len(CAPTIONS), share)})["context"]
            expected = [texts[int(share * len(texts))] for texts in every]
            np.testing.assert_allclose(found, text(expected)["context"].numpy(), atol=1e-5)
        assert set(_drawn(reader, every[1], text)) == set(every[1]), "every variant of a picture is drawn"
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        notes = [json.load(tar.extractfile(m)) for m in tar if m.name.endswith(".json")]  # type: ignore[arg-type]
    assert [each["captions"] for each in notes] == [c if isinstance(c, list) else [c] for c in CAPTIONS]


def _drawn(reader: LatentReader, texts: list[str], text: Any) -> Iterator[str]:
    """Yield the variants of picture 1 that 40 epochs draw."""
    order = build_order(reader.info, seed=5, window_shards=1, global_batch=5)
    known = dict(zip(texts, text(texts)["context"].numpy(), strict=True))
    with build_batches(
        reader, order, config=DataConfig(loader="prefetch"), seed=5, device=torch.device("cpu"), start_samples=0,
        rank=0, ranks=1, micro=5, global_batch=5,
    ) as batches:  # fmt: skip
        for batch in (next(batches) for _ in range(40)):
            row = order.samples(batch.position.numpy()).tolist().index(1)
            found = batch.condition["context"][row].numpy()
            yield min(known, key=lambda text: np.abs(known[text] - found).max())


def test_the_size_of_variants_is_told(
    tmp_path: Path, source: Path, pipelines: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["encode", source, out, "--pretrained", pipelines["clip"], "--resolution", 32, "--shuffle-tags", 10]
    assert main([str(word) for word in command]) == 0
    each = sample_bytes(DatasetInfo.read(out)) / 1024
    assert each > 9 * 77 * 32 * 2 / 1024
    told = capfd.readouterr()
    assert f"--shuffle-tags 10: about {each:.1f} KiB for each picture, " in told.out + told.err


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield fork_server()


@pytest.mark.fault(9)
@pytest.mark.parametrize(("kind", "count"), by_day([("t5", 3)], ("t5", 1), ("t5", 2), ("clip", 2), ("klein", 3)))
def test_killed_ranks_write_the_bytes_of_one_process(
    tmp_path: Path, pipelines: dict[str, Path], ranks: Any, kind: str, count: int
) -> None:
    """Other variants of a caption in other pictures, and the same ones after a kill."""
    source = captioned(tmp_path / "images", [CAPTIONS[number % 5] for number in range(24)])
    flags = [
        "--resolution=32",
        "--samples-per-shard=8",
        "--batch=2",
        "--decode=pillow",
        "--workers=1",
        "--captions=all",
    ]
    variants = [f"--shuffle-tags={VARIANTS}", "--keep-tokens=1", "--drop-tags=0.25", "--seed=3"]
    command = ["encode", str(source), f"--pretrained={pipelines[kind]}", "--dtype=float32", *flags, *variants]
    assert finish(begin(ranks, command, tmp_path / "undisturbed", 1)) == [0]
    calls = random.Random(f"{kind}, {count}")
    numbers = [calls.randrange(1, CALLS) for _ in range(count)]
    assert killed(ranks, command, tmp_path / "out", numbers) == [-9] * count
    with pytest.raises(ConfigError, match=r"drop_tags was 0\.25, is 0\.5; seed was 3, is 4"):
        encode(source, tmp_path / "out", pipelines[kind], **_of(flags, variants) | {"drop_tags": 0.5, "seed": 4})
    assert finish(begin(ranks, command, tmp_path / "out", count)) == [0] * count
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def _of(flags: list[str], variants: list[str]) -> dict[str, Any]:
    words = (flag.removeprefix("--").split("=") for flag in [*flags, *variants])
    named = {name.replace("-", "_"): value for name, value in words}
    numbers = {name: json.loads(value) for name, value in named.items() if value[0].isdigit()}
    return {"dtype": "float32", **named, **numbers}


@pytest.mark.parametrize("kind", by_day(["t5", "klein", "qwen"], "clip", "z-image"))
def test_a_dropped_caption_is_the_empty_prompt_of_the_encoder(
    tmp_path: Path, source: Path, pipelines: dict[str, Path], kind: str
) -> None:
    """With its mask, or, where a network sees no mask, with the states of its padding."""
    encode(source, tmp_path / "out", pipelines[kind], dtype="float32", samples_per_shard=9, **OPTIONS)
    empty = without_padding(Pretrained(str(pipelines[kind])).text()([""]))
    with LatentReader(tmp_path / "out") as reader:
        order = build_order(reader.info, seed=5, window_shards=1, global_batch=20)
        null = from_stored({name: torch.from_numpy(value) for name, value in reader.null().items()})
        with build_batches(
            reader, order, config=DataConfig(loader="prefetch"), seed=5, device=torch.device("cpu"), start_samples=0,
            rank=0, ranks=1, micro=20, global_batch=20,
        ) as batches:  # fmt: skip
            batch = next(batches)
    objective = Objective(DdpmConfig(condition_dropout=0.5), seed=5, null=null, device="cpu", posterior=True)
    found = objective.add_noise(batch).condition
    rows = batch.condition["context"].shape[1]
    dropped = (found["context"] != batch.condition["context"]).flatten(1).any(1)
    assert 4 < int(dropped.sum()) < 16
    assert null.keys() == empty.keys()
    for name in null:
        value = found[name]
        torch.testing.assert_close(value[~dropped], batch.condition[name][~dropped])
        of_empty = empty[name][:, :rows].expand(int(dropped.sum()), *value.shape[1:])
        torch.testing.assert_close(value[dropped].to(of_empty.dtype), of_empty, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle_tags": 0}, "--shuffle-tags 0: a number of variants, at least 1"),
        ({"drop_tags": 0.1}, "--drop-tags 0.1 needs --shuffle-tags K"),
        ({"keep_tokens": 1}, "--keep-tokens has no effect without --shuffle-tags or --drop-tags"),
        ({"seed": 3}, "--seed 3 has no effect without --shuffle-tags"),
        ({"shuffle_tags": 501, "captions": "all"}, "1002 variants of the 2 captions of a picture, at most 1000"),
        ({"shuffle_tags": 2, "classes_from": "none"}, "have no captions, whose variants or prefix"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, source: Path, pipelines: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    autoencoder = pipelines["clip"] / ("vae" if "classes_from" in options else "")
    with pytest.raises(ConfigError, match=message):
        encode(source, tmp_path / "out", autoencoder, **options)


def test_what_lost_all_tags_is_counted(tmp_path: Path, pipelines: dict[str, Path]) -> None:
    source = captioned(tmp_path / "images", ["a", "b, c", ""])
    said = encode(source, tmp_path / "out", pipelines["clip"], shuffle_tags=8, drop_tags=0.6)
    tags = Tags(shuffle_tags=True, drop_tags=0.6)
    lost = sum(not tags.variant(text, f"0/{n:09d}/0/{k}") for n, text in enumerate(["a", "b, c"]) for k in range(8))
    told = f"variants of captions that lost all tags, trained as the empty prompt: {lost} (first: 000.png, 001.png)"
    assert any(told in line for line in said), said
    assert any("pictures with an empty caption, trained as the empty prompt: 1" in line for line in said)
