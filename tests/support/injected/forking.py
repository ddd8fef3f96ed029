"""A script or module whose processes of Python are forks: ``forking.py FOLDER SCRIPT ARGUMENTS...``, or ``-m MODULE``.

They have imported everything, so that a rank starts in a second. A fork has the command line, variables, descriptors,
folder and session that its command is given, and runs at its end what it has registered. An error before its first
line, such as a missing folder, ends the fork and raises nothing in its parent. Other programs are started as ever.
FOLDER gets a file per fork, its process id, with its start time and its rank.
"""

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import process, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from fastdiff import exit_message
from fastdiff.exit_message import started_s

FOLDER = "FORKS"
"""Environment variable: the folder."""
_execv = os.execv


class _Exec(BaseException):
    def __init__(self, path: str, words: Sequence[str]) -> None:
        super().__init__()
        self.words = list(words)


class Forking(subprocess.Popen[bytes]):
    """A fork instead of a new interpreter; another program is started as ever."""

    def _execute_child(
        self, args: Sequence[str], executable: str | None, preexec: Any, close: bool, pass_fds: Sequence[int],
        cwd: str | None, env: Mapping[str, str], info: Any, flags: int, shell: bool, p2cread: int, p2cwrite: int,
        c2pread: int, c2pwrite: int, errread: int, errwrite: int, *more: Any,
    ) -> None:  # fmt: skip
        if args[0] != sys.executable:
            given = (args, executable, preexec, close, pass_fds, cwd, env, info, flags, shell)
            super()._execute_child(*given, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more)  # type: ignore[misc]
            return
        assert (executable, preexec, close, shell) == (None, None, True, False), "a fork does not know these options"
        # Until it has dropped the parent's handlers a fork would take a signal and forget it; a new program has none.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if not self.pid:
            session, environment = more[5], os.environ if env is None else env
            _live(args, environment, cwd, session, pass_fds, (p2cread, c2pwrite, errwrite), mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _live(
    words: Sequence[str], env: Mapping[str, str], cwd: str | None, session: bool, kept: Sequence[int],
    streams: Sequence[int], mask: set[signal.Signals],
) -> NoReturn:  # fmt: skip
    """Run a command of Python from its start to its end; no exception reaches the code of the parent."""
    code = 1
    try:
        if session:
            os.setsid()
        _become(words, dict(env), kept, streams)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if cwd is not None:
            os.chdir(cwd)
        code = _run(list(words))
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        util._exit_function()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the command, or by its reader
                stream.flush()
        os._exit(code)


def _become(words: Sequence[str], env: dict[str, str], kept: Sequence[int], streams: Sequence[int]) -> None:
    """Drop the files, signals, children and exit functions of the parent; take over the variables."""
    atexit._clear()  # what the parent removes at its end
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # atexit has just forgotten it
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    note = f"{started_s(os.getpid())} {env.get('RANK', '')}"
    place = Path(os.environ[FOLDER]) / str(os.getpid())
    place.with_suffix(".new").write_text(note)
    place.with_suffix(".new").replace(place)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for stream, descriptor in enumerate(streams):
        if descriptor != -1:
            os.dup2(descriptor, stream)
    first = 3
    for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(first, descriptor)
        first = descriptor + 1
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(stream, "w", 1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(env)
    _show(words, env)
    # Computed on the import of the module, from the parent of the process.
    exit_message._LAUNCHER = f"{os.getppid()}-{started_s(os.getppid())}"
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]


def _show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write the command line and the variables to where the kernel reads those of a process, as far as they fit."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    first = {name: environment[name] for name in ("RANK", FOLDER) if name in environment}
    variables = [f"{name}={value}" for name, value in (first | dict(environment)).items()]
    for texts, begin, end in ((words, *map(int, places[:2])), (variables, *map(int, places[2:]))):
        content = b"".join(os.fsencode(f"{text}\0") for text in texts)
        ctypes.memmove(begin, content[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _exec(path: str, words: Sequence[str]) -> NoReturn:
    raise _Exec(path, words)


def _run(words: list[str]) -> int:
    """Run what a command of Python names, and then what that execs; return the exit code."""
    os.execv = _exec
    while words[0] == sys.executable:
        place = next(place for place, word in enumerate(words) if place and word not in ("-I", "-u"))
        kind, sys.argv = words[place], words[place + (words[place] == "-m") :]
        try:
            sys.modules.pop("sitecustomize", None)
            with contextlib.suppress(ImportError):
                import sitecustomize  # noqa: F401
            if kind == "-c":
                exec(sys.argv.pop(1), {"__name__": "__main__"})
            else:
                (runpy.run_module if kind == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
            return 0
        except _Exec as other:
            words = other.words
        except SystemExit as stopped:
            if stopped.code is None or isinstance(stopped.code, int):
                return stopped.code or 0
            sys.stderr.write(f"{stopped.code}\n")
            return 1
        except BaseException:
            traceback.print_exc()
            return 1
    _execv(words[0], words)


if __name__ == "__main__":
    os.setsid()
    os.environ[FOLDER] = sys.argv[1]
    for name in ("TORCH_EXTENSIONS_DIR", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    tempfile.tempdir = None  # that of this environment
    subprocess.Popen = Forking  # type: ignore[misc]
    command = [sys.executable, *sys.argv[2:]]
    _show(command, os.environ)
    sys.exit(_run(command))
