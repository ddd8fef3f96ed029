"""A process that dies before its n-th call that makes something durable or visible, or removes it."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

DURABLE: dict[str, Callable[..., Any]] = {"os.fsync": os.fsync, "pathlib.Path.replace": Path.replace}
REMOVING: dict[str, Callable[..., Any]] = {"os.unlink": os.unlink}


@contextmanager
def dying_at(number: int, calls: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Kill this process before the call with this number among ``calls``, counted from 1."""
    counted = itertools.count(1)

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    with ExitStack() as stack:
        for name, real in calls.items():
            stack.enter_context(mock.patch(name, dying(real)))
        yield
