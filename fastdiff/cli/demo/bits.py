"""Comparison of two checkpoints bit by bit."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import deserialize

from fastdiff.checkpoint.manifest import committed
from fastdiff.errors import StorageError


@dataclass(frozen=True, slots=True)
class Difference:
    """What two checkpoints have in common."""

    step: int
    tensors: int
    numbers: int
    """Bytes of all tensors, divided by four: fp32 numbers."""
    bits: int
    """Bits that differ; tensors of another name or shape count with all of theirs."""


def compare(first: Path, second: Path) -> Difference:
    """Compare the newest checkpoints of two runs: weights, averages, optimizer states and sums of the log.

    Args:
        first: run folder.
        second: run folder.

    Raises:
        StorageError: a run has no checkpoint, or they are of different steps or numbers of ranks.
    """
    newest = [next(iter(committed(run / "checkpoints")), None) for run in (first, second)]
    if newest[0] is None or newest[1] is None or newest[0].name != newest[1].name:
        raise StorageError(f"{first} and {second}: expected checkpoints of the same step, found {newest}")
    files = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in newest if folder]
    if files[0] != files[1]:
        raise StorageError(f"{newest[0]} and {newest[1]}: expected the same files, found {files[0]} and {files[1]}")
    tensors = size = bits = 0
    for name in files[0]:
        one, other = (_tensors(folder / name) for folder in newest if folder)
        for key in sorted(one.keys() | other.keys()):
            a, b = one.get(key, b""), other.get(key, b"")
            bits += _differing(a, b)
            tensors, size = tensors + 1, size + len(a)
    return Difference(int(newest[0].name.removeprefix("step-")), tensors, size // 4, bits)


def _tensors(file: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor of a safetensors file by name, dtype and shape."""
    found = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    return {f"{name} {tensor['dtype']} {tensor['shape']}": tensor["data"] for name, tensor in found}


def _differing(a: bytes, b: bytes) -> int:
    if len(a) != len(b):
        return 8 * max(len(a), len(b))
    one, other = (np.frombuffer(part, dtype=np.uint8) for part in (a, b))
    return int(np.unpackbits(one ^ other).sum())
