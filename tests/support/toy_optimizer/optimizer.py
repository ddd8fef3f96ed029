"""The toy optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Toy(torch.optim.Optimizer):
    """Adds up a moment of each element, and divides that of a matrix by a running norm of its gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> Any:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._update(parameter, self.state[parameter], **group)

    def _update(
        self, parameter: Tensor, state: dict[str, Any], lr: float, momentum: float, weight_decay: float, **_: Any
    ) -> None:
        state["step"] += 1
        moment = state["moment"].mul_(momentum).add_(parameter.grad, alpha=1 - momentum)  # type: ignore[arg-type]
        parameter.mul_(1 - lr * weight_decay)
        if parameter.dim() > 1:
            norm = state["norm"].mul_(momentum).add_(parameter.grad.norm(), alpha=1 - momentum)  # type: ignore[union-attr]
            moment = moment / (norm + 1e-8)
        parameter.sub_(moment, alpha=lr)
