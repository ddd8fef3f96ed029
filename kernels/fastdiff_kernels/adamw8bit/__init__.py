"""The optimizer AdamW with 8-bit moments, for whole parameters and for the flat tensors of DeepSpeed's ZeRO.

Formula, bytes and limits are those of ``kernels``, the codes those of ``companding``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastdiff_kernels.adamw8bit.blocks import Blocks, Slice, Whole, build_blocks, find_straddling
from fastdiff_kernels.adamw8bit.companding import BLOCK
from fastdiff_kernels.adamw8bit.kernels import adamw8bit, largest
from fastdiff_kernels.adamw8bit.reference import Extras, Moments, Step, over_ranks

__all__ = ["BLOCK", "AdamW8bit", "Slice"]


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with decoupled weight decay and one byte per parameter and moment.

    ``state[p]`` holds ``step`` (int), ``exp_avg_codes`` (int8 ``[N]``), ``exp_avg_sq_codes`` (uint8 ``[N]``),
    ``exp_avg_scales`` and ``exp_avg_sq_scales`` (fp32, one per piece of a block, slice by slice in the order of the
    layout: the largest magnitude of the moment, and of the root of the second moment). Parameters are fp32, or bf16,
    which are then rounded stochastically; gradients fp32, bf16 or fp16. Everything must be contiguous. Nothing is read
    back from the device.

    A gradient that is not finite makes the state and from the next step on the parameters of its block not finite.

    Args:
        params: tensors or parameter groups; each tensor is one whole parameter unless ``cut`` says otherwise.
        lr: learning rate.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment, > 0.
        weight_decay: decoupled, per unit of learning rate.
        seed: of the stochastic rounding of bf16 parameters, in [0, 2**63).

    Raises:
        ValueError: a number out of its range.
    """

    grad_scale: Tensor | None
    """fp32 scalar on the device that multiplies every gradient until it is changed (unscaling, clipping); None: 1."""
    copies: dict[Tensor, Tensor]
    """For an optimized tensor, a tensor of equal size and any float dtype that receives the new parameters."""
    averages: dict[Tensor, tuple[Sequence[Tensor], Tensor]]
    """For an optimized tensor, fp32 averages of equal size, and the fp32 share of the weights in each, ``[K]``."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        seed: int = 0,
    ) -> None:
        for name, value, valid in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps > 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("seed", seed, 0 <= seed < 2**63),
        ):
            if not valid:
                raise ValueError(
                    f"{name} {value}: expected lr >= 0, betas in [0, 1), eps > 0, weight_decay >= 0, seed in [0, 2**63)"
                )
        self.grad_scale, self.copies, self.averages = None, {}, {}
        self._seed = seed
        self._blocks: dict[Tensor, Blocks] = {}
        self._group: ProcessGroup | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        """State of copies and pickles: the base class includes only its own attributes."""
        names = ("grad_scale", "copies", "averages", "_seed", "_blocks", "_group")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def cut(self, layout: Mapping[Tensor, Sequence[Slice]], group: ProcessGroup | None = None) -> None:
        """Set the slices of the parameters that each tensor holds, and reset the moments to zero.

        Collective over the ranks. Afterwards ``step`` is collective too wherever a block straddles ranks: each rank
        must step its tensors of one index in ``layout`` together with the others.

        Args:
            layout: the slices of each tensor (flattened) that this rank optimizes, as many tensors on every rank.
                Elements outside of all slices stay as they are.
            group: the ranks between which the parameters are cut; None: all.

        Raises:
            ValueError: a slice that reaches out of its tensor, or ranks that contradict each other.
        """
        for tensor, slices in layout.items():
            for piece in slices:
                if piece.offset < 0 or piece.start < 0 or piece.offset + piece.numel > tensor.numel():
                    raise ValueError(f"{piece} lies outside of its tensor of {tensor.numel()} elements")
        straddling = find_straddling(list(layout.values()), group)
        self._group = group
        self.state.clear()
        self._blocks = {
            tensor: build_blocks(slices, tensor.device, keys)
            for (tensor, slices), keys in zip(layout.items(), straddling, strict=True)
        }
        for index, tensor in enumerate(layout):
            self._state_of(tensor, index)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every tensor that has a gradient; return what ``closure`` returned, None without one.

        Raises:
            ValueError: a parameter or gradient of another dtype, shape or stride than ``AdamW8bit`` takes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = [(group, p) for group in self.param_groups for p in group["params"]]
        for index, (group, p) in enumerate(tensors):
            if p.grad is not None:
                self._update(p, group, self._state_of(p, index))
        return loss

    def _state_of(self, p: Tensor, index: int) -> dict[str, Any]:
        """Return the state of a tensor; an unknown tensor is one whole parameter and gets a new state."""
        if p not in self._blocks:
            self._blocks[p] = build_blocks([Whole(str(index), p.numel())], p.device)
        state: dict[str, Any] = self.state[p]
        if not state:
            pieces = self._blocks[p].pieces
            state["step"] = 0
            state["exp_avg_codes"] = torch.zeros(p.numel(), dtype=torch.int8, device=p.device)
            state["exp_avg_sq_codes"] = torch.zeros(p.numel(), dtype=torch.uint8, device=p.device)
            state["exp_avg_scales"] = torch.zeros(pieces, dtype=torch.float32, device=p.device)
            state["exp_avg_sq_scales"] = torch.zeros(pieces, dtype=torch.float32, device=p.device)
        return state

    def _update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not p.is_contiguous():
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} has strides {p.stride()}, expected it to be contiguous"
            )
        state["step"] += 1
        blocks = self._blocks[p]
        step = Step.of(state["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"], self._seed)
        moments = Moments(*(state[f"exp_avg_{key}"] for key in ("codes", "sq_codes", "scales", "sq_scales")))
        grad = p.grad.contiguous().view(-1)  # type: ignore[union-attr]
        scale = None if self.grad_scale is None else self.grad_scale.to(p.device, torch.float32)
        shared = None
        if blocks.straddling:
            shared = over_ranks(largest(grad, moments, blocks, step, scale), self._group)
        averages, shares = self.averages.get(p, ((), None))
        copy = self.copies.get(p)
        extras = Extras(
            grad_scale=scale,
            shared=shared,
            copy=None if copy is None else copy.view(-1),
            averages=[average.view(-1) for average in averages],
            shares=shares,
        )
        adamw8bit(p.detach().view(-1), grad, moments, blocks, step, extras)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer with the same layout; no dtype is changed.

        Raises:
            ValueError: other parameter groups, or state of another size than this layout has.
        """
        # Only the groups: the base class would cast the state to the dtype of the parameters, four times its size.
        super().load_state_dict(state_dict | {"state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        tensors = [p for group in self.param_groups for p in group["params"]]
        for index, (key, p) in enumerate(zip(keys, tensors, strict=True)):
            saved = state_dict["state"].get(key)
            if saved:
                self._restore(self._state_of(p, index), saved, index)

    @staticmethod
    def _restore(state: dict[str, Any], saved: Mapping[str, Any], index: int) -> None:
        for name, value in state.items():
            if not isinstance(value, Tensor):
                state[name] = saved[name]
            elif value.shape == saved[name].shape:
                value.copy_(saved[name])
            else:
                raise ValueError(
                    f"{name} of tensor {index} is {tuple(saved[name].shape)}, expected {tuple(value.shape)}; "
                    "the state is of another layout"
                )
