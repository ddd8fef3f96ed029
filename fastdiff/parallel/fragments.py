"""This rank's slices of the fp32 weights, in parameter coordinates: what EMA and checkpoints work on.

An optimizer updates flat fp32 tensors. Under ZeRO 1-3 a flat tensor holds slices of many parameters and differs from
rank to rank; under ZeRO-0 it is one whole parameter, the same on every rank, and one rank is its owner. ``Flat``
describes both, so that nothing outside ``engine.py`` knows the stage.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.parallel.world import World


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``[start, start + numel)`` of a flattened parameter, at ``offset`` of a flat tensor."""

    name: str
    start: int
    numel: int
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """Return this fragment of ``flat`` (``[N]``) as a view ``[numel]``."""
        return flat.narrow(0, self.offset, self.numel)

    def blocks(self, size: int, offset: int) -> Fragment:
        """Return the blocks of ``size`` elements of the parameter that this fragment touches.

        Args:
            size: elements of a block; the parameter's last block may be shorter.
            offset: where the first of these blocks lies in the tensor with one entry per block.
        """
        first, stop = self.start // size, -(-(self.start + self.numel) // size)
        return Fragment(self.name, first, stop - first, offset)


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """One tensor that the optimizer updates."""

    key: Tensor
    """The tensor object under which the optimizer keeps its state; any shape, fp32."""
    states: MutableMapping[Tensor, dict[str, Any]]
    """The optimizer's live state of all its tensors."""
    fragments: tuple[Fragment, ...]
    owned: bool
    """False where another rank averages and saves an equal copy."""

    @property
    def master(self) -> Tensor:
        """The fp32 weights, ``[N]``, a view."""
        return self.key.detach().view(-1)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of this tensor; empty before the first step."""
        return self.states.get(self.key, {})

    def blocks(self, size: int) -> tuple[Fragment, ...]:
        """The fragments in units of blocks, as they lie one after another in a tensor with one entry per block."""
        found: list[Fragment] = []
        for fragment in self.fragments:
            found.append(fragment.blocks(size, found[-1].offset + found[-1].numel if found else 0))
        return tuple(found)


Shapes = dict[str, tuple[int, ...]]


def layout_digest(world: World, flats: Sequence[Flat]) -> str:
    """Return a digest of which rank holds which fragment where; equal digests allow a plain copy of any state."""
    mine = [[(f.name, f.start, f.numel, f.offset) for f in flat.fragments] for flat in flats]
    return hashlib.sha256(json.dumps(world.gather(mine)).encode()).hexdigest()


def owned_fragments(flats: Sequence[Flat], tensors: Sequence[Tensor | None]) -> Iterator[tuple[Fragment, Tensor]]:
    """Yield each owned fragment with its view of the tensor (``[N]``) that stands for its flat."""
    for flat, tensor in zip(flats, tensors, strict=True):
        if flat.owned and tensor is not None:
            for fragment in flat.fragments:
                yield fragment, fragment.of(tensor)


def owned_blocks(
    flats: Sequence[Flat], tensors: Sequence[Tensor | None], size: int
) -> Iterator[tuple[Fragment, Tensor]]:
    """``owned_fragments`` in units of blocks; a block that several ranks touch belongs to the one that it starts on."""
    for flat, tensor in zip(flats, tensors, strict=True):
        if flat.owned and tensor is not None:
            for fragment, touched in zip(flat.fragments, flat.blocks(size), strict=True):
                others = int(fragment.start % size > 0)
                if touched.numel > others:
                    mine = Fragment(
                        touched.name, touched.start + others, touched.numel - others, touched.offset + others
                    )
                    yield mine, mine.of(tensor)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for full parameters and, in fp32, for the largest of them."""

    full: dict[str, Tensor]
    largest: Tensor

    @staticmethod
    def reserve(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Room:
        """Room for parameters of these shapes and this dtype; may run out of memory, and then alone does."""
        largest = max(math.prod(shape) for shape in shapes.values())
        full = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        return Room(full, torch.empty(largest, device=device))


def assemble(
    world: World, flats: Sequence[Flat], tensors: Sequence[Tensor | None], shapes: Shapes, room: Room | None = None
) -> dict[str, Tensor]:
    """Return the full parameters, on every rank's device, from fragments spread over the ranks; called by all ranks.

    Each rank writes its fragments into zeros and the ranks are added up: exact, since all other terms are zero.

    Args:
        world: the ranks.
        flats: this rank's.
        tensors: what stands for each flat, ``[N]`` fp32.
        shapes: of the parameters.
        room: where they go, and are rounded to its dtype; None: into new fp32 tensors.
    """
    room = room or Room.reserve(shapes, torch.float32, world.device)
    mine: dict[str, list[tuple[Fragment, Tensor]]] = {name: [] for name in shapes}
    for fragment, values in owned_fragments(flats, tensors):
        mine[fragment.name].append((fragment, values))
    for name, shape in shapes.items():
        whole = room.largest[: math.prod(shape)].zero_()
        for fragment, values in mine[name]:
            whole.narrow(0, fragment.start, fragment.numel).copy_(values)
        room.full[name].copy_(world.sum_(whole).view(shape))
    return room.full
