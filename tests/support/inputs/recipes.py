"""What the commands of published recipes read, tiny and random, under the names of the documents."""

from pathlib import Path

import torch

from fastdiff.models.pretrained import tiny_pixart
from tests.support.references.ldm_autoencoder import LdmAutoencoder


def va_vae(file: Path) -> None:
    """Write an autoencoder of 32 channels and a factor of 16 under the published names of VA-VAE."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = LdmAutoencoder((32, 32, 32, 32, 64), 1, 32, attends={4})
    torch.save({"state_dict": network.state_dict()}, file)


def latent_statistics(file: Path) -> None:
    """Write mean and deviation of 32 channels as VA-VAE's release has them."""
    generator = torch.Generator().manual_seed(0)
    mean, spread = (torch.rand(1, 32, 1, 1, generator=generator) for _ in range(2))
    torch.save({"mean": mean - 0.5, "std": spread + 0.5}, file)


def sd_vae(folder: Path) -> None:
    """Write an AutoencoderKL of four channels and a factor of 8."""
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
        )
    network.eval().save_pretrained(folder)


def sigma(folder: Path) -> None:
    """Write a pipeline of PixArt-Sigma with an autoencoder of a factor of 8."""
    tiny_pixart.build(folder)
    sd_vae(folder / "vae")


def dinov2_base(folder: Path) -> None:
    """Write a teacher of the width of DINOv2-B, one layer deep."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = Dinov2Model(Dinov2Config(num_hidden_layers=1, mlp_ratio=1, image_size=28))
    network.save_pretrained(folder)
    BitImageProcessor().save_pretrained(folder)


def features_of_dino(folder: Path, side: int = 16) -> None:
    """Write an AutoencoderRAE of the width of DINOv2-S, one layer deep, with ``side`` squared patches."""
    from diffusers import AutoencoderRAE

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = AutoencoderRAE(
            encoder_hidden_size=384,
            encoder_num_hidden_layers=1,
            decoder_hidden_size=32,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=64,
            encoder_input_size=14 * side,
            latents_mean=torch.zeros(384, side, side),
            latents_std=torch.ones(384, side, side),
        )
    network.eval().save_pretrained(folder)
