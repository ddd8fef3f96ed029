"""Staging of a save: this rank's tensors are copied to host memory and written from there during the training."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.checkpoint.safetensors_writer import header
from fastdiff.errors import StorageError

_BLOCK = 2**26
"""Bytes of a memory block: a power of two, because torch rounds pinned sizes up to one."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a save: the parts of a safetensors file, valid until the next copy."""

    parts: tuple[bytes | memoryview, ...]
    """Bytes of the file, in order."""

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(len(part) for part in self.parts)


class HostCopy:
    """Reusable host memory for copies; ``pinned_gib`` limits what is pinned, for copies from a GPU."""

    def __init__(self, pinned_gib: float = math.inf) -> None:
        self._blocks: list[Tensor] = []
        self._pinned_left = pinned_gib * 2**30

    def take(self, tensors: Mapping[str, Tensor], starts: Mapping[str, int], dtype: torch.dtype | None = None) -> Share:
        """Copy tensors; they may change after the call returns.

        Args:
            tensors: by name, on any device.
            starts: start of each slice in its flattened parameter; slices of any shape are saved as ``[numel]``.
            dtype: target of the rounding; None: no rounding.

        Raises:
            StorageError: there is not enough host memory.
        """
        kinds = {name: dtype or tensor.dtype for name, tensor in tensors.items()}
        # Widest dtype first, so that each tensor is aligned to its element size.
        order = sorted(tensors, key=lambda name: (-kinds[name].itemsize, name))
        shapes = {name: (t.numel(),) if name in starts else tuple(t.shape) for name, t in tensors.items()}
        layout = {name: (kinds[name], shapes[name]) for name in order}
        size = sum(math.prod(shape) * kind.itemsize for kind, shape in layout.values())
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        self._make_room(size, on_gpu)
        start = 0
        for name, (kind, _) in layout.items():
            # Convert on the device: a converting copy would be synchronous.
            values = tensors[name].detach().to(kind).contiguous().view(-1).view(torch.uint8)
            for place in self._places(start, start + len(values)):
                place.copy_(values[: len(place)], non_blocking=True)
                values = values[len(place) :]
                start += len(place)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        head = header(layout, {"starts": json.dumps(starts)})
        return Share((head, *(place.numpy().data for place in self._places(0, size))))

    def _make_room(self, size: int, pinned: bool) -> None:
        missing = size - sum(len(block) for block in self._blocks)
        while missing > 0:
            length = min(missing, _BLOCK)
            pins = pinned and length <= self._pinned_left
            self._pinned_left -= length if pins else 0
            try:
                self._blocks.append(_allocate(length, pins))
            except RuntimeError:  # the error of torch's allocator
                self._blocks.clear()  # telling the other ranks needs memory, too
                raise StorageError(
                    f"no host memory for a copy of {size / 2**30:.2f} GiB, from which a save is written during the "
                    f"training: {missing / 2**30:.2f} GiB are missing; use more hosts or hosts with more memory, or "
                    "keep fewer averages. Earlier checkpoints are intact: the same command resumes"
                ) from None
            missing -= len(self._blocks[-1])

    def _places(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the memory from byte ``start`` to byte ``stop``, split at block boundaries."""
        begin = 0
        for block in self._blocks:
            low, high = max(start - begin, 0), min(stop - begin, len(block))
            if low < high:
                yield block[low:high]
            begin += len(block)


def _allocate(size: int, pinned: bool) -> Tensor:
    """Allocate memory; pinned if possible, since the system limits the pinned memory of a process."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)
