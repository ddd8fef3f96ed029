"""Rank, kind and layers of text encoders of an adapter file, from its header. This module imports no torch."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdiff.errors import ConfigError, require

_DOWN = (
    "lora_down.weight",
    "lora_A.weight",
    "lora_A.default.weight",
    "lora.down.weight",
    "lora_linear_layer.down.weight",
    "lokr_w1_b",
    "lokr_w2_b",
    "lokr_w1_b.default",
    "lokr_w2_b.default",
)
"""Endings of the matrix of a layer whose rows are the rank."""
_WHOLE = ("lokr_w2", "lokr_w2.default")
"""Endings of matrices without a rank, beside none that has one."""
TEXT_ENCODERS = ("lora_te", "text_encoder", "lora_prior_te")
"""Beginnings of the names of layers of text encoders."""
_KINDS = {"lokr_w": "lokr", "dora_scale": "dora", "lora_magnitude_vector": "dora"}
"""Parts of names of which every file of a kind has one; a LoRA has none."""
_FUSED = "qkv"
"""End of the names of layers that have the rows of three: their rank may be three times that of the adapter."""
_LARGEST_HEADER = 64 << 20


def rank_of(path: Path) -> int:
    """Return the rank of a safetensors file: the largest of the network's layers, without queries, keys and values.

    Raises:
        ConfigError: it cannot be read, or has no matrices of an adapter.
    """
    header = _header(path)
    metadata = header.pop("__metadata__", {})
    named = metadata.get("ss_network_dim", "")
    told = int(named) if named.isdecimal() else 0
    found = {name: rank for name, rank in _ranks(header).items() if not name.startswith(TEXT_ENCODERS)}
    if not found and any(name.endswith(_WHOLE) for name in header):
        return told or 1
    require(bool(found), f"--lora.init {path}: it has no matrices of a LoRA of a network, such as lora_A or lora_down")
    apart = [rank for name, rank in found.items() if not name.endswith(_FUSED)]
    if not apart and told:
        return told
    return max(apart or found.values())


def kind_of_file(path: Path) -> str:
    """Return the value of ``--lora.kind`` for a safetensors file, from its names; errors as in ``rank_of``."""
    names = _header(path)
    return next((kind for part, kind in _KINDS.items() if any(part in name for name in names)), "lora")


def layers_of_text_encoders(path: Path) -> int:
    """Return how many layers of text encoders a safetensors file changes; errors as in ``rank_of``."""
    header = _header(path)
    whole = {name.removesuffix(ending) for name in header for ending in _WHOLE if name.endswith(ending)}
    return sum(name.startswith(TEXT_ENCODERS) for name in {*_ranks(header), *(name.rstrip("._") for name in whole)})


def _ranks(header: Mapping[str, Any]) -> dict[str, int]:
    """Return the rows of the first matrix of each layer."""
    found = {}
    for name, entry in header.items():
        ending = next((ending for ending in _DOWN if name.endswith(ending)), None)
        if ending is not None:
            found[name.removesuffix(ending).rstrip("._")] = int(entry["shape"][0])
    return found


def _header(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"--lora.init {path}: no such file")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError("its header is too long")
            found = json.loads(file.read(length))
        if not isinstance(found, dict):
            raise ValueError("its header is no object")
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"--lora.init {path}: no safetensors file ({error}); is it complete?") from None
    return found
