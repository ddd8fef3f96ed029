"""The rank of an adapter file, from the shapes in its header. This module imports no torch."""

import json
import struct
from pathlib import Path
from typing import Any

from fastdiff.errors import ConfigError, require

_DOWN = (
    "lora_down.weight",
    "lora_A.weight",
    "lora_A.default.weight",
    "lora.down.weight",
    "lora_linear_layer.down.weight",
)
"""Endings of the first matrix of a layer, whose rows are the rank."""
_FUSED = "qkv"
"""End of the names of layers that have the rows of three: their rank may be three times that of the adapter."""
_LARGEST_HEADER = 64 << 20


def rank_of(path: Path) -> int:
    """Return the rank of a safetensors file: the largest of its layers, without those of queries, keys and values.

    Raises:
        ConfigError: it cannot be read, or has no matrices of a LoRA.
    """
    header = _header(path)
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        ending = next((ending for ending in _DOWN if name.endswith(ending)), None)
        if ending is not None:
            found[name.removesuffix(ending).rstrip("._")] = int(entry["shape"][0])
    require(bool(found), f"--lora.init {path}: it has no matrices of a LoRA, such as lora_A or lora_down")
    apart = [rank for name, rank in found.items() if not name.endswith(_FUSED)]
    told = metadata.get("ss_network_dim", "")
    if not apart and told.isdecimal() and int(told) > 0:
        return int(told)
    return max(apart or found.values())


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
