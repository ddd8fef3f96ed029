"""Ranks of ``fastdiff encode`` in processes that have imported everything, so that a kill hits the encode."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdiff.cli.main import main
from tests.support.injected.durable_calls import DURABLE, dying_at

CALLS = 16
"""Calls of one partition that make something durable or visible."""
TIMEOUT_S = 120


def begin(context: Any, command: list[str], out: Path, count: int) -> list[Any]:
    """Start so many ranks of a command without OUT."""
    return _started(context, [(rank_main, ([*command, str(out)], rank, count)) for rank in range(count)])


def killed(context: Any, command: list[str], out: Path, numbers: Sequence[int]) -> list[int]:
    """Run a rank for each number, which dies before its call of that number among ``DURABLE``; return the codes."""
    ranks = [(killed_main, ([*command, str(out)], number, rank, len(numbers))) for rank, number in enumerate(numbers)]
    return finish(_started(context, ranks))


def finish(processes: list[Any]) -> list[int]:
    """Wait for ranks and return their exit codes."""
    for process in processes:
        process.join(TIMEOUT_S)
        process.kill()
    return [process.exitcode for process in processes]


def rank_main(argv: list[str], rank: int, ranks: int) -> None:
    """Be a rank of ``fastdiff``."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    sys.exit(main(argv))


def killed_main(argv: list[str], number: int, rank: int = 0, ranks: int = 1) -> None:
    """Encode until the call number ``number`` that makes something durable or visible, and die before it."""
    with dying_at(number, DURABLE):
        rank_main(argv, rank, ranks)


def _started(context: Any, ranks: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    processes = [context.Process(target=target, args=arguments, daemon=True) for target, arguments in ranks]
    for process in processes:
        process.start()
    return processes
