"""State of bitsandbytes' AdamW8bit in parameter coordinates, for another number of ranks or another ZeRO stage.

Both moments of a flat tensor are codes into a table (``qmap1``, ``qmap2``). Each block of 256 elements has one scale
(``absmax1``, ``absmax2``); blocks cross the borders of parameters (Dettmers et al. 2022, arXiv:2110.02861). Another
layout has other blocks. Therefore the values are read by parameter and requantized in the blocks of the new flat
tensors; the error of each value is at most half a step of the table times the largest value of its block. Flat tensors
that bitsandbytes keeps in fp32 (below 4096 elements at ZeRO-0) have no table and are not rounded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoint.reader import FRAGMENTS, RAW, Checkpoint
from fastdiff.errors import StorageError
from fastdiff.parallel.fragments import Flat, Fragment

BLOCK = 256
"""Elements per scale."""
_MOMENTS = ("1", "2")
_AT_ONCE = 2**16 * BLOCK
"""Elements that are rounded at once; each takes 12 bytes."""


def fragments_tensor(flat: Flat, parameters: Sequence[str]) -> Tensor:
    """Return the layout of a flat tensor: its parameter slices and their offsets.

    Returns:
        ``[fragments, 4]`` int64: number of the parameter in ``parameters``, start in it, elements, offset in the flat.
    """
    numbers = {name: number for number, name in enumerate(parameters)}
    rows = [(numbers[f.name], f.start, f.numel, f.offset) for f in flat.fragments]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


class BlockwiseState:
    """Optimizer state of all ranks by parameter, from a checkpoint of bitsandbytes with the fragments of its flats."""

    def __init__(self, saved: Checkpoint) -> None:
        self._folder = saved.folder
        self._parts: dict[str, list[tuple[Fragment, _SavedFlat]]] = {}
        parameters = list(saved.manifest["parameters"])
        for handle, key in saved.keys(FRAGMENTS):
            flat = _SavedFlat(handle, key.removeprefix(FRAGMENTS))
            for number, start, numel, offset in handle.get_tensor(key).tolist():
                part = Fragment(parameters[number], start, numel, offset)
                self._parts.setdefault(part.name, []).append((part, flat))

    def moment(self, moment: str, fragment: Fragment) -> Tensor:
        """Return elements ``[start, start + numel)`` of moment "1" or "2" of a parameter, ``[numel]`` fp32 on the CPU.

        StorageError: the checkpoint lacks some of them.
        """
        values, filled = torch.empty(fragment.numel), 0
        for part, flat in self._parts.get(fragment.name, []):
            low = max(part.start, fragment.start)
            high = min(part.start + part.numel, fragment.start + fragment.numel)
            if low < high:
                shift = part.offset - part.start
                values[low - fragment.start : high - fragment.start] = flat.moment(moment, low + shift, high + shift)
                filled += high - low
        if filled != fragment.numel:
            raise StorageError(
                f"{self._folder}: holds {filled} of {fragment.numel} elements of the optimizer's state of "
                f"{fragment.name}; the checkpoint belongs to another model"
            )
        return values


class _SavedFlat:
    """The moments of one flat tensor in a rank's file."""

    def __init__(self, handle: Any, number: str) -> None:
        self._handle = handle
        self._prefix = f"{RAW}{number}/"
        self._is_8bit = f"{self._prefix}qmap1" in handle.keys()  # noqa: SIM118 (not a mapping)

    def moment(self, moment: str, low: int, high: int) -> Tensor:
        """Return elements ``[low, high)`` in fp32."""
        if not self._is_8bit:
            return self._read(f"state{moment}", low, high)
        first, last = low // BLOCK, -(-high // BLOCK)
        codes = self._read(f"state{moment}", first * BLOCK, last * BLOCK)
        scales = self._read(f"absmax{moment}", first, last).repeat_interleave(BLOCK)[: len(codes)]
        table: Tensor = self._handle.get_tensor(f"{self._prefix}qmap{moment}")
        values = table[codes.int()] * scales
        return values[low - first * BLOCK : high - first * BLOCK]

    def _read(self, key: str, low: int, high: int) -> Tensor:
        """Read entries of a flattened tensor; ``high`` may exceed its length."""
        piece = self._handle.get_slice(self._prefix + key)
        size = piece.get_shape()
        values: Tensor = piece[low : min(high, size[0])] if len(size) == 1 else piece[:].flatten()[low:high]
        return values


def requantize(flat: Flat, state: BlockwiseState) -> None:
    """Fill the state that bitsandbytes has created for ``flat``, with its tables and blocks; padding is zero."""
    for moment in _MOMENTS:
        values = torch.zeros(flat.master.numel(), device=flat.key.device)
        for fragment in flat.fragments:
            fragment.of(values).copy_(state.moment(moment, fragment))
        stored: Tensor = flat.state[f"state{moment}"]
        if stored.dtype == torch.uint8:
            pieces = [_round(piece, flat.state[f"qmap{moment}"]) for piece in torch.split(values, _AT_ONCE)]
            flat.state[f"absmax{moment}"].copy_(torch.cat([scales for _, scales in pieces]))
            values = torch.cat([codes for codes, _ in pieces])
        stored.copy_(values.view_as(stored))


def _round(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes, ``[N]`` uint8, and the scale of each block, ``[ceil(N / 256)]``.

    ``bitsandbytes.functional.quantize_blockwise`` is not used: on a CPU it misses the nearest code and raises 2e-8 of
    the largest value to 1.6e-5 of it (0.50.0).
    """
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scaled = (blocks / scales[:, None]).nan_to_num_()  # 0 / 0 in a block of zeros
    codes = torch.bucketize(scaled, table[:-1] + table.diff() / 2, out_int32=True)
    return codes.view(-1)[: len(values)].to(torch.uint8), scales
