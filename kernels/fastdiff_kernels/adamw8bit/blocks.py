"""Blocks of 256 elements of each parameter, and their places in flat tensors that hold slices of many parameters.

Blocks are cut in the coordinates of the parameter, so that they are the same however the parameters are spread over
ranks. A piece is the part of one block in one slice: the whole block, or less of it at the end of the parameter or
where ZeRO cut the parameter; in the second case the pieces straddle ranks, and share the block's scales.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastdiff_kernels.adamw8bit.companding import BLOCK, ELEMENT_STEP


class Slice(Protocol):
    """Elements ``[start, start + numel)`` of the flattened parameter ``name``, at ``offset`` of a flat tensor."""

    @property
    def name(self) -> str:
        """Of the parameter."""
        ...

    @property
    def start(self) -> int:
        """First element in the flattened parameter."""
        ...

    @property
    def numel(self) -> int:
        """Number of elements."""
        ...

    @property
    def offset(self) -> int:
        """First element in the flat tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """The slice of a tensor that is one whole parameter."""

    name: str
    numel: int
    start: int = 0
    offset: int = 0


Key = tuple[str, int]
"""Name of a parameter and index of a block in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The pieces of one flat tensor, slice by slice and in each from its first block to its last.

    The tensors are on the device of the flat tensor. An aligned piece is a whole block at a multiple of 16 elements.
    """

    slices: tuple[Slice, ...]
    offsets: Tensor
    """First element of each piece in the flat tensor, int64 ``[pieces]``."""
    phases: Tensor
    """Dither of the first element of the block of each piece, int32 ``[pieces]`` (``companding``)."""
    aligned: Tensor
    """Index of each aligned piece, int32."""
    others: Tensor
    """Index of every other piece, int32 ``[others]``."""
    lanes: Tensor
    """Place in its block of the first element of each other piece, int32 ``[others]``."""
    lengths: Tensor
    """Elements of each other piece, int32 ``[others]``."""
    slots: Tensor
    """Number of the straddling block that each other piece belongs to, int32 ``[others]``; -1: none."""
    straddling: int
    """Blocks of this tensor that straddle ranks, counted over all ranks."""

    @property
    def pieces(self) -> int:
        """Number of pieces, and of scales of each moment."""
        return self.offsets.numel()


def build_blocks(slices: Sequence[Slice], device: torch.device, straddling: Sequence[Key] = ()) -> Blocks:
    """The pieces of ``slices``.

    Args:
        slices: the content of a flat tensor, in any order.
        device: of the flat tensor.
        straddling: the blocks of this tensor that straddle ranks, in an order that all ranks share.
    """
    slot_of = {key: slot for slot, key in enumerate(straddling)}
    slices = tuple(s for s in slices if s.numel > 0)
    columns: list[tuple[Tensor, ...]] = [_columns(s) for s in slices] or [(torch.zeros(0, dtype=torch.int64),) * 4]
    offset, lane, length, phase = (torch.cat(column) for column in zip(*columns, strict=True))
    aligned = (length == BLOCK) & (offset % 16 == 0)
    others = (~aligned).nonzero().flatten()
    keys = [key for s in slices for key in _keys(s)] if slot_of else []
    slots = torch.tensor([slot_of.get(keys[i], -1) for i in others.tolist()] if slot_of else [-1] * len(others))

    def narrow(column: Tensor) -> Tensor:
        return column.to(device, torch.int32)

    return Blocks(
        slices=slices,
        offsets=offset.to(device),
        phases=narrow(phase),
        aligned=narrow(aligned.nonzero().flatten()),
        others=narrow(others),
        lanes=narrow(lane[others]),
        lengths=narrow(length[others]),
        slots=narrow(slots),
        straddling=len(slot_of),
    )


def _range(piece: Slice) -> tuple[int, int]:
    return piece.start // BLOCK, -(-(piece.start + piece.numel) // BLOCK)


def _keys(piece: Slice) -> list[Key]:
    return [(piece.name, block) for block in range(*_range(piece))]


def _columns(piece: Slice) -> tuple[Tensor, ...]:
    """Offset, first lane, length and phase of the pieces of a slice, int64 ``[pieces]``."""
    block = torch.arange(*_range(piece))
    start = (block * BLOCK).clamp_(min=piece.start)
    end = ((block + 1) * BLOCK).clamp_(max=piece.start + piece.numel)
    # int64 products and sums wrap, which keeps their low 32 bits right.
    word = (block * (BLOCK * ELEMENT_STEP) + zlib.crc32(piece.name.encode())) & 0xFFFFFFFF
    phase = torch.where(word > 0x7FFFFFFF, word - 2**32, word)
    return piece.offset + start - piece.start, start - block * BLOCK, end - start, phase


Piece = tuple[str, int, int, int]
"""Name of a parameter, index of a block in it, and elements ``[first, last)`` of the parameter."""


def find_straddling(layout: Sequence[Sequence[Slice]], group: ProcessGroup | None = None) -> list[list[Key]]:
    """For each tensor of the layout, the blocks that several ranks hold pieces of, sorted; collective.

    Ranks that all have whole parameters, in whichever tensors, share no block.

    Args:
        layout: the slices of each tensor that this rank optimizes; those of a block that straddles ranks lie in
            tensors of the same index.
        group: the ranks; None: all.

    Raises:
        ValueError: a block lies twice on one rank; or one straddles ranks, and they have it in tensors of different
            index, or different numbers of tensors. Raised on every rank.
    """
    ranks = _gather([[*_short_pieces(slices)] for slices in layout], group)
    found: dict[Key, set[tuple[int, int, int]]] = {}
    for tensors in ranks:
        here = set()
        for index, (name, block, first, last) in ((i, piece) for i, pieces in enumerate(tensors) for piece in pieces):
            key = (name, block)
            if key in here:
                raise ValueError(f"layout: block {block} of {name!r} lies in two slices of a rank, expected one")
            here.add(key)
            found.setdefault(key, set()).add((first, last, index))
    straddling: list[list[Key]] = [[] for _ in layout]
    for (name, block), pieces in sorted(found.items()):
        if len({(first, last) for first, last, _ in pieces}) == 1:
            continue
        indices = {index for _, _, index in pieces}
        counts = [len(tensors) for tensors in ranks]
        if len(indices) > 1 or len({*counts}) > 1:
            raise ValueError(
                f"layout: block {block} of {name!r} straddles ranks, which have it in the tensors {sorted(indices)} of "
                f"{counts}; expected one index, and as many tensors on every rank"
            )
        straddling[indices.pop()].append((name, block))
    return straddling


def _short_pieces(slices: Sequence[Slice]) -> Iterator[Piece]:
    """The pieces that are not whole blocks: at most the first and the last of each slice."""
    for piece in slices:
        end = piece.start + piece.numel
        for block in {piece.start // BLOCK, max(end - 1, 0) // BLOCK} if piece.numel > 0 else ():
            first, last = max(block * BLOCK, piece.start), min((block + 1) * BLOCK, end)
            if last - first < BLOCK:
                yield piece.name, block, first, last


def _gather(mine: list[list[Piece]], group: ProcessGroup | None) -> list[list[list[Piece]]]:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size(group) == 1:
        return [mine]
    gathered: list[list[list[Piece]]] = [[]] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, mine, group=group)
    return gathered
