"""Experiment trackers that show numbers and images during a run: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import io
import itertools
import logging
import os
import queue
import re
import secrets
import socket
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
from fastdiff.patient_files import AppendedFile
from fastdiff.sanitize import escape
from fastdiff.training.state import TrainState

INIT_S, FINISH_S = 30.0, 60.0
"""Timeouts in seconds for the first answer of a server, and for the remaining uploads at the end."""
BROKEN_OFF_S = 5.0
"""Timeout in seconds at the end by an error or a preemption: other ranks wait, or a scheduler is about to kill."""
_WAITING = 256
"""Largest number of queued calls of a tracker."""
_GRACE_S = 5.0
_UNANSWERED = re.compile(
    "timed out|timeout|deadline exceeded|giving up|connection refused|unreachable|no such host", re.IGNORECASE
)
"""Messages of wandb about a slow or unreachable server; all its errors have one class."""

WANDB_ID = "wandb-id"
"""File of the run folder with the wandb id that a resumed run continues."""


class Tracker(Protocol):
    """An experiment tracker."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Write the rest within ``patience_s`` seconds, and whether the run ended in an error."""


class Trackers:
    """All trackers of a run, open on rank 0 through every rewind, and absent on the other ranks.

    Leaving the context closes them.

    Args:
        state: the run; all ranks construct this together.

    Raises:
        ConfigError: on every rank: wandb refuses the run.
    """

    def __init__(self, state: TrainState) -> None:
        self._trackers: list[Tracker] = []
        state.world.on_first(lambda: self._open(state))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""
        for tracker in self._trackers:
            tracker.scalars(values, step)

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption."""
        for tracker in self._trackers:
            tracker.images(images, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = kind is not None and not issubclass(kind, Preempted)
        for tracker in self._trackers:
            with suppress(OSError):  # a failed write was reported when it happened
                tracker.close(failed=failed, patience_s=FINISH_S if kind is None else BROKEN_OFF_S)

    def _open(self, state: TrainState) -> None:
        patient = state.config.output.failed_saves > 0
        for name in state.config.output.report_to:
            if name == "tensorboard":
                self._trackers.append(_TensorBoard(state.folder, state.progress.steps, patient=patient))
                continue
            try:
                self._trackers.append(BackgroundTracker(_Wandb(state)))
            except OSError as error:
                if not patient:
                    raise
                log.warning(f"{error.filename or state.folder}: {error.strerror}; the run goes on without wandb")


def require_installed(report_to: Sequence[str]) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    if "wandb" in report_to and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "--output.report_to wandb needs wandb, which is not installed: pip install 'fastdiff[wandb]'; or leave it "
            "out"
        )


class BackgroundTracker:
    """Tracker in a separate thread, so that a slow or unreachable server never delays the training.

    Calls that do not fit into the queue are dropped with one warning; ``metrics.jsonl`` has all numbers.

    Args:
        tracker: used by that thread alone from now on.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._show, name="fastdiff-tracker", daemon=True)
        self._thread.start()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Queue numbers by name."""
        self._put(partial(self._tracker.scalars, dict(values), step))

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        """Queue uint8 images ``[N, 3, H, W]`` by caption."""
        self._put(partial(self._tracker.images, dict(images), step))

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Send the queued calls, as far as the server accepts them within ``patience_s`` seconds."""
        end = time.monotonic() + patience_s
        for last in (partial(self._tracker.close, failed=failed, patience_s=patience_s), None):
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
            except Exception as error:  # trackers raise errors of their own classes
                self._warn(f"failed ({escape(sanitize.message(str(error)) or type(error).__name__)})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(f"a tracker of --output.report_to {what}; all numbers are in metrics.jsonl")


class _TensorBoard:
    """Events in a new file in ``tensorboard/`` of the run folder; events after the step of a resume are hidden.

    The file is written as the log is, without the thread of torch's ``SummaryWriter``, which prints a traceback on a
    full disk and leaves half an event, behind which nothing is read.

    Args:
        run: the run folder.
        step: of the resume.
        patient: events wait in memory while the disk is full.
    """

    def __init__(self, run: Path, step: int, *, patient: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # only rank 0 needs it

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_OPENED)}"
        self._file = AppendedFile(run / "tensorboard" / name, patient=patient)
        self._append(file_version="brain.Event:2")
        # TensorBoard hides earlier events of this step and of later ones.
        self._append(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(step=step, summary=Summary(value=shown))

    def images(self, images: Mapping[str, Tensor], step: int) -> None:
        from torch.utils.tensorboard.summary import image

        for caption, pixels in images.items():
            summary = image(f"validation/{caption}", pixels, dataformats="NCHW")  # type: ignore[no-untyped-call]
            self._append(step=step, summary=summary)

    def close(self, *, failed: bool, patience_s: float) -> None:
        self._file.close()

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())


_OPENED = itertools.count()
"""Numbers of this process's event files: two of the same second have the same name otherwise."""


class _Wandb:
    """A wandb run named after the run folder, with its files there.

    wandb accepts each step once: after a resume it keeps the first values of repeated steps.
    """

    def __init__(self, state: TrainState) -> None:
        import wandb

        self._wandb: Any = wandb
        if state.config.output.failed_saves:
            logging.raiseExceptions = False  # a full disk fails wandb's own log, with a traceback for every line
        options = {
            "project": state.config.output.project,
            "name": state.folder.name,
            "dir": str(state.folder),
            "id": _wandb_id(state),
            "resume": "allow",
            "config": sanitize.tree(as_json(state.config)),
            "settings": wandb.Settings(init_timeout=INIT_S, finish_timeout=FINISH_S),
        }
        try:
            self._run: Any = self._begin(options)
        except wandb.errors.Error as error:
            said = sanitize.message(" ".join(str(error).split()))
            raise ConfigError(
                f"wandb refuses the run: {said}; log in with `wandb login`, set WANDB_MODE=offline, or "
                "leave it out of --output.report_to"
            ) from None

    def _begin(self, options: dict[str, Any]) -> Any:
        try:
            return self._wandb.init(**options)
        except self._wandb.errors.CommError as error:
            if not _UNANSWERED.search(str(error)):  # the server has answered and refuses
                raise
        log.warning(
            f"wandb's server does not answer within {INIT_S:g} s; the run is recorded in "
            f"{options['dir']}/wandb, from where `wandb sync` uploads it"
        )
        self._wandb.teardown()  # otherwise the failed run would still be active
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


def _wandb_id(state: TrainState) -> str:
    """Return the wandb id of the run; create it for a new folder."""
    path = state.folder / WANDB_ID
    known = path.read_text().strip() if path.exists() else ""
    if not known:
        known = secrets.token_hex(8)
        state.files.write(path, known.encode())
    return known
