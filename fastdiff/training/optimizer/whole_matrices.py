"""Optimizers that need whole parameters, over the flat tensors in which the engines keep slices of them.

A parameter that lies whole on a rank is updated there: at ZeRO-0 on every rank, under ZeRO-1 to 3 on one. A parameter
that ZeRO cuts is updated by its owner, which gets the slices of weights, gradient and state of the others (``owners``).
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastdiff.config.optimizers.family import OptimizerFamily
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Flat, Shapes
from fastdiff.parallel.world import World
from fastdiff.training.optimizer.owners import Exchange, OverRanks, Piece, pieces_of


class WholeMatrices(OverRanks):
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
        self._exchange: Exchange | None = None
        self._flats: Sequence[Flat] = ()
        self._groups: dict[int, dict[str, Any]] = {}
        super().__init__(params, self._inner.defaults)

    def lay_out(
        self, family: OptimizerFamily, flats: Sequence[Flat], shapes: Shapes, matrices: Matrices, world: World
    ) -> None:
        """Create the state and choose the owners; see ``OverRanks``."""
        self._family, self._flats = family, flats
        pieces = pieces_of(family, flats, shapes, matrices)
        work = {name: prod(shape) for name, shape in shapes.items()}
        self._exchange = Exchange(flats, shapes, pieces, world, work, shares=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters of the flat tensors that are in the groups and have a gradient.

        Before ``lay_out`` it changes nothing: DeepSpeed takes such a step when it is built.
        """
        if (exchange := self._exchange) is None:
            return
        # ZeRO-3 steps one after another.
        keys = self._groups = {id(key): group for group in self.param_groups for key in group["params"]}
        stepped = [index for index, flat in enumerate(self._flats) if id(flat.key) in keys]
        for one in exchange.owned:
            piece = one.piece
            if one.owner is None and piece is not None and id(piece.flat.key) in keys:
                self._update_in_place(one.shape, piece)
        for batch in exchange.batches(stepped):
            tables = exchange.gather(batch, self._rows)
            results = [
                None if table is None else self._update(one.shape, table, one.piece)
                for one, table in zip(batch, tables, strict=True)
            ]
            exchange.give_back(batch, results, self._places)
        for state in (self._flats[index].state for index in stepped):
            if "step" in state:
                state["step"] = state["step"] + 1

    @property
    def _names(self) -> list[str]:
        return [tensor.name for tensor in self._family.elements]

    def _rows(self, piece: Piece) -> list[Tensor]:
        """Return this rank's slices of weights, gradient and state, each ``[numel]``."""
        flat = piece.flat
        return [piece.of(flat.master), piece.gradient, *(piece.of(flat.state[name]) for name in self._names)]

    def _places(self, piece: Piece) -> list[Tensor]:
        """Return the slices of weights and state, and the single entries of the state."""
        weights, _, *states = self._rows(piece)
        return [weights, *states, *map(piece.state, piece.entries)]

    def _update_in_place(self, shape: Sequence[int], piece: Piece) -> None:
        if piece.flat.key.grad is not None:
            self._update(shape, self._rows(piece), piece)

    def _update(self, shape: Sequence[int], rows: Iterable[Tensor], piece: Piece | None) -> list[Tensor]:
        """Let the optimizer update one parameter in place; return what ``_places`` says.

        Args:
            shape: of the parameter.
            rows: its weights, gradient and state, each whole, ``[numel]``.
            piece: of this rank, whose single entries are updated.
        """
        assert piece is not None
        weights, gradient, *elements = rows
        parameter, single = weights.view(*shape), {name: piece.state(name).view(()) for name in piece.entries}
        state = {**{n: row.view(*shape) for n, row in zip(self._names, elements, strict=True)}, **single}
        held: dict[str, Any] = dict(state)
        if "step" in piece.flat.state:
            held["step"] = piece.flat.state["step"] + 0  # a copy: the flat tensor counts once for all of its parameters
        parameter.grad = gradient.view(*shape).to(parameter.dtype)
        self._inner.param_groups[0].update({**self._groups[id(piece.flat.key)], "params": [parameter]})
        self._inner.state.clear()
        self._inner.state[parameter] = held
        self._inner.step()
        for name, values in state.items():
            values.copy_(held[name])  # where the optimizer has replaced a tensor
        return [weights, *elements, *(value.view(1) for value in single.values())]
