"""A committed checkpoint, read in parameter coordinates, whatever ranks and ZeRO stage wrote it.

Every rank's file holds tensors named ``<kind>/<parameter>`` (kinds: ``master``, ``ema/<name>`` of an average, and the
optimizer's own, such as ``exp_avg``): slices of flattened parameters, whose starts stand in the file's metadata. The
scales of 8-bit moments (``exp_avg_scales``) are such slices too, counted not in elements but in blocks of the
parameter. State that cannot be sliced (bitsandbytes' blocks cross the borders of parameters) is kept whole as
``raw/<flat>/<key>``, and what the draw of the timesteps has learned as ``timesteps/<key>`` in the file of rank 0. No
pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.errors import ConfigError, StorageError
from fastdiff.fragments import Fragment

MANIFEST = "MANIFEST.json"
METERS = "meters"
TIMESTEPS = "timesteps/"
"""Prefix of what a density of timesteps has learned, in the file of rank 0."""
FORMAT = "fastdiff-checkpoint"
VERSION = 1
"""Raised when older checkpoints would be misread: also if the 8-bit moments get other codes or blocks."""

_POWER = "power-"


def constant_name(rate: float) -> str:
    """Return the name of the average of a constant decay rate: 0.9999."""
    return str(rate)


def power_name(std: float) -> str:
    """Return the name of the power-function average of a relative width: power-0.05."""
    return f"{_POWER}{std}"


def in_words(average: str) -> str:
    """What people are told of the average of this name: "EMA of rate 0.9999" or "EMA of width 0.05"."""
    std = average.removeprefix(_POWER)
    return f"EMA of rate {average}" if std == average else f"EMA of width {std}"


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def committed(checkpoints: Path) -> list[Path]:
    """Return the committed checkpoints of a run, newest first; only committed ones have a manifest."""
    return sorted((m.parent for m in checkpoints.glob(f"step-*[0-9]/{MANIFEST}")), reverse=True)


def step_of(folder: Path) -> int:
    """Return N of ``step-N``."""
    return int(folder.name.removeprefix("step-"))


def snapshot_folder(run: Path) -> Path:
    """Where a run keeps its snapshots: checkpoints with nothing but power-function averages, in 16 bits."""
    return run / "ema"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint in ``folder``; StorageError if it is not one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {manifest['format']} version {manifest['version']}, expected {FORMAT} {VERSION}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder / MANIFEST}: not a readable manifest ({error})") from None
    return manifest  # type: ignore[no-any-return]


def problems(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Return what is wrong with a checkpoint: its manifest, or any digest; empty if it is intact.

    With ``shares`` ranks, rank ``share`` looks at every ``shares``-th file.
    """
    try:
        files = sorted(read_manifest(folder)["files"].items())
    except StorageError as error:
        return [str(error)]
    found = (_problem_of(folder / name, entry) for name, entry in files[share::shares])
    return [problem for problem in found if problem is not None]


def _problem_of(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path}: {size} bytes, expected {entry['bytes']}"
        if file_digest(path) != entry["sha256"]:
            return f"{path}: sha256 differs from the manifest"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


@dataclass(frozen=True, slots=True)
class _Piece:
    path: Path
    key: str
    start: int
    numel: int


class Saved:
    """One committed checkpoint, opened for reading.

    Args:
        folder: ``step-N`` with its manifest. The caller has verified the digests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._pieces: dict[str, list[_Piece]] = {}
        self._handles: dict[Path, Any] = {}
        for name in self.manifest["files"]:
            self._index(folder / name)

    @property
    def ema_rates(self) -> tuple[float, ...]:
        """Decay rates of the averages that were saved."""
        return tuple(self.manifest["ema_rates"])

    @property
    def ema_stds(self) -> tuple[float, ...]:
        """Relative widths of the power-function averages that were saved."""
        return tuple(self.manifest.get("ema_stds", ()))

    @property
    def averages(self) -> tuple[str, ...]:
        """Names of all averages that were saved, those of constant rate first."""
        return (*map(constant_name, self.ema_rates), *map(power_name, self.ema_stds))

    def weights(self, ema: float | None = None) -> dict[str, Tensor]:
        """Return the full fp32 parameters on the CPU: the weights, or their average of decay rate ``ema``."""
        if ema is not None and ema not in self.ema_rates:
            raise ConfigError(f"{self.folder} has no EMA of rate {ema}; it has {list(self.ema_rates)}")
        return self.full("master" if ema is None else f"ema/{constant_name(ema)}")

    def full(self, kind: str) -> dict[str, Tensor]:
        """Return ``kind`` (``master``, ``ema/<name>``, ``exp_avg``; no scales) of every parameter, on the CPU."""
        return {
            name: self.slice(kind, Fragment(name, 0, math.prod(shape), 0)).view(shape)
            for name, shape in self.manifest["parameters"].items()
        }

    def slice(self, kind: str, fragment: Fragment) -> Tensor:
        """Return entries ``[start, start + numel)`` of ``kind`` of a parameter, ``[numel]`` on the CPU.

        Entries are elements, for scales blocks (``Flat.blocks``).
        """
        stop = fragment.start + fragment.numel
        result, filled = None, 0
        for piece in self._pieces.get(f"{kind}/{fragment.name}", []):
            low, high = max(piece.start, fragment.start), min(piece.start + piece.numel, stop)
            if low >= high:
                continue
            values = self._handle(piece.path).get_slice(piece.key)[low - piece.start : high - piece.start]
            if result is None:
                result = torch.empty(fragment.numel, dtype=values.dtype)
            result[low - fragment.start : high - fragment.start] = values
            filled += high - low
        if result is None or filled != fragment.numel:
            raise StorageError(
                f"{self.folder}: holds {filled} of {fragment.numel} elements of {kind}/{fragment.name}; "
                "the checkpoint belongs to another model"
            )
        return result

    def raw(self, flat: int, rank: int) -> dict[str, Tensor]:
        """Return the unsliceable state of a flat tensor, from ``rank``'s file or, where it has none, its owner's."""
        own = f"rank-{rank:05d}.safetensors"
        for name in sorted(self.manifest["files"], key=lambda name: (name != own, name)):
            handle = self._handle(self.folder / name)
            keys = [key for key in handle.keys() if key.startswith(f"raw/{flat}/")]  # noqa: SIM118 (not a mapping)
            if keys:
                return {key.rsplit("/", 1)[1]: handle.get_tensor(key) for key in keys}
        return {}

    def meters(self, rank: int, ranks: int) -> Tensor:
        """Return the loss sums that ``rank`` of ``ranks`` goes on with; rank 0 takes all if the ranks are others."""
        sums: list[Tensor] = [
            self._handle(self.folder / name).get_tensor(METERS) for name in sorted(self.manifest["files"])
        ]
        if len(sums) == ranks:
            return sums[rank]
        return torch.stack(sums).sum(0) if rank == 0 else torch.zeros_like(sums[0])

    def timesteps(self) -> dict[str, Tensor]:
        """Return what the density of timesteps had learned; empty for one that does not learn."""
        handle = self._handle(self.folder / "rank-00000.safetensors")
        keys = [key for key in handle.keys() if key.startswith(TIMESTEPS)]  # noqa: SIM118 (not a mapping)
        return {key.removeprefix(TIMESTEPS): handle.get_tensor(key) for key in keys}

    def _index(self, path: Path) -> None:
        handle = self._handle(path)
        for key, start in json.loads(handle.metadata()["starts"]).items():
            numel = math.prod(handle.get_slice(key).get_shape())
            self._pieces.setdefault(key, []).append(_Piece(path, key, start, numel))

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StorageError(f"{path}: not a readable safetensors file ({error})") from None
        return self._handles[path]
