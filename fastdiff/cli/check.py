"""``fastdiff verify`` and ``fastdiff doctor``: is everything as it should be."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from fastdiff.config.argument_types import Subcommands
from fastdiff.config.presets import PRESETS
from fastdiff.errors import DataError, StorageError


def add(commands: Subcommands) -> None:
    """Register the commands."""
    verify = commands.add_parser("verify", help="check every byte of latent shards, or of a run's checkpoints")
    verify.add_argument("folder", type=Path, metavar="FOLDER", help="what `fastdiff encode` or a training run wrote")
    verify.set_defaults(run=_verify)

    doctor = commands.add_parser("doctor", help="what this machine has, what is wrong and how to mend it")
    doctor.add_argument(
        "--preset", metavar="NAME", help=f"also list which kernels and attention it would use: {', '.join(PRESETS)}"
    )
    doctor.set_defaults(run=_doctor)


def _verify(arguments: argparse.Namespace) -> None:
    from fastdiff.checkpoint.verify import is_run, verify_run
    from fastdiff.data.shards.verify import verify

    if is_run(arguments.folder):
        run = verify_run(arguments.folder)
        if not run.ok:
            raise StorageError(str(run))
        print(run)
        return
    found = verify(arguments.folder)
    if not found.ok:
        raise DataError(str(found))
    print(found)


def _doctor(arguments: argparse.Namespace) -> None:
    from fastdiff.cli.doctor import examine, explain

    hint = ["kernels and attention: `fastdiff doctor --preset NAME` lists what each layer would use"]
    explained = list(explain(arguments.preset)) if arguments.preset else hint  # refuses before anything is said
    for line in chain(examine(), explained):
        print(line)
