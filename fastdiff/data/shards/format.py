"""The format of a folder of latent shards: ``dataset.json`` and the names of the other files.

``dataset.json`` is written last, so a folder that has one is complete. Its ``sha256`` is the digest of the canonical
JSON of all its other fields. Each shard consists of ``train-000000.tar`` (plain WebDataset), ``train-000000.idx`` (the
index of DALI's ``wds2idx`` v1.2) and ``train-000000.index.json`` (our index: offset, length and crc32 of every
component, see ``index.py``).

Buckets are latent sizes, for images of several aspect ratios; all samples of a shard belong to one bucket. A sample may
have variants of an array: a flipped latent, and the embeddings of several captions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fastdiff.conditions import (
    BITS,
    CAPTIONED,
    FEATURES,
    MASK_OF,
    MASKS,
    OF_ENCODER,
    OF_IMAGE,
    REFERENCE,
    Shape,
    StoredDtype,
    image_shape,
    padded_tokens,
    problem_of_shapes,
    stored_dtype,
    stored_dtypes,
)
from fastdiff.config.data_sets import is_list
from fastdiff.data.selection import Selection
from fastdiff.errors import DataError, StorageError
from fastdiff.files import publish, read_bounded
from fastdiff.sanitize import escape

INFO_FILE = "dataset.json"
ENCODE_PLAN = "encode.json"
"""Beside it, if it was encoded from images: the options of the encode, by which the same command finds edits."""
LATENT, FLIPPED = "latent", "latent_flipped"
LATENT_LIMITS = "latent_limits"
"""Of latents in int8, see ``int8_latents.py``."""
LATENT_DTYPES: tuple[StoredDtype, ...] = ("float16", "bfloat16", "float32", "uint8", "int8")
LOSS_MASK = "loss_mask"
"""Weight of each latent position in the loss, float16 of 0 to 1; mirrored with the latent when it is read."""
COLUMNS = (LATENT, LATENT_LIMITS, *CAPTIONED, *OF_IMAGE, *OF_ENCODER, FEATURES, REFERENCE, LOSS_MASK)
"""All columns, in the order of the tar."""
ENCODED = (LATENT, LATENT_LIMITS, *OF_ENCODER, FEATURES, REFERENCE)
"""Columns that the autoencoder or a teacher gives; each has a variant for the mirrored image, if the latent has one."""

# Limits of the memory that an untrusted dataset.json can make a reader allocate; far above useful values.
MAX_INFO_BYTES = 2**27
MAX_SAMPLE_BYTES = 2**30
MAX_SHARD_SAMPLES = 2**20
MAX_VARIANTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """An npy component that every sample has."""

    dtype: StoredDtype
    """Latents have one of ``LATENT_DTYPES``: uint8 in pixel space, int8 with ``latent_limits``; masks are uint8."""
    shape: tuple[int, ...]

    @property
    def numpy(self) -> np.dtype[Any]:
        """Dtype of the npy component: that of the values, or integers with their bits (``conditions.BITS``)."""
        return np.dtype(BITS.get(self.dtype, self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the values of one sample, without the npy header."""
        return math.prod(self.shape) * self.numpy.itemsize

    @property
    def header(self) -> bytes:
        """The npy header (format 1.0) of one sample.

        It does not use ``numpy.save``, so that a data set has the same bytes with every version of numpy.
        """
        descr = self.numpy.newbyteorder("<").str
        text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {self.shape}, }}"
        length = math.ceil((len(text) + 11) / 64) * 64
        return b"\x93NUMPY\x01\x00" + (length - 10).to_bytes(2, "little") + text.ljust(length - 11).encode() + b"\n"

    def of_size(self, size: int) -> Column:
        """Return the column with as many rows as an npy file of ``size`` bytes holds; itself if it can have none."""
        rows, rest = divmod(size - len(self.header), self.nbytes // self.shape[0])
        return self if rest or not 1 <= rows <= self.shape[0] else self.first(rows)

    def first(self, rows: int) -> Column:
        """Return the column with fewer rows."""
        return dataclasses.replace(self, shape=(rows, *self.shape[1:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """The normalisation of stored latents to x0: ``(stored - shift) * scale``.

    There is one value per channel, or one per element of ``[C, H, W]``, the last dimension first. A posterior has the
    values of the mean first, then those of the standard deviation, whose shift is 0. Pixels have a shift of 127.5 and a
    scale of 1 / 127.5.
    """

    shift: tuple[float, ...]
    scale: tuple[float, ...]

    @property
    def of_mean(self) -> Normalisation:
        """The normalisation of the mean alone, of that of a posterior."""
        half = len(self.shift) // 2
        return Normalisation(shift=self.shift[:half], scale=self.scale[:half])

    @property
    def of_posterior(self) -> Normalisation:
        """The normalisation of a posterior, of that of its mean."""
        return Normalisation(shift=(*self.shift, *[0.0] * len(self.shift)), scale=(*self.scale, *self.scale))

    @classmethod
    def of_pixels(cls, channels: int) -> Normalisation:
        """Return the normalisation of levels 0 to 255, as ``fastdiff_kernels.noising.dequantised`` applies it."""
        return cls(shift=(127.5,) * channels, scale=(1 / 127.5,) * channels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The origin of the samples: source, transform, encoders and versions."""

    source: str
    transform: str
    autoencoder: str = "identity"
    autoencoder_digest: str | None = None
    text_encoder: str | None = None
    text_encoder_digest: str | None = None
    teacher: str | None = None
    """Vision model that gave the features of a teacher."""
    teacher_digest: str | None = None
    statistics: str = ""
    """What shift and scale of the latents are, in words; empty: those of the autoencoder."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def packages(self) -> dict[str, str]:
        """Packages of encoders that are not of this one: ``plugin.autoencoder`` and ``plugin.text_encoder``."""
        return {name: package for name, package in self.versions.items() if name.startswith("plugin.")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """A published shard."""

    name: str
    samples: int
    bytes: int
    sha256: str
    index_sha256: str
    bucket: int = 0
    """Index of its latent size in ``DatasetInfo.buckets``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NullInfo:
    """The embedding of the empty prompt for one column, stored in ``null.COLUMN.npy`` next to dataset.json."""

    sha256: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The contents of ``dataset.json``."""

    columns: dict[str, Column]
    normalisation: Normalisation
    provenance: Provenance
    classes: int | None = None
    """Number of classes of the ``cls`` component; None: the samples have none."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers; empty: unknown."""
    kind: Literal["mean", "posterior"] = "mean"
    """Content of the latent column: the mean of the autoencoder's posterior, or mean and standard deviation stacked
    on channels."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Latent heights and widths; ``columns`` has the first. Empty: all latents have the size in ``columns``."""
    flipped: bool = False
    """Whether every sample has a second latent, encoded from the mirrored image."""
    captions: int = 1
    """Embeddings per sample and column. A sample with fewer captions repeats them in turn and records their number."""
    normalisations: dict[str, Normalisation] = field(default_factory=dict)
    """Of further columns: of the autoencoder, one value per element each; of the features of a teacher, one per
    component."""
    null: dict[str, NullInfo] = field(default_factory=dict)
    """The embedding of the empty prompt, by column."""
    longest_caption: int | None = None
    """Rows up to the last valid one of the longest caption, the empty one included; None: unknown, or no masks."""
    selection: Selection | None = None
    """What was left out of the source; None: unknown."""
    shards: tuple[ShardInfo, ...] = ()
    samples: int = 0
    format: Literal["fastdiff-latents"] = "fastdiff-latents"
    version: Literal[1] = 1

    @property
    def latent(self) -> Column:
        """The latent column, of shape ``(C, H, W)`` or, for posteriors, ``(2C, H, W)``."""
        return self.columns[LATENT]

    @property
    def x0_normalisation(self) -> Normalisation:
        """The normalisation to x0 of a latent, or of the mean of a posterior: what decoding undoes."""
        return self.normalisation.of_mean if self.kind == "posterior" else self.normalisation

    @property
    def statistics_shape(self) -> tuple[int, int, int]:
        """Shape of shift and scale beside a latent: ``(C, 1, 1)``, or ``(C, H, W)``."""
        channels = self.latent.shape[0]
        _, height, width = self.latent.shape
        return (channels, 1, 1) if len(self.normalisation.shift) == channels else (channels, height, width)

    def normalised_shape(self, column: str) -> tuple[int, ...]:
        """Return the shape of shift and scale of a further column; empty: it has none."""
        shape = self.columns[column].shape
        return (shape[0], 1, 1) if column == FEATURES else shape if column in OF_ENCODER else (0,)

    @property
    def in_pixels(self) -> bool:
        """Whether the latents are uint8 pixels, which ``Batch.latents`` keeps unchanged."""
        return self.latent.dtype == "uint8"

    def columns_of(self, bucket: int) -> dict[str, Column]:
        """Return the columns of a bucket, in the order of the tar."""
        columns = {name: self.columns[name] for name in COLUMNS if name in self.columns}
        if self.buckets:
            shape = (self.latent.shape[0], *self.buckets[bucket])
            columns[LATENT] = dataclasses.replace(self.latent, shape=shape)
            if LOSS_MASK in columns:
                columns[LOSS_MASK] = loss_mask_column(columns[LATENT])
            if REFERENCE in columns:
                of_all = (*columns[REFERENCE].shape[:2], *self.buckets[bucket])
                columns[REFERENCE] = dataclasses.replace(columns[REFERENCE], shape=of_all)
        return columns

    def batch_columns(self, bucket: int) -> dict[str, Column]:
        """Return the columns of a batch: captions with masks are padded to the longest one of the data set."""
        return {
            name: column.first(padded_tokens(self.longest_caption, column.shape[0]))
            if self.is_masked(name) or name in MASKS
            else column
            for name, column in self.columns_of(bucket).items()
        }

    def variants(self, column: str) -> tuple[str, ...]:
        """Return the names of a column's arrays in every sample: ``context``, ``context1``, ``context2``, ..."""
        if column in ENCODED:
            return (column, f"{column}_flipped") if self.flipped else (column,)
        count = self.captions if column in CAPTIONED else 1
        return (column, *(f"{column}{number}" for number in range(1, count)))

    def is_masked(self, column: str) -> bool:
        """Whether a mask excludes rows of a column: those after the last valid one are not stored, others are zeros."""
        return MASK_OF.get(column) in self.columns

    @property
    def components(self) -> tuple[str, ...]:
        """The components of every sample, in the order of the tar; ``json`` is optional."""
        arrays = [f"{name}.npy" for column in COLUMNS if column in self.columns for name in self.variants(column)]
        return (*arrays, *(["cls"] if self.classes is not None else []), *(["captions"] if self.captions > 1 else []))

    def shard_name(self, number: int, bucket: int = 0) -> str:
        """Return ``train-000012.tar``, or with buckets ``train-000012-64x48.tar`` (latent height and width)."""
        size = "-{}x{}".format(*self.buckets[bucket]) if self.buckets else ""
        return f"train-{number:06d}{size}.tar"

    @cached_property
    def digest(self) -> str:
        """Sha256 of the content that a run reads; it identifies the data set in a checkpoint.

        Provenance is excluded: equal bytes encoded with another version of numpy are the same data set.
        """
        content = {
            "columns": {name: dataclasses.asdict(column) for name, column in self.columns.items()},
            "normalisation": dataclasses.asdict(self.normalisation),
            "classes": self.classes,
            "kind": self.kind,
            "shards": [[shard.name, shard.samples, shard.bytes, shard.sha256] for shard in self.shards],
        }
        added = {name: value for name, value in self._fields().items() if name in _ADDED and name not in _NOT_READ}
        if self.buckets:
            added["shard_buckets"] = [shard.bucket for shard in self.shards]
        return _sha256_of(content | added)

    def _fields(self) -> dict[str, Any]:
        """Return the fields of ``dataset.json``; unused later additions to the format are left out."""
        fields = dataclasses.asdict(self)
        for name, default in _ADDED.items():
            if fields[name] == default:
                del fields[name]
        if not self.buckets:
            for shard in fields["shards"]:
                del shard["bucket"]
        if self.provenance.text_encoder_digest is None:
            del fields["provenance"]["text_encoder_digest"]
        if not self.provenance.statistics:
            del fields["provenance"]["statistics"]
        if self.provenance.teacher is None:
            del fields["provenance"]["teacher"], fields["provenance"]["teacher_digest"]
        return fields

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> DatasetInfo:
        """Read and check ``dataset.json`` of a folder.

        Raises:
            DataError: The file is missing or invalid.
            StorageError: The file exists but cannot be read.
        """
        path = Path(folder) / INFO_FILE
        try:
            text = read_bounded(path, MAX_INFO_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:
            if is_list(os.fspath(folder)):
                raise DataError(f"{folder} holds several data sets; give one of the folders in it") from error
            raise DataError(
                f"{path} is missing: the folder is not a complete data set; run `fastdiff encode` first"
            ) from error
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise _broken(path, str(error)) from error
        try:
            info = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise _broken(path, _first_problem(error)) from error
        if problem := info.problem() or _problem_of_digest(text):
            raise _broken(path, problem)
        return info

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``dataset.json``; raises OSError."""
        fields = self._fields()
        publish(Path(folder) / INFO_FILE, canonical_json(fields | {"sha256": _sha256_of(fields)}) + b"\n")

    def problem(self) -> str | None:
        """Return a contradiction between the fields, or None."""
        return self.problem_of_layout() or self._problem_of_shards()

    def problem_of_layout(self) -> str | None:
        """Return a contradiction between the fields except the shards, or None."""
        return self._problem_of_columns() or self._problem_of_scales() or self._problem_of_variants()

    def _problem_of_columns(self) -> str | None:
        if LATENT not in self.columns or len(self.latent.shape) != 3:
            return f"there is no column {LATENT!r} of shape [C, H, W]"
        if self.latent.dtype not in LATENT_DTYPES:
            return f"the latents are {self.latent.dtype}, expected {', '.join(LATENT_DTYPES)}"
        if unknown := self.columns.keys() - set(COLUMNS):
            return f"unknown column {min(unknown)!r}; expected {', '.join(COLUMNS)}"
        sizes = [size for column in self.columns.values() for size in column.shape]
        if any(min(column.shape, default=0) < 1 for column in self.columns.values()):
            return "a column has no dimensions, or a dimension below 1"
        no_conditions = LATENT, LATENT_LIMITS, LOSS_MASK
        conditions = {name: column for name, column in self.columns.items() if name not in no_conditions}
        if problem := problem_of_shapes({name: column.shape for name, column in conditions.items()}):
            return problem
        for name, column in conditions.items():
            if column.dtype not in (dtypes := stored_dtypes(name)):
                return f"{name} is {column.dtype}, expected {' or '.join(dtypes)}"
        limits = {LATENT_LIMITS: Column(dtype="float32", shape=(2, self.latent.shape[0]))}
        if {n: self.columns[n] for n in limits if n in self.columns} != (limits if self.latent.dtype == "int8" else {}):
            return f"latents in int8, and these alone, need {LATENT_LIMITS} of float32 [2, {self.latent.shape[0]}]"
        of_latents = self.latent.shape[0] // (2 if self.kind == "posterior" else 1), *self.latent.shape[1:]
        if REFERENCE in self.columns and (self.in_pixels or self.columns[REFERENCE].shape[1:] != of_latents):
            return f"{REFERENCE} is {self.columns[REFERENCE]}, expected latents {list(of_latents)} and no pixels"
        mask = loss_mask_column(self.latent)
        if self.columns.get(LOSS_MASK, mask) != mask:
            return f"{LOSS_MASK} is {self.columns[LOSS_MASK]}, expected float16 {list(mask.shape)} as the latents"
        if self.classes is not None and self.classes < 1:
            return f"classes is {self.classes}, expected at least 1"
        if self.class_names and len(self.class_names) != self.classes:
            return f"{len(self.class_names)} class names for {self.classes} classes"
        if len(self.buckets) > MAX_VARIANTS or min(itertools.chain(*self.buckets), default=1) < 1:
            return f"buckets must be at most {MAX_VARIANTS} pairs of height and width, each at least 1"
        if len(set(self.buckets)) != len(self.buckets):
            return "two buckets have the same size"
        if self.buckets and self.buckets[0] != self.latent.shape[1:]:
            return f"the latent column has the size {self.latent.shape[1:]}, the first bucket {self.buckets[0]}"
        largest = max(sizes + list(itertools.chain(*self.buckets)))
        if largest > MAX_SAMPLE_BYTES or self._sample_bytes() > MAX_SAMPLE_BYTES:
            return f"the arrays of a sample have more than {MAX_SAMPLE_BYTES} bytes"
        return None

    def _sample_bytes(self) -> int:
        """Return the bytes of one sample of the largest bucket."""
        buckets = range(max(1, len(self.buckets)))
        return max(sum(column.nbytes for column in self.columns_of(bucket).values()) for bucket in buckets)

    def _least_bytes(self, bucket: int) -> int:
        """Return the bytes of the largest array of a sample with the shortest captions."""
        columns = self.columns_of(bucket).items()
        return max((column.first(1) if self.is_masked(name) else column).nbytes for name, column in columns)

    def _problem_of_scales(self) -> str | None:
        channels, shift, scale = self.latent.shape[0], self.normalisation.shift, self.normalisation.scale
        elements = channels if self.buckets else math.prod(self.latent.shape)
        if len(shift) != len(scale) or len(shift) not in (channels, elements):
            per_element = "" if elements == channels else f", or {elements} of each, one per element"
            return f"normalisation needs {channels} shifts and {channels} scales, one per channel{per_element}"
        if not all(map(math.isfinite, (*shift, *scale))) or 0.0 in scale:
            return "normalisation holds a non-finite value or a scale of 0"
        half = len(shift) // 2
        if self.kind == "posterior" and (channels % 2 or any(shift[half:]) or scale[:half] != scale[half:]):
            return "a posterior needs 2C channels: mean and deviation of equal scales, the deviation without shift"
        if self.in_pixels and (self.kind, self.normalisation) != ("mean", Normalisation.of_pixels(channels)):
            return "uint8 latents are pixels: kind must be mean, shift 127.5 and scale 1 / 127.5"
        for name, found in self.normalisations.items():
            count = math.prod(self.normalised_shape(name)) if name in self.columns else 0
            if (len(found.shift), len(found.scale)) != (count, count) or not count:
                return (
                    f"normalisations has {name}, expected columns of the autoencoder with one value per element, or "
                    f"{FEATURES} with one per component"
                )
            if not all(map(math.isfinite, (*found.shift, *found.scale))) or 0.0 in found.scale:
                return f"the normalisation of {name} holds a non-finite value or a scale of 0"
        if FEATURES in self.columns and FEATURES not in self.normalisations:
            return f"normalisations lacks {FEATURES}"
        if self.in_pixels and self.flipped and FEATURES not in self.columns:
            return "flipped must be false for pixels, which are mirrored at reading"
        return None

    def _problem_of_variants(self) -> str | None:
        captioned = {name for name in CAPTIONED if name in self.columns}
        if not 1 <= self.captions <= MAX_VARIANTS or (self.captions > 1 and not captioned):
            return f"captions is {self.captions}, expected 1 to {MAX_VARIANTS}, and 1 without embedded captions"
        masked = [self.columns[name].shape[0] for name in MASKS & captioned]
        if self.longest_caption is not None and not (masked and 1 <= self.longest_caption <= min(masked)):
            return f"longest_caption is {self.longest_caption}, expected 1 to the rows of a mask"
        if self.null and self.null.keys() != captioned:
            return f"null has the columns {sorted(self.null)}, the embedded captions {sorted(captioned)}"
        return None

    def _problem_of_shards(self) -> str | None:
        # A name is joined to the folder; anything but a plain file name could lead out of it.
        wrong = [shard.name for shard in self.shards if not re.fullmatch(r"[A-Za-z0-9_-]+\.tar", shard.name)]
        if wrong:
            return f"{wrong[0]!r} is not a valid shard name"
        if len({shard.name for shard in self.shards}) != len(self.shards):
            return "two shards have the same name"
        if any(shard.samples < 1 or shard.bytes < 1 for shard in self.shards):
            return "a shard holds no samples"
        buckets = range(max(1, len(self.buckets)))
        array = [self._least_bytes(bucket) for bucket in buckets]
        for shard in self.shards:
            if shard.bucket not in buckets:
                return f"{shard.name}: bucket {shard.bucket} of {len(self.buckets)} buckets"
            least = shard.samples * len(self.components) * tarfile.BLOCKSIZE + array[shard.bucket]
            if shard.samples > MAX_SHARD_SAMPLES or least > shard.bytes:
                return (
                    f"{shard.name}: {shard.samples} samples in {shard.bytes} bytes; expected at most "
                    f"{MAX_SHARD_SAMPLES} samples and, for these, at least {least} bytes"
                )
        total = sum(shard.samples for shard in self.shards)
        if total != self.samples or not self.shards:
            return f"samples is {self.samples}, but the {len(self.shards)} shards hold {total}"
        return None


def loss_mask_column(latent: Column) -> Column:
    """Return the column of the masks of the loss, one weight per position of the latents."""
    return Column(dtype="float16", shape=latent.shape[1:])


def condition_columns(
    captioned: Mapping[str, Shape], floating: StoredDtype, of_image: Iterable[str] = ()
) -> dict[str, Column]:
    """Return the columns of conditions.

    Args:
        captioned: shapes of the arrays of a caption, by name.
        floating: dtype of the embeddings among them.
        of_image: names of those that follow from an image.
    """
    shapes = {**captioned, **{name: image_shape(name) for name in of_image}}
    return {name: Column(dtype=stored_dtype(name, floating), shape=shape) for name, shape in shapes.items()}


# Later additions to the format; a field with its default is not written.
_ADDED: dict[str, Any] = {
    "buckets": (),
    "flipped": False,
    "captions": 1,
    "normalisations": {},
    "null": {},
    "class_names": (),
    "longest_caption": None,
    "selection": None,
}
_NOT_READ = ("class_names", "longest_caption", "selection")
"""Later additions that describe the samples, but do not change what a run reads."""


def idx_path(shard: Path) -> Path:
    """Return the path of DALI's index of a shard."""
    return shard.with_suffix(".idx")


def index_path(shard: Path) -> Path:
    """Return the path of our index of a shard."""
    return shard.with_suffix(".index.json")


def null_path(folder: Path, column: str) -> Path:
    """Return the path of a column's embedding of the empty prompt."""
    return folder / f"null.{column}.npy"


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sha256_of(value: object) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _problem_of_digest(text: bytes) -> str | None:
    """Compare the digest in a ``dataset.json`` with all its other fields, unused ones included."""
    try:
        fields: dict[str, Any] = json.loads(text)
        declared = fields.pop("sha256", None)
        found = _sha256_of(fields)
    except (ValueError, RecursionError) as error:  # a number that is not JSON, or too deep nesting
        return str(error)
    return None if declared == found else f"sha256 is {declared!r}, but its fields have {found!r}: it was changed"


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"


def _broken(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} is not usable ({escape(problem)}); restore it, or run `fastdiff encode` into a new folder"
    )
