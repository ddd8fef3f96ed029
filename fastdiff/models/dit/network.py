"""The diffusion transformer DiT (Peebles & Xie 2023, "Scalable Diffusion Models with Transformers").

Parameter names and shapes are those of the published checkpoints (github.com/facebookresearch/DiT), which load
unchanged with ``strict=True``. Under ZeRO-3 a parameter is gathered only during the forward of its block or, outside of
the blocks, of its own module; no code here reads one at another time, except its dtype.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.blockwise import BlockwiseModel, is_compiled, run_block
from fastdiff.models.embeddings import LabelEmbedder, PatchEmbed, TimestepEmbedder, position_table
from fastdiff.models.linear import summed_later, without_bias
from fastdiff_kernels import dispatch
from fastdiff_kernels.adaln import (
    Modulation,
    gated_modulated_norm,
    gated_residual,
    modulated_norm,
    residual_modulated_norm,
)
from fastdiff_kernels.gelu import gelu
from fastdiff_kernels.names import AttentionBackend
from fastdiff_kernels.packed_attention import packed_attention, packed_choice

NORM_EPS = 1e-6


class DiTBlock(nn.Module):
    """Transformer block: attention and MLP, each modulated and gated by the condition (adaLN-Zero, figure 3).

    The unit of ``torch.compile``, of recomputation and of ZeRO-3's gathering.
    """

    def __init__(self, config: DiTConfig, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        self.attn = Attention(config.hidden, config.heads, (config.size // config.patch) ** 2, attention)
        self.mlp = Mlp(config.hidden, int(config.hidden * config.mlp_ratio))
        self.adaLN_modulation = AdaLNModulation(config.hidden, 6)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """``tokens [B, T, D], condition [B, D] -> [B, T, D]``."""
        # Shift, scale and gate of the attention, then of the MLP, each [B, D].
        modulation = Modulation(self.adaLN_modulation(condition))
        tokens, normed = residual_modulated_norm(tokens, modulation, eps=NORM_EPS)
        branch, bias = self.attn(normed)
        tokens, normed = gated_modulated_norm(tokens, branch, modulation, bias=bias, eps=NORM_EPS)
        branch, bias = self.mlp(normed)
        return gated_residual(tokens, branch, modulation, bias=bias)

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its adaLN ops, which are alike; see ``fastdiff_kernels.dispatch.Explains``."""
        chosen = dispatch.choice("adaln", example)
        if is_compiled(self) and chosen.forward != "triton":
            compiled = "compile (Inductor)"
            chosen = replace(chosen, forward=compiled, backward=compiled, why=f"{chosen.why}; in a compiled block")
        yield chosen


class DiT(BlockwiseModel):
    """Transformer that predicts noise, velocity or clean latents from noisy latents, a time and a class.

    A fresh network outputs exactly 0 and each of its blocks is the identity (adaLN-Zero, section 3.2).
    Initial weights are drawn from torch's global generator; ``fastdiff.models.build.build_model`` makes them a
    function of a seed.
    """

    block_classes = (DiTBlock,)
    config: DiTConfig
    pos_embed: Tensor
    """``[1, T, D]``, a buffer: part of every checkpoint, never trained."""

    def __init__(self, config: DiTConfig, *, recompute: bool = False, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.x_embedder = PatchEmbed(config)
        self.t_embedder = TimestepEmbedder(config.hidden)
        self.y_embedder = LabelEmbedder(config.classes, config.hidden)
        self.register_buffer("pos_embed", position_table(config.hidden, config.size // config.patch))
        self.blocks = nn.ModuleList(DiTBlock(config, attention) for _ in range(config.depth))
        self.final_layer = FinalLayer(config)
        self._initialise()

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor | None = None) -> Tensor:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype; cast to the dtype of the weights.
            time: ``[B]`` int64 or float timesteps in [0, T).
            label: ``[B]`` int64 classes, ``classes`` being the null class; None: the null class for all.

        Returns:
            ``[B, C, H, W]``, with ``learn_sigma`` ``[B, 2C, H, W]``, in the dtype of the weights.
        """
        dtype = self.x_embedder.proj.weight.dtype
        tokens = self.x_embedder(noisy.to(dtype)) + self.pos_embed.to(dtype)  # [B, C, H, W] -> [B, T, D]
        condition = self.t_embedder(time, dtype) + self.y_embedder(label, noisy.shape[0], noisy.device)
        for block in self.blocks:
            tokens = run_block(block, tokens, condition, recompute=self.recompute)
        return self._unpatchify(self.final_layer(tokens, condition))

    def _unpatchify(self, tokens: Tensor) -> Tensor:
        """``[B, T, p * p * C_out] -> [B, C_out, H, W]``."""
        batch, patch, size = tokens.shape[0], self.config.patch, self.config.size
        side = size // patch
        pixels = tokens.reshape(batch, side, side, patch, patch, -1)  # -> [B, H/p, W/p, p, p, C_out]
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(
            batch, -1, size, size
        )  # -> [B, C_out, H/p, p, W/p, p] -> [B, C_out, H, W]

    def _initialise(self) -> None:
        """Initialise as published: Xavier, normal(0.02) embeddings, zeros in the modulations and the last layer."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _xavier(module)
        _xavier(self.x_embedder.proj)
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        for layer in self.t_embedder.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, AdaLNModulation):
                _zero(cast(nn.Linear, module[1]))
        _zero(self.final_layer.linear)


class FinalLayer(nn.Module):
    """Modulated norm, and the linear map from tokens to patches."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        channels = config.channels * (2 if config.learn_sigma else 1)
        self.linear = nn.Linear(config.hidden, config.patch**2 * channels)
        self.adaLN_modulation = AdaLNModulation(config.hidden, 2)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """``tokens [B, T, D], condition [B, D] -> [B, T, p * p * C_out]``."""
        modulation = Modulation(self.adaLN_modulation(condition))
        return cast(Tensor, self.linear(modulated_norm(tokens, modulation, eps=NORM_EPS)))

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its adaLN; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("adaln", example)


class AdaLNModulation(nn.Sequential):
    """``parts`` vectors of shift, scale or gate from the condition: ``[B, D] -> [B, parts * D]``."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(hidden, parts * hidden))


class Attention(nn.Module):
    """Multi-head self-attention over all ``length`` tokens; query, key and value come from one packed projection."""

    def __init__(self, hidden: int, heads: int, length: int, backend: AttentionBackend = "auto") -> None:
        super().__init__()
        self.heads, self.length, self.backend = heads, length, backend
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B, T, D] -> [B, T, D]``, and the bias that is to be added, see ``without_bias``."""
        batch, length, hidden = tokens.shape
        projected, bias = summed_later(self.qkv, tokens, "adaln")
        packed = projected.view(batch, length, 3, self.heads, hidden // self.heads)
        return without_bias(self.proj, packed_attention(packed, bias=bias, backend=self.backend))

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its attention; see ``fastdiff_kernels.dispatch.Explains``."""
        yield packed_choice(self.proj.in_features // self.heads, self.length, example, self.backend)


class Mlp(nn.Module):
    """Two linear layers with the tanh form of GELU between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner)
        self.fc2 = nn.Linear(inner, hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B, T, D] -> [B, T, D]``, and the bias that is to be added, see ``without_bias``."""
        inner, bias = summed_later(self.fc1, tokens, "adaln")
        return without_bias(self.fc2, gelu(inner, bias))


def _xavier(layer: nn.Linear | nn.Conv2d) -> None:
    nn.init.xavier_uniform_(layer.weight.data.flatten(1))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
