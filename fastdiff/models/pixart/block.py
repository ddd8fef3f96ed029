"""The block of a PixArt: self-attention, cross-attention to the caption and an MLP, named as in diffusers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from fastdiff.config.networks.pixart import MLP_RATIO, PixArtConfig
from fastdiff.models.blockwise import is_compiled
from fastdiff.models.linear import summed_later, without_bias
from fastdiff_kernels import attention as attention_op
from fastdiff_kernels import dispatch
from fastdiff_kernels.adaln import Modulation, gated_residual, residual_modulated_norm
from fastdiff_kernels.gelu import gelu
from fastdiff_kernels.masked_attention import masked_attention, masked_choice
from fastdiff_kernels.names import AttentionBackend

NORM_EPS = 1e-6


class PixArtBlock(nn.Module):
    """Transformer block; a table is added to the modulations that all blocks share (adaLN-single).

    Self-attention and MLP are modulated and gated. Cross-attention between them is neither, and has no norm: its output
    is added as it is. The unit of ``torch.compile``, of recomputation and of ZeRO-3's gathering.
    """

    def __init__(self, config: PixArtConfig, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.empty(6, config.hidden))
        self.attn1 = SelfAttention(config, attention)
        self.attn2 = CrossAttention(config, attention)
        self.ff = FeedForward(config.hidden)

    def forward(self, tokens: Tensor, shared: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        """Map tokens to tokens.

        Args:
            tokens: ``[B, T, D]``.
            shared: ``[B, 6D]``, shift, scale and gate of self-attention, then of the MLP.
            context: ``[B, L, D]``, the projected caption.
            context_mask: ``[B, L]`` bool, the tokens of the caption.

        Returns:
            ``[B, T, D]``.
        """
        packed = (self.scale_shift_table + shared.view(len(shared), 6, -1)).flatten(1)  # [B, 6D]
        of_attention, of_mlp = (Modulation(half) for half in packed.chunk(2, dim=1))
        tokens, normed = residual_modulated_norm(tokens, of_attention, eps=NORM_EPS)
        branch, bias = self.attn1(normed)
        tokens = gated_residual(tokens, branch, of_attention, bias=bias)
        tokens = tokens + self.attn2(tokens, context, context_mask)
        tokens, normed = residual_modulated_norm(tokens, of_mlp, eps=NORM_EPS)
        branch, bias = self.ff(normed)
        return gated_residual(tokens, branch, of_mlp, bias=bias)

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its adaLN ops, which are alike; see ``fastdiff_kernels.dispatch.Explains``."""
        chosen = dispatch.choice("adaln", example)
        if is_compiled(self) and chosen.forward != "triton":
            compiled = "compile (Inductor)"
            chosen = replace(chosen, forward=compiled, backward=compiled, why=f"{chosen.why}; in a compiled block")
        yield chosen


class Attention(nn.Module):
    """Projections of multi-head attention, all with a bias.

    Queries, keys and values have a layer each, under the published names, and an adapter on each. To join the three
    weights for one product would copy them in every step, and their gradients; it is not done.
    """

    def __init__(self, config: PixArtConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.heads, self.length, self.backend = config.heads, config.side**2, backend
        self.to_q, self.to_k, self.to_v = (nn.Linear(config.hidden, config.hidden) for _ in range(3))
        # diffusers' second entry is a dropout without weights.
        self.to_out = nn.ModuleList([nn.Linear(config.hidden, config.hidden)])

    def projected(self, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[B, H, T, d]`` of ``tokens [B, T, D]``, keys and values ``[B, H, L, d]`` of ``context``."""
        query, key, value = (
            each.view(*each.shape[:2], self.heads, -1).transpose(1, 2)  # [B, T, D] -> [B, H, T, d]
            for each in (self.to_q(tokens), self.to_k(context), self.to_v(context))
        )
        return query, key, value

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return cast(nn.Linear, self.to_out[0]).in_features // self.heads


class SelfAttention(Attention):
    """Attention of all tokens to each other."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B, T, D] -> [B, T, D]``, and the bias that is to be added, see ``without_bias``."""
        mixed = attention_op.attention(*self.projected(tokens, tokens), backend=self.backend)
        return without_bias(self.to_out[0], mixed.transpose(1, 2).flatten(2))  # [B, H, T, d] -> [B, T, D]

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its attention; see ``fastdiff_kernels.dispatch.Explains``."""
        yield attention_op.choice(self.head_width, self.length, self.length, example, self.backend)


class CrossAttention(Attention):
    """Attention of the tokens to those of the caption."""

    def __init__(self, config: PixArtConfig, backend: AttentionBackend) -> None:
        super().__init__(config, backend)
        self.caption_tokens = config.caption_tokens

    def forward(self, tokens: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        """``tokens [B, T, D], context [B, L, D], context_mask [B, L] bool -> [B, T, D]``."""
        mixed = masked_attention(*self.projected(tokens, context), context_mask, backend=self.backend)
        return cast(Tensor, self.to_out[0](mixed.transpose(1, 2).flatten(2)))  # [B, H, T, d] -> [B, T, D]

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its attention; see ``fastdiff_kernels.dispatch.Explains``."""
        yield masked_choice(self.head_width, self.length, self.caption_tokens, example, self.backend)


class FeedForward(nn.Module):
    """Two linear layers with the tanh form of GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = MLP_RATIO * width
        # diffusers' second entry is a dropout without weights.
        self.net = nn.ModuleList([_Projection(width, inner), nn.Identity(), nn.Linear(inner, width)])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B, T, D] -> [B, T, D]``, and the bias that is to be added, see ``without_bias``."""
        inner, bias = summed_later(cast(_Projection, self.net[0]).proj, tokens, "adaln")
        return without_bias(self.net[2], gelu(inner, bias))


class _Projection(nn.Module):
    """The layer before GELU, under its name in diffusers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner)
