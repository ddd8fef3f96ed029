"""MANIFEST.json of a checkpoint: format, validation, and the digests of all files.

Only committed checkpoints have a manifest. It lists every rank's file with size and sha256, and holds a sha256 of its
own content.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from fastdiff.errors import StorageError
from fastdiff.files import file_digest, read_bounded

MANIFEST = "MANIFEST.json"
FORMAT = "fastdiff-checkpoint"
VERSION = 1
"""Incremented when older checkpoints would be misread, also when the codes or blocks of 8-bit moments change."""
_FILE = re.compile(r"rank-[0-9]{5}\.safetensors")
_STEP = re.compile(r"step-[0-9]{8,}")
_LARGEST_MANIFEST = 2**26
"""Bytes; the manifest of a thousand ranks has less than 1 MiB."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions caused by malformed data."""


def committed(checkpoints: Path) -> list[Path]:
    """Return the committed checkpoints of a run, newest first; only committed ones have a manifest."""
    found = (manifest.parent for manifest in checkpoints.glob(f"step-*/{MANIFEST}"))
    return sorted((folder for folder in found if _STEP.fullmatch(folder.name)), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return N of ``step-N``."""
    return int(folder.name.removeprefix("step-"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint in ``folder``; StorageError if it is not valid.

    A manifest is untrusted: every file that it names must lie in ``folder`` and have a size and a digest.
    """
    try:
        manifest = json.loads(read_bounded(folder / MANIFEST, _LARGEST_MANIFEST))
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {manifest['format']} version {manifest['version']}, expected {FORMAT} {VERSION}")
        for name, entry in manifest["files"].items():
            _check_file(name, entry)
        digest_of(manifest)  # fails if it is nested too deeply to be written
    except (OSError, *MALFORMED) as error:
        raise StorageError(f"{folder / MANIFEST}: not a readable manifest ({type(error).__name__}: {error})") from None
    return manifest  # type: ignore[no-any-return]


def _check_file(name: str, entry: Any) -> None:
    """Validate a file entry; raise ValueError, or an error of ``MALFORMED`` if the entry is no mapping."""
    if not _FILE.fullmatch(name):
        raise ValueError(f"file {name!r}, expected rank-NNNNN.safetensors")
    if not (isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)):
        raise ValueError(f"{name}: expected bytes and sha256, given {entry}")


def digest_of(manifest: dict[str, Any]) -> str:
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
    step = manifest.get("progress", {}).get("steps")
    if _STEP.fullmatch(folder.name) and step not in (None, step_of(folder)):
        return [f"{folder}: holds step {step}, a copy under another name; delete it, or move it out of this folder"]
    files = sorted(manifest["files"].items())
    found = (_problem_of(folder / name, entry) for name, entry in files[share::shares])
    return [problem for problem in found if problem is not None]


def _problem_of(path: Path, entry: dict[str, Any]) -> str | None:
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
