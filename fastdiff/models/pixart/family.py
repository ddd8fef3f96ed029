"""Family of the PixArt."""

from fastdiff.config.networks.pixart import MLP_RATIO, PixArtConfig
from fastdiff.models.cost.flops import self_attention_multiply_adds
from fastdiff.models.family import ModelFamily
from fastdiff.models.fused import ONE, SQUARES, Declared
from fastdiff.models.pipeline_settings import PipelineSettings
from fastdiff.models.pixart.network import PixArt
from fastdiff_kernels.names import AttentionBackend

_FREQUENCIES = 256


def _build(config: PixArtConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> PixArt:
    return PixArt(config, recompute=recompute, attention=attention)


def _multiply_adds(config: PixArtConfig) -> float:
    tokens, captions, width = config.side**2, config.caption_tokens, config.hidden
    block = self_attention_multiply_adds(width, tokens) + 2 * MLP_RATIO * tokens * width**2
    block += 2 * width**2 * (tokens + captions) + 2 * tokens * captions * width  # cross-attention
    embedders = _input_multiply_adds(config) + width**2 + captions * width**2 + 6 * width**2
    embedders += 3 * (width // 3) ** 2 if config.size_conditioning else 0
    return float(config.depth * block + embedders + tokens * width * config.patch**2 * config.out_channels)


def _input_multiply_adds(config: PixArtConfig) -> float:
    width, numbers = config.hidden, 2 if config.size_conditioning else 1  # the sizes' three have a third each
    return float(
        width * (config.size**2 * config.channels + config.caption_tokens * config.caption_dim + _FREQUENCIES * numbers)
    )


_MATRICES: Declared = {
    "*scale_shift_table": None,
    "transformer_blocks.*.weight": ONE,
    "adaln_single.emb.*.linear_1.weight": None,
    "adaln_single.emb.*.linear_2.weight": ONE,
    "adaln_single.linear.weight": SQUARES,
    "caption_projection.linear_1.weight": None,
    "caption_projection.linear_2.weight": ONE,
    "pos_embed.proj.weight": None,
    "proj_out.weight": None,
}


PIXART = ModelFamily(
    config=PixArtConfig,
    build=_build,
    multiply_adds=_multiply_adds,
    input_multiply_adds=_input_multiply_adds,
    draws_on_meta=True,
    subject=lambda config: "A text-to-image diffusion transformer",
    library="diffusers",
    script_format="diffusers",
    formats={"diffusers": "fastdiff.export.pipeline:DIFFUSERS"},
    options=lambda config: f"--model.base_width {config.base_width}" if config.base_width else "",
    drawing=lambda config: PipelineSettings(steps=20, guidance=4.5),
    sampling_batch=16,
    matrices=lambda config: _MATRICES,
)
