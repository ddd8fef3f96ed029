"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685) of the networks with peft, and its files for diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import Model
from fastdiff.models.family import family_of
from fastdiff.models.quantized import Bits, QuantizedLinear
from fastdiff.optional_packages import pip_install

WEIGHTS_FILE = "pytorch_lora_weights.safetensors"
"""File name of an adapter in a folder, as diffusers expects it."""

_ADAPTER = "default"


def add_lora(model: Model, config: LoraConfig, *, seed: int, weights: Mapping[str, Tensor] | None = None) -> None:
    """Freeze ``model`` and add trainable matrices to its layers, in place.

    A layer ``x -> W x + b`` becomes ``W x + b + alpha / rank * B A x``. A starts normal with deviation 1 / rank, B at
    0. A and B are fp32; only they require a gradient. With ``config.quantize`` the frozen linear layers of the blocks
    (``ModelFamily.quantized_blocks``) store their weights in 8 or 4 bits.

    Args:
        model: network with fp32 weights on the CPU, not compiled.
        config: configuration of the adapter; its rank is above 0.
        seed: seed of the initial values; its low 64 bits count. The global random state is restored.
        weights: A and B by name, as in ``model.named_parameters()``; None: the initial values.

    Raises:
        ConfigError: peft is missing, a target matches no layer, or ``weights`` belong to another adapter.
    """
    targets = lora_targets(config, model.config)
    _check_targets(model, targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed & (2**64 - 1))
        _inject(model, config, targets)
    if weights is not None:
        _load(model, weights)
    if config.quantize != "none":
        _quantize(model, config)


def lora_targets(config: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """Return the suffixes of the names of the adapted layers."""
    return config.targets or model.lora_targets


def lora_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the trained parameters under diffusers' names, without the prefix of the network.

    diffusers' training scripts write ``to_q.lora.down.weight`` for the attention of a UNet, and ``lora_A.weight`` for
    all other layers. From a file with both it loads only the latter, so the former is used only if it fits every name.

    Args:
        weights: names as in ``model.named_parameters()``.
    """
    from diffusers.utils import convert_state_dict_to_diffusers

    suffix = f".{_ADAPTER}.weight"
    plain = {name.removesuffix(suffix) + ".weight": value.contiguous() for name, value in weights.items()}
    converted = dict(convert_state_dict_to_diffusers(plain))
    return plain if any(name in plain for name in converted) else converted


def save_lora(folder: Path, weights: Mapping[str, Tensor], config: LoraConfig, model: ModelConfig) -> Path:
    """Write the adapter in diffusers' format and return the file.

    For a UNet, ``pipeline.load_lora_weights(folder)`` applies it with the same scale: the metadata of the file has rank
    and alpha. Programs that ignore them scale by 1, which is correct only if alpha is the rank. For other networks the
    names begin with ``transformer.``; diffusers has no pipeline with the layer names of a DiT.

    Args:
        folder: created if it is missing.
        weights: every trained parameter, names as in ``model.named_parameters()``.
        config: configuration of the adapter.
        model: configuration of the network.
    """
    from diffusers.loaders import SD3LoraLoaderMixin, StableDiffusionLoraLoaderMixin

    metadata = {"r": config.rank, "lora_alpha": config.numerator, "target_modules": list(lora_targets(config, model))}
    layers = lora_weights(weights)
    component = family_of(model).lora_component
    loader = {"transformer": SD3LoraLoaderMixin, "unet": StableDiffusionLoraLoaderMixin}[component]
    given = {f"{component}_lora_layers": layers, f"{component}_lora_adapter_metadata": metadata}
    loader.save_lora_weights(folder, **given)
    return folder / WEIGHTS_FILE


def _adaptable(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def _check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    names = _adaptable(model)
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ConfigError(
                f"--lora.targets {target}: no linear layer or convolution of this network has a name with this end; "
                f"the names end in {', '.join(sorted({_end(name) for name in names}))}"
            )


def _end(name: str) -> str:
    """Return the last part of a dotted name, with the part before it if the last is a number."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _inject(model: nn.Module, config: LoraConfig, targets: tuple[str, ...]) -> None:
    try:
        import peft
    except ImportError:
        raise ConfigError(f"--lora.rank needs peft, which is not installed: {pip_install('peft')}") from None
    adapter: Any = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.numerator,  # type: ignore[arg-type]  # peft divides it by r; a float works
        target_modules=list(targets),
        init_lora_weights="gaussian",
    )
    try:
        peft.inject_adapter_in_model(adapter, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ConfigError(f"--lora.targets {' '.join(targets)}: {error}") from None


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


def _quantize(model: Model, config: LoraConfig) -> None:
    bits: Bits = 4 if config.quantize == "4bit" else 8
    classes = family_of(model.config).quantized_blocks or model.block_classes
    for block in [module for module in model.modules() if isinstance(module, classes)]:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear) and not module.weight.requires_grad:
                parent, _, child = name.rpartition(".")
                setattr(block.get_submodule(parent), child, QuantizedLinear(module, bits))
