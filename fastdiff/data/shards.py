"""The format of a folder of latent shards: ``dataset.json`` and the names of the files beside it.

``dataset.json`` is written last, so a folder that has one is complete; its ``sha256`` is that of the canonical JSON
of all its other fields. Each shard is ``train-000000.tar``
(plain WebDataset), ``train-000000.idx`` (the index of DALI's ``wds2idx`` v1.2) and
``train-000000.index.json`` (ours: offset, length and crc32 of every component, see ``index.py``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fastdiff.errors import DataError, StorageError

INFO_FILE = "dataset.json"
LATENT = "latent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One npy component that every sample has."""

    dtype: Literal["float16", "float32"]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values of one sample, without the npy header."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def header(self) -> bytes:
        """The npy header (format 1.0) of one sample.

        Written here and not by ``numpy.save``, so that a data set has the same bytes with every numpy.
        """
        descr = np.dtype(self.dtype).newbyteorder("<").str
        text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {self.shape}, }}"
        length = math.ceil((len(text) + 11) / 64) * 64
        return b"\x93NUMPY\x01\x00" + (length - 10).to_bytes(2, "little") + text.ljust(length - 11).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """How stored latents become x0: ``(stored - shift) * scale``, one number per channel."""

    shift: tuple[float, ...]
    scale: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the samples come from."""

    source: str
    transform: str
    autoencoder: str = "identity"
    autoencoder_digest: str | None = None
    text_encoder: str | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard as it was published."""

    name: str
    samples: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The contents of ``dataset.json``."""

    columns: dict[str, Column]
    normalisation: Normalisation
    provenance: Provenance
    classes: int | None = None
    """Number of classes of the ``cls`` component; None: the samples have none."""
    kind: Literal["mean"] = "mean"
    """What the latent column holds: the mean of the autoencoder's posterior."""
    shards: tuple[ShardInfo, ...] = ()
    samples: int = 0
    format: Literal["fastdiff-latents"] = "fastdiff-latents"
    version: Literal[1] = 1

    @property
    def latent(self) -> Column:
        """The column of the latents; its shape is ``(C, H, W)``."""
        return self.columns[LATENT]

    @cached_property
    def digest(self) -> str:
        """Sha256 of what a run reads; it identifies the data set in a checkpoint.

        Without the provenance: the same bytes, encoded with another numpy, are the same data set.
        """
        content = {
            "columns": {name: dataclasses.asdict(column) for name, column in self.columns.items()},
            "normalisation": dataclasses.asdict(self.normalisation),
            "classes": self.classes,
            "kind": self.kind,
            "shards": [[shard.name, shard.samples, shard.bytes, shard.sha256] for shard in self.shards],
        }
        return _sha256_of(content)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> DatasetInfo:
        """Read and check ``dataset.json`` of a folder.

        Raises:
            DataError: There is none, or it is not what `fastdiff encode` writes.
            StorageError: The file is there and cannot be read.
        """
        path = Path(folder) / INFO_FILE
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(
                f"{path} is missing: the folder is no complete data set; run `fastdiff encode` first"
            ) from error
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        try:
            info = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise _broken(path, _first_problem(error)) from error
        if problem := info.problem() or _problem_of_digest(text):
            raise _broken(path, problem)
        return info

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``dataset.json`` under a temporary name, fsync, rename, fsync the folder; raises OSError."""
        fields = dataclasses.asdict(self)
        publish(Path(folder) / INFO_FILE, canonical_json(fields | {"sha256": _sha256_of(fields)}) + b"\n")

    def problem(self) -> str | None:
        """What in here contradicts itself, or None."""
        return self.problem_of_layout() or self._problem_of_shards()

    def problem_of_layout(self) -> str | None:
        """What contradicts itself apart from the shards, or None."""
        if LATENT not in self.columns or len(self.latent.shape) != 3:
            return f"there is no column {LATENT!r} of shape [C, H, W]"
        if any(min(column.shape, default=0) < 1 for column in self.columns.values()):
            return "a column has no dimensions, or one below 1"
        channels, scales = self.latent.shape[0], self.normalisation
        if (len(scales.shift), len(scales.scale)) != (channels, channels):
            return f"normalisation needs {channels} shifts and {channels} scales, one per channel"
        if not all(map(math.isfinite, (*scales.shift, *scales.scale))) or 0.0 in scales.scale:
            return "normalisation holds a value that is not finite or a scale of 0"
        if self.classes is not None and self.classes < 1:
            return f"classes is {self.classes}"
        return None

    def _problem_of_shards(self) -> str | None:
        # A name is joined to the folder: only a plain file name, or a foreign dataset.json could point
        # anywhere.
        wrong = [shard.name for shard in self.shards if not re.fullmatch(r"[A-Za-z0-9_-]+\.tar", shard.name)]
        if wrong:
            return f"{wrong[0]!r} is no name of a shard"
        if len({shard.name for shard in self.shards}) != len(self.shards):
            return "two shards have the same name"
        if any(shard.samples < 1 or shard.bytes < 1 for shard in self.shards):
            return "a shard holds no samples"
        total = sum(shard.samples for shard in self.shards)
        if total != self.samples or not self.shards:
            return f"samples is {self.samples}, but the {len(self.shards)} shards hold {total}"
        return None


def idx_path(shard: Path) -> Path:
    """DALI's index of a shard."""
    return shard.with_suffix(".idx")


def index_path(shard: Path) -> Path:
    """Our index of a shard."""
    return shard.with_suffix(".index.json")


def temporary(path: Path) -> Path:
    """Name of ``path`` while it is being written."""
    return path.with_name(path.name + ".tmp")


def canonical_json(value: object) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sha256_of(value: object) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _problem_of_digest(text: bytes) -> str | None:
    """Compare the digest in a ``dataset.json`` with its other fields, also with those that nobody reads."""
    fields: dict[str, Any] = json.loads(text)
    declared = fields.pop("sha256", None)
    try:
        found = _sha256_of(fields)
    except ValueError as error:  # a number that JSON does not have
        return str(error)
    return None if declared == found else f"sha256 is {declared!r}, its other fields have {found!r}: it was changed"


def publish(path: Path, content: bytes) -> None:
    """Write a small file so that it is there completely or not at all, also after a power cut."""
    with temporary(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename(temporary(path), path)


def rename(source: Path, target: Path) -> None:
    """Rename an fsynced file within its folder and make the new name durable."""
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"


def _broken(path: Path, problem: str) -> DataError:
    return DataError(f"{path} is not usable ({problem}); restore it, or run `fastdiff encode` into a new folder")
