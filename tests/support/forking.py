"""Runs a command line of Python in this process, and forks each process of Python that it or they start.

For commands that start others, as DeepSpeed's launcher: a process that starts anew imports for up to eight seconds, a
forked one has imported everything. Parents, command lines, environments, signals and exit codes are the real ones.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

FORKING = Path(__file__)
_ARG_START, _ARG_END = 48, 49
"""Fields of ``/proc/PID/stat``, counted from 1: the place of the command line in memory."""
_START = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class _Popen(subprocess.Popen[Any]):
    """Forks if the command is this Python."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [args] if isinstance(args, str) else [os.fspath(word) for word in args]
        if words[0] != sys.executable:
            _START(self, args, *rest)
            return
        _, _, _, passed, cwd, environment, _, _, _, *pipes = rest[:15]
        new_session = rest[-2]
        streams = (pipes[0], pipes[3], pipes[5])
        _flush()
        self.pid = os.fork()
        if self.pid == 0:
            _end_as_python_does(lambda: _become(words, environment, cwd, passed, streams, new_session))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _become(
    words: Sequence[str],
    environment: dict[str, str] | None,
    cwd: str | None,
    passed: Sequence[int],
    streams: Sequence[int],
    new_session: bool,
) -> None:
    """Turn this copy of its parent into a process that has just been started, and run the command line."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if new_session:
        os.setsid()
    for stream, descriptor in enumerate(streams):
        if descriptor != -1:
            os.dup2(descriptor, stream)
    for descriptor in passed:
        os.set_inheritable(descriptor, True)
    if cwd is not None:
        os.chdir(cwd)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    _run(words)


def _run(words: Sequence[str]) -> None:
    """Run a command line of Python."""
    _name(words)
    number = next(n for n, word in enumerate(words) if n and word not in ("-u", "-I"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="-u" in words[:number] or "PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    _begin_as_python_does()
    if words[number] == "-m":
        sys.argv = list(words[number + 1 :])
        runpy.run_module(words[number + 1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words[number:])
        sys.path.insert(0, str(Path(words[number]).parent))
        runpy.run_path(words[number], run_name="__main__")


def _name(words: Sequence[str]) -> None:
    """Give the process this command line, as far as there is room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[n - 3]) for n in (_ARG_START, _ARG_END))
    line = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _begin_as_python_does() -> None:
    """Look for modules along PYTHONPATH, run ``sitecustomize``, and compute what a module computes on its import."""
    from fastdiff import exit_message

    exit_message._LAUNCHER = f"{os.getppid()}-{exit_message.started_s(os.getppid())}"
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    tempfile.tempdir = None  # that of TMPDIR
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        import_module("sitecustomize")


def _end_as_python_does(run: Callable[[], None]) -> NoReturn:
    """Run, and end the process with the exit code of Python."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _exec(_: str, words: Sequence[str]) -> NoReturn:
    """Run this Python without starting it anew."""
    assert words[0] == sys.executable
    _end_as_python_does(lambda: _run(words))


if __name__ == "__main__":
    os.setsid()
    subprocess.Popen = _Popen  # type: ignore[misc]
    os.execv = _exec  # type: ignore[assignment]
    _run(sys.argv[1:])
