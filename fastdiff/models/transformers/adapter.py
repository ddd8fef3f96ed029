"""A transformer of diffusers as a network of this package: its blocks under our engines, its names of weights.

The network shares the modules and parameters of an instance of diffusers' class, so every name is the same. Its blocks
are the classes in ``_repeated_blocks``, or else those of ``_no_split_modules`` that are in a list of modules.

diffusers calls blocks with keywords, which the hooks of ZeRO-3's leaf modules do not see; a hook of every block moves
them into positions.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.errors import ConfigError
from fastdiff.models.blockwise import BlockwiseModel, run_block
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff_kernels import attention as attention_op
from fastdiff_kernels import dispatch
from fastdiff_kernels.names import AttentionBackend

C = TypeVar("C", bound=DiffusersTransformerConfig)


class DiffusersTransformer(BlockwiseModel, Generic[C]):
    """Base class of the adapters; a family adds ``forward``, which packs the inputs and unpacks the output.

    Args:
        config: shape of the network.
        recompute: recompute each block in the backward pass instead of storing its activations.
        attention: implementation of attention among those of torch.

    Raises:
        ConfigError: the attention is not one of torch's.
    """

    config: C
    network: Any
    """Instance of diffusers' class."""

    def __init__(self, config: C, *, recompute: bool = False, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        if attention == "xformers":
            raise ConfigError(
                f"--performance.attention xformers: {config.title} calls torch's attention; use auto, cudnn or flash"
            )
        network = _class(config)(**config.to_diffusers())
        for name in self.unused_names(config):
            nn.init.zeros_(network.get_parameter(name).requires_grad_(False))
        self.config, self.recompute, self._attention = config, recompute, attention
        self._modules, self._parameters, self._buffers = network._modules, network._parameters, network._buffers
        self._non_persistent_buffers_set = network._non_persistent_buffers_set
        self.__dict__["network"] = network  # not a module of this one, which would prefix its names
        self.block_classes = block_classes(network)
        for block in network.modules():
            if isinstance(block, self.block_classes):
                block.register_forward_pre_hook(_by_position(type(block)), with_kwargs=True)
        if recompute:
            network.enable_gradient_checkpointing(partial(run_block, recompute=True))

    def train(self, mode: bool = True) -> Self:
        """Set the mode of training, in diffusers' instance as well."""
        self.__dict__["network"].training = mode
        return super().train(mode)

    @staticmethod
    def unused_names(config: C) -> tuple[str, ...]:
        """Return the parameters that change no output: no engine trains them, so weight decay does not move them."""
        return ()

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its attention; see ``fastdiff_kernels.dispatch.Explains``."""
        noisy, condition = dry_inputs(self.config, self.inputs, 1)
        length = self.tokens(noisy.shape[2:], condition["context"].shape[1])
        yield attention_op.choice(self.config.head_dim, length, length, example, self._attention)

    def tokens(self, size: torch.Size, caption: int) -> int:
        """Return the length of the joint stream for latents of this height and width and a caption."""
        height, width = size
        return height * width // self.config.smallest_factor**2 + caption

    def attending(self, noisy: Tensor, caption: int) -> AbstractContextManager[None]:
        """Return a context in which torch's attention takes the kernels that the run asks for."""
        length = self.tokens(noisy.shape[2:], caption)
        dtype = next(self.parameters()).dtype
        return attention_op.kernels(self._attention, noisy.device, dtype, self.config.head_dim, length, length)

    def __getattr__(self, name: str) -> Any:
        """Return a module or parameter of diffusers' class; their types are not known here."""
        return super().__getattr__(name)


def block_classes(network: Any) -> tuple[type[nn.Module], ...]:
    """Return the classes of the blocks of an instance of diffusers' class."""
    if names := getattr(network, "_repeated_blocks", None):
        found = {type(module) for module in network.modules() if type(module).__name__ in names}
    else:
        lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
        names = network._no_split_modules
        found = {type(module) for each in lists for module in each if type(module).__name__ in names}
    return tuple(sorted(found, key=lambda block: block.__name__))


def unused(network: type[DiffusersTransformer[C]], config: C) -> dict[str, Tensor]:
    """Return the parameters of a network that change no output, as zeros."""
    with torch.device("meta"):
        found = dict(network(config).named_parameters())
    return {name: torch.zeros(found[name].shape) for name in network.unused_names(config)}


def _by_position(block: type[nn.Module]) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
    """Return a hook before the forward of a block that moves keyword arguments into their positions."""
    _, *parameters = inspect.signature(block.forward).parameters.values()

    def moved(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not named:
            return None
        others = [named.pop(each.name, each.default) for each in parameters[len(given) :]]
        return (*given, *others), named

    return moved


def _class(config: DiffusersTransformerConfig) -> Any:
    import diffusers  # its import takes seconds

    return getattr(diffusers, config.diffusers_class)


class Cost:
    """Multiply-adds of a forward pass on one sample, counted once per configuration by running it on ``meta``.

    Args:
        network: class of the adapter.
        inputs: names of the linear layers, and convolutions of patches, whose inputs need no gradient: those of
            latents, time and captions.
    """

    def __init__(self, network: type[DiffusersTransformer[Any]], inputs: tuple[str, ...]) -> None:
        self._network, self._inputs = network, inputs
        self._counted = cache(self._count)

    def total(self, config: DiffusersTransformerConfig) -> float:
        """Return those of all layers."""
        return self._counted(config)[0]

    def of_inputs(self, config: DiffusersTransformerConfig) -> float:
        """Return those of the layers whose inputs need no gradient."""
        return self._counted(config)[1]

    @torch.no_grad()
    def _count(self, config: DiffusersTransformerConfig) -> tuple[float, float]:
        with torch.device("meta"):
            network = self._network(config, attention="sdpa")
            noisy, condition = dry_inputs(config, network.inputs, 1)
            of_inputs: list[float] = []
            for name in self._inputs:
                network.get_submodule(name).register_forward_hook(
                    lambda layer, _, out: of_inputs.append(float(layer.weight[0].numel() * out.numel()))
                )
            with FlopCounterMode(display=False) as counter:
                network(noisy, torch.zeros(1), **condition)
        return float(counter.get_total_flops()) / 2, sum(of_inputs)
