"""The data sets that folders or a configuration of kohya's sd-scripts stand for, each with its options of an encode.

In the layout of folders, a folder holds one subfolder ``N_name`` for each data set: N repeats, and the name is the
caption of pictures without a caption file. Regularisation pictures are in another folder of this layout. An epoch of
kohya's holds as many of them as of the others, whatever their repeats (``DreamBoothDataset`` in
``library/train_util.py`` of https://github.com/kohya-ss/sd-scripts). It imports no torch.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.config.data_sets import ListedSet
from fastdiff.data.images.kinds import head_of, kind_of_file
from fastdiff.data.images.metadata import METADATA
from fastdiff.data.images.walk import is_folder, visible, walk_files
from fastdiff.data.kohya.dataset_config import DatasetConfig, Refusal, Subset
from fastdiff.data.kohya.keys import INTERPOLATIONS
from fastdiff.errors import ConfigError
from fastdiff.sanitize import escape

_NAME = re.compile(r"([0-9]{1,6})(?:_(.*))?", re.DOTALL)
VARIANTS = 10
"""Variants of a caption whose tags kohya shuffles in every step, unless the command says how many: as many as an epoch
has uses of a picture in the folders ``10_name`` of kohya's guides."""


NO_UPSCALE = (
    "pictures smaller than their bucket are enlarged, and `fastdiff encode` counts them: take them out, or give a "
    "smaller resolution; kohya makes a bucket of their own size"
)
"""What becomes of kohya's ``bucket_no_upscale``."""


@dataclass(frozen=True, slots=True)
class Part:
    """A data set to encode."""

    source: str
    """Folder of its pictures."""
    listed: ListedSet
    """Its folder in OUT, its repeats and whether it is regularisation."""
    options: Mapping[str, Any]
    """Options of the encode in place of those of the command."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The data sets of a source."""

    parts: tuple[Part, ...]
    told: tuple[str, ...] = ()
    """What to say of them: what is left out, and what the training must be told."""


def is_layout(folder: Path) -> bool:
    """Return whether a folder has kohya's layout: pictures in subfolders ``N_name`` alone, and no table of captions."""
    if not folder.is_dir():
        return False
    entries = visible(folder)
    with_pictures = [entry.name for entry in entries if is_folder(entry) and _holds_pictures(Path(entry.path))]
    alone = any(
        not is_folder(entry) and (entry.name in METADATA or _is_picture(folder, entry.name)) for entry in entries
    )
    named = all((match := _NAME.fullmatch(name)) and match[2] is not None for name in with_pictures)
    return bool(with_pictures) and not alone and named


def parts_of_folders(folder: Path, regularisation: Path | None, loss_weight: float) -> Parts:
    """Return the data sets of folders in kohya's layout.

    Args:
        folder: of the subfolders ``N_name``.
        regularisation: of those of the regularisation pictures; None: there are none.
        loss_weight: factor of the loss of these.

    Raises:
        ConfigError: a folder holds no such subfolder.
        StorageError: a folder cannot be read.
    """
    told: list[str] = []
    found = [*_in_layout(folder, told)]
    others = [*_in_layout(regularisation, told)] if regularisation is not None else []
    names = _Names()
    return Parts(
        tuple(
            Part(
                str(path),
                ListedSet(
                    folder=names.unique(f"{'reg_' if is_reg else ''}{path.name}"),
                    repeats=repeats,
                    loss_weight=loss_weight if is_reg else 1.0,
                    regularisation=is_reg,
                ),
                {"caption": caption, "caption_from": "none", "directly": True},
            )
            for is_reg, folders in ((False, found), (True, others))
            for path, repeats, caption in folders
        ),
        tuple(told),
    )


def _in_layout(folder: Path, told: list[str]) -> Iterator[tuple[Path, int, str]]:
    """Yield the subfolders with their repeats and captions; tell of others."""
    count = 0
    for entry in sorted(visible(folder), key=lambda entry: entry.name):
        if not is_folder(entry):
            if _is_picture(folder, entry.name):
                told.append(f"left out: {escape(entry.path)}: beside the folders N_name")
            continue
        match = _NAME.fullmatch(entry.name)
        if match is None or int(match[1]) < 1:
            told.append(f"left out: {escape(entry.path)}: no repeats in its name, expected N_name")
        elif not _holds_pictures(Path(entry.path), directly=True):
            below = ", but in subfolders, which kohya does not read" if _holds_pictures(Path(entry.path)) else ""
            told.append(f"left out: {escape(entry.path)}: it holds no pictures{below}")
        else:
            count += 1
            yield Path(entry.path), int(match[1]), (match[2] or "").strip()
    if not count:
        raise ConfigError(f"{escape(str(folder))} holds no folder N_name with pictures, such as '10_sks dog'")


def parts_of_config(config: DatasetConfig, loss_weight: float, variants: int | None = None) -> Parts:
    """Return the data sets of a configuration.

    Args:
        config: without refusals.
        loss_weight: factor of the loss of regularisation pictures.
        variants: of captions whose tags are shuffled; None: ``VARIANTS``.

    Raises:
        ConfigError: a key is refused, with all such keys, or a folder is missing.
    """
    refusals = [*config.refusals, *(each for subset in config.subsets for each in refusals_of(subset))]
    refusals += _differing(config.subsets)
    if refusals:
        lines = "\n  ".join(dict.fromkeys(map(str, refusals)))
        raise ConfigError(f"what has no counterpart here in the data sets of kohya:\n  {lines}")
    names = _Names()
    parts = []
    drops = any(subset["caption_dropout_rate"] for subset in config.subsets)  # otherwise the run decides
    for subset in config.subsets:
        if not os.path.isdir(subset.folder):
            raise ConfigError(f"image_dir {escape(subset.folder)}: no such folder")
        if not os.path.exists(subset.source):
            raise ConfigError(f"metadata_file {escape(subset.source)}: no such file")
        is_reg = bool(subset["is_reg"])
        listed = ListedSet(
            folder=names.unique(f"{'reg_' if is_reg else ''}{os.path.basename(os.path.normpath(subset.source))}"),
            repeats=subset["num_repeats"],
            loss_weight=loss_weight if is_reg else 1.0,
            condition_dropout=float(subset["caption_dropout_rate"]) if drops else None,
            regularisation=is_reg,
            group=subset.dataset,
        )
        parts.append(Part(subset.source, listed, options_of(subset, variants)))
    return Parts(tuple(parts), (*map("left out: {}".format, config.left_out), *_of_training(config.subsets, variants)))


def options_of(subset: Subset, variants: int | None = None) -> dict[str, Any]:
    """Return the options of an encode of a subset; those of tags only if tags are shuffled, as kohya has them."""
    shuffled, buckets = subset["shuffle_caption"], subset["enable_bucket"]
    mark = subset["keep_tokens_separator"] or ""
    listed = subset["metadata_file"] is not None
    found = {
        "image_root": subset.folder if listed else "",
        "directly": not listed,
        "caption": subset["class_tokens"] or "",
        "caption_from": "none",
        "caption_extension": "" if listed else subset["caption_extension"],
        "caption_prefix": subset["caption_prefix"] or "",
        "caption_suffix": subset["caption_suffix"] or "",
        "flip": subset["flip_aug"],
        "masks": subset["conditioning_data_dir"] or ("alpha" if subset["alpha_mask"] else ""),
        "buckets": buckets,
        "bucket_step": subset["bucket_reso_steps"] if buckets else None,
        "bucket_sides": (subset["min_bucket_reso"], subset["max_bucket_reso"]) if buckets else None,
        "shuffle_tags": (variants or VARIANTS) if shuffled else None,
        "drop_tags": float(subset["caption_tag_dropout_rate"]) if shuffled else 0.0,
        "keep_tokens": subset["keep_tokens"] if shuffled and not mark else 0,
        "keep_separator": mark if shuffled else "",
        "tag_separator": subset["caption_separator"] if shuffled else ",",
    }
    if subset["resolution"] is not None:
        found["resolution"] = side_of(subset["resolution"])
    if subset["resize_interpolation"] is not None:
        found["interpolation"] = INTERPOLATIONS.get(subset["resize_interpolation"], subset["resize_interpolation"])
    return found


def side_of(resolution: int | Sequence[int]) -> int:
    """Return the side of the smallest square with at least this area, which is all that kohya's buckets need of it."""
    if isinstance(resolution, int):
        return resolution
    area = resolution[0] * resolution[1]
    return math.isqrt(area - 1) + 1


def refusals_of(subset: Subset) -> Iterator[Refusal]:
    """Yield the values of a subset that have no counterpart for what its other keys say."""
    place, resolution = escape(subset.folder), subset["resolution"]
    if isinstance(resolution, list) and resolution[0] != resolution[1] and not subset["enable_bucket"]:
        reason = f"without enable_bucket pictures are squares here; add it, or give one side, such as {min(resolution)}"
        yield Refusal("resolution", place, resolution, reason)
    mark = subset["caption_separator"]
    if subset["metadata_file"] is not None and mark != ",":
        yield Refusal("caption_separator", place, mark, "tags of a metadata_file follow its caption behind a comma")
    if subset["caption_tag_dropout_rate"] and not subset["shuffle_caption"]:
        value = subset["caption_tag_dropout_rate"]
        yield Refusal("caption_tag_dropout_rate", place, value, "tags are dropped of shuffled captions alone")


def _differing(subsets: Sequence[Subset]) -> Iterator[Refusal]:
    """Yield what the training has once, where the subsets differ in it."""
    sizes = sorted({subset["batch_size"] for subset in subsets})
    if len(sizes) > 1:
        yield Refusal("batch_size", "[[datasets]]", sizes, "a run has one for all data sets; give all the same")


def _of_training(subsets: Sequence[Subset], variants: int | None) -> Iterator[str]:
    first = subsets[0]
    if any(subset["flip_aug"] for subset in subsets):
        yield "flip_aug: train with --data.random-flip"
    if any(subset["bucket_no_upscale"] for subset in subsets):
        yield f"bucket_no_upscale: {NO_UPSCALE}"
    if first["batch_size"] != 1:
        yield f"batch_size: train with --batch.micro {first['batch_size']}"
    if variants is None and any(subset["shuffle_caption"] for subset in subsets):
        yield f"shuffle_caption: {VARIANTS} variants of each caption are encoded; --shuffle-tags K encodes K"


class _Names:
    """Names of folders in OUT, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unique(self, text: str) -> str:
        """Return a name for a folder, of letters, digits, blanks, dots, dashes and underscores."""
        name = re.sub(r"[^\w .-]", "_", text).strip(" .") or "data"
        number = 1
        while (found := name if number == 1 else f"{name}-{number}") in self._taken:
            number += 1
        self._taken.add(found)
        return found


def _holds_pictures(folder: Path, *, directly: bool = False) -> bool:
    files = (each.name for each in visible(folder) if not is_folder(each)) if directly else walk_files(folder)
    return any(_is_picture(folder, file) for file in files)


def _is_picture(folder: Path, file: str) -> bool:
    kind = kind_of_file(file, lambda: head_of(os.path.join(folder, file)))
    return kind is not None and kind.taken
