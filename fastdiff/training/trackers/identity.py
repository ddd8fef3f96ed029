"""The identity of a run in a tracker, which a resume continues."""

from __future__ import annotations

import secrets

from fastdiff.training.state import TrainState


def run_id(state: TrainState, name: str) -> str:
    """Return the id in the file ``name`` of the run folder; create it for a new folder."""
    path = state.folder / name
    known = path.read_text().strip() if path.exists() else ""
    if not known:
        known = secrets.token_hex(8)
        state.files.write(path, known.encode())
    return known
