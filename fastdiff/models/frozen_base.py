"""A network with an adapter whose frozen weights are read one after another.

First the network is built with frozen parameters that have a shape and no memory, and the adapter is added to it. Then
each frozen weight is cast, or quantised, as it is read, so that no more than one is in memory in fp32.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.config.run import RunConfig
from fastdiff.models.adapter_kinds.kind import AdapterKind
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.build import Model, build_model
from fastdiff.models.lora import add_lora, of_base, quantized, quantized_layers, set_of_base

Weights = Iterable[tuple[str, Tensor]]
_FROZEN = ".base_layer.weight"
"""End of the names of the frozen weights of adapted layers."""


def adapted_without_base(
    config: RunConfig, untrained: Mapping[str, Tensor], trained: Mapping[str, Tensor] | None = None
) -> Model:
    """Build the network of a run with its adapter; its frozen parameters are views of one zero, fp32.

    Args:
        config: resolved configuration of the run, with LoRA.
        untrained: the buffers, among others.
        trained: the added weights; None: initial ones.

    Raises:
        ConfigError: as ``add_lora``.
    """
    performance = config.performance
    with torch.device("meta"):
        model = build_model(
            config.model, recompute=performance.recompute, attention=performance.attention, seed=config.seed
        )
    for name, parameter in list(model.named_parameters()):
        _set(model, name, torch.zeros(()).expand(parameter.shape))
    for name, _ in list(model.named_buffers()):
        if name in untrained:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._buffers[leaf] = untrained[name]
    add_lora(model, config.lora, seed=config.seed, weights=trained, base=False)
    return model


def fill(model: Model, config: RunConfig, weights: Weights, dtype: torch.dtype) -> None:
    """Set the frozen parameters of ``adapted_without_base``, in the dtype in which they are used.

    Args:
        model: of which each frozen parameter is set; with ``--lora.quantize`` its layers are replaced in place.
        config: as given before.
        weights: by their published names, fp32 on the CPU.
        dtype: of frozen parameters that are not quantised.

    Raises:
        RuntimeError: as ``load_state_dict`` says it, a weight is unknown, missing or of another shape.
    """
    packed = set(quantized_layers(model, config.lora))
    for name, value in _adapted_names(model, weights):
        layer, _, leaf = name.rpartition(".")
        if layer in packed and leaf == "weight":
            _set(model, name, value)
            quantized(model, layer, config.lora)
        else:
            _set(model, name, value.to(dtype))
        if name.endswith(_FROZEN):
            set_of_base(model, name.removesuffix(_FROZEN), config.lora)


def on_meta(model: Model, config: RunConfig, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Move the parameters of ``adapted_without_base`` to ``meta``, and return an iterator over all their values.

    Args:
        model: changed in place.
        config: as given before.
        weights: as in ``fill``.
        dtype: of the frozen parameters in use.
    """
    own = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in list(model.named_parameters()):
        _set(model, name, parameter.detach().to("meta"), trained=parameter.requires_grad)
    return _with_adapter(_adapted_names(model, weights), own, kind_of(config.lora), dtype)


def _with_adapter(
    frozen: Iterator[tuple[str, Tensor]], own: dict[str, Tensor], kind: AdapterKind[Any], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, value in frozen:
        yield name, value
        if name.endswith(_FROZEN):
            own |= of_base(name.removesuffix(_FROZEN), value.to(dtype), own, kind)
    yield from own.items()


def _adapted_names(model: nn.Module, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Return the published weights under the names that they have beside an adapter; names and shapes are compared."""
    # Before the engine cuts them up.
    return _compared({name: p.shape for name, p in model.named_parameters() if not p.requires_grad}, weights)


def _compared(frozen: Mapping[str, torch.Size], weights: Weights) -> Iterator[tuple[str, Tensor]]:
    names = {name.replace(".base_layer.", "."): name for name in frozen}
    for name, value in weights:
        if name not in names:
            raise RuntimeError(f"heading\nUnexpected key(s) in state_dict: {name!r}.")
        if value.shape != frozen[names[name]]:
            given, own = list(value.shape), list(frozen[names[name]])
            raise RuntimeError(f"heading\nsize mismatch for {name}: shape {given}, expected {own}")
        yield names.pop(name), value
    if names:
        raise RuntimeError("\n".join(["heading", *(f"Missing key(s) in state_dict: {name!r}." for name in names)]))


def _set(model: nn.Module, name: str, value: Tensor, *, trained: bool = False) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._parameters[leaf] = nn.Parameter(value, requires_grad=trained)
