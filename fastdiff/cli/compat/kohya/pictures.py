"""The pictures of a run of sd-scripts: folders ``N_name``, or a configuration of data sets; each is encoded once."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.cli.compat.translation import absolute
from fastdiff.data.kohya.dataset_config import read_dataset_config
from fastdiff.data.kohya.keys import INTERPOLATIONS, KEYS
from fastdiff.errors import ConfigError, require

_FLAGS = {"batch_size": "train_batch_size", "num_repeats": "dataset_repeats"}
"""Flags whose name is not that of their key."""
_DRAWN = ("shuffle_caption", "caption_tag_dropout_rate")


@dataclass(frozen=True, slots=True)
class Pictures:
    """A folder of pictures."""

    values: Mapping[str, Any]
    """By the keys of a configuration."""

    @property
    def folder(self) -> str:
        """Its path from the root; without one that of its file of metadata."""
        named = self.values["image_dir"] or Path(str(self.values["metadata_file"])).parent
        return absolute("--train_data_dir", str(named))

    @property
    def source(self) -> str:
        """What names the pictures: the file of metadata, or the folder."""
        file = self.values["metadata_file"]
        return self.folder if file is None else absolute("--dataset_config", str(file))

    @property
    def repeats(self) -> int:
        """How often an epoch holds each picture."""
        return int(self.values["num_repeats"])

    @property
    def regularisation(self) -> bool:
        """Whether they are regularisation pictures."""
        return bool(self.values["is_reg"])

    @property
    def mirrored(self) -> bool:
        """Whether half of the uses are mirrored."""
        return bool(self.values["flip_aug"])

    def encode(self, pipeline: str, shards: str, more: list[str]) -> list[str]:
        """Return the command that encodes them; ConfigError: a size that has no counterpart."""
        values = self.values
        words = ["fastdiff", "encode", self.source, shards, "--pretrained", pipeline]
        if self.source != self.folder:
            require(
                not self.source.lower().endswith(".jsonl"),
                f"--dataset_config: metadata_file {self.source}: expected .json; here a .jsonl has file_name and text "
                "in each line",
            )
            words += ["--image-root", self.folder]
        else:
            words += ["--caption-extension", str(values["caption_extension"])]
        words += ["--resolution", str(self._side())]
        if values["enable_bucket"]:
            sides = (str(values[f"{end}_bucket_reso"]) for end in ("min", "max"))
            words += ["--buckets", "--bucket-step", str(values["bucket_reso_steps"]), "--bucket-sides", *sides]
        words += ["--flip"] if self.mirrored else []
        words += _given("--interpolation", INTERPOLATIONS.get(str(values["resize_interpolation"])))
        words += _given("--caption", values["class_tokens"])
        words += _given("--caption-prefix", values["caption_prefix"])
        words += _given("--caption-suffix", values["caption_suffix"])
        words += _given("--masks", values["conditioning_data_dir"] or ("alpha" if values["alpha_mask"] else None))
        return [*words, *self._variants(), *more]

    def _side(self) -> int:
        """Return the side of the square whose area the pictures have."""
        size = self.values["resolution"]
        require(size is not None, "--resolution is missing; their script needs it too")
        width, height = (size, size) if isinstance(size, int) else size
        side = math.isqrt(width * height)
        if width != height and not self.values["enable_bucket"]:
            raise ConfigError(
                f"--resolution {width},{height}: pictures without buckets are squares here; use --enable_bucket, with "
                f"which they have the area of that, or --resolution {side}"
            )
        return side

    def _variants(self) -> list[str]:
        values = self.values
        if not any(values[name] for name in _DRAWN):
            return []
        words = ["--shuffle-tags", str(_VARIANTS)] if values["shuffle_caption"] else []
        words += _given("--drop-tags", values["caption_tag_dropout_rate"] or None)
        if values["caption_separator"] != KEYS["caption_separator"].default:
            words += ["--tag-separator", str(values["caption_separator"])]
        if mark := values["keep_tokens_separator"]:
            return [*words, "--keep-separator", str(mark)]
        return [*words, *_given("--keep-tokens", values["keep_tokens"] or None)]


_VARIANTS = 8
"""Variants of a caption whose tags are shuffled; theirs shuffles in every epoch."""


def _given(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]


def pictures_of(flags: argparse.Namespace) -> tuple[tuple[Pictures, ...], tuple[str, ...]]:
    """Return the folders of pictures, and in words what is left out of them.

    Raises:
        ConfigError: none is named, a folder is not here, or a key of the configuration is refused.
    """
    if flags.dataset_config:
        return _configured(flags)
    require(
        bool(flags.train_data_dir), "neither --dataset_config nor --train_data_dir is given; one names the pictures"
    )
    if flags.in_json:
        own = {"image_dir": flags.train_data_dir, "metadata_file": flags.in_json}
        unread = [f"--reg_data_dir {flags.reg_data_dir} is not used beside --in_json, in theirs neither"]
        return (Pictures(_KNOWN | _given_keys(flags) | own),), tuple(unread if flags.reg_data_dir else [])
    found, left_out = _folders(flags, "train_data_dir", regularisation=False)
    if flags.reg_data_dir:
        more, others = _folders(flags, "reg_data_dir", regularisation=True)
        found, left_out = [*found, *more], [*left_out, *others]
    return tuple(found), tuple(left_out)


def _configured(flags: argparse.Namespace) -> tuple[tuple[Pictures, ...], tuple[str, ...]]:
    try:
        config = read_dataset_config(Path(flags.dataset_config), _keys(flags))
    except ConfigError as error:
        raise ConfigError(f"--dataset_config {error}") from None
    if config.refusals:
        raise ConfigError(f"--dataset_config {flags.dataset_config}: {'; '.join(map(str, config.refusals))}")
    found = tuple(Pictures(_KNOWN | dict(subset.values)) for subset in config.subsets)
    beside = [name for name in ("train_data_dir", "reg_data_dir") if getattr(flags, name)]
    ignored = [f"--{name} is not used beside --dataset_config, in theirs neither" for name in beside]
    return found, (*config.left_out, *ignored)


def _folders(flags: argparse.Namespace, name: str, *, regularisation: bool) -> tuple[list[Pictures], list[str]]:
    """Return the pictures in the folders ``N_name`` of a folder."""
    root = Path(absolute(f"--{name}", getattr(flags, name)))
    if not root.is_dir():
        raise ConfigError(
            f"--{name} {root} is not here, and the names of its folders are part of the run; translate it there"
        )
    found, left_out = [], []
    for folder in sorted(each for each in root.iterdir() if each.is_dir()):
        repeats, _, tokens = folder.name.partition("_")
        if not repeats.lstrip("+").isdecimal() or int(repeats) < 1:
            left_out.append(
                f"{folder}: its name does not begin with repeats, as 10_sks dog, so theirs leaves it out too"
            )
            continue
        own = {"image_dir": str(folder), "num_repeats": int(repeats), "is_reg": regularisation, "class_tokens": tokens}
        found.append(Pictures(_KNOWN | _given_keys(flags) | own))
    require(bool(found), f"--{name} {root}: no folder with repeats in its name, as 10_sks dog")
    return found, left_out


_KNOWN = {name: key.default for name, key in KEYS.items()}


def _keys(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that are keys of a configuration, too, by those."""
    named = {name: _FLAGS.get(name, name) for name in KEYS}
    found = {name: getattr(flags, flag) for name, flag in named.items() if getattr(flags, flag, "") != ""}
    found |= {"resolution": _size(flags.resolution), "alpha_mask": flags.alpha_mask}
    # The misspelt flag of older versions goes before the other one.
    return found | ({"caption_extension": old} if (old := flags.caption_extention) is not None else {})


def _given_keys(flags: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in _keys(flags).items() if value is not None}


def _size(text: str | None) -> int | list[int] | None:
    """Return the size of ``--resolution``: a side, or width and height."""
    if text is None:
        return None
    parts = str(text).split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(parts) > 2:
        raise ConfigError(f"--resolution {text}: expected a side, or width,height")
    sides = [int(part) for part in parts]
    return sides[0] if len(set(sides)) == 1 else sides
