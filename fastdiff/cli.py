"""The command lines: flags of ``train.py``, and the ``fastdiff`` command. The only file that knows argv."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import NoReturn

import tyro

from fastdiff import config_file, deepspeed_config
from fastdiff.config import RunConfig
from fastdiff.errors import ConfigError, DataError, FastdiffError, StorageError
from fastdiff.launch import Launch, as_json
from fastdiff.presets import PRESETS, preset
from fastdiff.quiet import quieten

_STORAGE_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
)


def parse(argv: Sequence[str]) -> tuple[Launch, RunConfig]:
    """Return what the command line of ``train.py`` asks for.

    A small pre-pass takes what the ``deepspeed`` launcher adds and what chooses the defaults; tyro takes the rest:
    preset < ``--config`` file < flags.

    Raises:
        ConfigError: unknown preset, unreadable file, inconsistent values.
        SystemExit: 0 after ``--help``, 2 after a wrong flag (tyro names the nearest one).
    """
    own, rest = _pre_parser().parse_known_args(list(argv))
    if own.preset is None and own.config is None and not {"-h", "--help"} & set(rest):
        raise ConfigError(f"--preset NAME (or --config FILE) is missing; presets: {', '.join(PRESETS)}")
    default = preset(own.preset) if own.preset else RunConfig()
    if own.config:
        default = config_file.overlay(default, own.config)
    config = tyro.cli(
        RunConfig,
        prog="deepspeed fastdiff/train.py",
        description=_pre_parser().format_help(),
        default=default,
        args=rest,
        config=(tyro.conf.AvoidSubcommands,),
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    if not config.output.folder:
        raise ConfigError("--output.folder is missing: a run without a preset needs a folder, for example runs/first")
    path = own.deepspeed_config or (own.deepspeed if isinstance(own.deepspeed, str) else None)
    raw = deepspeed_config.read(path) if path else deepspeed_config.DEFAULT
    launch = Launch(
        deepspeed=raw,
        resume=own.resume,
        allow_change=tuple(own.allow_change),
        dry_run=own.dry_run,
        argv=tuple(argv),
    )
    return launch, config


def print_dry_run(config: RunConfig, ds_config: deepspeed_config.DsConfig) -> None:
    """Print the resolved configuration and the DeepSpeed JSON as one JSON object, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"config": as_json(config), "deepspeed": ds_config}, indent=2))


def report(error: FastdiffError) -> int:
    """Print ``error`` as one message, on one rank if all have it, and return its exit code."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not error.everywhere:
        where = f" (rank {rank})" if os.environ.get("WORLD_SIZE", "1") != "1" and not error.everywhere else ""
        print(f"fastdiff: error{where}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def as_storage_error(error: OSError) -> StorageError:
    """Return a file system's error as ours; raise anything else (a lost connection, a dead process) again."""
    if error.errno not in _STORAGE_ERRNOS:
        raise error
    return StorageError(f"{error.filename or 'storage'}: {error.strerror}")


def entry() -> None:
    """Run the ``fastdiff`` command."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run the ``fastdiff`` command with ``argv`` and return its exit code."""
    quieten()
    arguments = _parser().parse_args(list(argv))
    run: Callable[[argparse.Namespace], None] = arguments.run
    try:
        run(arguments)
    except FastdiffError as error:
        return report(error)
    except OSError as error:
        return report(as_storage_error(error))
    return 0


class _QuietParser(argparse.ArgumentParser):
    """Raises instead of printing, because every rank parses and one should speak."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _pre_parser() -> argparse.ArgumentParser:
    parser = _QuietParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON with fields of the run, or a run.json")
    parser.add_argument("--deepspeed_config", metavar="JSON", help="DeepSpeed configuration; default: ZeRO-1")
    parser.add_argument(
        "--resume",
        choices=("auto", "must", "never"),
        default="auto",
        help="continue the run in the folder: if there is one, only if there is one, or refuse to",
    )
    parser.add_argument(
        "--allow-change",
        metavar="KEY",
        action="append",
        default=[],
        help="accept that this field differs from the run that is continued",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--deepspeed", nargs="?", const=True, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdiff", description="Train diffusion models from sharded latents.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    encode = commands.add_parser("encode", help="write latent shards")
    encode.add_argument("source", choices=("digits", "synthetic"), help="digits: scikit-learn's 1,797 real scans")
    encode.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not hold a data set yet")
    encode.add_argument("--shape", type=_shape, default=(4, 32, 32), metavar="C,H,W", help="synthetic: latent shape")
    encode.add_argument("--samples", type=_count, default=10_000, help="synthetic: number of samples")
    encode.add_argument("--classes", type=_count, default=1000, help="synthetic: number of classes")
    encode.set_defaults(run=_encode)

    verify = commands.add_parser("verify", help="check every byte of latent shards")
    verify.add_argument("folder", type=Path, metavar="OUT")
    verify.set_defaults(run=_verify)

    sample = commands.add_parser("sample", help="draw images from a run")
    sample.add_argument("folder", type=Path, metavar="RUN", help="run folder; its newest checkpoint is used")
    sample.add_argument("--scheduler", default="ddim", help="ddim, dpmsolver++ or ddpm")
    sample.add_argument("--steps", type=_count, default=50, help="denoising steps")
    sample.add_argument("--cfg", type=float, default=1.5, help="classifier-free guidance scale; 1: none")
    sample.add_argument("--classes", type=_classes, default=None, metavar="0-9", help="classes, as 0-9 or 1,5,7")
    sample.add_argument("--per-class", type=_count, default=8, help="images per class")
    sample.add_argument("--ema", type=float, default=None, metavar="RATE", help="which average; default: the first")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--grid", type=Path, default=Path("grid.png"), metavar="PNG", help="picture to write")
    sample.set_defaults(run=_sample)

    evaluate = commands.add_parser("evaluate", help="measure the images of a run against the real ones")
    evaluate.add_argument("folder", type=Path, metavar="RUN")
    evaluate.set_defaults(run=_evaluate)

    doctor = commands.add_parser("doctor", help="what this machine has, what is wrong and how to mend it")
    doctor.add_argument("--preset", metavar="NAME", help="also list which kernels and attention this run would use")
    doctor.set_defaults(run=_doctor)
    return parser


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: expected C,H,W, for example 4,32,32")
    channels, height, width = map(int, parts)
    return channels, height, width


def _classes(text: str) -> list[int]:
    classes: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal() or int(high or low) < int(low):
            raise argparse.ArgumentTypeError(f"{text}: expected classes as 0-9 or 1,5,7")
        classes += range(int(low), int(high or low) + 1)
    return classes


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _encode(arguments: argparse.Namespace) -> None:
    from fastdiff.data.encode import encode_digits, encode_synthetic

    if arguments.source == "digits":
        encode_digits(arguments.out)
    else:
        encode_synthetic(arguments.out, arguments.shape, arguments.samples, classes=arguments.classes)


def _verify(arguments: argparse.Namespace) -> None:
    from fastdiff.data.verify import verify

    found = verify(arguments.folder)
    if not found.ok:
        raise DataError(str(found))
    print(found)


def _sample(arguments: argparse.Namespace) -> None:
    from fastdiff.trained import TrainedRun

    run = TrainedRun(arguments.folder, ema=arguments.ema)
    run.draw_grid(
        arguments.grid,
        classes=arguments.classes,
        per_class=arguments.per_class,
        scheduler=arguments.scheduler,
        steps=arguments.steps,
        cfg=arguments.cfg,
        seed=arguments.seed,
    )
    print(f"{arguments.grid}: {run.description}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from fastdiff.trained import TrainedRun

    result = TrainedRun(arguments.folder).evaluate()
    print(json.dumps(result))


def _doctor(arguments: argparse.Namespace) -> None:
    from fastdiff.doctor import examine, explain

    hint = ["kernels and attention: `fastdiff doctor --preset NAME` lists what each layer would use"]
    explained = list(explain(arguments.preset)) if arguments.preset else hint  # refuses before anything is said
    for line in chain(examine(), explained):
        print(line)
