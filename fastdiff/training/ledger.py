"""The ledger of a run, as the ranks open it together."""

import socket
from pathlib import Path

from fastdiff.json_lines import JsonLines, last_record
from fastdiff.ledger.records import open_ledger
from fastdiff.ledger.writer import Ledger
from fastdiff.parallel.world import World


def start_ledger(run: Path, samples: int, world: World) -> Ledger:
    """Return the account of this process, which rank 0 writes; called by all ranks, after ``run`` is claimed."""
    nodes = world.gather(socket.gethostname())
    lines: JsonLines | None = None

    def open_lines() -> tuple[int, float] | None:
        nonlocal lines
        lines = open_ledger(run)
        return _last_logged(run / "metrics.jsonl")

    logged = world.on_rank0(open_lines)
    return Ledger(lines, nodes, samples, logged)


def _last_logged(path: Path) -> tuple[int, float] | None:
    """Return step and time of the last line of the log, before the resume cuts it back; None without a whole one."""
    try:
        last = last_record(path)
        return None if last is None else (int(last["step"]), path.stat().st_mtime)
    except (OSError, ValueError, OverflowError):
        return None
