"""Family of Stable Diffusion's UNet."""

from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.models.cost.flops import res_block_multiply_adds, self_attention_multiply_adds
from fastdiff.models.family import ModelFamily
from fastdiff.models.fused import ONE, Declared, Fused
from fastdiff.models.pipeline_settings import PipelineSettings
from fastdiff.models.unet.blocks import TransformerBlock
from fastdiff.models.unet.network import UNet
from fastdiff_kernels.names import AttentionBackend


def _build(config: UNetConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> UNet:
    return UNet(config, recompute=recompute, attention=attention)


def _multiply_adds(config: UNetConfig) -> float:
    widths, time = config.block_out_channels, 4 * config.block_out_channels[0]
    sizes = _pooled_width(config)
    total = time * (widths[0] + time) + (time * (sizes + time) if config.pooled_dim else 0)
    total += 2 * 9 * config.size**2 * config.channels * widths[0]  # the first and the last convolution
    count = config.layers_per_block
    for level, width in enumerate(widths):
        finer, coarser = widths[max(level - 1, 0)], widths[level:][:2][-1]
        positions = (config.size >> level) ** 2
        down = [finer] + [width] * (count - 1)
        up = [coarser + width] + [2 * width] * (count - 1) + [width + finer]
        total += sum(res_block_multiply_adds(inputs, width, positions, time) for inputs in down + up)
        total += (2 * count + 1) * _transformer(config, width, config.transformer_layers[level], positions)
        total += 9 * width**2 * positions * 4 if level else 0  # the convolution after the upsampling
        total += 9 * width**2 * positions // 4 if level < len(widths) - 1 else 0  # the downsampling
    total += 2 * res_block_multiply_adds(widths[-1], widths[-1], positions, time)
    return total + _transformer(config, widths[-1], config.mid_transformer_layers, positions)


def _transformer(config: UNetConfig, width: int, layers: int, positions: int) -> int:
    """Return the multiply-adds of a transformer: projections and, per block, two attentions and a gated MLP."""
    own = self_attention_multiply_adds(width, positions)
    cross = (
        positions * (2 * width**2 + 2 * CAPTION_TOKENS * width)
        + 2 * CAPTION_TOKENS * config.cross_attention_dim * width
    )
    return layers * (own + cross + 12 * positions * width**2) + (2 * positions * width**2 if layers else 0)


def _pooled_width(config: UNetConfig) -> int:
    """Return the width of SDXL's additional features: the pooled caption and six sizes."""
    return config.pooled_dim + 6 * config.addition_time_embed_dim


def _input_multiply_adds(config: UNetConfig) -> float:
    widths, count = config.block_out_channels, config.layers_per_block
    time = 4 * widths[0]
    total = 9 * config.size**2 * config.channels * widths[0] + time * widths[0]
    total += time * _pooled_width(config) if config.pooled_dim else 0
    layers = [(2 * count + 1) * layers for layers in config.transformer_layers]
    keyed = sum(width * n for width, n in zip(widths, layers, strict=True)) + widths[-1] * config.mid_transformer_layers
    return float(total + 2 * CAPTION_TOKENS * config.cross_attention_dim * keyed)


_MATRICES: Declared = {
    "*.ff.net.0.proj.weight": Fused((1, 1)),
    "down_blocks.*.weight": ONE,
    "mid_block.*.weight": ONE,
    "up_blocks.*.weight": ONE,
    "*_embedding.linear_1.weight": None,
    "*_embedding.linear_2.weight": ONE,
    "conv_in.weight": None,
    "conv_out.weight": None,
}


UNET = ModelFamily(
    config=UNetConfig,
    build=_build,
    multiply_adds=_multiply_adds,
    input_multiply_adds=_input_multiply_adds,
    draws_on_meta=True,
    subject=lambda config: "A text-to-image UNet",
    library="diffusers",
    script_format="diffusers",
    adapter_formats=("lora", "lora-diffusers"),
    formats={
        "diffusers": "fastdiff.export.pipeline:DIFFUSERS",
        "single-file": "fastdiff.export.single_file:SINGLE_FILE",
        "lora": "fastdiff.export.unet_adapters:EVERYWHERE",
        "lora-diffusers": "fastdiff.export.unet_adapters:FOR_DIFFUSERS",
        "lora-native": "fastdiff.export.adapters:NATIVE",
        "lora-kohya": "fastdiff.export.unet_adapters:KOHYA",
    },
    pipeline_part="unet",
    quantized_blocks=(TransformerBlock,),
    drawing=lambda config: PipelineSettings(guidance=5.0 if config.pooled_dim else 7.5),
    sampling_batch=4,
    matrices=lambda config: _MATRICES,
)
