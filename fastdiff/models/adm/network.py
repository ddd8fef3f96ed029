"""The UNet of IDDPM and ADM, with the parameter names and shapes of the published checkpoints.

Nichol & Dhariwal 2021, arXiv:2102.09672; Dhariwal & Nichol 2021, arXiv:2105.05233. Feature maps are channels_last; as
in ``fastdiff.models.unet.blocks``, a map whose sum the next norm can compute is passed as its ``Terms``. Under ZeRO-3 a
parameter is gathered only during the forward of its own module, or of its block.
"""

from collections.abc import Iterator
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.errors import require
from fastdiff.models.adm.blocks import (
    AttentionBlock,
    Downsample,
    Dropout,
    Layer,
    ResBlock,
    Resize,
    Stage,
    Upsample,
    zeroed,
)
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.embeddings import timestep_sinusoids
from fastdiff.models.unet.blocks import Conv2d, GroupNorm, joined
from fastdiff.rng import dropout_stream
from fastdiff_kernels import dispatch
from fastdiff_kernels.names import AttentionBackend


class AdmUNet(BlockwiseModel):
    """UNet that predicts the target of the objective, and a variance, from noisy images, a time and a class.

    Initial weights are torch's own for each layer, drawn from its global generator. The last convolution of every
    residual block, of every attention and of the network is 0, so a fresh network outputs exactly 0.

    Args:
        config: shape of the network.
        recompute: recompute each block in the backward pass instead of storing its activations.
        attention: implementation of attention, see ``fastdiff_kernels.attention``.
        dropout_seed: key of the dropout, in [0, 2**64).
    """

    block_classes = (ResBlock, AttentionBlock)
    channels_last = True
    config: AdmConfig

    def __init__(
        self, config: AdmConfig, *, recompute: bool = False, attention: AttentionBackend = "auto", dropout_seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        parts = _Parts(config, recompute, attention, dropout_seed)
        self.time_embed = nn.Sequential(
            nn.Linear(config.width, parts.time_dim), nn.SiLU(), nn.Linear(parts.time_dim, parts.time_dim)
        )
        self.label_emb = nn.Embedding(config.classes, parts.time_dim) if config.classes else None
        channels = config.channels * (2 if config.low_res_size else 1)
        widths = config.widths
        self.input_blocks = nn.ModuleList(
            [nn.ModuleList([Conv2d(channels, widths[0], kernel_size=3, padding=1)]), *parts.encoder()]
        )
        self.middle_block = parts.middle()
        self.output_blocks = nn.ModuleList(parts.decoder())
        out = zeroed(Conv2d(widths[0], config.channels * (2 if config.learn_sigma else 1), kernel_size=3, padding=1))
        # The Identity stands for the published SiLU, which is part of this norm.
        self.out = nn.ModuleList([GroupNorm(config.norm_num_groups, widths[0]), nn.Identity(), out])

    def forward(
        self, noisy: Tensor, time: Tensor, label: Tensor | None = None, low_res: Tensor | None = None,
        position: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype and strides; cast to the dtype of the weights.
            time: ``[B]`` int64 or float timesteps.
            label: ``[B]`` int64 classes; ``classes``, and None for all samples, mean the null class. An unconditional
                network ignores them.
            low_res: ``[B, C, h, w]`` low-resolution images, with ``low_res_size``.
            position: ``[B]`` int64 positions in the run, the keys of the dropout; None: no dropout.

        Returns:
            ``[B, C, H, W]``, with ``learn_sigma`` ``[B, 2C, H, W]``, contiguous, in the dtype of the weights.

        Raises:
            ConfigError: H or W is not divisible by ``config.smallest_factor``, or an input is missing or unexpected.
        """
        self._check(noisy, low_res)
        dtype = cast(Tensor, self.out[2].weight).dtype
        noisy = noisy.to(dtype)
        if low_res is not None:
            enlarged = F.interpolate(low_res.to(dtype), noisy.shape[2:], mode="bilinear")
            noisy = torch.cat([noisy, enlarged], dim=1)  # 2 x [B, C, H, W] -> [B, 2C, H, W]
        embedding = F.silu(self._embed(time, label, dtype))
        # Not contiguous(memory_format=...): it keeps images of one channel, which match both orders.
        first = cast(nn.ModuleList, self.input_blocks[0])[0]
        branch, base, shift, skips = first(noisy.to(memory_format=torch.channels_last)), None, None, []
        for stage in [*self.input_blocks[1:], self.middle_block]:
            branch, base, shift, entered = stage((branch, base, shift), embedding, position)
            skips.append(entered)
        for stage in self.output_blocks:
            x = joined((branch, base, shift), skips.pop())
            branch, base, shift, _ = stage((x, None, None), embedding, position)
        out, _ = self.out[0](branch, shift=shift, residual=base)
        return cast(Tensor, self.out[2](out)).contiguous()

    def compile_blocks(self, **options: Any) -> Self:
        """Compile as in ``BlockwiseModel``; ``dynamic`` is False unless given, so each map size has its own graphs."""
        return super().compile_blocks(**{"dynamic": False, **options})

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its last norm; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("group_norm", example)

    def _embed(self, time: Tensor, label: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the embedding of time and class, ``[B, 4 * width]``."""
        embedding = cast(Tensor, self.time_embed(timestep_sinusoids(time, self.config.width, dtype).to(dtype)))
        if self.label_emb is None or label is None:
            return embedding
        known = label < self.config.classes
        return embedding + torch.where(known[:, None], self.label_emb(label.where(known, 0)), 0)

    def _check(self, noisy: Tensor, low_res: Tensor | None) -> None:
        factor, (height, width) = self.config.smallest_factor, noisy.shape[2:]
        require(
            height % factor == 0 and width % factor == 0,
            f"images of {height} x {width}: this UNet halves them {len(self.config.widths) - 1} times, so height and "
            f"width must be divisible by {factor}",
        )
        require(
            (low_res is not None) == (self.config.low_res_size > 0),
            f"--model.low_res_size {self.config.low_res_size}: the low-resolution images are "
            f"{'missing' if low_res is None else 'unexpected'}",
        )
        require(
            low_res is None or low_res.shape[:2] == noisy.shape[:2],
            f"low-resolution images of shape {None if low_res is None else tuple(low_res.shape)}: expected the batch "
            f"size and channels of the noisy images, of shape {tuple(noisy.shape)}",
        )


class _Parts:
    """Builder of the stages of a network, called from its first stage to its last."""

    def __init__(self, config: AdmConfig, recompute: bool, attention: AttentionBackend, dropout_seed: int) -> None:
        self.time_dim = 4 * config.width
        self._config, self._recompute, self._attention, self._seed = config, recompute, attention, dropout_seed
        self._size, self._width, self._res_blocks = config.size, config.widths[0], 0
        self._skips = [self._width]

    def encoder(self) -> Iterator[Stage]:
        """Yield the encoder's stages after the first convolution; the decoder takes the output of each."""
        for level, width in enumerate(self._config.widths):
            if level:
                yield self._kept([self._resized("down")])
            for _ in range(self._config.res_blocks):
                yield self._kept([self._res_block(width), *self._attention_here()])

    def middle(self) -> Stage:
        """Return the stage between encoder and decoder."""
        return self._stage([self._res_block(self._width), self._attention_block(), self._res_block(self._width)])

    def decoder(self) -> Iterator[Stage]:
        """Yield the decoder's stages; each takes a kept output of the encoder, concatenated to its input."""
        for level, width in reversed(list(enumerate(self._config.widths))):
            for left in reversed(range(self._config.res_blocks + 1)):
                self._width += self._skips.pop()
                layers = [self._res_block(width), *self._attention_here()]
                yield self._stage(layers + ([] if left or not level else [self._resized("up")]))

    def _kept(self, layers: list[Layer]) -> Stage:
        self._skips.append(self._width)
        return self._stage(layers)

    def _stage(self, layers: list[Layer]) -> Stage:
        return Stage(layers, recompute=self._recompute)

    def _resized(self, resize: Resize) -> Layer:
        self._size = self._size // 2 if resize == "down" else self._size * 2
        if self._config.resblock_updown:
            return self._res_block(self._width, resize)
        return Downsample(self._width) if resize == "down" else Upsample(self._width)

    def _res_block(self, width: int, resize: Resize | None = None) -> ResBlock:
        given, self._width = self._width, width
        dropout = Dropout(self._config.dropout, self._seed, dropout_stream(self._res_blocks))
        self._res_blocks += 1
        return ResBlock(
            given, width, self.time_dim, self._config.norm_num_groups,
            scale_shift=self._config.scale_shift_norm, resize=resize, dropout=dropout,
        )  # fmt: skip

    def _attention_here(self) -> list[Layer]:
        return [self._attention_block()] if self._size in self._config.attention_resolutions else []

    def _attention_block(self) -> AttentionBlock:
        heads, groups = self._config.heads_of(self._width), self._config.norm_num_groups
        order = self._config.qkv_order
        return AttentionBlock(self._width, heads, self._size**2, groups, self._attention, qkv_order=order)
