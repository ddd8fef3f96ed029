"""Preemption: save at the next step and exit with 75; the same command resumes the run.

Schedulers announce a preemption by a signal to any process that they know: a rank, a launcher, a batch script. A
request to one rank stops all (``parallel/consensus.py``). Ctrl-C is such a request, too; a second one ends the process
at once.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from fastdiff.console import write_line
from fastdiff.errors import Preempted, report
from fastdiff.exit_message import NODE_FOLDER, say_once
from fastdiff.parallel.heartbeat import Heartbeat, note_failure

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C, as of a shell."""
_CTRL_C = "Ctrl-C"
INTERRUPTED_FILE = "interrupted"
"""File in the supervisor's folder: the SIGTERM to its ranks passes on a Ctrl-C."""
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_LAUNCHERS = (b"deepspeed", b"fastdiff", b"torchrun")
"""Words in the command line of a launcher; in a container it may be process 1."""
STOPPING_LINE = "fastdiff: Ctrl-C: saving this step; Ctrl-C again ends at once, without it"
INTERRUPTED_LINE = "fastdiff: interrupted, not saved; the same command resumes from the newest checkpoint"
NOTICE_S = 25.0
"""Shortest usual time of schedulers between the signal and the kill."""


class StopRequest:
    """A request to stop this process."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """The cause; None: no request yet."""
        self.answered = False
        """True once the run is saved."""
        self._heartbeat: Heartbeat | None = None
        self._lock = threading.Lock()

    def arm(self, heartbeat: Heartbeat) -> None:
        """Let requests wait for the next step from now on, while ``heartbeat`` beats: there is a state to save."""
        with self._lock:
            self._heartbeat = heartbeat

    def make(self, reason: str) -> None:
        """Ask to stop: at the next step, or at once if there is no state to save. Callable from any thread."""
        with self._lock:
            asked, self.reason = self.reason is not None, self.reason or reason
            if self._heartbeat is None:
                self._exit("before the first step")
        if not asked:
            threading.Thread(target=self._give_up, name="notice", daemon=True).start()

    def _give_up(self) -> None:
        """End a rank that waits for a lost one: NCCL collectives do not notice the loss."""
        while self._heartbeat is not None and not self.answered:
            left_s = self._heartbeat.at_s + NOTICE_S - time.monotonic()
            if left_s <= 0:
                note_failure(Preempted.exit_code, f"nothing moved for {NOTICE_S:.0f} s after {self.reason}")
                self._exit(f"in a step that does not end ({NOTICE_S:.0f} s)")
            time.sleep(left_s)

    def _exit(self, when: str) -> NoReturn:
        # The main thread may be in a collective with a lost rank, where it cannot raise.
        error = Preempted(f"{self.reason} {when}, nothing saved; the same command resumes the run", everywhere=False)
        os._exit(report(error))

    def end_now(self) -> NoReturn:
        """End this process without saving: the user asked twice."""
        os._exit(say_once(INTERRUPTED, partial(write_line, INTERRUPTED_LINE)))


@contextlib.contextmanager
def listening(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGUSR1, Ctrl-C and the end of the launcher into a request to stop; called in the main thread.

    A thread reads the signals from the wakeup descriptor, because Python's handlers do not run while the main thread
    waits in a collective. Without a launcher (RANK is not set) no parent is watched: a background command may outlive
    its shell. A signal that the process ignores since its start, as under ``nohup``, stays ignored.
    """
    request = request or StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _let_the_thread_see_it) for number in heeded}
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ended = threading.Event()
    threads = [threading.Thread(target=_take_signals, args=(reader, request), name="signals", daemon=True)]
    if "RANK" in os.environ:
        _set_parent_death_signal(signal.SIGTERM)
        links = (_launcher(), request, ended)
        threads.append(threading.Thread(target=_watch_launcher, args=links, name="launcher", daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield request
    finally:
        ended.set()
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            # Schedulers repeat the signal. It must not change the exit code of a process that is about to end.
            signal.signal(number, handler if request.reason is None else signal.SIG_IGN)
        os.close(writer)  # the thread reads the end of file
        for thread in threads:
            thread.join()
        os.close(reader)


def _let_the_thread_see_it(number: int, frame: object) -> None:
    """Do nothing: Python writes a signal to the wakeup descriptor only if it has a handler."""


def _take_signals(reader: int, request: StopRequest) -> None:
    interrupts = 0
    while numbers := os.read(reader, 16):
        for number in numbers:
            if number not in SIGNALS:
                continue
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                request.end_now()
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                write_line(STOPPING_LINE)
            request.make(_cause(number))


def _cause(number: int) -> str:
    """Return the name of a signal for messages: what the user did, also where a supervisor passed it on."""
    folder = os.environ.get(NODE_FOLDER)
    if number == signal.SIGINT or (folder and (Path(folder) / INTERRUPTED_FILE).exists()):
        return _CTRL_C
    return signal.Signals(number).name


def _set_parent_death_signal(number: int) -> None:
    """Ask the kernel for a signal when the parent process ends for any reason (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _launcher() -> list[tuple[int, int]]:
    """Return (process, its parent) of this process, and of its parent if that is DeepSpeed's launcher.

    The ``deepspeed`` command starts a second launcher, which starts the ranks, and forwards no signal to it.
    """
    links = [(os.getpid(), os.getppid())]
    if b"deepspeed.launcher.launch" in _command(os.getppid()):
        links.append((os.getppid(), _parent(os.getppid())))
    return links


def _watch_launcher(links: list[tuple[int, int]], request: StopRequest, ended: threading.Event) -> None:
    while not any(_lost(process, parent) for process, parent in links):
        if ended.wait(_POLL_S):
            return
    request.make("the launcher ended")


def _lost(process: int, parent: int) -> bool:
    """Report whether a process has lost its parent, even before the first look."""
    if parent == 1 and not any(word in _command(1) for word in _LAUNCHERS):
        return True
    return _parent(process) != parent


def _parent(process: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
