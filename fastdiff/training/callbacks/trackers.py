"""Where the numbers and images of a run are shown while it goes on: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from fastdiff import sanitize
from fastdiff.config.run_record import as_json
from fastdiff.console import log
from fastdiff.errors import ConfigError, Preempted
from fastdiff.sanitize import escape
from fastdiff.training.state import TrainState

INIT_S, FINISH_S = 30.0, 60.0
"""Seconds that a server may take to answer at the start, and to take what is left at the end."""
BROKEN_OFF_S = 5.0
"""The same at the end by an error or a preemption: others wait for this rank, or a scheduler is about to kill it."""
_WAITING = 256
"""Calls that a board may be behind."""
_GRACE_S = 5.0
_UNANSWERED = re.compile(
    "timed out|timeout|deadline exceeded|giving up|connection refused|unreachable|no such host", re.IGNORECASE
)
"""What wandb's errors say of a server that is slow or away; they are all of one class."""

WANDB_ID = "wandb-id"
"""File of the run folder with the run's id, under which wandb goes on after a resume."""


class Tracker(Protocol):
    """One place to look at."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Write what is left within so many seconds, and whether the run ended in an error."""


class Trackers:
    """All boards of a run, open on rank 0; on the other ranks there is none and nothing is shown.

    Leaving the context closes them.

    Args:
        state: the run; all ranks make this together.

    Raises:
        ConfigError: on every rank: wandb refuses the run.
    """

    def __init__(self, state: TrainState) -> None:
        self._boards: list[Tracker] = []
        state.world.on_first(lambda: self._open(state))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""
        for board in self._boards:
            board.scalars(values, step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""
        for board in self._boards:
            board.images(images, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = kind is not None and not issubclass(kind, Preempted)
        for board in self._boards:
            with suppress(OSError):  # what could not be written has been reported when it was tried
                board.close(failed=failed, patience_s=FINISH_S if kind is None else BROKEN_OFF_S)

    def _open(self, state: TrainState) -> None:
        for name in state.config.output.report_to:
            self._boards.append(_TensorBoard(state) if name == "tensorboard" else Unhurried(_Wandb(state)))


def require_installed(report_to: Sequence[str]) -> None:
    """Refuse a board whose package is missing.

    Raises:
        ConfigError: with the command that installs it.
    """
    if "wandb" in report_to and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "--output.report_to wandb needs wandb, which is not installed: pip install 'fastdiff[wandb]'; or leave it "
            "out"
        )


class Unhurried:
    """Shows in a thread of its own, so that a board whose server is slow or away never holds up the training.

    What a board cannot take is left out of it, with one warning; ``metrics.jsonl`` has all numbers.

    Args:
        board: used by that thread alone from now on.
    """

    def __init__(self, board: Tracker) -> None:
        self._board = board
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._show, name="fastdiff-board", daemon=True)
        self._thread.start()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name, some time."""
        self._put(partial(self._board.scalars, dict(values), step))

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption, some time."""
        self._put(partial(self._board.images, dict(images), step))

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Show what is left, as long as the board's server takes it in that time."""
        end = time.monotonic() + patience_s
        for last in (partial(self._board.close, failed=failed, patience_s=patience_s), None):
            with suppress(queue.Full):
                self._waiting.put(last, timeout=max(0.0, end - time.monotonic()))
        self._thread.join(max(0.0, end - time.monotonic()) + min(_GRACE_S, patience_s))
        if self._thread.is_alive():
            self._warn(f"did not take all within {patience_s:g} s")

    def _put(self, action: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(action)
        except queue.Full:
            self._warn("does not keep up")

    def _show(self) -> None:
        while (action := self._waiting.get()) is not None:
            try:
                action()
            except Exception as error:  # of the board's own kind
                self._warn(f"failed ({escape(sanitize.line(str(error)) or type(error).__name__)})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(f"a board of --output.report_to {what}; all numbers are in metrics.jsonl")


class _TensorBoard:
    """Events in ``tensorboard/`` of the run folder; what was shown after the step of a resume is hidden."""

    def __init__(self, state: TrainState) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only rank 0 needs it, and it takes a second

        self._writer = SummaryWriter(str(state.folder / "tensorboard"), purge_step=state.progress.steps + 1)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        for caption, pixels in images.items():
            self._writer.add_images(f"validation/{caption}", pixels, step)
        self._writer.flush()

    def close(self, *, failed: bool, patience_s: float) -> None:
        self._writer.close()


class _Wandb:
    """A run in wandb, called as the run folder, with its files there.

    wandb takes no step twice: after a resume it shows the first values of the steps that were done again.
    """

    def __init__(self, state: TrainState) -> None:
        import wandb

        self._wandb: Any = wandb
        options = {
            "project": state.config.output.project,
            "name": state.folder.name,
            "dir": str(state.folder),
            "id": _wandb_id(state.folder),
            "resume": "allow",
            "config": sanitize.tree(as_json(state.config)),
            "settings": wandb.Settings(init_timeout=INIT_S, finish_timeout=FINISH_S),
        }
        try:
            self._run: Any = self._begin(options)
        except wandb.errors.Error as error:
            said = sanitize.line(" ".join(str(error).split()))
            raise ConfigError(
                f"wandb refuses the run: {said}; log in with `wandb login`, set WANDB_MODE=offline, or "
                "leave it out of --output.report_to"
            ) from None

    def _begin(self, options: dict[str, Any]) -> Any:
        try:
            return self._wandb.init(**options)
        except self._wandb.errors.CommError as error:
            if not _UNANSWERED.search(str(error)):  # it has answered, and refuses
                raise
        log.warning(
            f"wandb's server does not answer within {INIT_S:g} s; the run is recorded in "
            f"{options['dir']}/wandb, from where `wandb sync` uploads it"
        )
        self._wandb.teardown()  # or the run that did not begin would still be in use
        return self._wandb.init(**options, mode="offline")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        shown = [
            self._wandb.Image(image.permute(1, 2, 0).numpy(), caption=caption)
            for caption, pixels in images.items()
            for image in pixels
        ]
        self._run.log({"validation": shown}, step=step)

    def close(self, *, failed: bool, patience_s: float) -> None:
        self._run.finish(exit_code=int(failed))


def _wandb_id(folder: Path) -> str:
    """The id that the run has in wandb, new for a new folder."""
    path = folder / WANDB_ID
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
