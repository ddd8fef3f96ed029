"""Weights of an export, read from a checkpoint one tensor at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.weights import select
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.family import family_of
from fastdiff.models.load import build_network, check_base, pretrained, untrained
from fastdiff.models.pipeline_files import readable

Shapes = dict[str, tuple[int, ...]]
Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """Names and shapes of the parameters, with a reader."""

    shapes: Shapes
    read: Read
    """Returns a parameter, fp32 on the CPU."""
    description: str = "weights as trained"
    """Selected weights or average, in words."""

    def reader(self, dtype: torch.dtype) -> Read:
        """Return ``read`` with a check of each weight: ConfigError for one that overflows ``dtype``."""
        return lambda name: representable(name, self.read(name), dtype)


def exported_weights(
    saved: Checkpoint, config: RunConfig, *, ema: float | None, raw: bool, merge: bool, ema_std: float | None = None
) -> ExportedWeights:
    """Select the weights of a checkpoint.

    Args:
        saved: the checkpoint.
        config: the run's.
        ema: decay rate of the average; without it and ``ema_std`` the first EMA, or the raw weights if there is none.
        raw: select the raw weights.
        merge: with LoRA, merge the adapter into the network; otherwise select the adapter alone.
        ema_std: relative std of a power-function average, a saved one or one reconstructed from the snapshots.

    Raises:
        ConfigError: there is no such average, or the base weights of the adapter are missing.
    """
    chosen = select(saved, rate=ema, std=ema_std, raw=raw)
    trained: Shapes = {name: tuple(shape) for name, shape in saved.manifest["parameters"].items()}
    if (prefix := family_of(config.model).training_only) and not config.lora.rank:
        trained = {name: shape for name, shape in trained.items() if not name.startswith(prefix)}
    if not (config.lora.rank and merge):
        exported = ExportedWeights(trained, chosen.read, chosen.description)
        return exported if config.lora.rank else _with_untrained(exported, config)
    check_base(config.pretrained, config.lora, saved.manifest.get("base"))
    shapes, base = base_weights(config)
    merged = ExportedWeights(shapes, _merged(base, chosen.read, trained, config.lora), chosen.description)
    return _with_untrained(merged, config)


def _with_untrained(weights: ExportedWeights, config: RunConfig) -> ExportedWeights:
    """Add what training does not change, if a library has the network with these names, as its files hold it."""
    found = untrained(config) if family_of(config.model).library else {}
    kept = {name: value for name, value in found.items() if name not in weights.shapes}
    return replace(
        weights,
        shapes={**weights.shapes, **{name: tuple(value.shape) for name, value in kept.items()}},
        read=lambda name: kept[name] if name in kept else weights.read(name),
    )


def published_weights(config: RunConfig) -> ExportedWeights:
    """Return the weights of a published file; ConfigError: it belongs to another network, or cannot be read."""
    return ExportedWeights(*_built(config), f"weights of {Path(config.pretrained.path).name}")


def _built(config: RunConfig) -> tuple[Shapes, Read]:
    """Return the pretrained weights of a network, in memory."""
    found = {name: value.detach() for name, value in build_network(config).named_parameters()}
    return {name: tuple(value.shape) for name, value in found.items()}, found.__getitem__


def _merged(base: Read, adapter: Read, trained: Mapping[str, object], config: LoraConfig) -> Read:
    """Return the weights with their changes by the adapter; the others are those of the base."""
    kind = kind_of(config)
    layers = set(kind.layers(trained))

    def read(name: str) -> Tensor:
        weight, layer = base(name), name.removesuffix(".weight")
        if layer not in layers:
            return weight
        parameters = {end: adapter(layer + end) for end in kind.parameters if layer + end in trained}
        return cast(Tensor, kind.change(parameters, config).merged(weight))

    return read


def base_weights(config: RunConfig) -> tuple[Shapes, Read]:
    """Return the frozen weights of a LoRA run, read one by one from safetensors files, or from memory."""
    path = Path(config.pretrained.path)
    if path.suffix == ".pt":
        return _built(replace(config, lora=LoraConfig()))
    pipeline = pretrained(config.pretrained)
    files = [path] if path.suffix == ".safetensors" else pipeline.weight_files(pipeline.denoiser)
    buffers = family_of(config.model).buffers(config.model)
    handles: dict[str, Any] = {}
    for file in files:
        with readable(file):
            handle: Any = safe_open(file, framework="pt")
        handles |= {name: handle for name in handle.keys() if name not in buffers}  # noqa: SIM118 (not a mapping)
    shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in handles.items()}
    return shapes, lambda name: handles[name].get_tensor(name).float()


def representable(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` if ``dtype`` can represent it, otherwise raise ConfigError."""
    if dtype == torch.float16 and not value.to(dtype).isfinite().all() and value.isfinite().all():
        raise ConfigError(
            f"--dtype fp16: {name} has entries up to {value.abs().max():.3g}, above the fp16 maximum 65504; use bf16"
        )
    return value
