"""MANIFEST.json of a checkpoint: format, validation, and the digests of all files.

Only committed checkpoints have a manifest. It lists every rank's file with size and sha256, and holds a sha256 of its
own content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from fastdiff.errors import StorageError
from fastdiff.files import file_digest, read_bounded
from fastdiff.sanitize import escape

MANIFEST = "MANIFEST.json"
FORMAT = "fastdiff-checkpoint"
VERSION = 1
"""Incremented when older checkpoints would be misread, also when the codes or blocks of 8-bit moments change."""
_FILE = r"^rank-[0-9]{5}\.safetensors$"
_STEP = re.compile(r"step-[0-9]{8,}")
_LARGEST_MANIFEST = 2**26
"""Bytes; the manifest of a thousand ranks has less than 1 MiB."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions caused by malformed data."""

Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class FileEntry(TypedDict):
    """Size and digest of a rank's file."""

    bytes: Count
    sha256: str


@with_config(ConfigDict(extra="forbid"))
class ProgressEntry(TypedDict):
    """The fields of ``fastdiff.progress.Progress``; older checkpoints lack the later ones."""

    samples: Count
    steps: Count
    skipped: NotRequired[Count]
    skipped_in_a_row: NotRequired[Count]
    rewinds: NotRequired[Count]


class Manifest(TypedDict):
    """Content of MANIFEST.json.

    Checkpoints lack fields that are newer than they are, and snapshots those of the optimizer.
    """

    format: Literal["fastdiff-checkpoint"]
    version: int
    files: dict[Annotated[str, Field(pattern=_FILE)], FileEntry]
    sha256: NotRequired[str]
    """Of the rest of the manifest."""
    progress: NotRequired[ProgressEntry]
    config: NotRequired[dict[str, Any]]
    """Checked by ``config_file.from_mapping``."""
    dataset: NotRequired[str]
    """Digest of the data."""
    classes: NotRequired[Count | None]
    class_names: NotRequired[list[str]]
    """In the order of their numbers; empty: unknown."""
    base: NotRequired[str | None]
    """Digest of the weights that a LoRA is added to."""
    versions: NotRequired[dict[str, str]]
    world_size: NotRequired[Annotated[int, Field(ge=1)]]
    zero_stage: NotRequired[Annotated[int, Field(ge=0, le=3)]]
    parameters: NotRequired[dict[str, list[Count]]]
    """Shape of each."""
    ema_rates: NotRequired[list[Rate]]
    ema_stds: NotRequired[list[Rate]]
    layout: NotRequired[str]
    """Digest of the places of the parameters in the optimizer's flat tensors."""
    sliced_state: NotRequired[list[str]]
    has_raw_state: NotRequired[bool]
    optimizer_steps: NotRequired[Count]
    loss_scale: NotRequired[dict[str, Annotated[float, Field(allow_inf_nan=False)]]]


_SCHEMA = TypeAdapter(Manifest)


def committed(checkpoints: Path) -> list[Path]:
    """Return the committed checkpoints of a run, newest first; only committed ones have a manifest."""
    found = (manifest.parent for manifest in checkpoints.glob(f"step-*/{MANIFEST}"))
    return sorted((folder for folder in found if _STEP.fullmatch(folder.name)), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return N of ``step-N``."""
    return int(folder.name.removeprefix("step-"))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in ``folder``; StorageError if it is not valid.

    A manifest is untrusted: every file that it names must lie in ``folder`` and have a size and a digest.
    """
    try:
        manifest = json.loads(read_bounded(folder / MANIFEST, _LARGEST_MANIFEST))
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {manifest['format']} version {manifest['version']}, expected {FORMAT} {VERSION}")
        _SCHEMA.validate_python(manifest, strict=True)
        digest_of(manifest)  # fails if it is nested too deeply to be written
    except ValidationError as error:
        first = error.errors()[0]
        place, given = escape(".".join(map(str, first["loc"]))), repr(first["input"])[:100]
        raise StorageError(
            f"{folder / MANIFEST}: not a readable manifest ({place}: {first['msg']}, given {given})"
        ) from None
    except (OSError, *MALFORMED) as error:
        raise StorageError(f"{folder / MANIFEST}: not a readable manifest ({type(error).__name__}: {error})") from None
    return cast(Manifest, manifest)


def require_fields(folder: Path, manifest: Manifest, *names: str) -> None:
    """Raise StorageError if a field that is not in every manifest is missing."""
    for name in names:
        if name not in manifest:
            raise StorageError(f"{folder / MANIFEST}: {name} is missing; restore the checkpoint from a copy")


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without its own entry ``sha256``, as hexadecimal digits."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """List integrity problems of a checkpoint (manifest, digests); empty if intact.

    With ``shares`` ranks, rank ``share`` checks every ``shares``-th file.
    """
    try:
        manifest = read_manifest(folder)
    except StorageError as error:
        return [str(error)]
    if manifest.get("sha256") not in (None, digest_of(manifest)):  # None: written before manifests had a digest
        return [f"{folder / MANIFEST}: its content differs from its sha256"]
    step = manifest["progress"]["steps"] if "progress" in manifest else None
    if _STEP.fullmatch(folder.name) and step not in (None, step_of(folder)):
        return [f"{folder}: holds step {step}, a copy under another name; delete it, or move it out of this folder"]
    files = sorted(manifest["files"].items())
    found = (_problem_of(folder / name, entry) for name, entry in files[share::shares])
    return [problem for problem in found if problem is not None]


def _problem_of(path: Path, entry: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
        if not path.is_file():
            return f"{path}: it is not a file"
        if size != entry["bytes"]:
            return f"{path}: {size} bytes, expected {entry['bytes']}"
        if file_digest(path) != entry["sha256"]:
            return f"{path}: sha256 differs from the manifest"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None
