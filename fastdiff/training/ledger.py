"""The ledger of a run, as the ranks open it together."""

from __future__ import annotations

import socket
from pathlib import Path

from fastdiff.json_lines import read_records
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
    if not world.is_first:
        return Ledger(None, nodes, samples)
    return Ledger(open_ledger(run), nodes, samples, _last_logged(run / "metrics.jsonl"))


def _last_logged(path: Path) -> tuple[int, float] | None:
    """Return step and time of the last line of the log, before the resume cuts it back; None without one."""
    try:
        return int(read_records(path)[-1]["step"]), path.stat().st_mtime
    except (OSError, IndexError):
        return None
