"""The text DiT of PixArt-alpha and PixArt-Sigma, with diffusers' parameter names and shapes.

Chen et al. 2023, arXiv:2310.00426; Chen et al. 2024, arXiv:2403.04692. Under ZeRO-3 a parameter is gathered only during
the forward of its block or, outside of the blocks, of its own module; no code here reads one at another time, except
its dtype.
"""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.errors import require
from fastdiff.models.blockwise import BlockwiseModel, run_block
from fastdiff.models.linear import output_layer
from fastdiff.models.pixart.block import NORM_EPS, PixArtBlock
from fastdiff.models.pixart.embeddings import AdaLayerNormSingle, CaptionProjection, PatchEmbed
from fastdiff.models.pixart.initial import initialise, initialise_for_transfer
from fastdiff_kernels import dispatch
from fastdiff_kernels.adaln import Modulation, modulated_norm
from fastdiff_kernels.names import AttentionBackend


class PixArt(BlockwiseModel):
    """Transformer that predicts noise, velocity or clean latents from noisy latents, a time and a caption.

    A fresh network outputs exactly 0. Initial weights are drawn from torch's global generator;
    ``fastdiff.models.build.build_model`` makes them a function of a seed.
    """

    block_classes = (PixArtBlock,)
    config: PixArtConfig

    def __init__(self, config: PixArtConfig, *, recompute: bool = False, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.scale_shift_table = nn.Parameter(torch.empty(2, config.hidden))
        self.pos_embed = PatchEmbed(config)
        self.transformer_blocks = nn.ModuleList(PixArtBlock(config, attention) for _ in range(config.depth))
        self.proj_out = output_layer(config.hidden, config.patch**2 * config.out_channels, config.width_ratio)
        self.adaln_single = AdaLayerNormSingle(config)
        self.caption_projection = CaptionProjection(config)
        draw = initialise_for_transfer if config.base_width else initialise
        draw(self, last=self.proj_out, table=self.scale_shift_table)

    def forward(
        self, noisy: Tensor, time: Tensor, context: Tensor, context_mask: Tensor, time_ids: Tensor | None = None
    ) -> Tensor:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype; cast to the dtype of the weights.
            time: ``[B]`` int64 or float timesteps in [0, T).
            context: ``[B, L, caption_dim]`` embeddings of the tokens of the captions.
            context_mask: ``[B, L]`` bool, the tokens that belong to the caption, at least one each.
            time_ids: ``[B, 6]`` sizes and crops in pixels, with ``size_conditioning``; see
                ``fastdiff.conditions.time_ids``.

        Returns:
            ``[B, C, H, W]``, with ``learn_sigma`` ``[B, 2C, H, W]``, in the dtype of the weights.

        Raises:
            ConfigError: the patch does not divide H or W, or ``time_ids`` are missing or unexpected.
        """
        self._check(noisy, time_ids)
        dtype = self.proj_out.weight.dtype
        tokens = self.pos_embed(noisy.to(dtype))  # [B, C, H, W] -> [B, T, D]
        shared, embedding = self.adaln_single(time, time_ids, dtype)
        context = self.caption_projection(context.to(dtype))
        for block in self.transformer_blocks:
            tokens = run_block(block, tokens, shared, context, context_mask, recompute=self.recompute)
        modulation = Modulation((self.scale_shift_table + embedding.unsqueeze(1)).flatten(1))
        pixels = self.proj_out(modulated_norm(tokens, modulation, eps=NORM_EPS))
        return self._unpatchify(pixels, *noisy.shape[2:])

    def compile_blocks(self, **options: Any) -> Self:
        """Compile as in ``BlockwiseModel``; ``dynamic`` is False unless given, so each size has its own graphs."""
        return super().compile_blocks(**{"dynamic": False, **options})

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its last norm; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("adaln", example)

    def _unpatchify(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """``[B, T, p * p * C_out] -> [B, C_out, H, W]``."""
        patch = self.config.patch
        pixels = tokens.view(len(tokens), height // patch, width // patch, patch, patch, -1)
        maps = pixels.permute(0, 5, 1, 3, 2, 4)  # [B, H/p, W/p, p, p, C_out] -> [B, C_out, H/p, p, W/p, p]
        return maps.reshape(len(tokens), -1, height, width)

    def _check(self, noisy: Tensor, time_ids: Tensor | None) -> None:
        height, width = noisy.shape[2:]
        patch = self.config.patch
        require(
            height % patch == 0 and width % patch == 0,
            f"latents of {height} x {width}: height and width must be divisible by the patch, {patch}; encode the "
            "images at other sizes",
        )
        expected = self.config.size_conditioning
        require(
            (time_ids is not None) == expected,
            f"this PixArt takes {'time_ids, the sizes of the image,' if expected else 'no time_ids'} besides the "
            f"caption, given {'none' if time_ids is None else 'some'}; set --model.size_conditioning as it was trained",
        )
