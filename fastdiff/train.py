"""Train a diffusion model: ``deepspeed fastdiff/train.py --preset digits``. The same command again resumes.

This is the process of a rank: arguments, signals, exit codes. ``training.loop`` has the training.
"""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    # Until the run is built: imports and networks leave hardly any garbage, and the search for it takes a sixth of the
    # start.
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # until `listening`: nothing to save, and no traceback of an import
    # A script has its own folder first on the path, where packages would shadow modules of the same name.
    _own = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != _own]
    from fastdiff import errors, process_limits
    from fastdiff.standard_streams import lossy_output
    from fastdiff.starting import starting

    try:
        process_limits.try_threads()  # before imports that would end the process without a word of ours
    except RuntimeError as error:
        sys.exit(errors.report_any(error))
    with lossy_output():
        starting.begin("importing torch")

import time
import traceback
from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from fastdiff.cluster.preflight.single_node import check_files, check_if_requested
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.command_line import train_flags
from fastdiff.config.presets.departures import departure
from fastdiff.console import log, quieten, write_line
from fastdiff.errors import FastdiffError, is_lost_connection, report
from fastdiff.exit_message import say_once
from fastdiff.files import raise_open_files
from fastdiff.ledger.records import STARTED, process_began
from fastdiff.live_line import live_line
from fastdiff.parallel.determinism import reserve_workspaces
from fastdiff.parallel.preemption import INTERRUPTED, INTERRUPTED_LINE, StopRequest, listening
from fastdiff.parallel.world import start_world, stop_world, world_size
from fastdiff.standard_streams import lossy_output
from fastdiff.starting import starting
from fastdiff.training import failure
from fastdiff.training.loop import train

_GRACE_S = 10.0
"""Seconds for a launcher to find the rank that ended first, and to end the ranks that lost the connection to it."""


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code.

    It is 0, 2, 65, 70, 71, 74 or 75 (see ``errors.py``), 1 after a bug, or 130 after a second Ctrl-C.
    """
    quieten()
    with lossy_output():
        stop = StopRequest()
        try:
            os.environ.setdefault(STARTED, str(process_began()))  # the supervisor, if there is one, began before
            with listening(stop):
                return _start(argv, stop)
        except (Exception, KeyboardInterrupt) as error:
            return _report(error, stop)


def _start(argv: Sequence[str], stop: StopRequest) -> int:
    raise_open_files()
    live_line.clear()  # help and wrong flags are printed by the parsers
    launch, config = train_flags.parse(argv)
    if launch.dry_run:
        starting.give_up()
        train_flags.print_dry_run(config, deepspeed_config.resolve(launch.deepspeed, config, world_size()))
        return 0
    config.batch.require_divisible(world_size())
    starting.enter("checking the data")
    check_files(config, launch)
    reserve_workspaces(config.performance.deterministic)
    # The hang detection must act first: it knows more than a collective that timed out.
    starting.enter("meeting the other ranks" if world_size() > 1 else "opening the device")
    world = start_world(2 * launch.hang_timeout_s, config.performance.device)
    starting.enter("checking data and disk")
    check_if_requested(config, world)
    if world.is_first and (told := departure(config, launch.preset)):
        log.info(told)
    train(config, launch, world, stop, built=gc.enable if __name__ == "__main__" else None)
    stop_world()
    return 0


def _report(error: Exception | KeyboardInterrupt, stop: StopRequest) -> int:
    """Print one message for all ranks of the job, with the traceback of a bug, and return its exit code."""
    starting.give_up()
    if isinstance(error, KeyboardInterrupt):
        return say_once(INTERRUPTED, partial(write_line, INTERRUPTED_LINE))
    failure.note(error)
    error = failure.explained(error)
    if isinstance(error, FastdiffError):
        return report(error)
    code = say_once(1, partial(_say, error))
    if is_lost_connection(str(error)) and stop.reason is None and _has_others():
        # Another rank ended and cut the connection. The launcher must find that one first: its exit code is that of the
        # run.
        sys.stderr.flush()
        time.sleep(_GRACE_S)
    return code


def _has_others() -> bool:
    """Return whether a launcher speaks of other ranks, also where its variables cannot be."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _say(error: Exception) -> None:
    if is_lost_connection(str(error)):
        log.error(
            "lost the connection to another rank, which was killed (out of memory?) or is on another node, where its "
            "message is: %s",
            " ".join(str(error).split()),
        )
    else:
        write_line("".join(traceback.format_exception(error)).rstrip())


class _Callable(ModuleType):
    """This module, which has the name of the function ``fastdiff.train`` and hides it once it is imported."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return resolve_name("fastdiff.api.training:train")(*arguments, **options)


if __name__ != "__main__":
    sys.modules[__name__].__class__ = _Callable


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code and _has_others():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal exit would wait for other ranks, or abort in the process group
    sys.exit(code)
