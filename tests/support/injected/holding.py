"""A run that waits at one of its steps, so that a kill finds it there however loaded the machine is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastdiff.training.callbacks.user_defined import RunView


class Hold:
    """A callback of the run, on every rank: while ``held_at`` names its step, the run goes no further."""

    every = 1

    def on_step(self, run: RunView) -> None:
        while _step_to_wait_at(run.folder) == run.step:
            time.sleep(0.005)


HOLD = f"{__file__}:{Hold.__name__}"
"""For ``--output.callbacks``."""


@contextmanager
def held_at(step: int, run: Path) -> Iterator[None]:
    """Let the run wait after this step, which it has logged; its saves in the background continue."""
    file = _file(run)
    file.write_text(str(step))
    yield
    file.unlink()


def _file(run: Path) -> Path:
    return run.with_name(f"{run.name}.held-at")


def _step_to_wait_at(run: Path) -> int | None:
    try:
        return int(_file(run).read_text())
    except FileNotFoundError:
        return None
