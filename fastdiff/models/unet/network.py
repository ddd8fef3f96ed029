"""The UNet of Stable Diffusion 1.x, 2.x and XL, with diffusers' parameter names and shapes.

Rombach et al. 2022, arXiv:2112.10752; Podell et al. 2023, arXiv:2307.01952. Under ZeRO-3 a parameter is gathered only
during the forward of its own module, or of its block; no code here reads one at another time, except its dtype.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.unet import UNetConfig
from fastdiff.errors import require
from fastdiff.models.blockwise import BlockwiseModel, run_block
from fastdiff.models.embeddings import timestep_sinusoids
from fastdiff.models.unet.blocks import (
    Conv2d,
    Downsample,
    GroupNorm,
    ResBlock,
    Terms,
    TimestepEmbedding,
    Transformer,
    TransformerBlock,
    Upsample,
    joined,
    summed,
)
from fastdiff_kernels import dispatch
from fastdiff_kernels.names import AttentionBackend

_SIZES = 6
"""Numbers in ``time_ids``."""


class UNet(BlockwiseModel):
    """UNet that predicts noise, velocity or clean latents from noisy latents, a time and a caption.

    Feature maps are channels_last from the first convolution to the last. Initial weights are torch's own for each
    layer, drawn from its global generator in the order in which diffusers draws them.
    """

    block_classes = (ResBlock, TransformerBlock)
    channels_last = True
    config: UNetConfig

    def __init__(self, config: UNetConfig, *, recompute: bool = False, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        self.config = config
        widths, groups = config.block_out_channels, config.norm_num_groups
        time_dim = 4 * widths[0]
        self.conv_in = Conv2d(config.channels, widths[0], kernel_size=3, padding=1)
        self.time_embedding = TimestepEmbedding(widths[0], time_dim)
        features = config.pooled_dim + _SIZES * config.addition_time_embed_dim
        self.add_embedding = TimestepEmbedding(features, time_dim) if config.pooled_dim else None
        build = partial(_Parts, config, time_dim, recompute, attention)
        levels = range(len(widths))
        self.down_blocks = nn.ModuleList(DownLevel(build(level)) for level in levels)
        self.mid_block = MiddleLevel(build(levels[-1]))
        self.up_blocks = nn.ModuleList(UpLevel(build(level)) for level in reversed(levels))
        self.conv_norm_out = GroupNorm(groups, widths[0])
        self.conv_out = Conv2d(widths[0], config.channels, kernel_size=3, padding=1)

    def forward(
        self, noisy: Tensor, time: Tensor, context: Tensor, pooled: Tensor | None = None, time_ids: Tensor | None = None
    ) -> Tensor:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype and strides; cast to the dtype of the weights.
            time: ``[B]`` int64 or float timesteps in [0, T).
            context: ``[B, L, cross_attention_dim]`` embeddings of the tokens of the captions.
            pooled: ``[B, pooled_dim]`` embeddings of the whole captions, if ``pooled_dim`` is not 0.
            time_ids: ``[B, 6]`` sizes and crops, with ``pooled``; see ``fastdiff.batch.Condition``.

        Returns:
            ``[B, C, H, W]``, contiguous, in the dtype of the weights.

        Raises:
            ConfigError: H or W is not divisible by ``config.smallest_factor``, or ``pooled`` and ``time_ids`` are
                missing or unexpected.
        """
        self._check(noisy, pooled, time_ids)
        dtype = self.conv_in.weight.dtype
        embedding = F.silu(self._embed(time, pooled, time_ids, dtype))
        context = context.to(dtype)
        skips: list[Tensor] = [self.conv_in(noisy.to(dtype=dtype, memory_format=torch.channels_last))]
        for level in self.down_blocks:
            skips += level(skips[-1], embedding, context)
        terms: Terms = self.mid_block(skips[-1], embedding, context)
        joining = self.config.layers_per_block + 1
        for level in self.up_blocks:
            terms = level(terms, skips[-joining:], embedding, context)
            del skips[-joining:]
        branch, base, shift = terms
        out, _ = self.conv_norm_out(branch, shift=shift, residual=base)
        return cast(Tensor, self.conv_out(out)).contiguous()

    def blocks_in_order(self) -> list[nn.Module]:
        """Return the blocks in the order in which a pass runs them; a level lists its residual blocks first."""
        levels = [*self.down_blocks, self.mid_block, *self.up_blocks]
        return [block for level in levels for block in cast(_Level, level).blocks_in_order()]

    def compile_blocks(self, **options: Any) -> Self:
        """Compile as in ``BlockwiseModel``; ``dynamic`` is False unless given, so each map size has its own graphs."""
        return super().compile_blocks(**{"dynamic": False, **options})

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its last norm; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("group_norm", example)

    def _embed(self, time: Tensor, pooled: Tensor | None, time_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the embedding of time, pooled caption and sizes, ``[B, 4 * C_0]``."""
        sinusoids = timestep_sinusoids(time, self.config.block_out_channels[0], dtype)
        embedding = cast(Tensor, self.time_embedding(sinusoids.to(dtype)))
        if self.add_embedding is None or pooled is None or time_ids is None:
            return embedding
        sizes = timestep_sinusoids(time_ids.flatten(), self.config.addition_time_embed_dim, dtype)  # [B, 6] -> [6B, A]
        # [B, P], [6B, A] -> [B, P + 6A]
        features = torch.cat([pooled.to(dtype), sizes.to(dtype).view(time_ids.shape[0], -1)], dim=1)
        return embedding + cast(Tensor, self.add_embedding(features))

    def _check(self, noisy: Tensor, pooled: Tensor | None, time_ids: Tensor | None) -> None:
        height, width = noisy.shape[2:]
        factor = self.config.smallest_factor
        require(
            height % factor == 0 and width % factor == 0,
            f"latents of {height} x {width}: this UNet halves them {len(self.down_blocks) - 1} times, so height and "
            f"width must be divisible by {factor}; encode the images at other sizes",
        )
        given = [name for name, value in (("pooled", pooled), ("time_ids", time_ids)) if value is not None]
        expected = ["pooled", "time_ids"] if self.config.pooled_dim else []
        require(
            given == expected,
            f"this UNet takes {' and '.join(expected) or 'neither pooled nor time_ids'} besides the context, given "
            f"{' and '.join(given) or 'neither'}; encode the captions with the text encoders of the same pipeline",
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Builder of the parts of one level of a UNet."""

    config: UNetConfig
    time_dim: int
    recompute: bool
    attention: AttentionBackend
    level: int

    @property
    def width(self) -> int:
        """Channels of the level."""
        return self.config.block_out_channels[self.level]

    @property
    def finer(self) -> int:
        """Channels of the next finer level, or of this one if it is the finest."""
        return self.config.block_out_channels[max(self.level - 1, 0)]

    @property
    def coarser(self) -> int:
        """Channels of the next coarser level, or of this one if it is the coarsest."""
        return self.config.block_out_channels[self.level :][:2][-1]

    @property
    def layers(self) -> int:
        """Transformer blocks after each residual block."""
        return self.config.transformer_layers[self.level]

    def res_block(self, channels: int) -> ResBlock:
        return ResBlock(channels, self.width, self.time_dim, self.config.norm_num_groups)

    def transformer(self, layers: int) -> Transformer:
        return Transformer(
            self.width,
            self.config.attention_heads[self.level],
            layers,
            (self.config.size >> self.level) ** 2,
            context_dim=self.config.cross_attention_dim,
            groups=self.config.norm_num_groups,
            linear=self.config.use_linear_projection,
            attention=self.attention,
            recompute=self.recompute,
        )


class _Level(nn.Module):
    """Residual blocks at one size of the maps, each optionally followed by a transformer."""

    def __init__(self, parts: _Parts, channels: Sequence[int], layers: Sequence[int]) -> None:
        super().__init__()
        self.recompute = parts.recompute
        self.resnets, self.attentions = nn.ModuleList(), nn.ModuleList()
        for width, depth in zip(channels, layers, strict=True):  # the order in which diffusers draws initial weights
            self.resnets.append(parts.res_block(width))
            if depth:
                self.attentions.append(parts.transformer(depth))

    def blocks_in_order(self) -> Iterator[nn.Module]:
        """Yield its blocks in the order in which a pass runs them."""
        for resnet, transformer in zip_longest(self.resnets, self.attentions):
            yield resnet
            if transformer is not None:
                yield from cast(nn.ModuleList, transformer.transformer_blocks)

    def _res_block(self, n: int, terms: Terms, embedding: Tensor) -> Terms:
        out: Terms = run_block(self.resnets[n], *terms, embedding, recompute=self.recompute)
        return out


class DownLevel(_Level):
    """One level of the encoder."""

    def __init__(self, parts: _Parts) -> None:
        count = parts.config.layers_per_block
        super().__init__(parts, [parts.finer] + [parts.width] * (count - 1), [parts.layers] * count)
        last = parts.level == len(parts.config.block_out_channels) - 1
        self.downsamplers = nn.ModuleList([] if last else [Downsample(parts.width)])

    def forward(self, x: Tensor, embedding: Tensor, context: Tensor) -> list[Tensor]:
        """Map ``x [B, C, H, W]`` to the outputs of each residual block, with its transformer, and the downsampling."""
        terms: Terms = (x, None, None)
        maps: list[Tensor] = []
        for n in range(len(self.resnets)):
            terms = self._res_block(n, terms, embedding)
            if n:
                # Output of the previous layer, summed by the first norm of this one.
                maps.append(cast(Tensor, terms[1]))
            if self.attentions:
                terms = self.attentions[n](*terms, context)
        maps.append(summed(*terms))
        return [*maps, *(downsample(maps[-1]) for downsample in self.downsamplers)]


class MiddleLevel(_Level):
    """Level between encoder and decoder."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__(parts, [parts.width] * 2, [parts.config.mid_transformer_layers, 0])

    def forward(self, x: Tensor, embedding: Tensor, context: Tensor) -> Terms:
        """Return the terms of the output for the map ``x [B, C, H, W]``."""
        terms = self._res_block(0, (x, None, None), embedding)
        return self._res_block(1, self.attentions[0](*terms, context), embedding)


class UpLevel(_Level):
    """One level of the decoder, with the skip connections of the encoder."""

    def __init__(self, parts: _Parts) -> None:
        count = parts.config.layers_per_block + 1
        inputs = [parts.coarser] + [parts.width] * (count - 1)
        joining = [parts.width] * (count - 1) + [parts.finer]
        channels = [a + b for a, b in zip(inputs, joining, strict=True)]
        super().__init__(parts, channels, [parts.layers] * count)
        self.upsamplers = nn.ModuleList([Upsample(parts.width)] if parts.level else [])

    def forward(self, terms: Terms, skips: list[Tensor], embedding: Tensor, context: Tensor) -> Terms:
        """Return the terms of the output for those of the input and the skip maps, the last one first."""
        for n, skip in enumerate(reversed(skips)):
            terms = self._res_block(n, (joined(terms, skip), None, None), embedding)
            if self.attentions:
                terms = self.attentions[n](*terms, context)
        if not self.upsamplers:
            return terms
        return self.upsamplers[0](summed(*terms)), None, None
