"""Adapters of the networks, of every kind (``models.adapter_kinds``), on a frozen base."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError
from fastdiff.models.adapter_files.native_names import layers_of
from fastdiff.models.adapter_kinds.kind import AdapterKind
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.build import Model
from fastdiff.models.family import family_of
from fastdiff.models.quantized import Bits, QuantizedLinear
from fastdiff.rng import seed_initial_values


def add_lora(
    model: Model, config: LoraConfig, *, seed: int, weights: Mapping[str, Tensor] | None = None, base: bool = True
) -> None:
    """Freeze ``model`` and add trainable matrices to its layers, in place.

    With ``--lora.kind lora`` a layer ``x -> W x + b`` becomes ``W x + b + alpha / rank * B A x``. A starts normal with
    deviation 1 / rank, B at 0. Modules in ``adapter_kinds`` say what other kinds add. It is fp32; only it requires a
    gradient. With ``config.quantize`` the frozen linear layers of the blocks (``ModelFamily.quantized_blocks``) store
    their weights in 8 or 4 bits.

    Args:
        model: network with fp32 weights on the CPU, not compiled.
        config: configuration of the adapter; its rank is above 0.
        seed: seed of the initial values; its low 64 bits count. The global random state is restored.
        weights: the matrices by name, as in ``model.named_parameters()``; None: the initial values.
        base: False leaves the frozen layers, whose weights are to come, for ``quantized`` and ``of_base``.

    Raises:
        ConfigError: peft is missing, a target matches no layer, or ``weights`` belong to another adapter.
    """
    layers = adapted_layers(layers_of(model), lora_targets(config, model.config))
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        seed_initial_values(seed)
        try:
            kind_of(config).inject(model, config, layers)
        except ValueError as error:
            raise ConfigError(f"--lora.targets {' '.join(lora_targets(config, model.config))}: {error}") from None
    if weights is not None:
        _load(model, weights)
    if base:
        for layer in list(quantized_layers(model, config)):
            quantized(model, layer, config)
        for layer in layers:
            set_of_base(model, layer, config)


def lora_targets(config: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """Return the suffixes of the names of the adapted layers."""
    return config.targets or model.lora_targets


def adapted_layers(names: Iterable[str], targets: Collection[str]) -> list[str]:
    """Return those of the linear layers and convolutions of a network whose names end in a target.

    peft matches ends of names, too, but fails at a list of layers: in Flux.2 ``attn.to_out`` is a layer in one block
    and a list in another.

    Raises:
        ConfigError: no name ends in one of the targets.
    """
    names = list(names)
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ConfigError(
                f"--lora.targets {target}: no linear layer or convolution of this network has a name with this end; "
                f"the names end in {', '.join(sorted({end_of(name) for name in names}))}"
            )
    ends = tuple(f".{target}" for target in targets)
    return [name for name in names if f".{name}".endswith(ends)]


def end_of(name: str) -> str:
    """Return the last part of the dotted name of a layer, with the part before it if the last is a number."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = {name: tuple(p.shape) for name, p in parameters.items()}
    theirs = {name: tuple(value.shape) for name, value in weights.items()}
    if ours != theirs:
        name = min(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise ConfigError(
            f"the trained weights belong to another adapter: {name} is {theirs.get(name, 'missing')}, expected "
            f"{ours.get(name, 'no such weight')}; use --lora.rank and --lora.targets of their run"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def quantized_layers(model: Model, config: LoraConfig) -> Iterator[str]:
    """Yield the names of the frozen linear layers that ``config.quantize`` stores in 8 or 4 bits."""
    if config.quantize == "none":
        return
    classes = family_of(model.config).quantized_blocks or model.block_classes
    for name, block in model.named_modules():
        if isinstance(block, classes):
            for inner, layer in block.named_modules():
                if isinstance(layer, nn.Linear) and not layer.weight.requires_grad:
                    yield f"{name}.{inner}"


def quantized(model: Model, layer: str, config: LoraConfig) -> None:
    """Replace a linear layer, by its name, by one in 8 or 4 bits."""
    bits: Bits = 4 if config.quantize == "4bit" else 8
    parent, _, child = layer.rpartition(".")
    setattr(model.get_submodule(parent), child, QuantizedLinear(cast(nn.Linear, model.get_submodule(layer)), bits))


def of_base(
    layer: str, weight: Tensor, parameters: Mapping[str, Tensor], kind: AdapterKind[Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what follows from a frozen weight: buffers of its layer, and those of its parameters that are all 0.

    Args:
        layer: name of the adapted layer.
        weight: as it is used.
        parameters: of the adapter, by name.
        kind: of the adapter.
    """
    for end, value in {} if kind.of_base is None else kind.of_base(weight).items():
        known = parameters.get(layer + end)
        if known is None or known.is_meta or not known.any():
            yield layer + end, value


@torch.no_grad()
def set_of_base(model: nn.Module, layer: str, config: LoraConfig) -> None:
    """Set what follows from the frozen weight of an adapted layer, see ``of_base``, in place."""
    if kind_of(config).of_base is None:
        return
    adapted = cast(Any, model.get_submodule(layer))
    frozen = adapted.base_layer
    weight = frozen.dequantized() if isinstance(frozen, QuantizedLinear) else frozen.weight.detach()
    own = {f"{layer}.{name}": p for name, p in adapted.named_parameters(recurse=False)}
    for name, value in of_base(layer, weight, own, kind_of(config)):
        getattr(adapted, name.removeprefix(f"{layer}.")).copy_(value)


def switch(model: nn.Module, *, on: bool) -> None:
    """Let the layers of a network compute with or without their adapters, in place."""
    for module in list(model.modules()):
        if hasattr(module, "base_layer"):
            cast(Any, module).enable_adapters(on)


def unchanging(model: nn.Module, config: LoraConfig) -> dict[str, Tensor]:
    """Return trained parameters by name with which the layers of a network change nothing; all others are 0 then."""
    kind = kind_of(config)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    return {name + end: value for name, layer in layers.items() for end, value in kind.unchanged(layer).items()}
