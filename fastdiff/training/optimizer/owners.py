"""Whole parameters over the flat tensors in which the engines keep slices of them: owners, and what the ranks exchange.

A parameter that ZeRO cuts is treated by one rank, its owner: the other ranks send it their slices, and get back the
results, many parameters at once. Owners are chosen once, in the order of the parameters: of the ranks with a slice the
one with the least work so far.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastdiff.config.optimizers.family import OptimizerFamily
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Flat, Fragment, Shapes
from fastdiff.parallel.world import World
from fastdiff.planning.scaling.owners import Loads
from fastdiff.training.optimizer.empty_state import empty_state, sizes_of

PER_RANK = 1 << 24
"""Elements that a rank gathers of parameters at once, about: 64 MiB of each tensor, and no copies of what is fp32."""
_Transfer = tuple[Tensor, int | None]
"""A tensor and the rank with which it is exchanged."""


class OverRanks(torch.optim.Optimizer):
    """An optimizer of flat tensors that needs to know which slices of which parameters lie in them, on all ranks."""

    @abstractmethod
    def lay_out(
        self, family: OptimizerFamily, flats: Sequence[Flat], shapes: Shapes, matrices: Matrices, world: World
    ) -> None:
        """Create the state, zeros, and choose the owners; called by all ranks once the flat tensors are cut.

        Args:
            family: of the optimizer.
            flats: all of this rank.
            shapes: of all trained parameters, in one order on all ranks.
            matrices: that the network declares.
            world: the ranks.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's slice of a parameter."""

    flat: Flat
    fragment: Fragment
    entries: dict[str, Fragment]
    """Where its entries lie in state that has not one per element of the flat tensor, by name."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice of a tensor with one entry per element of the flat tensor, ``[numel]``."""
        return self.fragment.of(tensor.view(-1))

    def state(self, name: str) -> Tensor:
        """Return the entries of a state tensor, as a view ``[entries]``."""
        values = self.flat.state[name].view(-1)
        return self.entries[name].of(values) if name in self.entries else self.fragment.of(values)

    @property
    def gradient(self) -> Tensor:
        """Slice of the gradient, ``[numel]``."""
        assert self.flat.key.grad is not None
        return self.of(self.flat.key.grad)


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's slice of a parameter: elements ``[start, start + numel)``, in its flat tensor number ``index``."""

    rank: int
    index: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter of the network."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    owner: int | None
    """Rank that updates it; None: every rank that has it has all of it, and updates it."""
    piece: Piece | None
    """Of this rank."""

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def gathered(self) -> bool:
        """Whether the owner lacks a part of it."""
        return not any(one.rank == self.owner and one.numel == self.numel for one in self.slices)


def pieces_of(family: OptimizerFamily, flats: Sequence[Flat], shapes: Shapes, matrices: Matrices) -> dict[str, Piece]:
    """Create the state of every flat tensor, zeros; return this rank's slices by parameter."""
    pieces = {}
    for flat in flats:
        flat.states[flat.key] = empty_state(family, flat, shapes, matrices)
        sizes = {tensor.name: sizes_of(tensor, shapes, matrices) for tensor in family.state}
        layouts = {name: flat.blocks(found) for name, found in sizes.items() if found is not None}
        for number, fragment in enumerate(flat.fragments):
            entries = {name: layout[number] for name, layout in layouts.items() if layout[number].numel}
            pieces[fragment.name] = Piece(flat, fragment, entries)
    return pieces


class Exchange:
    """Owners of parameters, and the messages between them and the ranks with slices.

    Args:
        flats: all of this rank.
        shapes: of all trained parameters, in one order on all ranks.
        pieces: this rank's slices.
        world: the ranks.
        work: the parameters to be updated whole, with the work of each.
        shares: whether a parameter that every rank has whole is updated by one, which sends the others the result;
            otherwise by every rank.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        shapes: Shapes,
        pieces: Mapping[str, Piece],
        world: World,
        work: Mapping[str, int],
        *,
        shares: bool,
    ) -> None:
        self.rank, self._most = world.rank, PER_RANK * world.size
        self.sent_bytes = 0
        """Bytes that this rank has sent to others."""
        # NCCL cannot access host memory, where ZeRO's offload keeps the flat tensors.
        offloaded = world.device.type == "cuda" and any(flat.key.device.type == "cpu" for flat in flats)
        self.group: ProcessGroup | None = dist.new_group(backend="gloo") if offloaded else None
        """For what is exchanged between the ranks; None: all of them."""
        own = [(index, f.name, f.start, f.numel) for index, flat in enumerate(flats) for f in flat.fragments]
        slices: dict[str, list[Slice]] = {name: [] for name in shapes}
        for rank, found in enumerate(world.gather(own)):
            for index, name, start, numel in found:
                slices[name].append(Slice(rank, index, start, numel))
        self.owned = list(_owned(shapes, slices, pieces, work, shares=shares and world.size > 1))

    def batches(self, stepped: Sequence[int]) -> Iterator[list[Owned]]:
        """Yield the parameters with an owner that lie in the flat tensors of these numbers, some at a time."""
        owned = [one for one in self.owned if one.owner is not None and one.slices[0].index in stepped]
        return _batches(owned, self._most)

    def gather(
        self, batch: Sequence[Owned], rows: Callable[[Piece], Sequence[Tensor]], dtype: torch.dtype = torch.float32
    ) -> list[Tensor | None]:
        """Send this rank's slices of parameters to their owners.

        Args:
            batch: the parameters, on every rank the same.
            rows: returns the values of a slice, each ``[numel]``.
            dtype: in which they are sent.

        Returns:
            Of each parameter that this rank owns its values whole, ``[rows, numel]``; None: another rank owns it.
        """
        tables: list[Tensor | None] = []
        sent: list[_Transfer] = []
        received: list[_Transfer] = []
        for one in batch:
            mine, piece = one.owner == self.rank, one.piece
            own = [row.to(dtype) for row in rows(piece)] if piece is not None and (mine or one.gathered) else []
            if not mine:
                tables.append(None)
                sent += [(row, one.owner) for row in own]
                continue
            table = own[0].new_empty(len(own), one.numel)
            tables.append(table)
            for part in one.slices:
                places = table[:, part.start : part.start + part.numel]
                if part.rank == self.rank:
                    copy(own, places)
                elif one.gathered:
                    received += [(place, part.rank) for place in places]
        self._transfer(sent, received)
        return tables

    def give_back(
        self,
        batch: Sequence[Owned],
        results: Sequence[Sequence[Tensor] | None],
        places: Callable[[Piece], Sequence[Tensor]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Send the results of parameters from their owners to the other ranks, and copy each into its place.

        Args:
            batch: the parameters, on every rank the same.
            results: of each parameter that this rank owns its values, each one entry, or ``[numel]`` of the whole
                parameter; None: another rank owns it.
            places: returns where the values of a slice belong, in the same order.
            dtype: in which they are sent.
        """
        sent: list[_Transfer] = []
        received: list[_Transfer] = []
        waiting: list[Tensor] = []
        for one, result in zip(batch, results, strict=True):
            if one.piece is None:
                continue
            own = places(one.piece)
            if result is None:
                waiting += own
                received += [(place.to(dtype), one.owner) for place in own]  # itself, if it has this dtype
                continue
            for piece in one.slices:
                updated = [row if row.numel() < one.numel else row[piece.start :][: piece.numel] for row in result]
                if piece.rank == self.rank:
                    copy(updated, own)
                else:
                    sent += [(row.to(dtype), piece.rank) for row in updated]
        self._transfer(sent, received)
        copy([values for values, _ in received], waiting)

    def _transfer(self, sent: Sequence[_Transfer], received: Sequence[_Transfer]) -> None:
        """Send and receive tensors, all at once; two ranks exchange theirs in the order of the parameters."""
        self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor, _ in sent)
        ops = [dist.P2POp(dist.isend, tensor, rank, self.group) for tensor, rank in sent]
        ops += [dist.P2POp(dist.irecv, tensor, rank, self.group) for tensor, rank in received]
        for request in dist.batch_isend_irecv(ops) if ops else ():
            request.wait()


def copy(values: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    """Copy tensors into others."""
    for place, value in zip(places, values, strict=True):
        place.copy_(value.view_as(place))


def _batches(owned: Sequence[Owned], most: int) -> Iterator[list[Owned]]:
    """Yield consecutive parameters of about ``most`` elements together."""
    ends = accumulate(one.numel for one in owned)
    for _, batch in groupby(zip(ends, owned, strict=True), key=lambda pair: pair[0] // most):
        yield [one for _, one in batch]


def _owned(
    shapes: Shapes,
    slices: Mapping[str, Sequence[Slice]],
    pieces: Mapping[str, Piece],
    work: Mapping[str, int],
    *,
    shares: bool,
) -> Iterator[Owned]:
    """Yield the parameters to be updated whole, with their owners."""
    loads = Loads()
    for name in work:
        owner = None
        if shares or any(one.numel < prod(shapes[name]) for one in slices[name]):
            owner = loads.owner((one.rank for one in slices[name]), work[name])
        yield Owned(name, shapes[name], tuple(slices[name]), owner, pieces.get(name))
