"""A run on two data sets, as for prior preservation: exact shares for 1 to 3 ranks and after stops, weighted losses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from fastdiff.batch import Batch
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, Preempted
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.loop import take_steps, train
from fastdiff.training.state import TrainState
from tests.support.forked import forked_ranks, values
from tests.support.runs import hexes, launch, newest, records, tiny

BATCH, STEPS = 12, 10
EPOCH = 3 * 24 + 40

Seen = dict[int, tuple[int, int]]
"""By position: the data set and a checksum of the sample."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """24 digits, of which an epoch has each three times, and 40 others with half of the loss and their own dropout."""
    root = tmp_path_factory.mktemp("two")
    encode_digits(root / "digits", split="test")
    with LatentReader(root / "digits") as reader:
        found, info = reader.read(range(64)), replace(reader.info, shards=(), samples=0)
    for name, rows in (("photos", range(24)), ("others", range(24, 64))):
        with ShardWriter(root / name, info, samples_per_shard=9) as writer:
            for n in rows:
                writer.add(f"{n:03d}", {"latent": found["latent"][n]}, label=int(found["label"][n]))
    return f"instance={root / 'photos'}:3", f"prior={root / 'others'}:loss_weight=0.5:condition_dropout=0.5"


def config(sets: tuple[str, ...], folder: Path, steps: int = STEPS) -> RunConfig:
    found = tiny(Path(), folder, data__path="", data__sets=sets)
    return replace(found, samples=steps * BATCH, batch=BatchConfig(samples=BATCH, micro=2))


def watched(world: World, run_of: RunConfig, stop_at: int | None = None) -> Seen:
    """Train; the last rank is asked to stop within step ``stop_at``. Return what this rank saw."""
    seen: Seen = {}
    stop = StopRequest()

    def noted(batches: Iterator[Batch], state: TrainState) -> Iterator[Batch]:
        for batch in batches:
            assert batch.data_set is not None
            for row, position in enumerate(batch.position.tolist()):
                taken = position < (stop_at or STEPS) * BATCH
                if taken:
                    seen[position] = int(batch.data_set[row]), crc32(batch.latents[row].numpy().tobytes())
                if position // BATCH + 1 == stop_at and world.rank == world.size - 1:
                    stop.make("a request within a step")
            yield batch

    with ExitStack() as stack:
        run = build(run_of, launch(1), world, stack, stop)
        stop.arm(run.state.heartbeat)
        try:
            take_steps(run.state, noted(run.batches, run.state), run.callbacks)
            run.callbacks.on_end(run.state)
        except Preempted:
            run.callbacks.on_preempted(run.state)
            stop.answered = True
            assert run.state.progress.steps == stop_at
    return seen


def whole_and_part(world: World, sets: tuple[str, ...], folder: Path, stop_at: int | None) -> tuple[Seen, Seen]:
    """Make the whole run on these ranks, and the next part of the one that changes its ranks."""
    whole = watched(world, config(sets, folder / f"whole-{world.size}"))
    return whole, watched(world, config(sets, folder / "parts"), stop_at)


def test_shares_are_exact_for_1_2_and_3_ranks_and_after_stops(two: tuple[str, str], tmp_path: Path) -> None:
    """The run in parts begins on two ranks, goes on on one and ends on three, and sees what each whole run sees."""
    wholes, parts = [], []
    for ranks, stop_at in ((2, 4), (1, 7), (3, None)):
        found = values(forked_ranks(whole_and_part, two, tmp_path, stop_at, ranks=ranks))
        wholes.append({position: each for whole, _ in found for position, each in whole.items()})
        parts.append({position: each for _, part in found for position, each in part.items()})
    joined = {position: each for part in parts for position, each in part.items()}
    assert sum(map(len, parts)) == len(joined), "no sample is taken twice"
    numbers = [{position: number for position, (number, _) in seen.items()} for seen in (*wholes, joined)]
    assert numbers[0].keys() == set(range(STEPS * BATCH))
    assert numbers[1:] == [numbers[0]] * 3
    assert Counter(numbers[0][n] for n in range(EPOCH)) == {0: 72, 1: 40}
    logs = [records(tmp_path / name) for name in ("whole-1", "whole-2", "whole-3", "parts")]
    for step in range(STEPS):
        rows = [log[step] for log in logs]
        held = Counter(numbers[0][n] for n in range(step * BATCH, (step + 1) * BATCH))
        for row in rows:
            means = row["loss_set_instance"] or 0.0, row["loss_set_prior"] or 0.0
            assert row["loss"] * BATCH == pytest.approx(held[0] * means[0] + 0.5 * held[1] * means[1], rel=1e-6)
            assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4)


def test_the_weight_of_a_loss_is_that_of_its_gradient(world: World, two: tuple[str, str], tmp_path: Path) -> None:
    norms = []
    for weight in ("1", "2"):
        sets = tuple(f"{each.partition(':')[0]}:loss_weight={weight}" for each in two)
        train(config(sets, tmp_path / weight, steps=1), launch(1), world)
        (row,) = records(tmp_path / weight)
        norms.append((row["grad_norm"], row["loss"], row["loss_set_prior"]))
    assert norms[1][:2] == pytest.approx([2 * each for each in norms[0][:2]], rel=1e-6)
    assert norms[1][2] == pytest.approx(norms[0][2], rel=1e-6)


def test_one_entry_is_the_run_on_its_path_to_the_bit(world: World, two: tuple[str, str], tmp_path: Path) -> None:
    path = two[0].partition("=")[2].partition(":")[0]
    train(config((path,), tmp_path / "sets", steps=4), launch(1), world)
    train(
        replace(config((), tmp_path / "path", steps=4), data=replace(config((), tmp_path).data, path=path)),
        launch(1),
        world,
    )
    first, second = ([row["loss"] for row in records(tmp_path / name)] for name in ("sets", "path"))
    assert hexes(first) == hexes(second)


def test_a_resume_with_other_shares_names_what_changed(world: World, two: tuple[str, str], tmp_path: Path) -> None:
    """The record of the run has its data sets, and their paths may change."""
    run = config(two, tmp_path / "run", steps=2)
    train(run, launch(1), world)
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["config"]["data"]["sets"] == list(two)
    assert newest(tmp_path / "run").manifest["datasets"]["prior"]["per_epoch"] == 40
    other = replace(run, samples=4 * BATCH, data=replace(run.data, sets=(two[0].replace(":3", ":2"), two[1])))
    with pytest.raises(ConfigError, match="where now instance: other share of an epoch"):
        train(other, launch(1), world)


def test_the_start_names_each_data_set(world: World, two: tuple[str, str], tmp_path: Path, caplog) -> None:
    with caplog.at_level("INFO"):
        train(config(two, tmp_path / "run", steps=1), launch(1), world)
    assert "1 steps of 12 samples = 0.1 epochs of 112 samples" in caplog.text
    assert "24 images, 3 times each = 72 of 112 samples of an epoch (64.3%)" in caplog.text
    assert "40 images, 1 time each = 40 of 112 samples of an epoch (35.7%), loss x 0.5" in caplog.text
