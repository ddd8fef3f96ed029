"""Floating-point operations of the models, and what the devices can do.

One multiply-add counts as two operations; a backward pass costs twice a forward pass, but for the layers that see the
inputs, which have no gradient. (The "119 Gflops" that the DiT paper prints for XL/2 are multiply-adds.)
"""

from __future__ import annotations

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import ModelConfig

_PEAK_BF16 = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
}
"""Dense bf16 operations per second, from NVIDIA's data sheets; the longest name that fits counts."""


def forward_flops(config: ModelConfig) -> float:
    """Return the operations of one forward pass on one sample (matrix products and convolutions only).

    A UNet works on latents of ``config.size`` and captions of 77 tokens. The published SD 1.5 at 64 x 64 has 0.40 T
    multiply-adds by this count, which agrees with ``torch.utils.flop_counter``.
    """
    if isinstance(config, DiTConfig):
        return 2.0 * _dit(config)
    return 2.0 * (_adm(config) if isinstance(config, AdmConfig) else _unet(config))


def _dit(config: DiTConfig) -> float:
    """Multiply-adds."""
    tokens = (config.size // config.patch) ** 2
    width, patch = config.hidden, config.channels * config.patch**2
    out = patch * (2 if config.learn_sigma else 1)
    per_token = 4 * width**2 + 2 * config.mlp_ratio * width**2 + 2 * tokens * width
    per_sample = 6 * width**2  # adaLN of a block
    embedders = tokens * width * (patch + out) + 256 * width + width**2 + 2 * width**2
    return config.depth * (tokens * per_token + per_sample) + embedders


def _unet(config: UNetConfig) -> float:
    """Multiply-adds."""
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
        total += sum(_res_block(inputs, width, positions, time) for inputs in down + up)
        total += (2 * count + 1) * _transformer(config, width, config.transformer_layers[level], positions)
        total += 9 * width**2 * positions * 4 if level else 0  # behind the upsampling
        total += 9 * width**2 * positions // 4 if level < len(widths) - 1 else 0  # the downsampling
    total += 2 * _res_block(widths[-1], widths[-1], positions, time)
    return total + _transformer(config, widths[-1], config.mid_transformer_layers, positions)


def _adm(config: AdmConfig) -> float:
    """Multiply-adds."""
    time, out = 4 * config.width, config.channels * (2 if config.learn_sigma else 1)
    told = time * (2 if config.scale_shift_norm else 1)
    here = config.widths[0]
    skips, total = [here], _on_inputs(config) + time**2 + 9 * config.size**2 * here * out

    def layers(inputs: int, width: int, side: int) -> int:
        attends = side in config.attention_resolutions
        return _res_block(inputs, width, side**2, told) + (_self_attention(width, side**2) if attends else 0)

    def resized(width: int, side: int) -> int:
        return _res_block(width, width, side**2, told) if config.resblock_updown else 9 * width**2 * side**2

    for level, width in enumerate(config.widths):
        side = config.size >> level
        if level:
            total += resized(here, side)
            skips.append(here)
        for _ in range(config.res_blocks):
            total += layers(here, width, side)
            skips.append(here := width)
    total += 2 * _res_block(here, here, side**2, told) + _self_attention(here, side**2)
    for level, width in reversed(list(enumerate(config.widths))):
        side = config.size >> level
        for _ in range(config.res_blocks + 1):
            total += layers(here + skips.pop(), width, side)
            here = width
        total += resized(width, 2 * side) if level else 0
    return total


def _self_attention(width: int, positions: int) -> int:
    return positions * (4 * width**2 + 2 * positions * width)


def _res_block(inputs: int, width: int, positions: int, time: int) -> int:
    shortcut = inputs * width if inputs != width else 0
    return positions * (9 * (inputs + width) * width + shortcut) + time * width


def _transformer(config: UNetConfig, width: int, layers: int, positions: int) -> int:
    """Projections around it and, in each layer, two attentions and a gated feed-forward layer."""
    own = _self_attention(width, positions)
    cross = (
        positions * (2 * width**2 + 2 * CAPTION_TOKENS * width)
        + 2 * CAPTION_TOKENS * config.cross_attention_dim * width
    )
    return layers * (own + cross + 12 * positions * width**2) + (2 * positions * width**2 if layers else 0)


def _pooled_width(config: UNetConfig) -> int:
    """Of what SDXL embeds besides the time: the pooled caption and six sizes."""
    return config.pooled_dim + 6 * config.addition_time_embed_dim


def _on_inputs(config: ModelConfig) -> float:
    """Multiply-adds of the layers whose input is noisy latents, captions or an encoding of the time."""
    if isinstance(config, DiTConfig):
        return float(config.hidden * (config.size**2 * config.channels + 256))
    if isinstance(config, AdmConfig):
        channels = config.channels * (2 if config.low_res_size else 1)
        return float(9 * config.size**2 * channels * config.widths[0] + 4 * config.width**2)
    widths, count = config.block_out_channels, config.layers_per_block
    time = 4 * widths[0]
    total = 9 * config.size**2 * config.channels * widths[0] + time * widths[0]
    total += time * _pooled_width(config) if config.pooled_dim else 0
    layers = [(2 * count + 1) * layers for layers in config.transformer_layers]
    keyed = sum(width * n for width, n in zip(widths, layers, strict=True)) + widths[-1] * config.mid_transformer_layers
    return float(total + 2 * CAPTION_TOKENS * config.cross_attention_dim * keyed)


def training_flops(config: ModelConfig, *, adapter: bool = False, dream: bool = False) -> float:
    """Return the operations of a training step on one sample, without recomputation.

    Args:
        config: the network.
        adapter: whether its own weights are frozen (LoRA), so that they have no gradient to compute.
        dream: whether DREAM's estimate costs another forward pass.
    """
    return (3.0 - adapter + dream) * forward_flops(config) - 2.0 * _on_inputs(config)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in operations per second; None if the device is not listed."""
    fitting = [name for name in _PEAK_BF16 if name in device_name]
    return _PEAK_BF16[max(fitting, key=len)] if fitting else None
