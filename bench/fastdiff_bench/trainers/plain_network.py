"""Networks of the baselines without fastdiff's ops: a DiT in plain torch, and diffusers' UNet.

Unlike fastdiff's networks they run under ``torch.autocast``: their norms take shift and scale in another dtype.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.batch import Condition
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.models.dit.attention import Attention
from fastdiff.models.dit.final_layer import FinalLayer
from fastdiff.models.dit.mlp import Mlp
from fastdiff.models.dit.modulation import AdaLNModulation
from fastdiff.models.dit.network import DiT
from fastdiff.models.kernel_choice import compiles
from fastdiff.models.load import build_network
from fastdiff_bench import BenchError
from fastdiff_bench.trainers.initial_weights import drawn_on

_NORM_EPS = 1e-6


def network(config: RunConfig, device: torch.device, *, best: bool) -> Any:
    """Return the network of the run in fp32, with fastdiff's initial weights and parameter names."""
    with torch.device("meta"):
        model = _without_weights(config)
    with drawn_on(device):
        model.load_state_dict(build_network(config).state_dict(), assign=True)
    if best and isinstance(config.model, UNetConfig):
        model.to(memory_format=torch.channels_last)
    return model.to(device).train()


def _without_weights(config: RunConfig) -> Any:
    recompute = config.performance.recompute
    if isinstance(config.model, DiTConfig):
        if config.model.options:
            raise BenchError(f"the plain DiT lacks {config.model.options}; choose another preset, or no --peer")
        return PlainDiT(config.model, recompute=recompute)
    if isinstance(config.model, UNetConfig):
        from diffusers import UNet2DConditionModel

        model: Any = UNet2DConditionModel(**config.model.to_diffusers())
        if recompute:
            model.enable_gradient_checkpointing()
        return model
    raise BenchError(f"{config.model.title} has no plain network as a baseline; choose another preset, or no --peer")


def compiled(model: nn.Module, performance: PerformanceConfig, device: torch.device) -> bool:
    """Compile the network in place if fastdiff compiles its own here; return whether it does.

    A DiT is compiled per block, so that equal blocks share a graph; a UNet is compiled as a whole.
    """
    if not compiles(performance, device):
        return False
    if isinstance(model, PlainDiT):
        model.compile_blocks()
    else:
        model.compile()
    return True


def predict(model: nn.Module, noisy: Tensor, time: Tensor, condition: Condition) -> Tensor:
    """Map ``noisy [B, C, H, W], time [B] -> [B, C, H, W]``, or to twice the channels with a variance."""
    if isinstance(model, PlainDiT):
        return cast(Tensor, model(noisy, time, condition["label"]))
    added = {theirs: condition[ours] for ours, theirs in _ADDED.items() if ours in condition}
    return cast(Tensor, model(noisy, time, condition["context"], added_cond_kwargs=added, return_dict=False)[0])


_ADDED = {"pooled": "text_embeds", "time_ids": "time_ids"}
"""Additional conditions of an SDXL UNet: our names and diffusers' names."""


class PlainDiT(DiT):
    """The same network with torch's norms, modulations and attention."""

    def __init__(self, config: DiTConfig, *, recompute: bool = False) -> None:
        super().__init__(config, recompute=recompute)
        self.blocks = nn.ModuleList(_Block(config, number) for number in range(config.depth))
        self.final_layer = _FinalLayer(config)


class _Block(nn.Module):
    def __init__(self, config: DiTConfig, number: int) -> None:
        super().__init__()
        self.attn = _Attention(config, number)
        self.mlp = _Mlp(config.hidden, config.inner)
        self.adaLN_modulation = AdaLNModulation(config.hidden, 6)

    def forward(self, tokens: Tensor, condition: Tensor, *others: None) -> Tensor:
        """See ``DiTBlock``."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(condition).chunk(6, dim=1)
        tokens = tokens + gate_a.unsqueeze(1) * self.attn(_modulated(tokens, shift_a, scale_a))
        return cast(Tensor, tokens + gate_m.unsqueeze(1) * self.mlp(_modulated(tokens, shift_m, scale_m)))


class _Attention(Attention):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """Map ``[B, T, D] -> [B, T, D]``."""
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)  # [B, H, T, D / H]
        return cast(Tensor, self.proj(attended.transpose(1, 2).flatten(2)))


class _Mlp(Mlp):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """Map ``[B, T, D] -> [B, T, D]``."""
        return cast(Tensor, self.fc2(F.gelu(self.fc1(tokens), approximate="tanh")))


class _FinalLayer(FinalLayer):
    def forward(self, tokens: Tensor, condition: Tensor) -> tuple[Tensor, None]:
        """See ``FinalLayer``."""
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=1)
        return self.linear(_modulated(tokens, shift, scale)), None


PlainDiT.block_classes = (_Block,)  # type: ignore[assignment]


def _modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalize and modulate ``tokens [B, T, D]`` by ``shift`` and ``scale [B, D]``; fp32 under autocast."""
    normed = F.layer_norm(tokens, tokens.shape[-1:], eps=_NORM_EPS)
    return normed * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
