"""This rank's slices of the fp32 weights in parameter coordinates, used by EMA and checkpoints.

An optimizer updates flat fp32 tensors. Under ZeRO 1-3 a flat tensor holds slices of many parameters and differs from
rank to rank. Under ZeRO-0 it is one whole parameter, equal on every rank, and one rank owns it. ``Flat`` describes
both, so that only the engines (``training/engines``) know the stage.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.parallel.world import World


def channels_last(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return contiguous values ``[O * H * W * I]`` as a view ``[O, I, H, W]``, which is ``shape``."""
    out, into, height, width = shape
    return values.view(out, height, width, into).permute(0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``[start, start + numel)`` of a flattened parameter, stored at ``offset`` of a flat tensor."""

    name: str
    start: int
    numel: int
    offset: int
    channels_last: tuple[int, ...] | None = None
    """Shape ``[O, I, H, W]`` of a whole parameter whose elements lie in the order ``[O, H, W, I]``; None: any other."""

    def of(self, flat: Tensor) -> Tensor:
        """Return this fragment of ``flat`` (``[N]``) as a view in the order of the parameter's elements.

        It is ``[numel]``, or of the shape ``channels_last``.
        """
        mine = flat.narrow(0, self.offset, self.numel)
        return mine if self.channels_last is None else channels_last(mine, self.channels_last)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Copy values ``[numel]`` into this fragment of ``flat`` (``[N]``)."""
        mine = self.of(flat)
        mine.copy_(values.view(mine.shape))

    def within(self, value: Tensor) -> Tensor:
        """Return this fragment of the whole parameter ``value`` (any shape), ``[numel]``."""
        return value.flatten()[self.start : self.start + self.numel]

    def blocks(self, size: int, offset: int) -> Fragment:
        """Return this fragment in units of blocks, partly covered blocks included.

        Args:
            size: elements of a block; the parameter's last block may be shorter. 0: the parameter has no block.
            offset: position of the first block in the tensor with one entry per block.
        """
        if not size:
            return Fragment(self.name, 0, 0, offset)
        first, stop = self.start // size, -(-(self.start + self.numel) // size)
        return Fragment(self.name, first, stop - first, offset)


Sizes = Mapping[str, int]
"""Elements of a block by parameter; 0: the parameter has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A tensor that the optimizer updates."""

    key: Tensor
    """The tensor object under which the optimizer keeps its state; any shape, fp32."""
    states: MutableMapping[Tensor, dict[str, Any]]
    """The optimizer's live state, by tensor."""
    fragments: tuple[Fragment, ...]
    owned: bool
    """False if another rank averages and saves an equal copy."""

    @property
    def master(self) -> Tensor:
        """The fp32 weights as a view ``[N]``."""
        return self.key.detach().view(-1)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of this tensor; empty before the first step."""
        return self.states.get(self.key, {})

    def blocks(self, sizes: Sizes) -> tuple[Fragment, ...]:
        """The fragments in units of blocks, contiguous in a tensor with one entry per block."""
        found: list[Fragment] = []
        for fragment in self.fragments:
            found.append(fragment.blocks(sizes[fragment.name], found[-1].offset + found[-1].numel if found else 0))
        return tuple(found)


def copy_into(flats: Sequence[Flat], name: str, value: Tensor) -> None:
    """Copy the whole parameter ``name`` into this rank's fragments of it."""
    for flat in flats:
        for fragment in flat.fragments:
            if fragment.name == name:
                fragment.write(flat.master, fragment.within(value))


Shapes = dict[str, tuple[int, ...]]


def layout_digest(world: World, flats: Sequence[Flat]) -> str:
    """Return a digest of the fragments of all ranks; between equal layouts any state is copied as it is."""
    mine = [[(f.name, f.start, f.numel, f.offset, *(f.channels_last or ())) for f in flat.fragments] for flat in flats]
    return hashlib.sha256(json.dumps(world.gather(mine)).encode()).hexdigest()


def owned_fragments(flats: Sequence[Flat], tensors: Sequence[Tensor | None]) -> Iterator[tuple[Fragment, Tensor]]:
    """Yield each owned fragment with its view (``Fragment.of``) of the tensor ``[N]`` given for its flat."""
    for flat, tensor in zip(flats, tensors, strict=True):
        if flat.owned and tensor is not None:
            for fragment in flat.fragments:
                yield fragment, fragment.of(tensor)


def owned_blocks(
    flats: Sequence[Flat], tensors: Sequence[Tensor | None], sizes: Sizes
) -> Iterator[tuple[Fragment, Tensor]]:
    """Yield owned fragments in units of blocks; a block on several ranks belongs to the rank of its first element."""
    for flat, tensor in zip(flats, tensors, strict=True):
        if flat.owned and tensor is not None:
            for fragment, touched in zip(flat.fragments, flat.blocks(sizes), strict=True):
                others = int(touched.numel > 0 and fragment.start % sizes[fragment.name] > 0)
                if touched.numel > others:
                    mine = Fragment(
                        touched.name, touched.start + others, touched.numel - others, touched.offset + others
                    )
                    yield mine, mine.of(tensor)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for all full parameters, and an fp32 buffer of the size of the largest one."""

    full: dict[str, Tensor]
    largest: Tensor

    @staticmethod
    def reserve(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Room:
        """Allocate for parameters of these shapes and this dtype; ``assemble`` then needs no more memory."""
        largest = max(math.prod(shape) for shape in shapes.values())
        full = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        return Room(full, torch.empty(largest, device=device))


def assemble(
    world: World, flats: Sequence[Flat], tensors: Sequence[Tensor | None], shapes: Shapes, room: Room | None = None
) -> dict[str, Tensor]:
    """Return the full parameters on every rank, from the fragments of all ranks; called by all ranks.

    Each rank writes its fragments into zeros and the ranks are summed: exact, since all other terms are zero.

    Args:
        world: the ranks.
        flats: flat tensors of this rank.
        tensors: the values of each flat, fp32 ``[N]``.
        shapes: shapes of the parameters.
        room: destination; values are rounded to its dtype; None: new fp32 tensors.
    """
    room = room or Room.reserve(shapes, torch.float32, world.device)
    mine: dict[str, list[tuple[Fragment, Tensor]]] = {name: [] for name in shapes}
    for fragment, values in owned_fragments(flats, tensors):
        mine[fragment.name].append((fragment, values))
    for name, shape in shapes.items():
        whole = room.largest[: math.prod(shape)].zero_()
        for fragment, values in mine[name]:
            whole.narrow(0, fragment.start, fragment.numel).view(values.shape).copy_(values)
        room.full[name].copy_(world.sum_(whole).view(shape))  # [numel] -> shape of the parameter
    return room.full
