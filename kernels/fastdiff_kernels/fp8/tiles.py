"""Matrices by tiles: one program writes a tile in all forms of an operand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff_kernels.fp8.rounding import inverse, largest, magnitude, to_e4m3
from fastdiff_kernels.fp8.values import blank
from fastdiff_kernels.launch import jit, tl

TILE = 64
"""Rows and columns of a tile."""


def tiles(matrix: Tensor) -> tuple[int, int]:
    """Return the grid of programs over rows and columns."""
    return -(-matrix.shape[0] // TILE), -(-matrix.shape[1] // TILE)


def empty(like: Tensor, form: Sequence[bool]) -> list[Tensor]:
    """Return memory for the maxima, one per tile, and for the forms that are asked for."""
    rows, columns = tiles(like)
    return [like.new_empty(rows * columns, dtype=torch.float32), *blank(like, (like.shape[0], like.shape[1]), form)]


@jit
def write_tile(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, plain_ptr, maxima_ptr, values, unit_ptr, row, column, rows, columns
):
    """Write fp32 values of a tile in each form that has a pointer, and their maximum; outside the matrix they are 0."""
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    numbers = to_e4m3(values * inverse(unit_ptr))
    if rows_ptr is not None:
        tl.store(rows_ptr + at, numbers, mask=inside)
    if columns_ptr is not None:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(columns_ptr + column[:, None].to(tl.int64) * rows + row[None, :], tl.trans(numbers), mask=turned)
    if plain_ptr is not None:
        tl.store(plain_ptr + at, values.to(plain_ptr.dtype.element_ty), mask=inside)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima_ptr + program, largest(magnitude(values)))
