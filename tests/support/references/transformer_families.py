"""Small transformers of each family of diffusers, inputs for them, and a training step by diffusers' own class.

A family of tests is a small configuration and what a training script does with the class: pack the inputs, give it its
time, and compare its output with its target.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.config.networks.qwen_image import QwenImageConfig
from fastdiff.config.networks.sd3 import SD3Config
from fastdiff.config.networks.z_image import ZImageConfig
from fastdiff.models.build import Model, build_model

SIZES = ((8, 8), (6, 12))
"""The default one, and that of a bucket."""
Conditions = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of tests."""

    config: DiffusersTransformerConfig
    step: Callable[[Any, Tensor, Tensor, Tensor, Conditions], tuple[Tensor, Tensor]]
    """Takes an instance of diffusers' class, latents, noise, levels ``[B]`` (0: the data) and conditions of samples;
    returns its output as maps with its own sign, and the target of this output."""


def flux2_step(model: Any, latents: Tensor, noise: Tensor, sigma: Tensor, given: Conditions) -> tuple[Tensor, Tensor]:
    """Rows of tokens; text has the ids (0, 0, 0, i), the picture (0, y, x, 0)."""
    height, width = latents.shape[2:]
    noisy = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
    image = [[0, y, x, 0] for y in range(height) for x in range(width)]
    text = [[0, 0, 0, i] for i in range(given["context"].shape[1])]
    (out,) = model(
        noisy.reshape(*noisy.shape[:2], -1).permute(0, 2, 1), given["context"], sigma, img_ids=torch.tensor(image),
        txt_ids=torch.tensor(text), guidance=None, return_dict=False,
    )  # fmt: skip
    return out.permute(0, 2, 1).reshape(latents.shape), noise - latents


def z_image_step(model: Any, latents: Tensor, noise: Tensor, sigma: Tensor, given: Conditions) -> tuple[Tensor, Tensor]:
    """Lists of pictures and captions without padding; the time is 1 - sigma, the output the negative of the target."""
    noisy = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
    captions = [context[mask] for context, mask in zip(given["context"], given["context_mask"], strict=True)]
    (out,) = model([each.unsqueeze(1) for each in noisy], 1 - sigma, captions, return_dict=False)
    return torch.stack([each.squeeze(1) for each in out]), latents - noise


def qwen_image_step(
    model: Any, latents: Tensor, noise: Tensor, sigma: Tensor, given: Conditions
) -> tuple[Tensor, Tensor]:
    """Patches in rows, with channels in the order c, row, column, as the pipeline packs and unpacks them."""
    from diffusers import QwenImagePipeline

    batch, channels, height, width = latents.shape
    noisy = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
    (out,) = model(
        QwenImagePipeline._pack_latents(noisy, batch, channels, height, width), given["context"], given["context_mask"],
        sigma, img_shapes=[(1, height // 2, width // 2)] * batch, guidance=None, return_dict=False,
    )  # fmt: skip
    return QwenImagePipeline._unpack_latents(out, 8 * height, 8 * width, 8)[:, :, 0], noise - latents


def sd3_step(model: Any, latents: Tensor, noise: Tensor, sigma: Tensor, given: Conditions) -> tuple[Tensor, Tensor]:
    """Maps and captions as they are; the time counts to 1000."""
    noisy = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
    (out,) = model(noisy, given["context"], given["pooled"], 1000 * sigma, return_dict=False)
    return out, noise - latents


FAMILIES: dict[str, Family] = {
    "flux2": Family(
        config=Flux2Config(
            channels=32, size=8, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=24, axes_dims_rope=(4, 4, 4, 4), caption_tokens=9,
        ),
        step=flux2_step,
    ),
    "z-image": Family(
        config=ZImageConfig(
            channels=16, size=8, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=24,
            axes_dims=(4, 6, 6), axes_lens=(128, 32, 32), caption_tokens=40,
        ),
        step=z_image_step,
    ),
    "qwen-image": Family(
        config=QwenImageConfig(
            channels=4, size=8, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6), caption_tokens=12,
        ),
        step=qwen_image_step,
    ),
    "sd3": Family(
        config=SD3Config(
            channels=16, size=8, num_layers=3, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=96,
            caption_projection_dim=32, pooled_projection_dim=64, pos_embed_max_size=8, dual_attention_layers=(0,),
            caption_tokens=9,
        ),
        step=sd3_step,
    ),
}  # fmt: skip


def built(config: DiffusersTransformerConfig, seed: int = 0, **options: Any) -> Model:
    """An adapter with random values in every weight, so that each matters."""
    model = build_model(config, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def theirs(config: DiffusersTransformerConfig, weights: Mapping[str, Tensor]) -> Any:
    """diffusers' class with these weights; names and shapes are compared strictly."""
    import diffusers

    model = getattr(diffusers, config.diffusers_class)(**config.to_diffusers())
    model.load_state_dict({name: value.clone() for name, value in weights.items()})
    return model


def conditions(config: DiffusersTransformerConfig, batch: int = 3) -> dict[str, Tensor]:
    """Random conditions; a caption with a mask has one token, some or all."""
    generator = torch.Generator().manual_seed(1)
    found = {
        name: torch.randn(batch, *shape, generator=generator)
        for name, shape in config.conditions.items()
        if not name.endswith("_mask")
    }
    if "context_mask" in config.conditions:
        tokens = config.conditions["context_mask"][0]
        lengths = torch.tensor([1, tokens - 7, tokens])[:batch]
        found["context_mask"] = torch.arange(tokens)[None] < lengths[:, None]
        found["context"] = found["context"] * found["context_mask"][..., None]
    return found


def noisy(config: DiffusersTransformerConfig, size: tuple[int, int] = SIZES[0], batch: int = 3) -> Tensor:
    """Random latents of this height and width."""
    return torch.randn(batch, config.channels, *size, generator=torch.Generator().manual_seed(2))
