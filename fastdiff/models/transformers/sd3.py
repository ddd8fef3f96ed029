"""Stable Diffusion 3 and 3.5: the tokens of CLIP and T5, without a mask, and CLIP's embeddings of the whole caption.

Published files hold the table of positions, which is never trained. It is read from them, and need not be the one that
diffusers' class computes.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from fastdiff.config.networks.sd3 import SD3Config
from fastdiff.errors import require
from fastdiff.models.adapter_files.forms import ADAPTER_FORMATS
from fastdiff.models.family import ModelFamily
from fastdiff.models.fused import ONE, SQUARES, Declared
from fastdiff.models.pipeline_settings import PipelineSettings, linear_mu
from fastdiff.models.transformers.adapter import Cost, DiffusersTransformer, unused

_POSITIONS = "pos_embed.pos_embed"


class SD3Transformer(DiffusersTransformer[SD3Config]):
    """``SD3Transformer2DModel``."""

    def forward(self, noisy: Tensor, time: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype; cast to the dtype of the weights.
            time: ``[B]`` fp32, 1000 times the noise level from 0 (the data) to 1. It stays fp32: it is the phase of a
                sine.
            context: ``[B, L, joint_attention_dim]`` embeddings of the tokens of captions and padding.
            pooled: ``[B, pooled_projection_dim]`` embedding of the whole caption.

        Returns:
            ``[B, C, H, W]`` velocity from data to noise, in the dtype of the weights.

        Raises:
            ConfigError: the latents are larger than the table of positions.
        """
        self.config.require_positions(*noisy.shape[2:])
        dtype = self.context_embedder.weight.dtype
        with self.attending(noisy, context.shape[1]):
            velocity: Tensor = self.network(
                hidden_states=noisy.to(dtype),
                encoder_hidden_states=context.to(dtype),
                pooled_projections=pooled.to(dtype),
                timestep=time,
                return_dict=False,
            )[0]
        return velocity

    @staticmethod
    def unused_names(config: SD3Config) -> tuple[str, ...]:
        """Return the queries of the text in the last block, which drops the text after its attention."""
        attention = f"transformer_blocks.{config.num_layers - 1}.attn"
        queries = (f"{attention}.add_q_proj.weight", f"{attention}.add_q_proj.bias")
        return queries if config.qk_norm is None else (*queries, f"{attention}.norm_added_q.weight")


def _buffers(config: SD3Config) -> dict[str, Tensor]:
    """Return the table that diffusers' class computes."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed  # its import takes seconds

    width, side = config.caption_projection_dim, config.pos_embed_max_size
    table: Tensor = get_2d_sincos_pos_embed(width, side, base_size=config.size // config.patch_size, output_type="pt")
    return {_POSITIONS: table.float()[None]}


def _check_published(path: Path, names: Collection[str], buffers: Mapping[str, Tensor]) -> None:
    require(
        _POSITIONS not in buffers,
        f"{path}: its table of positions, {_POSITIONS}, would be lost; give the folder of the whole pipeline, from "
        "which it is read",
    )


_INPUTS = ("context_embedder", "time_text_embed.timestep_embedder.linear_1", "time_text_embed.text_embedder.linear_1")
_COST = Cost(SD3Transformer, ("pos_embed.proj", *_INPUTS))

_MATRICES: Declared = {
    "transformer_blocks.*.norm1*.linear.weight": SQUARES,
    "transformer_blocks.*.weight": ONE,
    "time_text_embed.*.linear_1.weight": None,
    "time_text_embed.*.linear_2.weight": ONE,
    "context_embedder.weight": None,
    "pos_embed.proj.weight": None,
    "norm_out.linear.weight": None,
    "proj_out.weight": None,
}


SD3 = ModelFamily(
    config=SD3Config,
    build=lambda config, /, *, recompute, attention, seed: SD3Transformer(
        config, recompute=recompute, attention=attention
    ),
    multiply_adds=_COST.total,
    input_multiply_adds=_COST.of_inputs,
    draws_on_meta=True,
    subject=lambda config: "A Stable Diffusion 3 text-to-image transformer",
    license=lambda config: "Stability AI Community License",
    library="diffusers",
    script_format="diffusers",
    formats={"diffusers": "fastdiff.export.pipeline:DIFFUSERS", **ADAPTER_FORMATS},
    buffers=_buffers,
    unused=lambda config: unused(SD3Transformer, config),
    check_published=_check_published,
    drawing=lambda config: PipelineSettings(steps=28, guidance=7.0, mu=linear_mu),
    sampling_batch=4,
    matrices=lambda config: _MATRICES,
)
