"""Damaged shards of every kind: an error that names the place or, on request, a replacement that is logged.

Never another tensor without a word: every sample that is read is the stored one, or that of the sample that the log
names, to the byte.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.shards.index import ShardIndex
from fastdiff.data.shards.reader import LatentReader, substitutes
from fastdiff.errors import ConfigError, DataError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks
from tests.support.runs import hexes, launch, losses, records, tiny

SHAPE, SHARDS, PER_SHARD = (2, 4, 4), 3, 8
SAMPLES = SHARDS * PER_SHARD
Damage = Callable[[Path, int, int], list[int]]
"""Damages a shard at a row; returns the rows that are lost."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("faults") / "intact"
    encode_synthetic(out, SHAPE, SAMPLES, classes=7, samples_per_shard=PER_SHARD)
    return out


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "latents"))


@pytest.fixture(scope="module")
def truth(intact: Path) -> dict[str, npt.NDArray[Any]]:
    with LatentReader(intact) as reader:
        return reader.read(np.arange(SAMPLES))


# --- fault 17: eight kinds of damage ---------------------------------------------------------------------------------


def shard_of(folder: Path, number: int) -> Path:
    return folder / f"train-{number:06d}.tar"


def index_of(folder: Path, number: int) -> Path:
    return shard_of(folder, number).with_suffix(".index.json")


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def corrupt(folder: Path, number: int, row: int) -> list[int]:
    place = ShardIndex.from_bytes(index_of(folder, number).read_bytes()).place("latent.npy", row)
    last = place.offset + place.length - 1
    overwrite(shard_of(folder, number), last, bytes([shard_of(folder, number).read_bytes()[last] ^ 1]))
    return [row]


def garbled_header(folder: Path, number: int, row: int) -> list[int]:
    place = ShardIndex.from_bytes(index_of(folder, number).read_bytes()).place("latent.npy", row)
    overwrite(
        shard_of(folder, number), place.offset, b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'shape': (100000000000,)}"
    )
    return [row]


def truncated(folder: Path, number: int, row: int) -> list[int]:
    place = ShardIndex.from_bytes(index_of(folder, number).read_bytes()).place("latent.npy", row)
    os.truncate(shard_of(folder, number), place.offset + place.length - 1)
    return list(range(row, PER_SHARD))


def empty(folder: Path, number: int, row: int) -> list[int]:
    os.truncate(shard_of(folder, number), 0)
    return list(range(PER_SHARD))


def missing(folder: Path, number: int, row: int) -> list[int]:
    shard_of(folder, number).unlink()
    return list(range(PER_SHARD))


def stale_index(folder: Path, number: int, row: int) -> list[int]:
    """The index of another encode, of which one sample lies elsewhere."""
    content = json.loads(index_of(folder, number).read_bytes())
    content["components"]["latent.npy"]["offset"][row] += 512
    index_of(folder, number).write_text(json.dumps(content))
    return list(range(PER_SHARD))


def short_index(folder: Path, number: int, row: int) -> list[int]:
    """An index whose writing was cut off."""
    size = index_of(folder, number).stat().st_size
    os.truncate(index_of(folder, number), size * (row + 1) // (PER_SHARD + 1))
    return list(range(PER_SHARD))


def missing_index(folder: Path, number: int, row: int) -> list[int]:
    index_of(folder, number).unlink()
    return list(range(PER_SHARD))


KINDS: list[Damage] = [corrupt, garbled_header, truncated, empty, missing, stale_index, short_index, missing_index]
PLACES = [(0, 0), (1, PER_SHARD // 2), (2, PER_SHARD - 1)]


@pytest.mark.fault(17)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_replaced_and_logged_if_asked_for(
    folder: Path, truth: dict[str, npt.NDArray[Any]], kind: Damage, place: tuple[int, int]
) -> None:
    lost = {place[0] * PER_SHARD + row for row in kind(folder, *place)}
    positions = np.arange(SAMPLES) + 100
    with LatentReader(folder, substitute=True) as reader:
        read = reader.read(np.arange(SAMPLES), positions=positions)
        log = dict(reader.substituted)
    assert read["latent"].shape == (SAMPLES, *SHAPE), "the batch keeps its size"
    assert set(log) == {100 + number for number in lost}, "each replaced sample is on the log, and no other"
    for number in range(SAMPLES):
        source = int(log[100 + number].by.partition(":")[2]) if number in lost else number
        assert source not in lost
        assert read["latent"][number].tobytes() == truth["latent"][source].tobytes()
        assert read["label"][number] == truth["label"][source]
    name = shard_of(folder, place[0]).name
    for entry in log.values():
        assert entry.damaged.startswith(f"{name}:")
        assert name in entry.reason
    if len(lost) < PER_SHARD:
        assert all(entry.by.startswith(f"{name}:") for entry in log.values()), "one of the same shard"
    else:
        assert len({entry.by for entry in log.values()}) == PER_SHARD, "a lost shard is not replaced by one sample"


def test_substitutes_stay_in_the_bucket_and_leave_out_nothing() -> None:
    from fastdiff.data.shards.format import ShardInfo

    sizes, buckets = (3, 100, 2, 70), (0, 1, 0, 1)
    shards = [
        ShardInfo(name=f"{n}", samples=size, bytes=1, sha256="", index_sha256="", bucket=bucket)
        for n, (size, bucket) in enumerate(zip(sizes, buckets, strict=True))
    ]
    starts = [0, 3, 103, 105, 175]
    assert list(substitutes(shards, starts, 1)) == [2, 0, 104, 103]
    found = list(substitutes(shards, starts, 170))
    assert found[:5] == [171, 172, 173, 174, 105]
    assert found[63:66] == [68, 69, 70], "from the same row of the next shard"
    assert all(3 <= number < 103 or 105 <= number < 175 for number in found)


def test_nothing_intact_is_an_error(folder: Path) -> None:
    for number in range(SHARDS):
        empty(folder, number, 0)
    with LatentReader(folder, substitute=True) as reader, pytest.raises(DataError, match=r"train-000001\.tar"):
        reader.read([9], positions=np.array([0]))


def test_without_its_position_no_sample_is_replaced(folder: Path) -> None:
    corrupt(folder, 1, 2)
    with LatentReader(folder, substitute=True) as reader:
        with pytest.raises(DataError, match="crc32"):
            reader.read([PER_SHARD + 2])
        assert not reader.substituted


# --- the same with any number of ranks, and after a resume -----------------------------------------------------------


def read_all(folder: Path, ranks: int, start: int, loader: Any) -> tuple[dict[int, bytes], dict[int, Any]]:
    """The latents of samples ``start`` to 95 of a run with batches of 8, and the log, by position."""
    latents: dict[int, bytes] = {}
    log: dict[int, Any] = {}
    for rank in range(ranks):
        with LatentReader(folder, substitute=True) as reader:
            order = build_order(reader.info, seed=3, window_shards=2, global_batch=8)
            batches = build_batches(
                reader, order, config=DataConfig(loader=loader), seed=3, device=torch.device("cpu"),
                start_samples=start, rank=rank, ranks=ranks, micro=8 // ranks, global_batch=8,
            )  # fmt: skip
            with batches:
                for _ in range((96 - start) // 8):
                    batch = next(batches)
                    values = zip(batch.position.tolist(), batch.latents, strict=True)
                    latents.update((position, latent.numpy().tobytes()) for position, latent in values)
            log |= {position: entry for position, entry in reader.substituted.items() if position < 96}
    return latents, log


@pytest.mark.fault(17)
@pytest.mark.parametrize("loader", ["prefetch", "dali"])
def test_replacements_depend_neither_on_the_ranks_nor_on_a_resume(folder: Path, loader: str) -> None:
    for damage, number, row in ((corrupt, 0, 3), (truncated, 1, 5), (missing, 2, 0)):
        damage(folder, number, row)
    latents, log = read_all(folder, 1, 0, loader)
    assert len(log) > 30
    assert read_all(folder, 2, 0, loader) == (latents, log)
    assert read_all(folder, 4, 0, loader) == (latents, log)
    after = {position: entry for position, entry in log.items() if position >= 40}
    assert read_all(folder, 2, 40, loader) == ({p: latent for p, latent in latents.items() if p >= 40}, after)


def damaged_digits(digits: Path, to: Path, config: RunConfig, positions: list[int]) -> Path:
    """The digits, of which the samples at these positions of the run are damaged."""
    folder = Path(shutil.copytree(digits, to))
    with LatentReader(digits) as reader:
        order = build_order(
            reader.info,
            seed=config.seed,
            window_shards=config.data.shuffle_shards,
            global_batch=config.batch.samples,
        )
        for shard, row in zip(*order.locate(order.samples(positions)), strict=True):
            corrupt(folder, int(shard), int(row))
    return folder


def damage_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "damaged.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_on(world: World, config: RunConfig) -> None:
    train(config, launch(1), world)


@pytest.mark.fault(17)
def test_a_run_goes_on_without_damaged_samples(world: World, digits: Path, tmp_path: Path) -> None:
    """It ends under the first policy; under the second it logs them, and a resume repeats every bit and the log."""
    plain = tiny(digits, tmp_path / "plain", steps=6)
    data = damaged_digits(digits, tmp_path / "damaged", plain, [20, 37, 85])
    fails = tiny(data, tmp_path / "run", steps=6, output__checkpoint_every=4, output__log_every=3)
    with pytest.raises(DataError, match="crc32"):
        train(fails, launch(1), world)
    config = dataclasses.replace(fails, data=dataclasses.replace(fails.data, damaged="skip"))
    once = dataclasses.replace(config, output=dataclasses.replace(config.output, folder=str(tmp_path / "once")))
    run_on(world, once)
    log = damage_log(tmp_path / "once")
    assert [(line["step"], line["position"]) for line in log] == [(2, 20), (3, 37), (6, 85)]
    assert all(line["key"].split(":")[0] == line["by"].split(":")[0] for line in log)
    assert all("crc32" in line["reason"] for line in log)

    short = dataclasses.replace(config, samples=5 * 16)
    run_on(world, short)  # the policy may change at a resume: the run that failed goes on
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000005")
    train(config, launch(1, allow_change=("samples",)), world)
    assert damage_log(tmp_path / "run") == log
    first, second = ([record["loss"] for record in records(tmp_path / name)] for name in ("run", "once"))
    assert hexes(first) == hexes(second)


@pytest.mark.fault(17)
def test_two_ranks_replace_and_log_the_same(world: World, digits: Path, tmp_path: Path) -> None:
    plain = tiny(digits, tmp_path / "plain", steps=4)
    data = damaged_digits(digits, tmp_path / "damaged", plain, [3, 12, 40, 60])
    one, two = (tiny(data, tmp_path / f"{ranks}", steps=4, data__damaged="skip") for ranks in (1, 2))
    run_on(world, one)
    ended = forked_ranks(run_on, two, ranks=2)
    assert [each.code for each in ended] == [0, 0], ended
    assert damage_log(tmp_path / "2") == damage_log(tmp_path / "1")
    assert len(damage_log(tmp_path / "1")) == 4
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


@pytest.mark.fault(17)
def test_too_many_damaged_samples_end_the_run(world: World, digits: Path, tmp_path: Path) -> None:
    """The eleventh of 64 samples, counted over a resume."""
    plain = tiny(digits, tmp_path / "plain", steps=8)
    data = damaged_digits(digits, tmp_path / "damaged", plain, [1, 2, 17, 18, 19, 33, 34, 35, 36, 50, 51, 70])
    config = tiny(data, tmp_path / "run", steps=3, data__damaged="skip")
    run_on(world, config)
    assert len(damage_log(tmp_path / "run")) == 9
    longer = dataclasses.replace(config, samples=8 * 16)
    with pytest.raises(DataError, match="11 of 64 samples were damaged, more than 10, up to step 4") as caught:
        train(longer, launch(1, allow_change=("samples",)), world)
    assert caught.value.everywhere
    assert "fastdiff verify" in str(caught.value)


@pytest.mark.fault(17)
def test_samples_that_a_rewind_leaves_out_are_logged(world: World, digits: Path, tmp_path: Path) -> None:
    """They have been trained on. One of every step is damaged, and each loss above the mean is a spike."""
    plain = tiny(digits, tmp_path / "plain", steps=8)
    positions = [16 * step + 4 for step in range(8)]
    data = damaged_digits(digits, tmp_path / "damaged", plain, positions)
    config = tiny(
        data, tmp_path / "run", 8, output__checkpoint_every=2, output__log_every=99, data__damaged="skip",
        divergence__policy="rewind", divergence__window=4, divergence__sigmas=1e-9, divergence__limit=99,
    )  # fmt: skip
    run_on(world, config)
    spikes = [json.loads(line) for line in (tmp_path / "run" / "spikes.jsonl").read_text().splitlines()]
    assert any(line["step"] % 2 for line in spikes if "rewound_to" in line), "where no checkpoint is due"
    assert [line["position"] for line in damage_log(tmp_path / "run")] == positions


def test_online_images_are_not_skipped_silently() -> None:
    with pytest.raises(ConfigError, match=r"--data\.damaged skip is for shards"):
        DataConfig(online=True, damaged="skip")
