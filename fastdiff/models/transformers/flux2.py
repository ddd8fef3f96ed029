"""Flux.2-klein: its inputs are tokens with four rotary ids each (image number, row, column, text position).

Pictures that an edited one refers to are tokens behind its own, without noise, with the image numbers 10, 20, 30 and so
on. They may have another height and width.
Captions have no mask: a token of padding is read as text, so cached captions keep the padding of the encoder.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.models.adapter_files.forms import ADAPTER_FORMATS
from fastdiff.models.family import ModelFamily
from fastdiff.models.fused import ONE, SQUARES, Declared, Fused
from fastdiff.models.pipeline_settings import PipelineSettings
from fastdiff.models.transformers.adapter import Cost, DiffusersTransformer

_BETWEEN_REFERENCES = 10
"""Difference of the image numbers of two references."""


class Flux2(DiffusersTransformer[Flux2Config]):
    """``Flux2Transformer2DModel`` on maps."""

    def forward(self, noisy: Tensor, time: Tensor, context: Tensor, reference: Tensor | None = None) -> Tensor:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype; cast to the dtype of the weights.
            time: ``[B]`` noise levels, from 0 (the data) to 1.
            context: ``[B, L, joint_attention_dim]`` embeddings of the tokens of captions and padding.
            reference: ``[B, N, C, h, w]`` latents of the pictures that each refers to; None: a picture from text alone.

        Returns:
            ``[B, C, H, W]`` velocity from data to noise, in the dtype of the weights.
        """
        height, width = noisy.shape[2:]
        dtype, length = self.x_embedder.weight.dtype, context.shape[1]
        tokens, ids = _tokens(noisy), _ids(noisy.device, rows=height, columns=width)
        if reference is not None:
            pictures = reference.unbind(1)
            tokens = torch.cat([tokens, *map(_tokens, pictures)], 1)
            rows, columns = reference.shape[3:]
            numbers = range(_BETWEEN_REFERENCES, _BETWEEN_REFERENCES * (len(pictures) + 1), _BETWEEN_REFERENCES)
            ids = torch.cat([ids, *(_ids(noisy.device, image=n, rows=rows, columns=columns) for n in numbers)])
        with self.attending(noisy, length):
            velocity: Tensor = self.network(
                hidden_states=tokens.to(dtype),
                encoder_hidden_states=context.to(dtype),
                timestep=time,
                img_ids=ids,
                txt_ids=_ids(noisy.device, text=length),
                guidance=None,
                return_dict=False,
            )[0]
        # The first tokens are those of the picture: [B, H * W, C] -> [B, C, H, W]
        return velocity[:, : height * width].transpose(1, 2).reshape(noisy.shape)

    def tokens(self, size: torch.Size, caption: int) -> int:
        """Return the length of the joint stream of a picture, its references and a caption."""
        height, width = size
        return (1 + self.config.references) * height * width + caption


def _tokens(latents: Tensor) -> Tensor:
    """``[B, C, H, W] -> [B, H * W, C]``."""
    return latents.flatten(2).transpose(1, 2)


def _ids(device: torch.device, *, image: int = 0, rows: int = 1, columns: int = 1, text: int = 1) -> Tensor:
    """Return the rotary ids of a grid of image number ``image``, ``[rows * columns * text, 4]`` int64."""
    axes = [torch.arange(length, device=device) for length in (rows, columns, text)]
    return torch.cartesian_prod(torch.arange(image, image + 1, device=device), *axes)


def _mu(scheduler: Mapping[str, Any], tokens: int, steps: int) -> float:
    """Return the published fit of the time shift: linear in the tokens for 10 and for 200 steps, between in steps."""
    of_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return of_200
    of_10 = 8.73809524e-05 * tokens + 1.89833333
    return of_200 + (of_200 - of_10) * (steps - 200) / 190


_COST = Cost(Flux2, ("x_embedder", "context_embedder", "time_guidance_embed.timestep_embedder.linear_1"))

_MATRICES: Declared = {
    "*_modulation*.linear.weight": SQUARES,
    "transformer_blocks.*.linear_in.weight": Fused((1, 1)),
    "transformer_blocks.*.weight": ONE,
    "single_transformer_blocks.*.attn.to_out.weight": ONE,
    "time_guidance_embed.*.linear_1.weight": None,
    "time_guidance_embed.*.linear_2.weight": ONE,
    "x_embedder.weight": None,
    "context_embedder.weight": None,
    "norm_out.linear.weight": None,
    "proj_out.weight": None,
}


def _matrices(config: Flux2Config) -> Declared:
    """Return the matrices; a single block has queries, keys, values and both halves of its MLP in one weight."""
    width = config.num_attention_heads * config.attention_head_dim
    inner = int(width * config.mlp_ratio)
    fused = Fused((width, width, width, inner, inner))
    return {"single_transformer_blocks.*.attn.to_qkv_mlp_proj.weight": fused, **_MATRICES}


FLUX2 = ModelFamily(
    config=Flux2Config,
    build=lambda config, /, *, recompute, attention, seed: Flux2(config, recompute=recompute, attention=attention),
    multiply_adds=_COST.total,
    input_multiply_adds=_COST.of_inputs,
    draws_on_meta=True,
    subject=lambda config: "A Flux.2 text-to-image transformer",
    license=lambda config: "Apache-2.0 (klein 4B) or FLUX non-commercial (klein 9B)",
    library="diffusers",
    script_format="diffusers",
    formats={"diffusers": "fastdiff.export.pipeline:DIFFUSERS", **ADAPTER_FORMATS},
    drawing=lambda config: PipelineSettings(steps=50, guidance=4.0, mu=_mu, even_sigmas=True, distilled_steps=4),
    sampling_batch=4,
    matrices=_matrices,
)
