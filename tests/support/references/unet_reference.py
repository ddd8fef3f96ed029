"""Small UNets of each kind, inputs for them, and diffusers' network with the same weights."""

from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.unet import UNetConfig
from fastdiff.models.unet.network import UNet

_SMALL: dict[str, Any] = {"size": 8, "norm_num_groups": 8, "cross_attention_dim": 24}
SMALL = {
    # A level with attention, one without, and maps that change their channels and that do not.
    "sd15": UNetConfig(
        **_SMALL, block_out_channels=(16, 32, 32), attention_heads=(2, 2, 2), transformer_layers=(1, 1, 0)
    ),
    "sd2": UNetConfig(
        **_SMALL, block_out_channels=(16, 32), attention_heads=(2, 4), transformer_layers=(1, 0),
        use_linear_projection=True,
    ),
    "sdxl": UNetConfig(
        **_SMALL, block_out_channels=(16, 32, 48), attention_heads=(2, 4, 6), transformer_layers=(0, 1, 2),
        mid_transformer_layers=2, use_linear_projection=True, pooled_dim=20, addition_time_embed_dim=8,
    ),
}  # fmt: skip


def inputs(config: UNetConfig, batch: int = 2, height: int = 8, width: int = 8) -> dict[str, Tensor]:
    """Arguments of a UNet by name."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = {
        "noisy": normal(batch, config.channels, height, width),
        "time": torch.tensor([3, 997, 501, 0])[:batch],
        "context": normal(batch, 7, config.cross_attention_dim),
    }
    if config.pooled_dim:
        found["pooled"] = normal(batch, config.pooled_dim)
        found["time_ids"] = torch.tensor([[64.0, 96.0, 3.0, 0.0, 64.0, 64.0]] * batch)
    return found


def built(config: UNetConfig, seed: int = 0, **options: Any) -> UNet:
    """A UNet whose norms and biases matter as well."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet(config, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def diffusers_unet(config: UNetConfig) -> Any:
    """diffusers' network of the same configuration."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**config.to_diffusers())


def diffusers_forward(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Its output for ``inputs``."""
    names = {"pooled": "text_embeds", "time_ids": "time_ids"}
    added = {theirs: arguments[ours] for ours, theirs in names.items() if ours in arguments}
    out: Tensor = model(
        arguments["noisy"], arguments["time"], arguments["context"], added_cond_kwargs=added or None
    ).sample
    return out


def gradients(model: torch.nn.Module, out: Tensor) -> dict[str, Tensor]:
    """Gradient of every parameter of a loss that weighs all values of ``out`` differently."""
    model.zero_grad()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights + out.square()).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(got: Tensor, expected: Tensor) -> float:
    """Relative, in the Euclidean norm."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())
