"""Autoencoders of diffusers, tiny and with random weights, each in a folder of its own."""

from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["kl4", "kl16", "kl32", "dc", "flux2", "qwen", "rae"]
KINDS: tuple[Kind, ...] = ("kl4", "kl16", "kl32", "dc", "flux2", "qwen", "rae")
_BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (8, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


def tiny_autoencoder(folder: Path, kind: Kind, *, statistics: bool = True) -> Path:
    """Save an autoencoder; ``statistics``: with random ones of its latents, where its class keeps them as weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        of_elements = {"latents_mean": torch.randn(64, 4, 4), "latents_std": torch.rand(64, 4, 4) + 0.05}
        model = _rae(**(of_elements if statistics else {})) if kind == "rae" else _BUILDERS[kind]()
        if statistics and kind == "flux2":
            model.bn.running_mean.normal_()
            model.bn.running_var.uniform_(1e-4, 4.0)
    model.eval().save_pretrained(folder)
    return folder


def _kl(**options: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(**_BLOCKS, **options)


def _dc() -> Any:
    from diffusers import AutoencoderDC

    return AutoencoderDC(
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 16, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        scaling_factor=0.41407,
    )


def _flux2() -> Any:
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(**_BLOCKS, latent_channels=8)


def _qwen() -> Any:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[-0.75, 0.1, 1.55, -0.02], latents_std=[2.8, 1.45, 0.5, 3.2],
    )  # fmt: skip


def _rae(**statistics: Any) -> Any:
    from diffusers import AutoencoderRAE

    return AutoencoderRAE(
        encoder_hidden_size=64,
        encoder_patch_size=14,
        encoder_num_hidden_layers=2,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=64,
        patch_size=16,
        encoder_input_size=56,
        **statistics,
    )


_BUILDERS = {
    "kl4": lambda: _kl(latent_channels=4),
    "kl16": lambda: _kl(
        latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False
    ),
    "kl32": lambda: _kl(latent_channels=32, scaling_factor=0.3, shift_factor=-0.2),
    "dc": _dc,
    "flux2": _flux2,
    "qwen": _qwen,
}
