"""Complete but tiny Stable Diffusion pipeline with random weights, for tests and the demo.

It has every part of a real pipeline (tokenizer, CLIP text encoder, autoencoder, UNet, scheduler) in the layout of
diffusers, so code that loads it also loads a real one. Images are four times as wide as their latents.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.unet import UNetConfig

Kind = Literal["sd15", "sd2", "sdxl"]

IMAGE_SIZE = 32
_WIDTH = 32
_START, _END = "<|startoftext|>", "<|endoftext|>"

UNETS: dict[Kind, UNetConfig] = {
    "sd15": UNetConfig(
        size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_heads=(4, 4),
        transformer_layers=(1, 0),
        cross_attention_dim=_WIDTH,
        norm_num_groups=8,
    ),
    "sd2": UNetConfig(
        size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_heads=(2, 4),
        transformer_layers=(1, 0),
        cross_attention_dim=_WIDTH,
        use_linear_projection=True,
        norm_num_groups=8,
    ),
    "sdxl": UNetConfig(
        size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_heads=(2, 4),
        transformer_layers=(0, 2),
        mid_transformer_layers=2,
        cross_attention_dim=2 * _WIDTH,
        use_linear_projection=True,
        pooled_dim=_WIDTH,
        addition_time_embed_dim=8,
        norm_num_groups=8,
    ),
}
"""Configurations of the UNets of the tiny pipelines."""


def build(folder: Path, *, kind: Kind = "sd15", seed: int = 0) -> Path:
    """Write a pipeline and return its folder.

    Args:
        folder: created if it is missing.
        kind: sd15 predicts the noise, sd2 the velocity; sdxl has two text encoders and conditions on sizes.
        seed: seed of every weight; the global random state is restored.
    """
    import diffusers

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        parts: dict[str, Any] = {
            "vae": autoencoder(diffusers, force_upcast=kind == "sdxl"),
            "text_encoder": _text_encoder(projected=False),
            "tokenizer": _tokenizer(folder),
            "unet": diffusers.UNet2DConditionModel(**UNETS[kind].to_diffusers()),
            "scheduler": _scheduler(diffusers, kind),
        }
        if kind == "sdxl":
            parts |= {"text_encoder_2": _text_encoder(projected=True), "tokenizer_2": _tokenizer(folder)}
            pipeline = diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False)
        else:
            pipeline = diffusers.StableDiffusionPipeline(
                **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
            )
    pipeline.save_pretrained(folder)
    return folder


def autoencoder(diffusers: Any, *, force_upcast: bool = False) -> Any:
    """Return an autoencoder with random weights, for images four times as wide as their latents.

    Args:
        diffusers: the package.
        force_upcast: whether it says that it overflows in fp16, as SDXL's does.
    """
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        force_upcast=force_upcast,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
    )


def _text_encoder(*, projected: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        projection_dim=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_factor=8.0,  # otherwise the embeddings of all captions are nearly equal
        max_position_embeddings=CAPTION_TOKENS,
        bos_token_id=_vocabulary()[_START],
        eos_token_id=_vocabulary()[_END],
        pad_token_id=_vocabulary()[_END],
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def _tokenizer(folder: Path) -> Any:
    """Return CLIP's tokenizer with one token per character, a vocabulary without training."""
    from transformers import CLIPTokenizer

    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps(_vocabulary()))
    merges.write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(vocab=str(vocabulary), merges=str(merges), model_max_length=CAPTION_TOKENS)
    vocabulary.unlink()
    merges.unlink()
    return tokenizer


def _vocabulary() -> dict[str, int]:
    printable = [chr(code) for code in range(33, 127)]
    names = [*printable, *(f"{character}</w>" for character in printable), _START, _END]
    return {name: number for number, name in enumerate(names)}


def _scheduler(diffusers: Any, kind: Kind) -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction" if kind == "sd2" else "epsilon",
    )
