"""Tiling of ``group_norm``: the programs of a sample, from its shape alone, whatever the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff_kernels.launch import triton

_TILE = 4096
_ELEMENTS_PER_THREAD = 16
_PROGRAMS_PER_SAMPLE = 40
_ONE_PASS_BYTES = 2**15
_SMALLEST_ONE_PASS_TILE = 2048


def channels_last(x: Tensor) -> bool:
    """Whether the memory of ``x [N, C, ...]`` runs as ``[N, ..., C]``."""
    if x.dim() == 4 and x.numel():  # without a view, which would take longer than the check
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def power_of_2(number: int) -> int:
    """The least power of 2 that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor as the kernels see it."""

    samples: int
    hw: int
    """Positions."""
    channels: int
    groups: int
    strides: tuple[int, int]
    """Of positions and of channels."""
    itemsize: int

    @classmethod
    def of(cls, x: Tensor, groups: int) -> Shape:
        """``x [N, C, ...]`` in ``groups`` groups."""
        samples, channels, hw = x.shape[0], x.shape[1], x.shape[2:].numel()
        strides = (channels, 1) if channels_last(x) else (1, hw)
        return cls(samples, hw, channels, groups, strides, x.element_size())

    @property
    def per_group(self) -> int:
        """Channels of a group."""
        return self.channels // self.groups

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Arguments of every kernel, in order."""
        return self.hw, self.channels, *self.strides


@dataclass(frozen=True, slots=True)
class Tiling:
    """The programs of a sample: blocks of channels times chunks of ``rows`` positions."""

    block_hw: int
    block_c: int
    rows: int
    chunks: int
    blocks: int

    @classmethod
    def of(cls, shape: Shape) -> Tiling:
        """The tiling of a sample of this shape."""
        positions, channels = power_of_2(shape.hw), power_of_2(shape.channels)
        # At least 128 bytes in a row of memory, whichever way the rows run.
        block_hw = min(positions, 64 if shape.strides[1] == 1 else 512)
        block_c = min(channels, _TILE // block_hw)
        block_hw = min(positions, _TILE // block_c)
        blocks = triton.cdiv(shape.channels, block_c)
        rows = block_hw * max(1, triton.cdiv(shape.hw * blocks, _PROGRAMS_PER_SAMPLE * block_hw))
        return cls(block_hw, block_c, rows, triton.cdiv(shape.hw, rows), blocks)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Arguments of every kernel, in order."""
        return self.rows, self.chunks, self.blocks

    @property
    def options(self) -> dict[str, int]:
        """Constants of the kernels that work through tiles."""
        return {"BLOCK_HW": self.block_hw, "BLOCK_C": self.block_c, "num_warps": _warps(self.block_hw * self.block_c)}


def _warps(tile: int, per_thread: int = _ELEMENTS_PER_THREAD) -> int:
    return max(1, min(16, tile // (32 * per_thread)))


def one_pass_constants(shape: Shape) -> dict[str, int] | None:
    """Constants of the form in which one program has ``SPAN`` whole groups; None where they do not fit."""
    vector = 16 // shape.itemsize
    span = vector // math.gcd(vector, shape.per_group) if shape.strides[1] == 1 else 1
    block_hw = power_of_2(shape.hw)

    def tile(span: int) -> int:
        return block_hw * power_of_2(span * shape.per_group)

    while 2 * span <= shape.groups and tile(2 * span) <= _SMALLEST_ONE_PASS_TILE:
        span *= 2
    span = min(span, shape.groups)
    if tile(span) * shape.itemsize > _ONE_PASS_BYTES or shape.hw == 0:
        return None
    return {
        "SPAN": span, "BLOCK_GROUPS": power_of_2(span), "BLOCK_HW": block_hw,
        "BLOCK_C": power_of_2(span * shape.per_group), "num_warps": _warps(tile(span), 2 * _ELEMENTS_PER_THREAD),
    }  # fmt: skip


def fold_constants(shape: Shape, chunks: int) -> dict[str, int]:
    """Constants of the folds over one group's chunks."""
    block = min(1024, power_of_2(chunks * shape.per_group))
    return {"PER_GROUP": shape.per_group, "BLOCK_PARTIALS": block, "num_warps": max(1, block // 256)}
