"""Kills spread over a whole job, from the encode to the export: the same commands go on and leave equal bytes.

The result is compared by ``tests.support.independent_reader``, which knows the file formats and nothing of fastdiff.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastdiff.cli.main import main
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support import independent_reader as reader
from tests.support.forked import forked_ranks, values
from tests.support.injected.crash_points import CrashPoints, Operation
from tests.support.runs import launch, tiny

pytestmark = pytest.mark.timeout(900)
STEPS = 12


@dataclass(frozen=True)
class Kill:
    """The first rank dies at a file operation, a write half done."""

    when: str
    op: str
    path: str
    """Regular expression of the end of the path."""
    count: int = 1
    """Number of the operation among those of this kind and path."""
    by_day: bool = False

    def __str__(self) -> str:
        return self.when

    def dies(self) -> Callable[[Operation], bool]:
        """Return a function that is True at the operation."""
        left = self.count

        def is_it(operation: Operation) -> bool:
            nonlocal left
            left -= operation["op"] == self.op and re.search(f"{self.path}$", operation["path"]) is not None
            return left == 0

        return is_it


TEMPORARY = r"\.\d+-[0-9a-f]{8}\.tmp"
KILLS = (
    Kill("within the encode", "fsync", rf"train-000003\.tar{TEMPORARY}"),
    Kill("while the encode is published", "rename", rf"dataset\.json{TEMPORARY}", by_day=True),
    Kill("at the first start, before its record", "rename", rf"run\.json{TEMPORARY}", by_day=True),
    Kill("at the first step, within its line of the log", "write", r"metrics\.jsonl"),
    Kill("within the first save", "fsync", r"step-00000002\.tmp/rank-00000\.safetensors"),
    Kill("at the commit of a save", "rename", r"checkpoints/step-00000004\.tmp"),
    Kill("at a resume, when its log is cut back", "fsync", r"metrics\.jsonl"),
    Kill("within a snapshot", "write", r"ema/step-00000006\.tmp/rank-00000\.safetensors"),
    Kill(
        "within the removal of an old checkpoint", "unlink", r"checkpoints/step-\d{8}\.tmp/[^/]+", count=2, by_day=True
    ),
    Kill("at the end, after the last save", "create", r"step-00000012\.tmp/MANIFEST\.json"),
    Kill("within the export", "fsync", r"out\.unfinished/content/model\.safetensors"),
    Kill("before the export has its name", "rename", r"out\.unfinished/content", by_day=True),
)


def config_of(root: Path) -> RunConfig:
    return tiny(
        root / "data",
        root / "run",
        steps=STEPS,
        batch__micro=8,
        optim__schedule="cosine",
        optim__warmup_steps=3,
        ema=EmaConfig(rates=(0.9,), power_stds=(0.1,), snapshot_every=3),
        output__checkpoint_every=2,
    )


def job(world: World, root: Path, kill: Kill | None = None) -> None:
    """Encode, train and export, as far as it is not done yet; die meanwhile."""
    points = CrashPoints(root, root.with_name(f"{root.name}.journal"), kill.dies() if kill and world.is_first else None)
    with points.watched():
        if world.is_first and not (root / "data" / "dataset.json").exists():
            assert main(["encode", "digits", str(root / "data")]) == 0
        world.gather(None)
        train(config_of(root), launch(3), world)
        if world.is_first:
            assert main(["export", str(root / "run"), str(root / "out"), "--format", "safetensors"]) == 0


def assert_same(killed: Path, whole: Path) -> None:
    for name, read in (("data", reader.shards), ("run", reader.run)):
        found, expected = read(killed / name), read(whole / name)
        assert found.keys() == expected.keys()
        for part, content in expected.items():
            assert found[part] == content, f"{name}: {part}"
    exported = [reader.tensors(root / "out" / "model.safetensors") for root in (killed, whole)]
    assert exported[0] == exported[1]
    assert [record["step"] for record in reader.log(killed / "run" / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert not reader.leftovers(killed)


@pytest.mark.nightly
@pytest.mark.fault(1)
def test_a_job_that_is_killed_again_and_again_leaves_equal_bytes(
    tmp_path: Path, nightly: bool, record_property: Callable[[str, object], None]
) -> None:
    """By night 12 kills and two ranks under ZeRO-3; by day 4 kills of one rank."""
    whole, killed, ranks = tmp_path / "whole", tmp_path / "killed", 2 if nightly else 1
    for root in (whole, killed):
        root.mkdir()
    values(forked_ranks(job, whole, ranks=ranks))
    kills = [kill for kill in KILLS if nightly or kill.by_day]
    record_property("trials", len(kills))
    for kill in kills:
        ended = forked_ranks(job, killed, kill, ranks=ranks)
        assert ended[0].code == -signal.SIGKILL, (str(kill), ended[0].trace)
    values(forked_ranks(job, killed, ranks=ranks))
    assert_same(killed, whole)
