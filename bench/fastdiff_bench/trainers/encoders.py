"""Frozen encoders of a text-to-image pipeline, in Stable Diffusion's proportions to a UNet of any size.

The autoencoder is Stable Diffusion's (four levels of two layers, a factor of eight) and the text encoder CLIP's, with
Stable Diffusion's widths relative to the UNet: for the UNet of SD 1.5 they are its own. The weights are random, which
does not change the time.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.models.pretrained import tiny_pipeline

FACTOR = 8
"""Pixels per latent."""
_UNET_WIDTH, _VAE_WIDTH = 320, 128
_HEAD = 64


def autoencoder(unet: UNetConfig) -> Any:
    """Return an ``AutoencoderKL`` of diffusers, on torch's default device."""
    from diffusers import AutoencoderKL

    width = max(8, unet.block_out_channels[0] * _VAE_WIDTH // _UNET_WIDTH // 8 * 8)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        layers_per_block=2,
        latent_channels=unet.channels,
        norm_num_groups=min(32, width),
        sample_size=FACTOR * unet.size,
    )


def text_encoder(unet: UNetConfig, vocabulary: int) -> Any:
    """Return a ``CLIPTextModel`` of transformers with embeddings as wide as the UNet expects."""
    from transformers import CLIPTextConfig, CLIPTextModel

    width = unet.cross_attention_dim
    heads = max(1, width // _HEAD)
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=heads,
            num_attention_heads=heads,
            max_position_embeddings=CAPTION_TOKENS,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )


def tokenizer() -> Any:
    """Return a ``CLIPTokenizer`` with one token per character, as in fastdiff's tiny pipelines."""
    from transformers import CLIPTokenizer

    with TemporaryDirectory() as folder:
        return CLIPTokenizer.from_pretrained(tiny_pipeline.build(Path(folder)) / "tokenizer")
