"""The network of a run, every weight on the device ``meta``, and inputs, for a pass without data."""

from collections.abc import Collection

import torch
from torch import Tensor

from fastdiff.batch import DTYPES, Condition
from fastdiff.conditions import CONDITIONS, ConditionKind, Shape
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.models.build import Model, build_model
from fastdiff.models.lora import add_lora
from fastdiff_kernels.names import AttentionBackend


def dry_network(config: RunConfig, *, recompute: bool = False, attention: AttentionBackend = "sdpa") -> Model:
    """Build the network of a run without memory for it; ConfigError: no peft, or a target of the LoRA matches no layer.

    With a LoRA only A and B require a gradient, and the frozen layers that it quantises have their packed weights.
    """
    with torch.device("meta"):
        network = build_model(config.model, recompute=recompute, attention=attention, seed=config.seed)
        if config.lora.rank:
            add_lora(network, config.lora, seed=config.seed)
    return network


def dry_inputs(model: ModelConfig, names: Collection[str], samples: int) -> tuple[Tensor, Condition]:
    """Return noisy latents ``[samples, C, H, W]`` and the known of the conditions ``names``: zeros, whole masks."""
    shapes = {**{name: () for name, kind in CONDITIONS.items() if not kind.shape}, **model.conditions}
    condition = {name: _blank(CONDITIONS[name], (samples, *shapes[name])) for name in names if name in shapes}
    if "position" in condition:
        condition["position"] = torch.arange(samples)
    return torch.zeros(samples, model.channels, model.size, model.size), condition


def _blank(kind: ConditionKind, shape: Shape) -> Tensor:
    return torch.full(shape, bool(kind.mask_of), dtype=DTYPES[kind.dtype])
