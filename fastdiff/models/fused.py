"""Matrices of hidden layers, as networks declare them for optimizers that treat a matrix as a whole.

A weight may hold several matrices, one below the other (queries, keys and values; shifts, scales and gates). Such an
optimizer treats each by itself. Weights of the first and last layers, embeddings and tables of vectors are no matrices
of this kind, even if they have two dimensions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from fastdiff.errors import require


@dataclass(frozen=True, slots=True)
class Matrix:
    """The matrices of a weight ``[rows, ...]``, one below the other, ``groups`` times."""

    heights: tuple[int, ...]
    """Rows of each matrix in a group."""
    groups: int
    columns: int


Matrices = Mapping[str, Matrix]
"""By name of the parameter; one that is missing has none."""


@dataclass(frozen=True, slots=True)
class Fused:
    """How matrices lie in a weight ``[rows, ...]``, whose other dimensions are the columns."""

    parts: tuple[int, ...] = (1,)
    """Relative heights of the matrices, from the first row on; empty: as many square ones as fit."""
    groups: Callable[[int], int] = lambda columns: 1
    """How often the parts follow each other, by the columns: with ``(q, k, v)`` of each of H heads, H times."""

    def cut(self, shape: tuple[int, ...]) -> Matrix:
        """Return the matrices of a weight of this shape."""
        rows, columns = shape[0], prod(shape[1:])
        parts = self.parts or (1,) * max(rows // columns, 1)
        groups = self.groups(columns)
        unit, left = divmod(rows, groups * sum(parts))
        require(left == 0, f"a weight of the shape {list(shape)} cannot be cut along its rows into {groups} x {parts}")
        return Matrix(tuple(unit * part for part in parts), groups, columns)


ONE = Fused()
SQUARES = Fused(())
Declared = Mapping[str, Fused | None]
"""By pattern of names (``fnmatch``), of which the first that fits counts: the matrices of a weight; None: none."""
