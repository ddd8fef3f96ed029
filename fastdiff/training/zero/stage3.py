"""ZeRO-3: networks that no rank holds whole, and the order in which DeepSpeed gathers and reduces their parameters."""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from fastdiff.config.deepspeed import DsConfig
from fastdiff.console import without_prints
from fastdiff.training.zero.refusals import refusals


class _InTurn(nn.Module):
    """The parameters of a network on ``meta``, each of which gets memory when DeepSpeed asks for it to cut it up."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.network, self._dtype, self._device = network, dtype, device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Replace and yield them."""
        for module in self.network.modules():
            for name, given in list(module.named_parameters(recurse=False)):
                value = torch.zeros(given.shape, dtype=self._dtype, device=self._device)
                parameter = nn.Parameter(value, requires_grad=given.requires_grad)
                setattr(module, name, parameter)
                yield parameter


def partition(model: nn.Module, ds_config: DsConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Give a network on ``meta`` this rank's parts of its parameters, as DeepSpeed makes them of a whole network."""
    with without_prints(), refusals():
        deepspeed.init_distributed()  # it takes over the process group
        # It also replaces torch's linear layer in this process: with torch's own, autograd would keep gathered weights.
        deepspeed.zero.Init(module=_InTurn(model, dtype, device), config_dict_or_path=ds_config)


def require_input_gradients(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> None:
    """Give a block that follows only frozen parameters (LoRA) an input with a gradient.

    ZeRO-3 reduces the gradients of a leaf module once the gradients of its inputs exist. If no input has one, it does
    so before the backward pass of the module, and the gradients are lost.
    """
    for module in model.modules():
        if isinstance(module, blocks) and any(p.requires_grad for p in module.parameters()):
            module.register_forward_pre_hook(_require_input_gradient)


def _require_input_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not torch.is_grad_enabled() or any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return None
    return (inputs[0].detach().requires_grad_(), *inputs[1:])


def plan_two_passes_as_one(engine: Any) -> None:
    """Make ZeRO-3 treat a forward pass without a gradient and the following one with a gradient as one step.

    It prefetches parameters in the module order of the previous step, and assumes that every forward pass starts a
    step. Two alternating orders would be recorded, compared between all ranks and discarded in every step.
    """
    offload = engine.optimizer.parameter_offload
    offload.fwd_pre_hook.remove()
    offload.is_second_pass = False

    def start(*_: Any) -> None:
        if not offload.is_second_pass:
            offload.get_param_coordinator().reset_step()
        offload.is_second_pass = not torch.is_grad_enabled()

    # Before the hooks that gather, like the hook that it replaces.
    offload.fwd_pre_hook = engine.module.register_forward_pre_hook(start, prepend=True)
