"""Qwen-Image: captions and patches of latents in two streams with joint attention.

diffusers' class copies a number to the device in every step, and keeps its rotary tables in caches of its methods; the
same layers are called here, and the few factors that a step needs are computed on the device. A mask is always given,
so that one graph serves every batch of a shape.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.config.networks.qwen_image import PATCH, QwenImageConfig
from fastdiff.models.adapter_files.forms import ADAPTER_FORMATS
from fastdiff.models.blockwise import run_block
from fastdiff.models.family import ModelFamily
from fastdiff.models.fused import ONE, SQUARES, Declared
from fastdiff.models.pipeline_settings import PipelineSettings, linear_mu
from fastdiff.models.transformers.adapter import Cost, DiffusersTransformer, unused

_THETA = 10000.0
"""Base of the rotary frequencies."""


class QwenImage(DiffusersTransformer[QwenImageConfig]):
    """``QwenImageTransformer2DModel`` on maps."""

    def forward(self, noisy: Tensor, time: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype; cast to the dtype of the weights.
            time: ``[B]`` noise levels, from 0 (the data) to 1; rounded to the dtype of the weights, as published.
            context: ``[B, L, joint_attention_dim]`` embeddings of the tokens of the captions.
            context_mask: ``[B, L]`` bool, the tokens that belong to the caption.

        Returns:
            ``[B, C, H, W]`` velocity from data to noise, in the dtype of the weights.
        """
        height, width = (size // PATCH for size in noisy.shape[2:])
        dtype, length = self.img_in.weight.dtype, context.shape[1]
        with self.attending(noisy, length):
            patches = F.pixel_unshuffle(noisy.to(dtype), PATCH)  # channels in the order C, row, column
            picture = self.img_in(patches.flatten(2).transpose(1, 2))  # [B, 4C, h, w] -> [B, h * w, D]
            caption = self.txt_in(self.txt_norm(context.to(dtype)))
            modulation = self.time_text_embed(time.to(dtype), picture)
            turns = self._turns_of_picture(noisy, height, width), self._turns_of_caption(noisy, height, width, length)
            for block in self.transformer_blocks:
                caption, picture = run_block(
                    block, picture, caption, context_mask, modulation, turns, recompute=self.recompute
                )
            patches = self.proj_out(self.norm_out(picture, modulation)).transpose(1, 2)
        return F.pixel_shuffle(patches.unflatten(2, (height, width)), PATCH)

    @staticmethod
    def unused_names(config: QwenImageConfig) -> tuple[str, ...]:
        """Return what the last block computes for the text after its attention, which is dropped, and its queries."""
        layers = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
        return tuple(
            f"transformer_blocks.{config.num_layers - 1}.{name}" for name in (*names, "attn.norm_added_q.weight")
        )

    def _turns_of_picture(self, noisy: Tensor, height: int, width: int) -> Tensor:
        """Return the rotary factors of the patches, ``[h * w, head_dim / 2]`` complex64: rows and columns centred."""
        sides = (torch.arange(side, device=noisy.device) - (side - side // 2) for side in (height, width))
        return self._turns(F.pad(torch.cartesian_prod(*sides), (1, 0)))

    def _turns_of_caption(self, noisy: Tensor, height: int, width: int, length: int) -> Tensor:
        """Return those of the tokens ``[L, head_dim / 2]``, which follow the picture on its diagonal."""
        first = max(height, width) // 2
        return self._turns(torch.arange(first, first + length, device=noisy.device)[:, None].expand(-1, 3))

    def _turns(self, positions: Tensor) -> Tensor:
        """``[T, 3] -> [T, head_dim / 2]``, in fp32 arithmetic."""
        phases = []
        for position, channels in zip(positions.unbind(1), self.config.axes_dims_rope, strict=True):
            exponents = torch.arange(0, channels, 2, device=positions.device).float() / channels
            phases.append(torch.outer(position, 1.0 / _THETA**exponents))
        phase = torch.cat(phases, dim=1)
        return torch.polar(torch.ones_like(phase), phase)


_COST = Cost(QwenImage, ("img_in", "txt_in", "time_text_embed.timestep_embedder.linear_1"))

_MATRICES: Declared = {
    "transformer_blocks.*_mod.1.weight": SQUARES,
    "transformer_blocks.*.weight": ONE,
    "time_text_embed.*.linear_1.weight": None,
    "time_text_embed.*.linear_2.weight": ONE,
    "img_in.weight": None,
    "txt_in.weight": None,
    "norm_out.linear.weight": None,
    "proj_out.weight": None,
}


QWEN_IMAGE = ModelFamily(
    config=QwenImageConfig,
    build=lambda config, /, *, recompute, attention, seed: QwenImage(config, recompute=recompute, attention=attention),
    multiply_adds=_COST.total,
    input_multiply_adds=_COST.of_inputs,
    draws_on_meta=True,
    subject=lambda config: "A Qwen-Image text-to-image transformer",
    license=lambda config: "Apache-2.0",
    library="diffusers",
    script_format="diffusers",
    formats={"diffusers": "fastdiff.export.pipeline:DIFFUSERS", **ADAPTER_FORMATS},
    drawing=lambda config: PipelineSettings(
        steps=50, guidance=4.0, negative=" ", norm_patch=PATCH, mu=linear_mu, even_sigmas=True
    ),
    unused=lambda config: unused(QwenImage, config),
    sampling_batch=4,
    matrices=lambda config: _MATRICES,
)
