"""``--steps`` and ``--epochs``: the length of a run in other units than ``--samples``."""

import argparse
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import NamedTuple

from fastdiff.config.arguments.types import LARGEST, Parser, count, positive
from fastdiff.config.command_line.data_set import INFO_FILE, named_sets, read_description
from fastdiff.config.data_sets import DataSet, members_of, samples_per_epoch
from fastdiff.config.presets import encode_command
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.errors import ConfigError, FastdiffError, require
from fastdiff.sanitize import address, is_address

_COUNT = "fastdiff.data.images.sources:count_images"
"""Counts the images of a source; imported for this alone, because it stands on the configuration."""
_COLUMNS = ("image_column", "caption_column", "dataset_config")
"""Fields that it takes."""
OF_LENGTH = ("path", "sets", "max_samples", *_COLUMNS)
"""Fields of the data that decide the length of an epoch, beside ``online``."""


def add_run_length(parser: argparse.ArgumentParser) -> None:
    """Register ``--steps`` and ``--epochs``."""
    parser.add_argument("--steps", type=count, metavar="N", help="length of the run in optimizer steps")
    parser.add_argument("--epochs", type=positive, metavar="N", help="length of the run in passes over its data set")


def samples_flag(
    steps: int | None,
    epochs: float | None,
    flags: Sequence[str],
    batch: BatchConfig,
    data: DataConfig,
    preset: str | None,
    source: str = "",
) -> list[str]:
    """Return the ``--samples`` flag that equals ``--steps`` or ``--epochs``; nothing without either of them.

    Args:
        steps: as given.
        epochs: as given, whole or not; rounded to whole steps, at least one.
        flags: the flags of the fields, which may change the batch and the data set.
        batch: that of the run before them.
        data: that of the run before them.
        preset: name of the preset, for the command that makes its data set.
        source: origin of the length for messages, such as ``--config FILE``; empty: a flag.

    Raises:
        ConfigError: the length is given twice, or the size of the data set is unknown.
    """
    if steps is None and epochs is None:
        return []
    fields, _ = _field_parser().parse_known_args(list(flags))
    given = {"--samples": fields.samples, "--steps": steps, "--epochs": epochs}
    names = [name for name, value in given.items() if value is not None]
    called = f"{source}: {' and '.join(names).replace('--', '')}" if source else " and ".join(names)
    require(len(names) <= 1, f"{called}: each is the length of the run; give one of them")
    samples = fields.batch or max(1, batch.samples)  # a wrong one is refused later
    if epochs is not None:
        online = fields.online or data.online
        said = _Said(f"{source}: epochs {epochs:g}", "steps") if source else _Said(f"--epochs {epochs:g}", "--steps")
        entries = named_sets(data, fields.path, fields.sets)
        images = _listed(entries[0].path if entries else "", said, fields) if online else _images(entries, said, preset)
        require(epochs * images / samples <= LARGEST, f"{said.epochs}: more than {LARGEST} steps; give fewer")
        steps = max(1, round(epochs * images / samples))
    return ["--samples", str((steps or 1) * samples)]


def sets_samples(flags: Sequence[str]) -> bool:
    """Return whether ``--samples`` is among the flags."""
    return any(flag.partition("=")[0] == "--samples" for flag in flags)


class _Said(NamedTuple):
    """Names of a length in messages, as it was given."""

    epochs: str
    """With the number."""
    steps: str


def _images(entries: Sequence[DataSet], said: _Said, preset: str | None) -> int:
    """Return the samples of an epoch; only the descriptions of the data sets are read."""
    members = members_of(entries)
    paths = [member.path for member in members] or [""]
    sizes = [_samples_of(path, said, preset) for path in paths]
    return sum(samples_per_epoch(entries, members, sizes))


def _samples_of(path: str, said: _Said, preset: str | None) -> int:
    """Return the size of a data set; only its own file is read."""
    require(
        bool(path) and not is_address(path),
        f"{said.epochs}: the size of {address(path) or 'no --data.path'} is not known here; use {said.steps}",
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
    raise ConfigError(f"{said.epochs}: the size of {path} is unknown, {problem}, or use {said.steps}")


def _listed(path: str, said: _Said, fields: argparse.Namespace) -> int:
    """Return the number of images for online encoding, which are listed for it."""
    count_images = resolve_name(_COUNT)
    columns = {name: value for name, value in vars(fields).items() if name in _COLUMNS and value is not None}
    try:
        return min(int(count_images(path, **columns)), fields.max_samples or LARGEST)
    except FastdiffError as error:
        raise ConfigError(
            f"{said.epochs}: the images of {address(path)} cannot be counted ({error}); use {said.steps}"
        ) from None


def _field_parser() -> argparse.ArgumentParser:
    """Return a parser of the fields that the length depends on; tyro parses them again, with all others."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--samples")
    parser.add_argument("--batch.samples", dest="batch", type=count)
    parser.add_argument("--data.path", dest="path")
    parser.add_argument("--data.sets", dest="sets", nargs="*")
    parser.add_argument("--data.online", dest="online", action="store_true")
    parser.add_argument("--data.max_samples", "--data.max-samples", dest="max_samples", type=count)
    for name in _COLUMNS:
        parser.add_argument(f"--data.{name}", f"--data.{name.replace('_', '-')}", dest=name)
    return parser
