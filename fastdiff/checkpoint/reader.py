"""Reader of a committed checkpoint in parameter coordinates, for any number of ranks and ZeRO stage that wrote it.

Every rank's file holds tensors named ``<kind>/<parameter>``. Kinds are ``master``, ``ema/<name>`` for an average, and
those of the optimizer, such as ``exp_avg``. The tensors are slices of flattened parameters; the file's metadata holds
their starts. State with an entry per block, matrix or parameter (``config.optimizers.family``), such as the scales of
8-bit moments (``exp_avg_scales``), is sliced in these entries instead of elements. State that cannot be sliced
(bitsandbytes' blocks cross the borders of parameters) is stored whole as ``raw/<flat>/<key>``, and
``fragments/<flat>`` lists its parameters (``bitsandbytes_state``). ``meters`` holds the loss
sums of the rank for the log. The file of rank 0 also holds the learned state of timestep sampling (``timesteps/<key>``)
and the losses that spikes are compared with (``spikes/<key>``). There is no pickle. The manifest has all other state:
progress, configuration, digests, parameter shapes, optimizer groups and loss scale (``training.checkpoints``).
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.checkpoint.manifest import MALFORMED, open_part, read_manifest, require_fields
from fastdiff.checkpoint.power_function import constant_name, power_name
from fastdiff.errors import ConfigError, StorageError
from fastdiff.parallel.fragments import Fragment

METERS = "meters"
"""Name of the loss sums, in the file of every rank."""
TIMESTEPS = "timesteps/"
"""Prefix of the learned state of timestep sampling, in the file of rank 0."""
FP8 = "fp8/"
"""Prefix of the maxima that scales of FP8 products come from, in the file of rank 0."""
SPIKES = "spikes/"
"""Prefix of the recent losses for spike detection, in the file of rank 0."""
RAW = "raw/"
"""Prefix of state that cannot be sliced by parameter, followed by the number of the flat tensor and a key."""
FRAGMENTS = "fragments/"
"""Prefix of the parameter layout of a flat tensor with raw state, followed by its number."""


def snapshot_folder(run: Path) -> Path:
    """Return the folder of a run's snapshots: checkpoints that hold only power-function averages, in 16 bits."""
    return run / "ema"


@dataclass(frozen=True, slots=True)
class _Piece:
    path: Path
    key: str
    start: int
    numel: int


class Checkpoint:
    """A committed checkpoint, ``step-N`` with its manifest, opened for reading; the caller has verified the digests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._pieces: dict[str, list[_Piece]] = {}
        self._handles: dict[Path, Any] = {}
        for name in self.manifest["files"]:
            self._index(folder / name)

    def require(self, *names: str) -> None:
        """Raise StorageError if the manifest lacks one of these fields."""
        require_fields(self.folder, self.manifest, *names)

    @property
    def ema_rates(self) -> tuple[float, ...]:
        """Decay rates of the saved averages."""
        return tuple(self.manifest["ema_rates"])

    @property
    def ema_stds(self) -> tuple[float, ...]:
        """Relative stds of the saved power-function averages."""
        return tuple(self.manifest.get("ema_stds", ()))

    @property
    def optimizer_steps(self) -> int:
        """Steps counted by the optimizer; fewer than were applied if it started later."""
        # Older checkpoints have no such entry: the optimizer counted all applied steps.
        progress = self.manifest["progress"]
        return int(self.manifest.get("optimizer_steps", progress["steps"] - progress.get("skipped", 0)))

    @property
    def averages(self) -> tuple[str, ...]:
        """Names of all saved averages; constant rates come first."""
        return (*map(constant_name, self.ema_rates), *map(power_name, self.ema_stds))

    def weights(self, ema: float | None = None) -> dict[str, Tensor]:
        """Return the full fp32 parameters on the CPU: the raw weights, or their average of decay rate ``ema``."""
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

        Entries are elements, or blocks for scales (``Flat.blocks``).
        """
        stop = fragment.start + fragment.numel
        parts = [
            (piece, low, high)
            for piece in self._pieces.get(f"{kind}/{fragment.name}", [])
            if (low := max(piece.start, fragment.start)) < (high := min(piece.start + piece.numel, stop))
        ]
        held = sum(high - low for _, low, high in parts)
        if not parts or held != fragment.numel:  # checked before memory is allocated
            raise StorageError(
                f"{self.folder}: holds {held} of {fragment.numel} elements of {kind}/{fragment.name}; "
                "the checkpoint belongs to another model"
            )
        result = None
        for piece, low, high in parts:
            values = self._handle(piece.path).get_slice(piece.key)[low - piece.start : high - piece.start]
            if result is None:
                result = torch.empty(fragment.numel, dtype=values.dtype)
            result[low - fragment.start : high - fragment.start] = values
        assert result is not None
        return result

    def unsliced_state(self, flat: int, rank: int) -> dict[str, Tensor]:
        """Return the state of a flat tensor that cannot be sliced, from the file of ``rank``, or that of its owner."""
        prefix, own = f"{RAW}{flat}/", f"rank-{rank:05d}.safetensors"
        for name in sorted(self.manifest["files"], key=lambda name: (name != own, name)):
            found = self._with_prefix(name, prefix)
            if found:
                return found
        return {}

    def keys(self, prefix: str) -> Iterator[tuple[Any, str]]:
        """Yield the open file and the name of every tensor whose name begins with ``prefix``."""
        for name in sorted(self.manifest["files"]):
            handle = self._handle(self.folder / name)
            yield from ((handle, key) for key in handle.keys() if key.startswith(prefix))  # noqa: SIM118 (no mapping)

    def meters(self, rank: int, ranks: int) -> Tensor:
        """Loss accumulators of this rank; after a change of world size rank 0 gets the total."""
        sums: list[Tensor] = [
            self._handle(self.folder / name).get_tensor(METERS) for name in sorted(self.manifest["files"])
        ]
        if len(sums) == ranks:
            return sums[rank]
        return torch.stack(sums).sum(0) if rank == 0 else torch.zeros_like(sums[0])

    def timesteps(self) -> dict[str, Tensor]:
        """Return the learned state of timestep sampling; empty if it does not learn."""
        return self._with_prefix("rank-00000.safetensors", TIMESTEPS)

    def spikes(self) -> dict[str, Tensor]:
        """Return the recent losses for spike detection; empty in a checkpoint from before they were saved."""
        return self._with_prefix("rank-00000.safetensors", SPIKES)

    def fp8(self) -> dict[str, Tensor]:
        """Return the maxima that scales of FP8 products come from; empty without FP8."""
        return self._with_prefix("rank-00000.safetensors", FP8)

    def _with_prefix(self, name: str, prefix: str) -> dict[str, Tensor]:
        """Return the tensors of one file whose names begin with ``prefix``, with the prefix removed."""
        handle = self._handle(self.folder / name)
        keys = [key for key in handle.keys() if key.startswith(prefix)]  # noqa: SIM118 (not a mapping)
        return {key.removeprefix(prefix): handle.get_tensor(key) for key in keys}

    def _index(self, path: Path) -> None:
        handle = self._handle(path)
        try:
            for key, start in json.loads(handle.metadata()["starts"]).items():
                numel = math.prod(handle.get_slice(key).get_shape())
                self._pieces.setdefault(key, []).append(_Piece(path, key, int(start), numel))
        except (SafetensorError, *MALFORMED) as error:
            raise StorageError(f"{path}: its metadata do not give the starts of its slices ({error})") from None

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                os.close(open_part(path.parent, path.name))  # a link, a pipe or a device is refused
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StorageError(f"{path}: not a readable safetensors file ({error})") from None
        return self._handles[path]
