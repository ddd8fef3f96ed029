"""Terminals of a given width, what a program writes to them, and what a user sees there."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from tests.support.processes import BIN, ROOT, Finished

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_ERASE = "\x1b[K"


class Terminal:
    """A terminal of some columns."""

    def __init__(self, columns: int = 80) -> None:
        self._ours, self.descriptor = pty.openpty()
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> str:
        """Return what was written since the last call; what a terminal takes without a reader is 4 kB."""
        os.write(self.descriptor, b"\0")
        found = b""
        while not found.endswith(b"\0"):
            found += os.read(self._ours, 65536)
        return found[:-1].decode()

    def read_to_end(self) -> str:
        """Close the terminal here, and return what programs write until all of them have closed it."""
        os.close(self.descriptor)
        self.descriptor = -1
        found = b""
        try:
            while chunk := os.read(self._ours, 65536):
                found += chunk
        except OSError:  # nobody has it open
            pass
        return found.decode()

    def close(self) -> None:
        """Hang up."""
        os.close(self._ours)
        if self.descriptor >= 0:
            os.close(self.descriptor)


@contextmanager
def on_terminal(columns: int = 80) -> Iterator[Terminal]:
    """Make standard output and standard error of this process a terminal."""
    with closing(Terminal(columns)) as terminal, open(terminal.descriptor, "w", buffering=1, closefd=False) as stream:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield terminal


def run_on_terminal(command: Sequence[str | Path], columns: int = 80, **environment: str) -> Finished:
    """Run a command on a terminal to its end; the output is all that it writes."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COLUMNS", "NO_COLOR")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"OMP_NUM_THREADS": "1", "TERM": "xterm", "PATH": f"{BIN}:{env['PATH']}", **environment}
    with closing(Terminal(columns)) as terminal:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=env, stdin=terminal.descriptor,
            stdout=terminal.descriptor, stderr=terminal.descriptor, start_new_session=True,
        )  # fmt: skip
        output = terminal.read_to_end()
        return Finished(process.wait(), output)


def frames(written: str) -> list[str]:
    """Return every state of the lines that a program drew over, and the lines that it left, without colours."""
    return [part for part in re.split(r"\r\n|\r|\n", _STYLE.sub("", written).replace(_ERASE, "")) if part]


def seen(written: str) -> list[str]:
    """Return the lines that stand on the screen at the end."""
    lines = []
    for line in _STYLE.sub("", written).replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            kept = "" if part.startswith(_ERASE) else shown[len(part) :]
            shown = part.removeprefix(_ERASE) + kept
        lines.append(shown)
    return lines
