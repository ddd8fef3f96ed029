"""Streaming writer of safetensors files: only one tensor is in memory at a time.

Format: the length of the header as 8 bytes, little-endian; the header, JSON with dtype, shape and offsets of every
tensor, padded with spaces to a multiple of 8; then the values, without gaps.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | Mapping[str, torch.dtype],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a new file, without an fsync; its bytes depend on the arguments alone.

    Args:
        path: must not exist.
        shapes: of the tensors, which are written in the order of their names.
        dtype: of every tensor, or of each by name: float32, float16 or bfloat16.
        read: returns the tensor of a name; it is converted to its ``dtype``.
        metadata: of the file, in addition to its format.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    with path.open("xb") as file:
        # The loaders of transformers require the format.
        dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
        layout = {name: (dtypes[name], shapes[name]) for name in sorted(shapes)}
        file.write(header(layout, {"format": "pt", **(metadata or {})}))
        for name in sorted(shapes):
            file.write(_bytes(read(name), name, shapes[name], dtypes[name]))


def header(layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file: the bytes before the values.

    Args:
        layout: dtype and shape of every tensor, in the order of their values.
        metadata: of the file.
    """
    content: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    padded = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    return len(padded).to_bytes(8, "little") + padded


def _bytes(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> memoryview:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the header says {tuple(shape)}")
    values = tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8)
    return memoryview(values.numpy())  # type: ignore[arg-type]
