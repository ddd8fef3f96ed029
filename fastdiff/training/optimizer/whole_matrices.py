"""Optimizers that need whole parameters, over the flat tensors in which the engines keep slices of them.

A parameter that lies whole on a rank is updated there: at ZeRO-0 on every rank, under ZeRO-1 to 3 on one. A parameter
that ZeRO cuts is updated by one rank, its owner: the other ranks send it their slices of weights, gradient and state,
and get back the results, many parameters at once. Owners are chosen once, in the order of the parameters: of the ranks
with a slice the one that owns the fewest elements.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastdiff.config.optimizers.family import OptimizerFamily
from fastdiff.parallel.fragments import Flat, Fragment, Shapes
from fastdiff.parallel.world import World
from fastdiff.training.optimizer.empty_state import empty_state, sizes_of

_PER_RANK = 1 << 24
"""Elements that a rank gathers of parameters at once, about: 64 MiB of each tensor, and no copies of what is fp32."""
_Transfer = tuple[Tensor, int | None]
"""A tensor and the rank with which it is exchanged."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """This rank's slice of a parameter."""

    flat: Flat
    fragment: Fragment
    scalars: dict[str, Fragment]
    """Where its entries of matrices and parameters lie in the state, by name."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice of a tensor with one entry per element of the flat tensor, ``[numel]``."""
        return self.fragment.of(tensor.view(-1))

    def state(self) -> dict[str, Tensor]:
        """Return the entries of ``scalars`` as views."""
        return {name: entry.of(self.flat.state[name]).view(()) for name, entry in self.scalars.items()}


@dataclass(frozen=True, slots=True)
class _Slice:
    """A rank's slice of a parameter: elements ``[start, start + numel)``, in its flat tensor number ``index``."""

    rank: int
    index: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter of the network."""

    shape: tuple[int, ...]
    slices: tuple[_Slice, ...]
    owner: int | None
    """Rank that updates it; None: every rank that has it has all of it."""
    piece: _Piece | None
    """Of this rank."""


class WholeMatrices(torch.optim.Optimizer):
    """The optimizer ``of``, which gets one whole parameter after another, fp32 in its shape.

    The state of a parameter is given to it as ``OptimizerFamily.state`` declares it: tensors of the parameter's shape,
    and scalars for entries of matrices and parameters.

    Args:
        params: the flat tensors.
        arguments: of ``of``.
    """

    of: ClassVar[type[torch.optim.Optimizer]]

    def __init__(self, params: Any, **arguments: Any) -> None:
        self._inner = self.of([torch.zeros(1, 1)], **arguments)
        self._matrices: list[_Matrix] = []
        self._flats: Sequence[Flat] = ()
        self._groups: dict[int, dict[str, Any]] = {}
        super().__init__(params, self._inner.defaults)

    def lay_out(self, family: OptimizerFamily, flats: Sequence[Flat], shapes: Shapes, world: World) -> None:
        """Create the state, zeros, and choose the owners; called by all ranks once the flat tensors are cut.

        Args:
            family: of ``of``.
            flats: all of this rank.
            shapes: of all trained parameters, in one order on all ranks.
            world: the ranks.
        """
        self._family, self._flats, self._rank, self._most = family, flats, world.rank, _PER_RANK * world.size
        # NCCL cannot access host memory, where ZeRO's offload keeps the flat tensors.
        offloaded = world.device.type == "cuda" and any(flat.key.device.type == "cpu" for flat in flats)
        self._group: ProcessGroup | None = dist.new_group(backend="gloo") if offloaded else None
        own = [(index, f.name, f.start, f.numel) for index, flat in enumerate(flats) for f in flat.fragments]
        slices: dict[str, list[_Slice]] = {name: [] for name in shapes}
        for rank, found in enumerate(world.gather(own)):
            for index, name, start, numel in found:
                slices[name].append(_Slice(rank, index, start, numel))
        self._matrices = list(_matrices(shapes, slices, self._create_state(shapes)))

    def _create_state(self, shapes: Shapes) -> dict[str, _Piece]:
        """Create the state of every flat tensor; return this rank's slices by parameter."""
        pieces = {}
        for flat in self._flats:
            self.state[flat.key] = empty_state(self._family, flat, shapes)
            sizes = {tensor.name: sizes_of(tensor, shapes) for tensor in self._family.state}
            layouts = {name: flat.blocks(found) for name, found in sizes.items() if found is not None}
            for number, fragment in enumerate(flat.fragments):
                scalars = {name: layout[number] for name, layout in layouts.items() if layout[number].numel}
                pieces[fragment.name] = _Piece(flat, fragment, scalars)
        return pieces

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters of the flat tensors that are in the groups and have a gradient.

        Before ``lay_out`` it changes nothing: DeepSpeed takes such a step when it is built.
        """
        # ZeRO-3 steps one after another.
        keys = self._groups = {id(key): group for group in self.param_groups for key in group["params"]}
        stepped = [index for index, flat in enumerate(self._flats) if id(flat.key) in keys]
        cut = [m for m in self._matrices if m.owner is not None and m.slices[0].index in stepped]
        for matrix in self._matrices:
            piece = matrix.piece
            if matrix.owner is None and piece is not None and id(piece.flat.key) in keys:
                self._update_in_place(matrix.shape, piece)
        for batch in _batches(cut, self._most):
            tables = self._gather(batch)
            for matrix, table in zip(batch, tables, strict=True):
                if table is not None:
                    self._update(matrix.shape, table, matrix.piece)
            self._return(batch, tables)
        for state in (self._flats[index].state for index in stepped):
            if "step" in state:
                state["step"] = state["step"] + 1

    @property
    def _names(self) -> list[str]:
        return [tensor.name for tensor in self._family.elements]

    def _rows(self, piece: _Piece) -> list[Tensor]:
        """Return this rank's slices of weights, gradient and state, each ``[numel]``."""
        flat, gradient = piece.flat, piece.flat.key.grad
        assert gradient is not None
        return [piece.of(tensor) for tensor in (flat.master, gradient, *(flat.state[name] for name in self._names))]

    def _update_in_place(self, shape: Sequence[int], piece: _Piece) -> None:
        if piece.flat.key.grad is not None:
            self._update(shape, self._rows(piece), piece)

    def _update(self, shape: Sequence[int], rows: Iterable[Tensor], piece: _Piece | None) -> None:
        """Let the optimizer update one parameter in place.

        Args:
            shape: of the parameter.
            rows: its weights, gradient and state, each whole, ``[numel]``.
            piece: of this rank, whose single entries are updated.
        """
        assert piece is not None
        parameter, gradient, *elements = (row.view(*shape) for row in rows)
        state = {**dict(zip(self._names, elements, strict=True)), **piece.state()}
        held: dict[str, Any] = dict(state)
        if "step" in piece.flat.state:
            held["step"] = piece.flat.state["step"] + 0  # a copy: the flat tensor counts once for all of its parameters
        parameter.grad = gradient.to(parameter.dtype)
        self._inner.param_groups[0].update({**self._groups[id(piece.flat.key)], "params": [parameter]})
        self._inner.state.clear()
        self._inner.state[parameter] = held
        self._inner.step()
        for name, values in state.items():
            values.copy_(held[name])  # where the optimizer has replaced a tensor

    def _gather(self, batch: Sequence[_Matrix]) -> list[Tensor | None]:
        """Send this rank's slices of parameters to their owners; return those it owns: ``[2 + states, numel]``."""
        tables: list[Tensor | None] = []
        sent: list[_Transfer] = []
        received: list[_Transfer] = []
        for matrix in batch:
            own = [] if matrix.piece is None else [row.float() for row in self._rows(matrix.piece)]
            if matrix.owner != self._rank:
                tables.append(None)
                sent += [(row, matrix.owner) for row in own]
                continue
            table = own[0].new_empty(len(own), prod(matrix.shape))
            tables.append(table)
            for piece in matrix.slices:
                places = table[:, piece.start : piece.start + piece.numel]
                if piece.rank == self._rank:
                    _copy(own, places)
                else:
                    received += [(place, piece.rank) for place in places]
        self._exchange(sent, received)
        return tables

    def _return(self, batch: Sequence[_Matrix], tables: Sequence[Tensor | None]) -> None:
        """Send the slices of updated parameters from their owners to the other ranks, which copy them into place."""
        sent: list[_Transfer] = []
        received: list[_Transfer] = []
        places: list[Tensor] = []
        for matrix, table in zip(batch, tables, strict=True):
            if matrix.piece is None:
                continue
            weights, _, *states = self._rows(matrix.piece)
            scalars = [value.view(1) for value in matrix.piece.state().values()]
            own = [weights, *states, *scalars]
            if table is None:
                places += own
                received += [(place.float(), matrix.owner) for place in own]  # itself, if it is fp32
                continue
            for piece in matrix.slices:
                rows = table[:, piece.start : piece.start + piece.numel]
                updated = [rows[0], *rows[2:], *(value.float() for value in scalars)]
                if piece.rank == self._rank:
                    _copy(updated, own)
                else:
                    sent += [(row, piece.rank) for row in updated]
        self._exchange(sent, received)
        _copy([values for values, _ in received], places)

    def _exchange(self, sent: Sequence[_Transfer], received: Sequence[_Transfer]) -> None:
        """Send and receive tensors, all at once; two ranks exchange theirs in the order of the parameters."""
        ops = [dist.P2POp(dist.isend, tensor, rank, self._group) for tensor, rank in sent]
        ops += [dist.P2POp(dist.irecv, tensor, rank, self._group) for tensor, rank in received]
        for request in dist.batch_isend_irecv(ops) if ops else ():
            request.wait()


def _copy(values: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def _batches(matrices: Sequence[_Matrix], most: int) -> Iterator[list[_Matrix]]:
    """Yield consecutive parameters of about ``most`` elements together."""
    ends = accumulate(prod(matrix.shape) for matrix in matrices)
    for _, batch in groupby(zip(ends, matrices, strict=True), key=lambda pair: pair[0] // most):
        yield [matrix for _, matrix in batch]


def _matrices(
    shapes: Shapes, slices: Mapping[str, Sequence[_Slice]], pieces: Mapping[str, _Piece]
) -> Iterator[_Matrix]:
    """Yield all parameters with their owners."""
    load: Counter[int] = Counter()
    for name, shape in shapes.items():
        owner = None
        if any(one.numel < prod(shape) for one in slices[name]):
            owner = min((one.rank for one in slices[name]), key=lambda rank: (load[rank], rank))
            load[owner] += prod(shape)
        yield _Matrix(shape, tuple(slices[name]), owner, pieces.get(name))
