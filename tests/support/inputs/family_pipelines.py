"""Tiny pipelines of the families of diffusers' transformers, complete and with random weights."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM, Qwen3Model

from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.models.pretrained.pipeline import Pretrained
from tests.support.inputs.autoencoders import tiny_autoencoder
from tests.support.inputs.text_pipelines import clip, qwen3, qwen_vl, t5
from tests.support.references.transformer_families import FAMILIES

_OF_TEMPLATE = 170
"""Tokens, one per character, between those that are dropped of Qwen-Image's template and the caption."""
TOKENS = {"flux2": 40, "z-image": 40, "qwen-image": 40 + _OF_TEMPLATE, "sd3": 40}
"""Of a caption of each tiny pipeline; Stable Diffusion 3: behind those of CLIP."""


def _flux2(folder: Path, transformer: Any) -> Any:
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

    width = transformer.config.joint_attention_dim // 3
    text_encoder, tokenizer = qwen3(Qwen3ForCausalLM, width, layers=28)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=AutoencoderKLFlux2.from_pretrained(tiny_autoencoder(folder, "flux2")),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _z_image(folder: Path, transformer: Any) -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline

    text_encoder, tokenizer = qwen3(Qwen3Model, transformer.config.cap_feat_dim)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=AutoencoderKL.from_pretrained(tiny_autoencoder(folder, "kl16")),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _qwen_image(folder: Path, transformer: Any) -> Any:
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    text_encoder, tokenizer = qwen_vl(transformer.config.joint_attention_dim)
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9),
        vae=AutoencoderKLQwenImage.from_pretrained(tiny_autoencoder(folder, "qwen")),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _sd3(folder: Path, transformer: Any) -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    folder.mkdir(parents=True)
    transformer.pos_embed.pos_embed /= 3  # published tables need not be that of the class
    parts = [clip(folder), clip(folder), t5(transformer.config.joint_attention_dim)]
    names = [f"{part}{number}" for number in ("", "_2", "_3") for part in ("text_encoder", "tokenizer")]
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL.from_pretrained(tiny_autoencoder(folder, "kl16")),
        transformer=transformer,
        **dict(zip(names, chain.from_iterable(parts), strict=True)),
    )


_BUILDERS: dict[str, Callable[[Path, Any], Any]] = {
    "flux2": _flux2, "z-image": _z_image, "qwen-image": _qwen_image, "sd3": _sd3,
}  # fmt: skip


def family_pipeline(folder: Path, kind: str) -> Path:
    """Write the pipeline of a family of tests and return its folder."""
    import diffusers

    config = FAMILIES[kind].config
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        transformer = getattr(diffusers, config.diffusers_class)(**config.to_diffusers())
    _BUILDERS[kind](folder / "parts", transformer).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def network_in(pipeline: Path) -> DiffusersTransformerConfig:
    """Return the shape of its network."""
    found = Pretrained(str(pipeline)).network_config()
    assert isinstance(found, DiffusersTransformerConfig)
    return found
