"""The fork server of tests/support/forked.py starts real ranks of the trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from fastdiff.parallel.world import World
from tests.support.forked import forked_ranks, values
from tests.support.runs import hexes, launch, tiny, train_losses


def _die_on_rank_1(world: World) -> int:
    world.agree(None)  # both have started
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.rank


def test_a_killed_rank_is_distinguished_from_one_that_returned() -> None:
    assert forked_ranks(_die_on_rank_1)[1].code == -signal.SIGKILL


def test_ranks_train(digits: Path, tmp_path: Path) -> None:
    runs = [
        values(forked_ranks(train_losses, tiny(digits, tmp_path / name, batch__micro=8), launch(3)))[0]
        for name in ("first", "second")
    ]
    assert hexes(runs[0]) == hexes(runs[1])
