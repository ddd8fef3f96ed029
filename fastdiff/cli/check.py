"""``fastdiff verify`` and ``fastdiff doctor``: checks of data, checkpoints and the machine."""

import argparse

from fastdiff.config.arguments.types import Subcommands, local_path
from fastdiff.console import Colour, show
from fastdiff.errors import DataError, StorageError

_COLOURS = {"OK": Colour.GREEN, "PROBLEM:": Colour.RED}
"""Of the lines of ``fastdiff doctor``, by their first word."""


def add(commands: Subcommands) -> None:
    """Register the commands."""
    verify = commands.add_parser("verify", help="check every byte of latent shards, or of a run's checkpoints")
    verify.add_argument(
        "folder", type=local_path, metavar="FOLDER", help="output of `fastdiff encode` or of a training run"
    )
    verify.set_defaults(run=_verify)

    doctor = commands.add_parser("doctor", help="report this machine's software, devices and problems")
    doctor.add_argument(
        "--preset",
        metavar="NAME",
        help="also list the kernels and the attention that it would use; `fastdiff train --help` lists the presets",
    )
    doctor.set_defaults(run=_doctor)


def _verify(arguments: argparse.Namespace) -> None:
    from fastdiff.checkpoint.verify import is_run, verify_run
    from fastdiff.config.data_sets import is_list, read_list
    from fastdiff.data.shards.format import INFO_FILE
    from fastdiff.data.shards.verify import verify

    if is_run(arguments.folder):
        run = verify_run(arguments.folder)
        if not run.ok:
            raise StorageError(str(run))
        show(str(run))
        return
    if is_list(str(arguments.folder)):
        reports = [verify(arguments.folder / listed.folder) for listed in read_list(str(arguments.folder))]
        text = "\n".join(map(str, reports))
        if not all(report.ok for report in reports):
            raise DataError(text)
        show(text)
        return
    if not (arguments.folder / INFO_FILE).exists():
        raise DataError(
            f"{arguments.folder}: neither a run nor a complete data set (no run.json, no dataset.json); run "
            "`fastdiff encode` first, again if it was interrupted"
        )
    found = verify(arguments.folder)
    if not found.ok:
        raise DataError(str(found))
    show(str(found))


def _doctor(arguments: argparse.Namespace) -> None:
    from fastdiff.cli.machines.doctor import examine

    for line in examine(arguments.preset):
        show(line, _COLOURS.get(line.partition(" ")[0]))
