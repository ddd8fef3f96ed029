"""Statistics of training latents that are not their autoencoder's own: checkpoints keep them, decoding undoes them."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

from fastdiff.data.shards.format import DatasetInfo, Normalisation
from fastdiff.models.encoders.autoencoder import Autoencoder
from fastdiff.models.pretrained.pipeline import Pretrained

_FIELD = "latent_statistics"
STATISTICS = f"{_FIELD}.safetensors"
"""File of an export: ``shift`` and ``scale``, by which a latent z becomes x0, ``(z - shift) * scale``."""


def manifest_of(info: DatasetInfo) -> dict[str, Any]:
    """Return what a manifest has of the latents of a data set; nothing if their statistics are the autoencoder's."""
    if not info.provenance.statistics:
        return {}
    found = info.x0_normalisation
    return {_FIELD: {"shift": _packed(found.shift), "scale": _packed(found.scale)}}


def statistics_in(manifest: Mapping[str, Any]) -> Normalisation | None:
    """Return the statistics that a manifest has; None: the autoencoder's own."""
    found = manifest.get(_FIELD)
    return None if found is None else Normalisation(shift=_unpacked(found["shift"]), scale=_unpacked(found["scale"]))


def open_autoencoder(pipeline: Pretrained, device: torch.device | str, statistics: Normalisation | None) -> Autoencoder:
    """Load the autoencoder that decodes the latents of a run; ConfigError: it is another one, with other latents."""
    found = pipeline.autoencoder(device)
    return found if statistics is None else found.with_statistics(statistics.shift, statistics.scale)


def write_statistics(folder: Path, statistics: Normalisation) -> None:
    """Write the file of an export; raises OSError."""
    values = {"shift": statistics.shift, "scale": statistics.scale}
    (folder / STATISTICS).write_bytes(save({name: np.array(each, np.float32) for name, each in values.items()}))


def _packed(values: Sequence[float]) -> str:
    """Return float32 numbers, of which there may be 200,000, in base64."""
    return base64.b64encode(np.array(values, "<f4").tobytes()).decode()


def _unpacked(text: str) -> tuple[float, ...]:
    return tuple(np.frombuffer(base64.b64decode(text), "<f4").tolist())
