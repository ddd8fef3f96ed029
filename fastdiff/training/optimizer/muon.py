"""Muon over the flat tensors in which the engines keep slices of parameters.

Only the orthogonalisation needs a whole matrix. Momentum, decay, and AdamW for the other parameters update each element
where it lies; between them the owner of a matrix gets the slices of what is to be orthogonalised, and sends back the
results, in the dtype of the iterations. Without ZeRO every rank has all slices, so the owners only send.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.optimizers.family import OptimizerFamily
from fastdiff.config.optimizers.muon import SCALES
from fastdiff.models.cost.flops import update_flops
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Flat, Shapes
from fastdiff.parallel.world import World
from fastdiff.training.optimizer.orthogonalise import orthogonalise
from fastdiff.training.optimizer.owners import Exchange, OverRanks, Owned, Piece, pieces_of

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class _Span:
    """Elements ``[start, start + numel)`` of a slice whose matrices have the same scale."""

    piece: Piece
    start: int
    numel: int
    scale: float

    def of(self, values: Tensor) -> Tensor:
        """Return the span of values of the slice, ``[numel]``."""
        return values[self.start : self.start + self.numel]


class Muon(OverRanks):
    """Muon for the matrices that the network declares, AdamW (Loshchilov and Hutter 2019) for all else.

    Each matrix W of a weight, with its gradient g and momentum m, is updated by itself::

        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g, or m without nesterov
        W = W * (1 - lr * weight_decay) - lr * scale(rows, columns) * NewtonSchulz(u)

    as in github.com/KellerJordan/Muon. A convolution ``[O, I, H, W]`` is the matrix ``[O, I * H * W]``, and has its
    scale (there that of ``[H, W]``). The arguments are the fields of ``MuonConfig``; ``adamw_lr`` follows the schedule
    of ``lr``.
    """

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        self._lr = lr
        self._exchange: Exchange | None = None
        self._flats: Sequence[Flat] = ()
        super().__init__(params, {"lr": lr, **options})

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to others."""
        return 0 if self._exchange is None else self._exchange.sent_bytes

    def lay_out(
        self, family: OptimizerFamily, flats: Sequence[Flat], shapes: Shapes, matrices: Matrices, world: World
    ) -> None:
        """Create the state and choose the owners; see ``OverRanks``."""
        self._flats, self._matrices, self._device = flats, matrices, world.device
        pieces = pieces_of(family, flats, shapes, matrices)
        self._exchange = Exchange(flats, shapes, pieces, world, update_flops(family, matrices), shares=True)
        scale = SCALES[self.defaults["scale"]]
        self._of_matrices = [piece for name, piece in pieces.items() if name in matrices]
        self._of_others = [piece for name, piece in pieces.items() if name not in matrices]
        self._spans = [span for piece in self._of_matrices for span in _spans(piece, matrices, scale)]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the flat tensors that are in the groups and have a gradient, which is overwritten.

        Before ``lay_out`` it changes nothing: DeepSpeed takes such a step when it is built.
        """
        if (exchange := self._exchange) is None:
            return
        group = self.param_groups[0]
        keys = {id(key) for one in self.param_groups for key in one["params"]}  # ZeRO-3 steps one after another
        stepped = [index for index, flat in enumerate(self._flats) if id(flat.key) in keys]
        for flat in (self._flats[index] for index in stepped):
            flat.state["step"] += 1
            if flat.key.grad is not None:
                flat.key.grad = flat.key.grad.float()
        live = {id(self._flats[index].key) for index in stepped if self._flats[index].key.grad is not None}
        rate = group["adamw_lr"] * (group["lr"] / self._lr)
        self._take_adamw(live, rate, group["adamw_betas"], group["adamw_eps"], group["weight_decay"])
        self._mix(live, **group)
        dtype = _DTYPES[group["iterations_dtype"]]
        for one in exchange.owned:
            if one.owner is None and one.piece is not None and id(one.piece.flat.key) in live:
                one.piece.gradient.copy_(self._orthogonalised(one, one.piece.gradient, dtype))
        for batch in exchange.batches(stepped):
            tables = exchange.gather(batch, lambda piece: [piece.gradient], dtype)
            results = [
                None if table is None else [self._orthogonalised(one, table[0], dtype)]
                for one, table in zip(batch, tables, strict=True)
            ]
            exchange.give_back(batch, results, lambda piece: [piece.gradient], dtype)
        self._move([span for span in self._spans if id(span.piece.flat.key) in live], **group)

    def _mix(self, live: Set[int], momentum: float, nesterov: bool, **_: Any) -> None:
        """Move the momentum by the gradient, and replace the gradient by what is to be orthogonalised.

        Args:
            live: ids of the keys of the flat tensors to be updated.
            momentum: decay rate.
            nesterov: see ``MuonConfig``.
        """
        pieces = [piece for piece in self._of_matrices if id(piece.flat.key) in live]
        if not pieces:
            return
        gradients, held = [piece.gradient for piece in pieces], [piece.state("momentum") for piece in pieces]
        exact = [each.float() for each in held]  # itself, if it is fp32
        torch._foreach_lerp_(exact, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, exact, momentum if nesterov else 1.0)
        if exact[0] is not held[0]:
            torch._foreach_copy_(held, exact)

    def _orthogonalised(self, one: Owned, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Orthogonalise a parameter ``[numel]`` on the device of the ranks; ``[numel]`` of ``dtype``, where it was."""
        matrix = self._matrices[one.name]
        whole = values.to(self._device).view(-1, matrix.columns)
        return orthogonalise(whole, matrix, dtype).flatten().to(values.device)

    def _move(self, spans: Sequence[_Span], lr: float, weight_decay: float, **_: Any) -> None:
        """Move the weights by the updates, which the gradients hold."""
        if not spans:
            return
        weights = [span.of(span.piece.of(span.piece.flat.master)) for span in spans]
        updates = [span.of(span.piece.gradient) for span in spans]
        if weight_decay:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_mul_(updates, [span.scale for span in spans])
        torch._foreach_add_(weights, updates, alpha=-lr)

    def _take_adamw(
        self, live: Set[int], rate: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """Update the parameters that are no matrices, in the flat tensors whose keys have the ids ``live``."""
        pieces = [piece for piece in self._of_others if id(piece.flat.key) in live]
        if not pieces:
            return
        (beta1, beta2), steps = betas, pieces[0].flat.state["step"]
        weights, gradients = [piece.of(piece.flat.master) for piece in pieces], [piece.gradient for piece in pieces]
        means, squares = ([piece.state(name) for piece in pieces] for name in ("exp_avg", "exp_avg_sq"))
        if weight_decay:
            torch._foreach_mul_(weights, 1 - rate * weight_decay)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**steps) ** 0.5)
        torch._foreach_add_(roots, eps)
        torch._foreach_addcdiv_(weights, means, roots, value=-rate / (1 - beta1**steps))


def _spans(piece: Piece, matrices: Matrices, scale: Callable[[int, int], float]) -> Iterator[_Span]:
    """Yield the spans of a slice."""
    fragment, matrix = piece.fragment, matrices[piece.fragment.name]
    end, offset = fragment.start + fragment.numel, 0
    for height in matrix.heights * matrix.groups:
        first, last = max(offset, fragment.start), min(offset + height * matrix.columns, end)
        offset += height * matrix.columns
        if first < last:
            yield _Span(piece, first - fragment.start, last - first, scale(matrix.groups * height, matrix.columns))
