"""The network of a training with other trained weights, for validation and previews of an adapter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastdiff.training.state import TrainState


def shares_base(state: TrainState, dtype: torch.dtype) -> bool:
    """Whether this rank has all frozen weights in this dtype, so that other weights need no copy of them."""
    own = {p.dtype for p in state.engine.module.parameters() if not p.requires_grad and p.is_floating_point()}
    return state.config.lora.rank > 0 and state.engine.stage < 3 and own <= {dtype}


class SharedBase(nn.Module):
    """A network with other values of its trained parameters, and its frozen ones; for passes without gradients.

    Args:
        network: in training; between two passes it stays as it is.
        weights: values of its trained parameters by name.
    """

    def __init__(self, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.__dict__["_network"] = network  # no module of this one, whose modes it would follow
        self._weights = dict(weights)

    def forward(self, *inputs: Any, **condition: Any) -> Any:
        """Run the network in evaluation mode, its blocks uncompiled: they are compiled for other batches."""
        network: nn.Module = self.__dict__["_network"]
        was_training = network.training
        network.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                return functional_call(network, self._weights, inputs, condition)
        finally:
            network.train(was_training)
