"""Captions of variable length: shards store the tokens of each with its mask, and loaders deliver both."""

import dataclasses
import tarfile
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastdiff.batch import from_stored, to_stored
from fastdiff.conditions import StoredDtype, problem_of_shapes, require_shapes, require_sources
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.data.loading.batches import empty_batch
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.loading.fit import _check_conditions
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance, condition_columns
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pixart.network import PixArt
from fastdiff.rng import Stream, uniform

Arrays = dict[str, Any]
TOKENS, WIDTH, COUNT = 5, 3, 8
LATENT = Column(dtype="float16", shape=(2, 4, 4))
SHAPES = {"context": (TOKENS, WIDTH), "context_mask": (TOKENS,)}
NULL: Arrays = {
    "context": np.full((TOKENS, WIDTH), 0.5, np.float16),
    "context_mask": np.array([1, 0, 0, 0, 0], np.uint8),
}


def template(**changes: Any) -> DatasetInfo:
    fields: dict[str, Any] = {
        "columns": {"latent": LATENT, **condition_columns(SHAPES, "float16")},
        "normalisation": Normalisation(shift=(0.0,) * 2, scale=(1.0,) * 2),
        "provenance": Provenance(source="test", transform="none"),
        "captions": 2,
    }
    return DatasetInfo(**(fields | changes))


def sample(number: int) -> Arrays:
    """A latent and two captions, the first of 1 to 5 tokens, the second of two tokens that do not lie side by side."""
    generator = np.random.default_rng(number)
    masks = (np.arange(TOKENS) <= number % TOKENS), np.array([1, 0, 1, 0, 0])
    arrays: Arrays = {"latent": generator.standard_normal((2, 4, 4)).astype(np.float16)}
    for suffix, mask in zip(("", "1"), masks, strict=True):
        arrays[f"context{suffix}"] = generator.standard_normal((TOKENS, WIDTH)).astype(np.float16)
        arrays[f"context_mask{suffix}"] = mask.astype(np.uint8)
    return arrays


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks") / "data"
    with ShardWriter(folder, template(), samples_per_shard=COUNT, null=NULL) as writer:
        for number in range(COUNT):
            writer.add(f"{number}", sample(number), captions=2)
    return folder


def test_a_shard_holds_the_tokens_of_each_caption(folder: Path) -> None:
    """Up to the last one that the mask marks, and zeros for others, so that the padding costs no disk."""
    with tarfile.open(folder / "train-000000.tar") as tar:
        files = [tar.extractfile(f"{number}.context.npy") for number in range(COUNT)]
        lengths = [np.load(BytesIO(file.read())).shape for file in files if file is not None]
    assert lengths == [(n % TOKENS + 1, WIDTH) for n in range(COUNT)]
    assert verify(folder).ok
    with LatentReader(folder) as reader:
        for caption, share in (("", 0.0), ("1", 0.9)):
            found = reader.read(np.arange(COUNT), choice={"caption": np.full(COUNT, share)})
            for number in range(COUNT):
                context, mask = (sample(number)[f"{name}{caption}"] for name in SHAPES)
                assert np.array_equal(found["context_mask"][number], mask)
                assert np.array_equal(found["context"][number], context * mask[:, None].astype(np.float16))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("loader", ["prefetch", "dali"])
def test_embeddings_in_dtypes_that_numpy_lacks(
    tmp_path: Path, loader: Any, dtype: StoredDtype, device: torch.device
) -> None:
    """Shards hold their bits, of both captions and of the null; batches have the numbers in bfloat16."""
    kind = getattr(torch, dtype)

    def bits(arrays: Arrays) -> Arrays:
        stored = {n: to_stored(torch.from_numpy(v).float(), dtype).numpy() for n, v in arrays.items() if v.ndim == 2}
        return arrays | stored

    columns = {"latent": LATENT, **condition_columns(SHAPES, dtype)}
    with ShardWriter(tmp_path / "out", template(columns=columns), samples_per_shard=COUNT, null=bits(NULL)) as writer:
        for number in range(COUNT):
            writer.add(f"{number}", bits(sample(number)), captions=2)
    assert verify(tmp_path / "out").ok
    with LatentReader(tmp_path / "out") as reader:
        order = build_order(reader.info, seed=5, window_shards=1, global_batch=COUNT)
        with build_batches(
            reader, order, config=DataConfig(loader=loader, random_flip=False), seed=5, device=device,
            start_samples=0, rank=0, ranks=1, micro=COUNT, global_batch=COUNT,
        ) as batches:  # fmt: skip
            batch = next(batches)
        ids = order.samples(np.arange(COUNT))
        null = from_stored({name: torch.from_numpy(value) for name, value in reader.null().items()})
    second = uniform(5, Stream.CAPTION, batch.position, 1)[:, 0] >= 0.5
    for row, number in enumerate(ids.tolist()):
        suffix = "1" if second[row] else ""
        values, mask = (torch.from_numpy(sample(number)[f"{name}{suffix}"]) for name in SHAPES)
        expected = (values * mask[:, None]).to(kind).to(torch.bfloat16)
        assert torch.equal(batch.condition["context"][row].cpu(), expected)
    assert torch.equal(null["context"], torch.full((TOKENS, WIDTH), 0.5).bfloat16())
    empty = empty_batch(reader.info, 0, 2, device)
    assert empty.condition["context"].dtype == torch.bfloat16


@pytest.mark.parametrize("loader", ["prefetch", "dali"])
def test_a_dropped_caption_takes_its_mask_along(folder: Path, loader: Any, device: torch.device) -> None:
    with LatentReader(folder) as reader:
        null = {name: torch.from_numpy(value) for name, value in reader.null().items()}
        null["context_mask"] = null["context_mask"].bool()
        order = build_order(reader.info, seed=5, window_shards=1, global_batch=COUNT)
        with build_batches(
            reader, order, config=DataConfig(loader=loader, random_flip=False), seed=5, device=device,
            start_samples=0, rank=0, ranks=1, micro=COUNT, global_batch=COUNT,
        ) as batches:  # fmt: skip
            batch = next(batches)
    assert batch.condition["context_mask"].dtype == torch.bool
    objective = Objective(DdpmConfig(condition_dropout=0.5), seed=0, null=null, device=device, inputs=tuple(SHAPES))
    found = objective.add_noise(batch).condition
    dropped = uniform(0, Stream.LABEL_DROP, batch.position, 1)[:, 0] < 0.5
    assert 0 < dropped.sum() < COUNT
    for name, value in found.items():
        assert torch.equal(value[dropped], null[name].to(device).expand_as(value)[dropped])
        assert torch.equal(value[~dropped], batch.condition[name][~dropped])


def test_captions_are_padded_to_the_longest_one(tmp_path: Path) -> None:
    """To 16 rows instead of 40, of 11 tokens, in batches, the null and passes without data; no result differs."""
    generator, many = np.random.default_rng(0), 40
    shapes = {"context": (many, WIDTH), "context_mask": (many,)}
    columns = {"latent": LATENT, **condition_columns(shapes, "float32")}

    def caption(tokens: int) -> Arrays:
        mask = (np.arange(many) < tokens).astype(np.uint8)
        return {"context": generator.standard_normal((many, WIDTH)).astype(np.float32), "context_mask": mask}

    samples = [caption(3 + number) for number in range(9)]
    with ShardWriter(tmp_path, template(columns=columns, captions=1), samples_per_shard=4, null=caption(1)) as writer:
        for number, arrays in enumerate(samples):
            writer.add(f"{number}", {"latent": sample(0)["latent"], **arrays})
    assert verify(tmp_path).ok
    network = PixArt(PixArtConfig(depth=1, hidden=24, heads=2, patch=2, channels=2, size=4, caption_dim=WIDTH))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    found = {}
    for rows in (16, many):
        if rows == many:  # as in data sets of older versions
            dataclasses.replace(DatasetInfo.read(tmp_path), longest_caption=None).write(tmp_path)
        with LatentReader(tmp_path) as reader:
            assert reader.null()["context"].shape == (rows, WIDTH)
            assert empty_batch(reader.info, 0, 2, torch.device("cpu")).condition["context_mask"].shape == (2, rows)
            read = reader.read(np.arange(9))
        for row, arrays in enumerate(samples):
            assert np.array_equal(read["context_mask"][row], arrays["context_mask"][:rows])
            valid = arrays["context_mask"][:rows, None].astype(np.float32)
            assert np.array_equal(read["context"][row], arrays["context"][:rows] * valid)
        condition = from_stored({name: torch.from_numpy(read[name]) for name in shapes})
        network.zero_grad()
        output = network(torch.from_numpy(read["latent"]).float(), torch.arange(9) * 100, **condition)
        output.square().mean().backward()
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        found[rows] = output.detach(), torch.cat([gradient.flatten() for gradient in gradients])
    for trimmed, padded in zip(found[16], found[many], strict=True):
        assert float((trimmed - padded).norm() / padded.norm()) < 1e-6


def test_a_token_beyond_the_longest_caption_is_damage(folder: Path, tmp_path: Path) -> None:
    shapes = {"context": (12, WIDTH), "context_mask": (12,)}
    columns = {"latent": LATENT, **condition_columns(shapes, "float16")}
    arrays = {name: np.ones(shape, columns[name].numpy) for name, shape in shapes.items()}
    with ShardWriter(tmp_path, template(columns=columns, captions=1), samples_per_shard=1) as writer:
        writer.add("0", {"latent": sample(0)["latent"], **arrays})
    info = DatasetInfo.read(tmp_path)
    assert info.longest_caption == 12
    dataclasses.replace(info, longest_caption=8).write(tmp_path)
    with LatentReader(tmp_path) as reader, pytest.raises(DataError, match=r"\(context.npy\).*expected"):
        reader.read([0])
    assert "longest_caption is 13, expected 1 to" in str(dataclasses.replace(info, longest_caption=13).problem())


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"context_mask": (5,)}, "context_mask is the mask of context, which is missing"),
        ({"context": (5, 3), "context_mask": (4,)}, "context_mask has the shape [4], expected [tokens] with 5 tokens"),
        ({"context": (5, 3), "pooled": (3, 1)}, "pooled has the shape [3, 1], expected [pooled_width]"),
        ({"time_ids": (5,)}, "time_ids has the shape [5], expected [6]"),
        ({"depth": (1,)}, "unknown condition 'depth'; expected label, context, context_mask"),
    ],
)
def test_conditions_outside_the_table_are_refused(shapes: dict[str, tuple[int, ...]], problem: str) -> None:
    assert problem in str(problem_of_shapes(shapes))
    with pytest.raises(ConfigError, match="the network x declares its conditions wrongly"):
        require_shapes(shapes, "the network x")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("label", "context"), "the network x takes label and context; a data set has classes or captions"),
        (("label", "time_ids"), "the network x takes time_ids without captions; only data sets with captions have it"),
        (("context", "time_ids"), None),
    ],
)
def test_conditions_that_no_data_set_has_together_are_refused(names: tuple[str, ...], problem: str | None) -> None:
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        require_sources(names, "the network x")


def test_data_with_other_conditions_than_the_network_takes_are_refused(digits: Path) -> None:
    with pytest.raises(ConfigError, match="x holds no embeddings of captions; the model takes context of 768; encode"):
        _check_conditions(UNetConfig(), "x", DatasetInfo.read(digits))
    with pytest.raises(
        ConfigError, match=rf"y holds context of {WIDTH} and context_mask; the model takes context of 7"
    ):
        _check_conditions(UNetConfig(), "y", template())


def test_a_mask_is_stored_as_bytes(tmp_path: Path) -> None:
    columns = template().columns
    columns["context_mask"] = dataclasses.replace(columns["context_mask"], dtype="float16")
    with pytest.raises(DataError, match="context_mask is float16, expected uint8"):
        ShardWriter(tmp_path, template(columns=columns), samples_per_shard=1)


def test_a_caption_of_impossible_length_is_damage(folder: Path, tmp_path: Path) -> None:
    """Six tokens in place of one, with all digests right: the reader and the check name the array."""
    longer = template(
        columns={"latent": LATENT, **condition_columns({"context": (6, WIDTH), "context_mask": (6,)}, "float16")}
    )
    arrays = sample(0) | {f"context{s}": np.ones((6, WIDTH), np.float16) for s in ("", "1")}
    arrays |= {f"context_mask{s}": np.ones(6, np.uint8) for s in ("", "1")}
    with ShardWriter(tmp_path / "data", longer, samples_per_shard=1) as writer:
        writer.add("0", arrays, captions=2)
    info = DatasetInfo.read(tmp_path / "data")
    dataclasses.replace(info, columns=template().columns, longest_caption=None).write(tmp_path / "data")
    with (
        LatentReader(tmp_path / "data") as reader,
        pytest.raises(DataError, match=r"key 0 \(context.npy\), .*164 bytes, expected 158"),
    ):
        reader.read([0])
    assert "context.npy" in str(verify(tmp_path / "data"))


def test_a_mask_of_nothing_is_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to no token has no value, and diffusers' networks take such a mask for none."""
    nothing = np.zeros(TOKENS, np.uint8)
    with (
        pytest.raises(DataError, match="key 0: context_mask1 marks no token of the caption, expected one or more"),
        ShardWriter(tmp_path / "out", template(), samples_per_shard=1, null=NULL) as writer,
    ):
        writer.add("0", sample(0) | {"context_mask1": nothing}, captions=2)
    with (
        pytest.raises(DataError, match="the empty prompt's context_mask marks no token"),
        ShardWriter(
            tmp_path / "null", template(), samples_per_shard=1, null=NULL | {"context_mask": nothing}
        ) as writer,
    ):
        writer.add("0", sample(0), captions=2)
    with monkeypatch.context() as patched:
        patched.setattr("fastdiff.data.shards.sample_files.MASKS", frozenset())
        with ShardWriter(tmp_path / "other", template(), samples_per_shard=1, null=NULL) as writer:
            writer.add("0", sample(0) | {"context_mask": nothing}, captions=2)
    with (
        LatentReader(tmp_path / "other") as reader,
        pytest.raises(DataError, match=r"key 0 \(context_mask.npy\).*it marks no token of the caption"),
    ):
        reader.read([0])
