"""Batches of posteriors, buckets, flips and captions: the same from both loaders, a function of the position."""

import itertools
import shutil

import numpy as np
import pytest
import torch

from fastdiff.config.sections.data import DataConfig
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.shards.index import ShardIndex
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError, DataError
from fastdiff.rng import Stream, uniform
from fastdiff_kernels import dispatch
from tests.support.inputs.captioned import SIZES, encode

LOADERS = ("dali", "prefetch")
CPU = torch.device("cpu")
SEED = 11


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader") / "latents"
    return folder, encode(folder, 60)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def take(folder, loader, count=12, *, device=CPU, flip=True, seed=SEED, rank=0, ranks=1, start=0, prefetch=3):
    with LatentReader(folder) as reader:
        order = build_order(reader.info, seed=seed, window_shards=2, global_batch=8)
        with build_batches(
            reader,
            order,
            config=DataConfig(loader=loader, prefetch=prefetch, random_flip=flip),
            seed=seed,
            device=device,
            start_samples=start,
            rank=rank,
            ranks=ranks,
            micro=4,
            global_batch=8,
        ) as stream:
            return list(itertools.islice(stream, count))


def parts(batch):
    return {"latents": batch.latents, "position": batch.position, **batch.condition}


def assert_equal(one, other):
    for first, second in zip(one, other, strict=True):
        assert parts(first).keys() == parts(second).keys()
        for name, tensor in parts(first).items():
            assert tensor.dtype == parts(second)[name].dtype
            assert torch.equal(tensor, parts(second)[name])


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("loader", LOADERS)
def test_batches_are_the_chosen_variants_of_the_samples_at_their_positions(latents, loader, flip, device):
    folder, truth = latents
    with LatentReader(folder) as reader:
        order = build_order(reader.info, seed=SEED, window_shards=2, global_batch=8)
    shift = np.array([0.5, -1.0, 0.0, 0.0], np.float32)[:, None, None]
    scale = np.array([2.0, 0.25, 2.0, 0.25], np.float32)[:, None, None]
    shapes, flips, captions = set(), [], []
    for index, batch in enumerate(take(folder, loader, 24, device=device, flip=flip)):
        positions = torch.arange(index * 4, index * 4 + 4)
        assert batch.position.tolist() == positions.tolist()
        assert {tensor.device.type for tensor in parts(batch).values()} == {device.type}
        flipped = uniform(SEED, Stream.FLIP, positions, 1)[:, 0] < 0.5
        u = uniform(SEED, Stream.CAPTION, positions, 1)[:, 0]
        for row, number in enumerate(order.samples(positions.numpy()).tolist()):
            arrays, own = truth[number].arrays, truth[number].captions
            caption = int(u[row].item() * own)
            stored = arrays["latent_flipped" if flip and flipped[row] else "latent"]
            assert np.array_equal(batch.latents[row].cpu().numpy(), (stored.astype(np.float32) - shift) * scale)
            for name, array in (
                ("context", f"context{caption or ''}"),
                ("pooled", f"pooled{caption or ''}"),
                ("time_ids",) * 2,
            ):
                found = batch.condition[name][row].cpu().numpy()
                assert (found.dtype, found.tobytes()) == (arrays[array].dtype, arrays[array].tobytes())
            flips.append(bool(flipped[row]))
            captions.append((own, caption))
        shapes.add(tuple(batch.latents.shape))
    assert shapes == {(4, 4, *size) for size in SIZES}
    assert len(set(flips)) == 2
    assert set(captions) == {(3, 0), (3, 1), (3, 2), (2, 0), (2, 1), (1, 0)}


@pytest.mark.parametrize("loader", LOADERS)
def test_ranks_and_starts_see_the_same_samples_with_the_same_choices(latents, loader, device):
    one = take(latents[0], loader, 12, device=device)
    for rank in (0, 1):
        assert_equal(take(latents[0], loader, 6, rank=rank, ranks=2, device=device), one[rank::2])
    assert_equal(take(latents[0], loader, 4, start=32, device=device), one[8:])
    other = take(latents[0], loader, 12, seed=SEED + 1, device=device)
    assert any(
        a.latents.shape != b.latents.shape or not torch.equal(a.latents, b.latents)
        for a, b in zip(one, other, strict=True)
    )


def test_the_choices_do_not_depend_on_what_computes_the_ops_of_the_run(latents):
    usual = take(latents[0], "prefetch")
    calls = []
    with dispatch.forced(philox="compile"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *args, **options: calls.append(args))
        assert_equal(take(latents[0], "prefetch"), usual)
    assert not calls


@pytest.mark.parametrize("loader", LOADERS)
def test_flips_that_the_data_do_not_have_are_refused(digits, loader):
    with pytest.raises(
        ConfigError, match=r"--data.random-flip, also of a preset: .* holds no flipped latents; encode with --flip"
    ):
        take(digits, loader)
    assert take(digits, loader, 1, flip=False)[0].condition.keys() == {"label"}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_damaged_sample_of_another_bucket_is_a_data_error_at_its_micro_batch(latents, loader, tmp_path):
    folder = shutil.copytree(latents[0], tmp_path / "latents")
    with LatentReader(folder) as reader:
        order = build_order(reader.info, seed=SEED, window_shards=2, global_batch=8)
        ids = [order.samples(np.arange(index * 4, index * 4 + 4)) for index in range(12)]
        # Not of bucket 0, whose shape stands in for a batch that cannot be read.
        index = next(n for n in range(2, 12) if reader.bucket_of(ids[n]) != 0)
        shard, row = (int(part[1]) for part in order.locate(ids[index]))
        path = folder / reader.info.shards[shard].name
    place = ShardIndex.from_bytes(path.with_suffix(".index.json").read_bytes()).place("latent.npy", row)
    content = bytearray(path.read_bytes())
    content[place.offset + place.length - 1] ^= 1
    path.write_bytes(content)
    assert len(take(folder, loader, index, flip=False)) == index
    with pytest.raises(DataError, match=rf"{path.name}, key {place.key} \(latent.npy\), offset {place.offset}: crc32"):
        take(folder, loader, index + 1, flip=False)
