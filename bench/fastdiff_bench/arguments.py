"""Flags shared by several benchmarks."""

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from fastdiff.errors import ConfigError
from fastdiff.parallel.devices import usable_gpus
from fastdiff_bench import BenchError
from fastdiff_bench.records import record, record_warnings

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--smoke`` and ``--out``."""
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is a GPU")
    add_output(parser, "smallest sizes, few repetitions", "<machine>/<date>_<what>")


def add_output(parser: argparse.ArgumentParser, smoke: str, out: str) -> None:
    """Add ``--smoke`` and ``--out``; the arguments say how little a smoke run does, and where records go by default."""
    parser.add_argument("--smoke", action="store_true", help=f"{smoke}: does everything run?")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"folder of the record; default: bench/results/{out}"
    )


def add_cases(parser: argparse.ArgumentParser, cases: Iterable[str]) -> None:
    """Add the cases to measure, as arguments without a name."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(cases)}; default: all")


def cases(arguments: argparse.Namespace, known: Iterable[str]) -> list[str]:
    """Return the cases to measure; BenchError if one is unknown."""
    known = list(known)
    if unknown := [name for name in arguments.cases if name not in known]:
        raise BenchError(f"no such case: {', '.join(unknown)}; expected some of: {', '.join(known)}")
    return list(dict.fromkeys(arguments.cases)) or known


def device(arguments: argparse.Namespace) -> str:
    """Return the device, ``cuda`` or ``cpu``.

    Raises:
        BenchError: cuda is requested and not available, or a GPU is present that torch cannot use.
    """
    try:
        gpus = usable_gpus("cpu" if arguments.device == "cpu" else "auto")
    except ConfigError as error:
        raise BenchError(str(error)) from None
    if arguments.device == "cuda" and not gpus:
        raise BenchError("--device cuda: there is no CUDA device to measure on; use --device cpu to try the harness")
    return "cuda" if gpus else "cpu"


def open_log(
    arguments: argparse.Namespace, command: str, what: str | None = None, place: str | None = None
) -> record.Log:
    """Open a new record ``<command>.jsonl`` in the folder of ``--out``, or in ``<place>/<date>_<what>`` of the results.

    Existing records and their pictures stay: the second record of a folder is ``<command>-2.jsonl``, and so on.
    Concurrent processes get different files.
    """
    what = what or command
    folder = arguments.out or record.folder(f"{what}-smoke" if arguments.smoke else what, place)
    names = itertools.chain([command], (f"{command}-{number}" for number in itertools.count(2)))
    folder.mkdir(parents=True, exist_ok=True)
    path = next(path for name in names if _created(path := folder / f"{name}.jsonl"))
    return _ToldLog(path, smoke=arguments.smoke)


class _ToldLog(record.Log):
    """A record whose path and reservations are printed once it is complete."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        if kind is None:
            print(
                "\n".join([f"record: {self.path}", *record_warnings.of_terminal(self.fingerprint, self.measurements)])
            )


def _created(path: Path) -> bool:
    """Create a file unless it, or a picture of its name, exists."""
    if path.with_suffix(".png").exists():
        return False
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
