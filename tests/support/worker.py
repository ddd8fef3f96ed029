"""A worker of pytest-xdist that is a fork of the server, where all is imported: the workers share that memory.

xdist starts this file as if it were Python. It waits for the fork, which has its streams and its environment.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.forked import Stream


def serve(requests: Stream, code: str) -> None:
    """Run the code that xdist has for a worker."""
    requests.take()
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
    try:
        exec(code, {})
    finally:
        atexit._run_exitfuncs()


def start(code: str) -> int:
    """Run the code in a fork, and return its exit code."""
    from tests.support.forked import Stream, fork_server

    process = fork_server().Process(target=serve, args=(Stream(0), code))
    process.start()
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.worker import start

    raise SystemExit(start(sys.argv[-1]))
