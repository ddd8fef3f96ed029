"""Muon with a momentum of 8 bits, and AdamW with 8-bit moments beside it.

Codes, blocks and dither are those of ``fastdiff_kernels.adamw8bit``: the state is the same however the ranks cut the
parameters. What is orthogonalised has not been rounded to 8 bits.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.optimizers.adamw import ADAMW8BIT
from fastdiff.config.optimizers.family import OptimizerFamily
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Flat, Fragment, Shapes
from fastdiff.parallel.world import World
from fastdiff.training.optimizer.empty_state import sizes_of
from fastdiff.training.optimizer.muon import Muon
from fastdiff.training.optimizer.owners import Piece
from fastdiff_kernels.adamw8bit import momentum as momentum8bit
from fastdiff_kernels.adamw8bit.blocks import Blocks, Key, build_blocks, find_straddling
from fastdiff_kernels.adamw8bit.kernels import adamw8bit, largest
from fastdiff_kernels.adamw8bit.reference import Extras, Moments, Step, over_ranks

_OF_OTHERS = tuple(tensor.name for tensor in ADAMW8BIT.state)


class Muon8bit(Muon):
    """``Muon`` with int8 codes and an fp32 scale per block of 256 elements of a matrix; see there."""

    def lay_out(
        self, family: OptimizerFamily, flats: Sequence[Flat], shapes: Shapes, matrices: Matrices, world: World
    ) -> None:
        """Create the state, choose the owners and cut the blocks; see ``OverRanks``."""
        super().lay_out(family, flats, shapes, matrices, world)
        assert self._exchange is not None
        self._group = self._exchange.group
        codes_of_others, codes = (
            _codes(family, name, flats, shapes, matrices) for name in (_OF_OTHERS[0], "momentum_codes")
        )
        self._blocks_of_others = [
            build_blocks(slices, flat.key.device, keys)
            for flat, slices, keys in zip(
                flats, codes_of_others, find_straddling(codes_of_others, self._group), strict=True
            )
        ]
        self._straddling = find_straddling(codes, self._group)
        self._blocks_of_matrices = [
            [(piece, _blocks(piece, keys)) for piece in self._of_matrices if piece.flat is flat]
            for flat, keys in zip(flats, self._straddling, strict=True)
        ]

    def _mix(self, live: Set[int], momentum: float, nesterov: bool, **_: Any) -> None:
        """Move the momentum and replace the gradient, matrix by matrix, without an fp32 copy of all of them."""
        share = momentum if nesterov else 1.0
        for flat, keys, found in zip(self._flats, self._straddling, self._blocks_of_matrices, strict=True):
            if id(flat.key) not in live:
                continue
            shared = torch.zeros(len(keys), device=flat.key.device) if keys else None
            if shared is not None:
                for piece, blocks in found:
                    momentum8bit.largest(piece.gradient, *_held(piece), blocks, momentum, shared)
                over_ranks(shared, self._group)
            for piece, blocks in found:
                number = flat.state["step"]
                momentum8bit.mix_(piece.gradient, *_held(piece), blocks, momentum, share, number, shared)

    def _take_adamw(
        self, live: Set[int], rate: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """Update the parameters that are no matrices, joined for one launch; see ``Muon``."""
        for flat, blocks in zip(self._flats, self._blocks_of_others, strict=True):
            if id(flat.key) in live:
                step = Step.of(flat.state["step"], rate, betas, eps, weight_decay)
                self._update_others(flat, blocks, step)

    def _update_others(self, flat: Flat, blocks: Blocks, step: Step) -> None:
        pieces = [piece for piece in self._of_others if piece.flat is flat]
        moments = Moments(*(flat.state[name] for name in _OF_OTHERS))
        gradients = torch.cat([flat.master[:0], *(piece.gradient for piece in pieces)])
        shared = gradients.new_zeros(blocks.straddling, 2) if blocks.straddling else None
        if shared is not None:
            if pieces:
                shared = largest(gradients, moments, blocks, step, None)
            over_ranks(shared, self._group)
        if not pieces:
            return
        weights = [piece.of(flat.master) for piece in pieces]
        joined = torch.cat(weights)
        adamw8bit(joined, gradients, moments, blocks, step, Extras(shared=shared))
        torch._foreach_copy_(weights, torch.split(joined, [one.numel() for one in weights]))


def _codes(
    family: OptimizerFamily, name: str, flats: Sequence[Flat], shapes: Shapes, matrices: Matrices
) -> list[list[Fragment]]:
    """Return the slices of parameters that lie in a state tensor with an entry per element, by flat tensor."""
    sizes = sizes_of(next(tensor for tensor in family.state if tensor.name == name), shapes, matrices)
    assert sizes is not None
    return [[one for one in flat.blocks(sizes) if one.numel] for flat in flats]


def _blocks(piece: Piece, straddling: Sequence[Key]) -> Blocks:
    return build_blocks([replace(piece.fragment, offset=0)], piece.flat.key.device, straddling)


def _held(piece: Piece) -> tuple[Tensor, Tensor]:
    return piece.state("momentum_codes"), piece.state("momentum_scales")
