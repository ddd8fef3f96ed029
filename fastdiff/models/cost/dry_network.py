"""The network of a run for a pass without data: every weight on the device ``meta``, with the adapter of a LoRA."""

import torch

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
