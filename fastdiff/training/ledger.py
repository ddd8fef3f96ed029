"""The ledger of a run, as the ranks open it together."""

from __future__ import annotations

import socket
from pathlib import Path

from fastdiff.ledger.records import open_ledger
from fastdiff.ledger.writer import Ledger
from fastdiff.parallel.world import World


def start_ledger(run: Path, samples: int, world: World) -> Ledger:
    """Return the account of this process, which rank 0 writes; called by all ranks, after ``run`` is claimed.

    Args:
        run: the run folder.
        samples: of an optimizer step.
        world: the ranks.
    """
    nodes = world.gather(socket.gethostname())
    return Ledger(open_ledger(run) if world.is_first else None, nodes, samples)
