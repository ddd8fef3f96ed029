"""MANIFEST.json of a checkpoint: format, validation, and the digests of all files.

Only committed checkpoints have a manifest. It lists every rank's file with size and sha256, and holds a sha256 of its
own content.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from fastdiff.errors import ConfigError, StorageError
from fastdiff.run_files import names_inside, open_inside, read_inside
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
    files: Annotated[dict[Annotated[str, Field(pattern=_FILE)], FileEntry], Field(min_length=1)]
    sha256: NotRequired[str]
    """Of the rest of the manifest."""
    progress: NotRequired[ProgressEntry]
    config: NotRequired[dict[str, Any]]
    """Checked by ``config_file.from_mapping``."""
    dataset: NotRequired[str]
    """Digest of the data."""
    datasets: NotRequired[dict[str, dict[str, Any]]]
    """Of several data sets what decides each, by its name (``data.joined.info.JoinedInfo.facts``)."""
    classes: NotRequired[Count | None]
    class_names: NotRequired[list[str]]
    """In the order of their numbers; empty: unknown."""
    base: NotRequired[str | None]
    """Digest of the weights that a LoRA is added to."""
    adapter: NotRequired[str | None]
    """Digest of the file that a LoRA started from."""
    pretrained: NotRequired[str | None]
    """Absolute path of the pretrained pipeline or file; None: of the hub, or none."""
    autoencoder: NotRequired[str | None]
    """Digest of the autoencoder that encoded the data; None: pixels, or unknown."""
    latent_statistics: NotRequired[dict[Literal["shift", "scale"], str]]
    """Shift and scale of the latents of the data, float32 in base64; absent: those of the autoencoder."""
    versions: NotRequired[dict[str, str]]
    world_size: NotRequired[Annotated[int, Field(ge=1)]]
    zero_stage: NotRequired[Annotated[int, Field(ge=0, le=3)]]
    parameters: NotRequired[Annotated[dict[str, list[Count]], Field(min_length=1)]]
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
    """Return the committed checkpoints of a run, newest first; only committed ones have a manifest.

    Raises:
        ConfigError: the folder is a link.
        OSError: it cannot be read.
    """
    try:
        names = names_inside(*_place(checkpoints))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(
            f"{checkpoints}: {error.strerror}, as it could lead to files of somebody else's choice; move the whole run "
            f"folder to the other disk, and link {checkpoints.parent} to it"
        ) from None
    found = [checkpoints / name for name in names if _STEP.fullmatch(name)]
    return sorted((path for path in found if os.path.lexists(path / MANIFEST)), key=step_of, reverse=True)


def _place(path: Path, depth: int = 1) -> tuple[Path, PurePath]:
    """Return the run folder and the path in it of what lies ``depth`` levels below that folder."""
    whole = path.absolute()
    run = whole.parents[min(depth, len(whole.parents)) - 1]
    return run, whole.relative_to(run)


def open_part(folder: Path, name: str) -> int:
    """Return a descriptor to read a file of a checkpoint, which may be a stranger's (``run_files``).

    Args:
        folder: ``step-N``, two levels below the folder of the run.
        name: of the file.

    Raises:
        OSError: it cannot be opened, is no regular file, or is a link or behind one.
    """
    return open_inside(*_place(folder / name, 3))


def step_of(folder: Path) -> int:
    """Return N of ``step-N``."""
    return int(folder.name.removeprefix("step-"))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in ``folder``; StorageError if it is not valid.

    A manifest is untrusted: every file that it names must lie in ``folder`` and have a size and a digest.
    """
    try:
        manifest = json.loads(read_inside(*_place(folder / MANIFEST, 3), _LARGEST_MANIFEST))
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
        with open(open_part(path.parent, path.name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                return f"{path}: {size} bytes, expected {entry['bytes']}"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                return f"{path}: sha256 differs from the manifest"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None
