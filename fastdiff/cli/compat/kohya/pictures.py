"""The pictures of a run of sd-scripts, which one `fastdiff encode` takes as they are: folders, TOML or metadata."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.cli.compat.translation import absolute
from fastdiff.data.kohya.dataset_config import DatasetConfig, Subset, read_dataset_config
from fastdiff.data.kohya.keys import INTERPOLATIONS, KEYS
from fastdiff.data.kohya.parts import Part, options_of, parts_of_config, parts_of_folders, refusals_of, side_of
from fastdiff.errors import ConfigError, require

_FLAGS = {"batch_size": "train_batch_size", "num_repeats": "dataset_repeats"}
"""Flags whose name is not that of their key."""
_DEFAULTS = {name: key.default for name, key in KEYS.items()}
_FILTER = "resize_interpolation"
_OF_PARTS = ("directly", "caption", "caption_from", "image_root")
"""Options that follow from a folder."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """What the script reads."""

    source: str
    """A folder of folders, a configuration or a file of metadata, by its path from the root."""
    words: tuple[str, ...]
    """Of the encode, besides the source, the folder to write and the pipeline."""
    subsets: tuple[Subset, ...]
    """The values of each data set; of folders, those that all have."""
    parts: tuple[Part, ...]
    """The data sets."""
    told: tuple[str, ...] = ()
    """What is left out, and what is not the same."""

    @property
    def micro(self) -> int:
        """Pictures per process and forward pass."""
        return int(self.subsets[0]["batch_size"])

    @property
    def mirrored(self) -> bool:
        """Whether half of the uses of some pictures are mirrored."""
        return self._any("flip_aug")

    @property
    def bucketed(self) -> bool:
        """Whether some pictures have aspect-ratio buckets."""
        return self._any("enable_bucket")

    @property
    def filtered(self) -> bool:
        """Whether the filter of the resizing is named for all."""
        return all(subset[_FILTER] for subset in self.subsets)

    @property
    def shuffled(self) -> bool:
        """Whether tags of some captions are shuffled."""
        return self._any("shuffle_caption")

    @property
    def dropped(self) -> bool:
        """Whether some captions are dropped."""
        return self._any("caption_dropout_rate")

    def _any(self, key: str) -> bool:
        return any(subset[key] for subset in self.subsets)


def pictures_of(flags: argparse.Namespace) -> Pictures:
    """Return the pictures that a command line names.

    Raises:
        ConfigError: none are named, a folder or a file is not here, or a flag or a key has no counterpart.
    """
    if flags.dataset_config:
        return _configured(flags)
    require(
        bool(flags.train_data_dir), "neither --dataset_config nor --train_data_dir is given; one names the pictures"
    )
    require(flags.resolution is not None, "--resolution is missing; their script needs it too")
    return _listed(flags) if flags.in_json else _in_folders(flags)


def _configured(flags: argparse.Namespace) -> Pictures:
    path = absolute("--dataset_config", str(flags.dataset_config))
    given = _keys(flags)
    config = _read(path, given)
    _require_in_file(path, config.subsets, _read(path, {}).subsets)
    sides = [subset["resolution"] for subset in config.subsets]
    require(None not in sides, f"--dataset_config {path}: resolution is missing; their script needs it too")
    weight = _prior_loss_weight(flags)
    found = parts_of_config(config, weight)
    reg = any(subset["is_reg"] for subset in config.subsets)
    words = (*_words_beside(given), *(["--prior-loss-weight", f"{weight:g}"] if reg else []))
    return Pictures(path, words, config.subsets, found.parts, tuple(_told(flags, path, config)))


def _require_in_file(path: str, subsets: Sequence[Subset], alone: Sequence[Subset]) -> None:
    """Refuse flags that no option of an encode stands for; ``alone``: what the file says without any."""
    for key in ("shuffle_caption", "alpha_mask", "num_repeats", "caption_dropout_rate"):
        values, without = ([subset[key] for subset in each] for each in (subsets, alone))
        of_run = key == "caption_dropout_rate" and len({*values}) == 1
        require(
            values == without or of_run,
            f"--{_FLAGS.get(key, key)} beside --dataset_config: write {key} into {path} ({KEYS[key].places[0]})",
        )


def _told(flags: argparse.Namespace, path: str, config: DatasetConfig) -> Iterator[str]:
    yield from (f"left out: {text}" for text in config.left_out)
    for name in ("train_data_dir", "reg_data_dir", "in_json"):
        if getattr(flags, name):
            yield f"--{name} is not used beside --dataset_config, in theirs neither"
    relative = [subset.folder for subset in config.subsets if not Path(subset.folder).is_absolute()]
    if relative:
        yield f"{relative[0]}, named by {path}, is in the folder of this command: encode there"
    if not flags.masked_loss and any(subset["conditioning_data_dir"] for subset in config.subsets):
        yield "conditioning_data_dir masks the loss; theirs refuses it without --masked_loss"


def _read(path: str, given: Mapping[str, Any]) -> DatasetConfig:
    try:
        return read_dataset_config(Path(path), given)
    except ConfigError as error:
        raise ConfigError(f"--dataset_config {error}") from None


def _listed(flags: argparse.Namespace) -> Pictures:
    folder, file = absolute("--train_data_dir", flags.train_data_dir), absolute("--in_json", flags.in_json)
    require(Path(file).is_file(), f"--in_json {file}: no such file here; translate it where it is")
    subset = _subset(flags, image_dir=folder, metadata_file=file)
    found = parts_of_config(DatasetConfig((subset,), (), ()), 1.0)
    unread = [f"--reg_data_dir {flags.reg_data_dir} is not used beside --in_json, in theirs neither"]
    words = ("--image-root", folder, *_words(subset))
    return Pictures(file, words, (subset,), found.parts, tuple(unread if flags.reg_data_dir else []))


def _in_folders(flags: argparse.Namespace) -> Pictures:
    train = _folder("train_data_dir", flags)
    regularisation = _folder("reg_data_dir", flags) if flags.reg_data_dir else None
    subset = _subset(flags, image_dir=str(train))
    found = parts_of_folders(train, regularisation, _prior_loss_weight(flags))
    words = ["--layout", "kohya", *_words(subset)]
    if regularisation:
        words += ["--regularisation", str(regularisation), "--prior-loss-weight", f"{_prior_loss_weight(flags):g}"]
    return Pictures(str(train), tuple(words), (subset,), found.parts, found.told)


def _words(subset: Subset) -> list[str]:
    """Return the options of an encode of a subset as words, besides those that follow from its folder."""
    usual = options_of(Subset(0, _DEFAULTS)) | {"caption_extension": ""}
    named = {name: value for name, value in options_of(subset).items() if value != usual.get(name)}
    return [word for name, value in named.items() if name not in _OF_PARTS for word in _option(name, value)]


def _words_beside(keys: Mapping[str, Any]) -> list[str]:
    """Return the options of an encode that count where a configuration says nothing."""
    named = {KEYS[key].option: value for key, value in keys.items() if KEYS[key].option}
    named |= {"resolution": side_of(keys["resolution"])} if "resolution" in keys else {}
    named |= {"interpolation": INTERPOLATIONS[keys[_FILTER]]} if _FILTER in keys else {}
    sides = [f"{end}_bucket_reso" for end in ("min", "max")]
    if any(key in keys for key in sides):
        named["bucket_sides"] = [keys.get(key, KEYS[key].default) for key in sides]
    return [word for name, value in named.items() for word in _option(name, value)]


def _option(name: str, value: Any) -> list[str]:
    """Return an option of an encode as words; none for the value of an option that is not given."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False or value in ("", 0):
        return []
    several = isinstance(value, tuple | list)
    return [flag] if value is True else [flag, *map(str, value if several else [value])]


def _folder(name: str, flags: argparse.Namespace) -> Path:
    path = Path(absolute(f"--{name}", getattr(flags, name)))
    if not path.is_dir():
        raise ConfigError(
            f"--{name} {path} is not here, and the names of its folders are part of the run; translate it there"
        )
    return path


def _prior_loss_weight(flags: argparse.Namespace) -> float:
    return float(getattr(flags, "prior_loss_weight", 1.0))  # sdxl_train.py has no such flag


def _keys(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that are keys of a configuration, too, and have another value than its default, by those."""
    named = {name: getattr(flags, _FLAGS.get(name, name), None) for name in KEYS}
    named["resolution"] = _size(flags.resolution)
    # The misspelt flag of older versions goes before the other one.
    named["caption_extension"] = flags.caption_extention or flags.caption_extension
    return {name: value for name, value in named.items() if value not in (None, "", KEYS[name].default)}


def _subset(flags: argparse.Namespace, **own: str) -> Subset:
    """Return the values of the flags; ConfigError: those that have no counterpart."""
    subset = Subset(0, _DEFAULTS | _keys(flags) | own)
    refused = [f"--{_FLAGS.get(each.key, each.key)} {each.value}: {each.reason}" for each in refusals_of(subset)]
    require(not refused, "\n  ".join(refused))
    return subset


def _size(text: str | None) -> int | list[int] | None:
    """Return the size of ``--resolution``: a side, or width and height."""
    if text is None:
        return None
    parts = str(text).split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(parts) > 2:
        raise ConfigError(f"--resolution {text}: expected a side, or width,height")
    sides = [int(part) for part in parts]
    return sides[0] if len(set(sides)) == 1 else sides
