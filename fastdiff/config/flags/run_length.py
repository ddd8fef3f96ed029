"""``--steps`` and ``--epochs``: the length of a run in other units than ``--samples``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fastdiff.config.argument_types import Parser, count, finite
from fastdiff.config.flags.data_set import INFO_FILE, read_description
from fastdiff.config.presets import encode_command
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError, require
from fastdiff.sanitize import address, is_address


def add_run_length(parser: argparse.ArgumentParser) -> None:
    """Register ``--steps`` and ``--epochs``."""
    parser.add_argument("--steps", type=count, metavar="N", help="length of the run in optimizer steps")
    parser.add_argument("--epochs", type=_epochs, metavar="N", help="length of the run in passes over its data set")


def samples_flag(
    steps: int | None, epochs: float | None, flags: Sequence[str], default: RunConfig, preset: str | None
) -> list[str]:
    """Return the ``--samples`` flag that equals ``--steps`` or ``--epochs``; nothing without either of them.

    Args:
        steps: as given.
        epochs: as given, whole or not; rounded to whole steps, at least one.
        flags: the flags of the fields, which may change the batch and the data set.
        default: the run before them.
        preset: name of the preset, for the command that makes its data set.

    Raises:
        ConfigError: the length is given twice, or the size of the data set is unknown.
    """
    if steps is None and epochs is None:
        return []
    fields, _ = _field_parser().parse_known_args(list(flags))
    given = {"--samples": fields.samples, "--steps": steps, "--epochs": epochs}
    names = [name for name, value in given.items() if value is not None]
    require(len(names) <= 1, f"{' and '.join(names)}: each is the length of the run; give one of them")
    batch = fields.batch or default.batch.samples
    if epochs is not None:
        require(
            not (fields.online or default.data.online),
            f"--epochs {epochs:g}: the number of images is not known before --data.online has listed them; use --steps",
        )
        path = default.data.path if fields.path is None else fields.path
        steps = max(1, round(epochs * _images(path, epochs, preset) / batch))
    return ["--samples", str((steps or 1) * batch)]


def _images(path: str, epochs: float, preset: str | None) -> int:
    """Return the size of a data set; only its own file is read."""
    require(
        bool(path) and not is_address(path),
        f"--epochs {epochs:g}: the size of {address(path) or 'no --data.path'} is not known here; use --steps",
    )
    try:
        samples = read_description(path)["samples"]
        if type(samples) is int and samples > 0:
            return samples
        problem = f"its {INFO_FILE} has no number of samples"
    except FileNotFoundError:
        problem = f"it has no {INFO_FILE}; make the data set with `{encode_command(preset, path)}`"
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"its {INFO_FILE} cannot be read ({error})"
    raise ConfigError(f"--epochs {epochs:g}: the size of {path} is unknown, {problem}, or use --steps")


def _field_parser() -> argparse.ArgumentParser:
    """Return a parser of the fields that the length depends on; tyro parses them again, with all others."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--samples")
    parser.add_argument("--batch.samples", dest="batch", type=count)
    parser.add_argument("--data.path", dest="path")
    parser.add_argument("--data.online", dest="online", action="store_true")
    return parser


def _epochs(text: str) -> float:
    number = finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number
