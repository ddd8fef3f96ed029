"""The identity of a run in a tracker, which a resume continues."""

import secrets
from contextlib import suppress

from fastdiff.run_files import read_inside
from fastdiff.training.state import TrainState

_LARGEST = 1000
"""Bytes of the largest id that is read."""


def run_id(state: TrainState, name: str) -> str:
    """Return the id in the file ``name`` of the run folder; create it for a new folder."""
    path = state.folder / name
    known = ""
    with suppress(FileNotFoundError, ValueError):  # a file of something else is replaced
        known = read_inside(state.folder, name, _LARGEST).decode().strip()
    if not known:
        known = secrets.token_hex(8)
        state.files.write(path, known.encode())
    return known


def keep_run_id(state: TrainState, name: str, given: str) -> None:
    """Write the id that the user gave into the file ``name`` of the run folder, for a resume without it."""
    state.files.write(state.folder / name, given.encode())
