"""Console output of a process: one logger, and filters for third-party noise.

``log`` is for messages during a run. It writes to standard error with the time, the level and, with several ranks, the
rank, and does not break a progress bar; a terminal gets wrapped lines. Commands print their results plainly on standard
output (``show``). The error that ends a command is printed by ``errors.report``.
"""

import enum
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from fastdiff import sanitize, verbosity
from fastdiff.live_line import live_line
from fastdiff.terminal import columns, fitted, redraws

_NAME = "fastdiff"


def write_line(text: str) -> None:
    """Write a line, without credentials, to standard error, above the bar of this process if it shows one."""
    live_line.write_above(sanitize.message(text))


def note(text: str) -> None:
    """Write a line that is no warning: not with ``--quiet``."""
    if not verbosity.is_quiet():
        write_line(text)


class Colour(enum.IntEnum):
    """Colours of a terminal, by their numbers in escape sequences."""

    RED = 31
    GREEN = 32


def show(text: str, colour: Colour | None = None) -> None:
    """Print a result on standard output; on a terminal it is wrapped and, unless NO_COLOR is set, coloured."""
    text = fitted(text, columns(sys.stdout))
    if colour is not None and redraws(sys.stdout) and not os.environ.get("NO_COLOR"):
        text = f"\x1b[{colour}m{text}\x1b[0m"
    with live_line.hidden():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        record.rank = f" [rank {os.environ.get('RANK', '0')}]" if several else ""
        return super().format(record)


class _Once(logging.Filter):
    """Filter that drops repeated warnings, and library warnings on all ranks of a node except the first.

    A warning with the attribute ``repeats`` is never dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or getattr(record, "repeats", False):
            return True
        foreign = record.name.partition(".")[0] != _NAME
        if foreign and record.levelno < logging.ERROR and os.environ.get("LOCAL_RANK", "0") != "0":
            return False
        message = record.getMessage()
        new = message not in self.given
        self.given.add(message)
        return new


def _is_wanted(record: logging.LogRecord) -> bool:
    """Return whether a message is as important as the user asked for."""
    least = logging.DEBUG if verbosity.is_verbose() else logging.WARNING if verbosity.is_quiet() else logging.INFO
    return record.levelno >= least


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for what DeepSpeed says on every start: its accelerator, and that it has not tried the optimizer.

    The first line of a run names the device; the tests of fastdiff try its optimizers with every stage.
    """
    told = record.funcName not in ("get_accelerator", "_do_optimizer_sanity_check")
    return told and not record.getMessage().startswith("Setting ds_accelerator")


once = _Once()
"""The filter that remembers given warnings; public for tests, which have several runs in one process."""
_handler = _Handler()
_handler.setFormatter(_Formatter("%(asctime)s%(rank)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
_handler.addFilter(_is_wanted)
_handler.addFilter(once)
log = logging.getLogger(_NAME)
"""Logger for all messages during a run."""
log.setLevel(logging.DEBUG)  # the handler leaves out what is not wanted
log.propagate = False
log.addHandler(_handler)
logging.getLogger("DeepSpeed").addFilter(_is_news)  # before DeepSpeed is imported


_LEVELS = {
    "DeepSpeed": logging.WARNING,  # dozens of lines about its settings; run.json holds those that matter
    "bitsandbytes": logging.ERROR,  # 4-bit inference kernels for CPUs, which are not used here
    # Kernels and formats that are not used here.
    "torchao": logging.ERROR,
    "torch.utils._pytree": logging.ERROR,
    "diffusers.quantizers": logging.ERROR,
}
"""Least level of what libraries may say, by their loggers."""


def quieten() -> None:
    """Silence third-party warnings that users cannot act on, unless ``--verbose`` asks for them, and log the rest.

    Call it after all imports, because DeepSpeed gives its logger a handler and a level on import; and again after the
    flags are parsed.
    """
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.handlers.clear()
    deepspeed.propagate = True
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(logging.NOTSET if verbosity.is_verbose() else level)
    if verbosity.is_verbose():
        logging.getLogger().setLevel(logging.INFO)
    else:
        # torch.distributed warns about names that DeepSpeed still calls, once per step.
        warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
        # In diffusers the multistep solver passes a tensor to numpy.
        warnings.filterwarnings("ignore", message=".*__array__ implementation.*", category=DeprecationWarning)
    if _handler not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_handler)
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{message} ({category.__name__} of {filename}:{lineno})"


@contextmanager
def without_prints() -> Iterator[None]:
    """Drop Python prints to standard output, for libraries that print on every rank."""
    with redirect_stdout(io.StringIO()):
        yield
