"""The keys of kohya's configurations of data sets: where each stands, its default, and what becomes of it.

Facts of https://github.com/kohya-ss/sd-scripts, ``docs/config_README-en.md`` and ``library/config_util.py``. A key may
stand in ``[general]``, in ``[[datasets]]`` and in ``[[datasets.subsets]]``; the innermost one counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

GENERAL, DATASET, SUBSET = "[general]", "[[datasets]]", "[[datasets.subsets]]"
_EVERYWHERE = (GENERAL, DATASET, SUBSET)
_OF_DATASETS = (GENERAL, DATASET)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key and its meaning here."""

    default: Any
    """Of kohya's scripts; a key that has it changes nothing, and is never refused."""
    expected: str
    """Values that it takes, for messages."""
    valid: Callable[[Any], bool]
    places: tuple[str, ...] = _EVERYWHERE
    ours: str = ""
    """What becomes of it, for the documentation; empty: it is refused."""
    refused: str = ""
    """Why any value but the default is refused; empty: it is taken."""
    option: str = ""
    """Field of the options of an encode that counts where a configuration says nothing; empty: none."""


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    sides = [value, value] if type(value) is int else value
    return isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)


def _flag(**fields: Any) -> Key:
    return Key(**{"default": False, "expected": "true or false", "valid": _is_bool, **fields})


def _whole(default: int | None, **fields: Any) -> Key:
    return Key(default=default, expected="a whole number", valid=_is_whole, **fields)


def _number(default: float | None, **fields: Any) -> Key:
    return Key(default=default, expected="a number", valid=_is_number, **fields)


def _share(**fields: Any) -> Key:
    return Key(default=0.0, expected="a share from 0 to 1", valid=lambda v: _is_number(v) and 0 <= v <= 1, **fields)


def _text(default: str | None, **fields: Any) -> Key:
    return Key(default=default, expected="a text", valid=_is_text, **fields)


_ONCE = "pictures are encoded once; --data.online crops at random in every step"
_TEXTS = "captions are encoded once"
INTERPOLATIONS = {
    "lanczos": "lanczos", "nearest": "nearest", "bilinear": "bilinear", "linear": "bilinear", "bicubic": "bicubic",
    "cubic": "bicubic", "box": "box", "area": "box",
}  # fmt: skip
"""Filters of kohya's ``resize_interpolation``, and ours."""

KEYS: Mapping[str, Key] = {
    "resolution": Key(
        default=None,
        expected="a side in pixels, or [width, height]",
        valid=_is_size,
        places=_OF_DATASETS,
        ours="`--resolution`, one side: that of the square with the area of a rectangle, which needs `enable_bucket`",
        option="resolution",
    ),
    "batch_size": _whole(1, places=_OF_DATASETS, ours="`--batch.micro` of the training, named at the end"),
    "enable_bucket": _flag(places=_OF_DATASETS, ours="`--buckets`", option="buckets"),
    "bucket_reso_steps": _whole(64, places=_OF_DATASETS, ours="`--bucket-step`", option="bucket_step"),
    "min_bucket_reso": _whole(256, places=_OF_DATASETS, ours="`--bucket-sides`, rounded down to the step"),
    "max_bucket_reso": _whole(1024, places=_OF_DATASETS, ours="`--bucket-sides`, rounded up to the step"),
    "bucket_no_upscale": _flag(
        places=_OF_DATASETS,
        ours="nothing: pictures smaller than their bucket are enlarged and counted; kohya has one of their size",
    ),
    "network_multiplier": _number(1.0, places=_OF_DATASETS, refused="the network has one strength for all data"),
    "validation_seed": _whole(
        None, places=_OF_DATASETS, ours="nothing: it draws the pictures of `validation_split`"
    ),
    "validation_split": _number(
        0.0,
        places=_OF_DATASETS,
        refused="held-out pictures are a folder of their own, encoded alike and given as --validation.data",
    ),
    "resize_interpolation": Key(
        default=None,
        expected=f"one of {', '.join(INTERPOLATIONS)}",
        valid=lambda value: _is_text(value) and value in INTERPOLATIONS,
        ours="`--interpolation`; default lanczos, where kohya has area for smaller and lanczos for larger pictures",
        option="interpolation",
    ),
    "image_dir": _text(None, places=(SUBSET,), ours="the pictures directly in this folder"),
    "metadata_file": _text(
        None,
        places=(SUBSET,),
        ours="a file of metadata as SOURCE, with `image_dir` as `--image-root`",
    ),
    "conditioning_data_dir": _text(None, places=(SUBSET,), ours="`--masks FOLDER`: mask files of the masked loss"),
    "num_repeats": _whole(1, ours="repeats of the data set"),
    "is_reg": _flag(places=(SUBSET,), ours="a data set with as many samples per epoch as the others, see below"),
    "class_tokens": _text(None, ours="`--caption`", option="caption"),
    "caption_extension": _text(".caption", ours="`--caption-extension`", option="caption_extension"),
    "caption_prefix": _text(None, ours="`--caption-prefix`", option="caption_prefix"),
    "caption_suffix": _text(None, ours="`--caption-suffix`", option="caption_suffix"),
    "flip_aug": _flag(ours="`--flip`; train with `--data.random-flip`", option="flip"),
    "alpha_mask": _flag(places=(SUBSET,), ours="`--masks alpha`"),
    "cache_info": _flag(ours="nothing: sizes and captions are read once anyway"),
    "shuffle_caption": _flag(ours="`--shuffle-tags K`, with the K of the command, or 10"),
    "keep_tokens": _whole(0, ours="`--keep-tokens`, with shuffled tags", option="keep_tokens"),
    "caption_dropout_rate": _share(ours="`condition_dropout` of the data set, which goes before that of the run"),
    "caption_tag_dropout_rate": _share(ours="`--drop-tags`, with shuffled tags", option="drop_tags"),
    "caption_separator": _text(",", ours="`--tag-separator`", option="tag_separator"),
    "keep_tokens_separator": _text(None, ours="`--keep-separator`", option="keep_separator"),
    "secondary_separator": _text(None, refused="a tag has no tags within it"),
    "enable_wildcard": _flag(refused="write out the captions, one in each line of a caption file, with --captions all"),
    "caption_dropout_every_n_epochs": _whole(0, refused=f"{_TEXTS}; use caption_dropout_rate"),
    "token_warmup_min": _whole(1, ours="nothing: it belongs to `token_warmup_step`"),
    "token_warmup_step": _number(0, refused=f"{_TEXTS}, whatever the step"),
    "color_aug": _flag(refused="pictures are encoded once, in their own colours"),
    "random_crop": _flag(refused=_ONCE),
    "face_crop_aug_range": Key(
        default=None,
        expected="[smallest, largest]",
        valid=lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)),
        refused=_ONCE,
    ),
    "custom_attributes": Key(
        default=None,
        expected="a table",
        valid=lambda value: isinstance(value, dict),
        refused="it is for strategies of a script of one's own",
    ),
}  # fmt: skip


def keys_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that options of an encode stand for."""
    found = {name: options[key.option] for name, key in KEYS.items() if key.option in options}
    sides = dict(zip(("min_bucket_reso", "max_bucket_reso"), options.get("bucket_sides") or (), strict=False))
    return found | sides
