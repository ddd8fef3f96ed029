"""The last record of a start in the ledger of its run, for which a killed trainer had no time."""

import time
from pathlib import Path

from fastdiff.cluster.supervisor.outcome import Outcome
from fastdiff.console import log
from fastdiff.errors import Preempted
from fastdiff.ledger.records import open_ledger
from fastdiff.ledger.writer import message_of
from fastdiff.parallel.heartbeat import beat_path, claimed_run, read_beat

_NO_ERROR = (0, Preempted.exit_code)


def note_end(folder: Path, outcome: Outcome) -> None:
    """Record that the ranks are gone, and how far rank 0 had come; nothing if it never owned the run folder.

    Whatever goes wrong is a warning: the outcome stays.

    Args:
        folder: of the ranks' beats on this node, the first.
        outcome: of the run.
    """
    try:
        _write_end(folder, outcome)
    except Exception as error:
        log.warning(f"the ledger of the run lacks its end: {type(error).__name__}: {error}")


def _write_end(folder: Path, outcome: Outcome) -> None:
    run, beat = claimed_run(folder), read_beat(beat_path(folder, 0))
    if run is None or beat is None:
        return
    now = time.time()
    lines = open_ledger(run)
    lines.write(
        {
            "event": "end",
            "at": now,
            "step": beat.step,
            "code": outcome.exit_code,
            "beat": now - (time.monotonic() - beat.monotonic_s),
            "phase": beat.phase,
            **({"message": message_of(outcome.line)} if outcome.exit_code not in _NO_ERROR or outcome.micro else {}),
            **({"micro": outcome.micro} if outcome.micro else {}),
        }
    )
    lines.close()
