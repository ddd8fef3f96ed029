"""Conditions: the inputs of a network besides noisy latents and time, in one table. Imports no torch.

A network declares its conditions by these names (``ModelConfig.conditions``), and a text encoder names its arrays so.
Shards, loaders, objective, sampling and passes without data read here what a condition is; none of them follows from
another. A new condition is one row.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fastdiff.errors import ConfigError, require

StoredDtype = Literal["float16", "float32", "uint8", "bfloat16", "float8_e4m3fn", "int8"]
BITS: Mapping[str, str] = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
"""Dtypes of embeddings that numpy lacks: shards and numpy hold their bits as integers of this dtype."""
Source = Literal["caption", "class", "image", "encoder", "teacher", "reference", "step"]
Shape = tuple[int, ...]
Size = tuple[int, int]
_ROWS = 8


def time_ids(original_size: Size, crop: Size, size: Size) -> tuple[float, ...]:
    """Return SDXL's micro-conditioning (Podell et al. 2023, arXiv:2307.01952, section 2.2).

    A mirrored image keeps the crop of the original image; for a centred crop both differ by at most a pixel.

    Args:
        original_size: Height and width of the image in the file.
        crop: Top and left of the crop in the resized image.
        size: Height and width of the crop, which is the target size.

    Returns:
        Original height and width, crop top and left, target height and width, all in pixels.
    """
    return tuple(map(float, (*original_size, *crop, *size)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionKind:
    """A kind of condition."""

    shape: tuple[int | str, ...]
    """Shape of one sample. A name stands for a size; kinds with the same name have the same size."""
    dtype: Literal["floating", "float32", "int64", "int8", "bool"]
    """Dtype in a batch; ``floating``: float16, bfloat16 or float32, as encoded; ``int8``: float32, whole numbers in
    shards. Shards store bool as uint8."""
    source: Source
    """What gives it: each caption of a sample, by the text encoder; its class; its image; the autoencoder, in the pass
    that gives the latents; a teacher, in a pass of its own; the autoencoder, from the pictures that it refers to; the
    training step."""
    null: Literal["caption", "class"] | None = None
    """What replaces a dropped one: the text encoder's null (zeros, or the empty caption), the number of classes; None:
    it is never dropped."""
    mask_of: str = ""
    """Condition whose tokens this marks as valid; empty: it is no mask."""
    of_image: Callable[[Size, Size, Size], tuple[float, ...]] | None = None
    """Returns its values for the original size of an image, its crop, and the size of the crop (``time_ids``)."""


CONDITIONS: Mapping[str, ConditionKind] = {
    "label": ConditionKind(shape=(), dtype="int64", source="class", null="class"),
    # Embeddings of the tokens of a caption.
    "context": ConditionKind(shape=("tokens", "width"), dtype="floating", source="caption", null="caption"),
    # The tokens of ``context`` that belong to the caption, of encoders with captions of variable length.
    "context_mask": ConditionKind(shape=("tokens",), dtype="bool", source="caption", null="caption", mask_of="context"),
    # Embedding of the whole caption.
    "pooled": ConditionKind(shape=("pooled_width",), dtype="floating", source="caption", null="caption"),
    # Size and crop of the image.
    "time_ids": ConditionKind(shape=(6,), dtype="float32", source="image", of_image=time_ids),
    # Class token of the teacher whose features are the latents; of the mirrored image where the latents are mirrored.
    "teacher_token": ConditionKind(shape=("teacher_width",), dtype="floating", source="encoder"),
    # Reduced patch features of a teacher, with which those of the network are aligned; of the mirrored image where the
    # latents are mirrored.
    "teacher_features": ConditionKind(
        shape=("feature_width", "feature_rows", "feature_rows"), dtype="int8", source="teacher"
    ),
    # Normalised latents of the pictures that an edited one refers to, the means of their posteriors; mirrored with it.
    "reference": ConditionKind(
        shape=("references", "reference_channels", "reference_rows", "reference_columns"),
        dtype="floating",
        source="reference",
    ),
    # Small image to enlarge.
    "low_res": ConditionKind(shape=("channels", "low_res_size", "low_res_size"), dtype="float32", source="step"),
    # Uniform number of each token in [0, 1): a training pass keeps those of the lowest.
    "token_scores": ConditionKind(shape=("latent_tokens",), dtype="float32", source="step"),
    # Whether the sample has the output of the blocks that leave tokens out.
    "sparse_path": ConditionKind(shape=(), dtype="bool", source="step"),
    # Position of the sample in the run, the key of a dropout.
    "position": ConditionKind(shape=(), dtype="int64", source="step"),
}
"""Every kind by name, those of shards in the order of a tar."""


def stored_dtypes(name: str) -> tuple[StoredDtype, ...]:
    """Return the dtypes that a condition may have in shards."""
    match CONDITIONS[name].dtype:
        case "floating":
            return "float16", "float32", "bfloat16", "float8_e4m3fn"
        case "bool":
            return ("uint8",)
        case "int8":
            return ("int8",)
        case _:
            return ("float32",)


def stored_dtype(name: str, floating: StoredDtype) -> StoredDtype:
    """Return the dtype of a condition in shards whose embeddings are ``floating``."""
    possible = stored_dtypes(name)
    return floating if floating in possible else possible[0]


def of_source(source: Source, names: Iterable[str] = CONDITIONS) -> tuple[str, ...]:
    """Return the names whose conditions come from ``source``, in the order of the table."""
    wanted = set(names)
    return tuple(name for name, kind in CONDITIONS.items() if name in wanted and kind.source == source)


(REFERENCE,) = of_source("reference")
"""Latents of reference pictures."""
CAPTIONED = of_source("caption")
"""Conditions with one array per caption."""
OF_IMAGE = of_source("image")
"""Conditions that follow from the size of an image and its crop."""
OF_ENCODER = of_source("encoder")
"""Conditions that the autoencoder gives beside the latents."""
(FEATURES,) = of_source("teacher")
"""Patch features of a teacher."""
(TEACHER_TOKEN,) = OF_ENCODER
"""Class token of a teacher, given by an autoencoder whose latents are its features, or by the teacher itself. In the
data it is clean; the network gets the noisy one."""
MASK_OF = {kind.mask_of: name for name, kind in CONDITIONS.items() if kind.mask_of}
"""Mask of each condition that has one: a row that it excludes is zeros, in shards and in batches."""
MASKS = frozenset(MASK_OF.values())
"""The masks. Each marks a token or more: attention to none has no value."""


def image_conditions(
    names: Collection[str], original_size: Size, crop: Size, size: Size
) -> dict[str, tuple[float, ...]]:
    """Return those of the conditions that follow from an image; see ``time_ids`` for the arguments."""
    found = {name: CONDITIONS[name].of_image for name in of_source("image", names)}
    return {name: values(original_size, crop, size) for name, values in found.items() if values is not None}


def image_shape(name: str) -> Shape:
    """Return the shape of a condition that follows from an image."""
    return tuple(size for size in CONDITIONS[name].shape if isinstance(size, int))


def fixed_sizes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes without the number of tokens, which may differ between captions and networks."""
    return {
        name: tuple(size for size, symbol in zip(shape, CONDITIONS[name].shape, strict=True) if symbol != "tokens")
        for name, shape in shapes.items()
    }


def padded_tokens(longest: int | None, most: int) -> int:
    """Return the tokens that captions with masks have in a batch: a multiple of 8, as kernels prefer, up to ``most``.

    Args:
        longest: tokens of the longest caption of the data set; None: unknown.
        most: tokens that the encoder reads.
    """
    return most if longest is None else min(most, math.ceil(longest / _ROWS) * _ROWS)


def problem_of_shapes(shapes: Mapping[str, Shape]) -> str | None:
    """Return what contradicts the table, or None.

    Args:
        shapes: of one sample, by the name of the condition.
    """
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in CONDITIONS:
            return f"unknown condition {name!r}; expected {', '.join(CONDITIONS)}"
        kind = CONDITIONS[name]
        expected = f"{name} has the shape {list(shape)}, expected [{', '.join(map(str, kind.shape))}]"
        if len(shape) != len(kind.shape):
            return expected
        if kind.mask_of and kind.mask_of not in shapes:
            return f"{name} is the mask of {kind.mask_of}, which is missing"
        for size, symbol in zip(shape, kind.shape, strict=True):
            if isinstance(symbol, int) and size != symbol:
                return expected
            if isinstance(symbol, str) and size != (known := sizes.setdefault(symbol, size)):
                return f"{expected} with {known} {symbol}"
    return None


def require_shapes(shapes: Mapping[str, Shape], what: str) -> None:
    """Raise ConfigError if conditions that a network or an encoder, ``what``, declares contradict the table."""
    if problem := problem_of_shapes(shapes):
        raise ConfigError(f"{what} declares its conditions wrongly: {problem}")


def require_sources(names: Collection[str], what: str) -> None:
    """Raise ConfigError if no data set has all conditions of a network, ``what``."""
    classes, captions, images = (of_source(source, names) for source in ("class", "caption", "image"))
    both, alone = classes and captions, images and not captions
    require(not both, f"{what} takes {' and '.join((*classes, *captions))}; a data set has classes or captions")
    require(not alone, f"{what} takes {' and '.join(images)} without captions; only data sets with captions have it")
