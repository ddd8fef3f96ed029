"""The diffusion transformer DiT (Peebles & Xie 2023, "Scalable Diffusion Models with Transformers").

Parameter names and shapes are those of the published checkpoints (github.com/facebookresearch/DiT), which load
unchanged with ``strict=True``. Under ZeRO-3 a parameter is gathered only during the forward of its block or, outside of
the blocks, of its own module; no code here reads one at another time, except its dtype.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fastdiff.batch import Output, Outputs
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.errors import require
from fastdiff.models.blockwise import BlockwiseModel, run_block
from fastdiff.models.dit.block import DiTBlock
from fastdiff.models.dit.final_layer import FinalLayer
from fastdiff.models.dit.initial import initialise, initialise_for_transfer, learned_positions, mask_token
from fastdiff.models.dit.kept_tokens import KeptTokens
from fastdiff.models.dit.modulation import MODULATIONS
from fastdiff.models.dit.projector import Projectors
from fastdiff.models.dit.rotary import rotary_table
from fastdiff.models.embeddings import LabelEmbedder, TimestepEmbedder, patch_embedder, position_table
from fastdiff_kernels.names import AttentionBackend

_TOKEN_EPS = 1e-6
"""Number that the norm of an embedded class token of a teacher adds to the mean square."""


class _Given(NamedTuple):
    """What all blocks are given."""

    condition: Tensor
    """``[B, D]``, or ``[B, 6D]`` of adaLN-single."""
    of_class: Tensor
    """Embedding of the class, ``[B, D]``."""
    cos: Tensor | None
    """For the tokens of classes and the patches; see ``rotary_table``."""
    sin: Tensor | None


class _Passed(NamedTuple):
    """What some blocks give."""

    tokens: Tensor
    """``[B, T, D]``."""
    values: Tensor | None
    """Those of block 0, if it is among the blocks or they were given."""
    aligned: Tensor | None
    """Tokens behind the block that is aligned with a teacher, if it is among the blocks."""


class DiT(BlockwiseModel):
    """Transformer that predicts noise, velocity or clean latents from noisy latents, a time and a class.

    A fresh network outputs exactly 0, and each of its blocks is the identity (adaLN-Zero, section 3.2), except with
    adaLN-single and with ``--model.base_width``.
    Initial weights are drawn from torch's global generator; ``fastdiff.models.build.build_model`` makes them a
    function of a seed.
    """

    block_classes = (DiTBlock,)
    config: DiTConfig
    pos_embed: Tensor | None
    """``[1, T, D]``, a buffer: part of every checkpoint, never trained."""
    cls_projectors: nn.Linear | None
    """Embedding of the class token of a teacher."""
    wg_norm: nn.RMSNorm | None
    """Norm of this embedding."""
    in_context_posemb: nn.Parameter | None
    """Positions of the class tokens, ``[1, N, D]``."""
    mask_token: nn.Parameter | None
    """Stands for a token without the output of the blocks that leave some out, ``[1, 1, D]``."""
    projectors: Projectors | None
    """Head for the features of a teacher."""
    fusion_proj: nn.Linear | None
    """Joins this output with the input of these blocks."""

    def __init__(self, config: DiTConfig, *, recompute: bool = False, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.x_embedder = patch_embedder(config)
        self.t_embedder = TimestepEmbedder(config.hidden)
        self.y_embedder = LabelEmbedder(config.classes, config.hidden)
        self.cls_projectors = nn.Linear(config.teacher_width, config.hidden) if config.teacher_width else None
        self.wg_norm = nn.RMSNorm(config.hidden, eps=_TOKEN_EPS) if config.teacher_norm else None
        self.t_block = MODULATIONS[config.modulation].shared(config.hidden)
        table = position_table(config.hidden, config.side, config.leading) if config.positions == "sincos" else None
        self.register_buffer("pos_embed", table)
        count = config.in_context
        self.register_parameter("in_context_posemb", learned_positions(count, config.hidden) if count else None)
        fuses = config.has_sparse_path
        self.register_parameter("mask_token", mask_token(config.hidden) if fuses else None)
        self.fusion_proj = nn.Linear(2 * config.hidden, config.hidden) if fuses else None
        self.blocks = nn.ModuleList(DiTBlock(config, number, attention) for number in range(config.depth))
        self.final_layer = FinalLayer(config)
        self.projectors = Projectors(config) if config.aligned_width else None
        (initialise_for_transfer if config.base_width else initialise)(self, self.final_layer)

    def compile_blocks(self, **options: Any) -> Self:
        """Compile as in ``BlockwiseModel``; ``dynamic`` is False unless given, so each number of tokens has its graphs.

        Otherwise the second number, that of most blocks with ``--model.routing``, would be a symbol in their code.
        """
        return super().compile_blocks(**{"dynamic": False, **options})

    def forward(
        self,
        noisy: Tensor,
        time: Tensor,
        label: Tensor | None = None,
        teacher_token: Tensor | None = None,
        token_scores: Tensor | None = None,
        sparse_path: Tensor | None = None,
    ) -> Output:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype; cast to the dtype of the weights.
            time: ``[B]`` int64 or float timesteps in [0, T).
            label: ``[B]`` int64 classes, ``classes`` being the null class; None: the null class for all.
            teacher_token: ``[B, W]`` noisy class tokens of a teacher, of a network with ``--model.teacher_width W``.
            token_scores: ``[B, T]`` fp32, of a network with ``--model.routing``: the tokens of the lowest scores
                pass the blocks that leave the others out; None: all do.
            sparse_path: ``[B]`` bool, of a network with ``--model.routing sprint``: whether a sample has the output
                of these blocks; None: all have.

        Returns:
            ``[B, C, H, W]``, with ``learn_sigma`` ``[B, 2C, H, W]``, in the dtype of the weights. With a class token of
            a teacher also the prediction of it, ``[B, W]``, and in training with ``--model.aligned_width K`` the
            projected features of the patches, ``[B, T, K]``, with
            ``--model.aligned_token`` behind that of the class token.

        Raises:
            ConfigError: ``teacher_token`` is missing or unexpected.
        """
        dtype = self.x_embedder.dtype
        tokens = self.x_embedder(noisy.to(dtype))  # [B, C, H, W] -> [B, T, D]
        tokens = self._behind_token(tokens, teacher_token)
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed.to(dtype)
        of_class = self.y_embedder(label, noisy.shape[0], noisy.device)
        condition = self.t_embedder(time, dtype) + of_class
        given = _Given(self.t_block(condition), of_class, *self._angles(tokens))
        tokens, aligned = self._through_blocks(tokens, given, token_scores, sparse_path)
        patches, token = self.final_layer(tokens, condition)
        latents = self._unpatchify(patches)
        projected = None if self.projectors is None or aligned is None else self.projectors(aligned)
        return latents if token is None and projected is None else Outputs(latents, token, projected)

    def _behind_token(self, patches: Tensor, token: Tensor | None) -> Tensor:
        """``patches [B, T, D], token [B, W] -> [B, 1 + T, D]``; without a token ``[B, T, D]``."""
        require(
            (token is None) == (self.cls_projectors is None),
            f"--model.teacher_width {self.config.teacher_width}: the noisy class token of a teacher is "
            f"{'missing' if token is None else 'unexpected'}; set the flag to the width of the column of the data",
        )
        if token is None or self.cls_projectors is None:
            return patches
        embedded = self.cls_projectors(token.to(patches.dtype))
        if self.wg_norm is not None:
            embedded = self.wg_norm(embedded)
        return torch.cat([embedded.unsqueeze(1), patches], dim=1)

    def _through_blocks(
        self, tokens: Tensor, given: _Given, scores: Tensor | None, path: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """``tokens [B, T, D] -> [B, T, D]``, and the tokens of the aligned block in training.

        Scores and path are ``token_scores`` and ``sparse_path``.
        """
        route, depth = self.config.route, self.config.depth
        if route is None:
            tokens, _, aligned = self._run(range(depth), tokens, given)
        else:
            whole, values, before = self._run(range(route.blocks.start), tokens, given)
            kept = None if scores is None else KeptTokens(scores, route.kept)
            sparse = whole if kept is None else kept.of_tokens(whole)
            sparse, _, _ = self._run(route.blocks, sparse, given, values, kept)
            tokens = self._joined(whole, sparse, kept, path)
            tokens, _, behind = self._run(range(route.blocks.stop, depth), tokens, given, values)
            aligned = behind if before is None else before
        return (tokens if self.in_context_posemb is None else tokens[:, self.config.in_context :]), aligned

    def _run(
        self, blocks: range, tokens: Tensor, given: _Given, values: Tensor | None = None, kept: KeptTokens | None = None
    ) -> _Passed:
        """Run some blocks.

        With ``kept``, ``tokens`` are these alone, ``values`` those of all.
        """
        first_value = values if kept is None or values is None else kept.of_values(values)
        aligned = None
        for number in blocks:
            if self.in_context_posemb is not None and number == self.config.in_context_from:
                tokens = torch.cat([given.of_class.unsqueeze(1) + self.in_context_posemb, tokens], dim=1)
            cos, sin = (_table_of(table, tokens, kept) for table in (given.cos, given.sin))
            block, inputs = self.blocks[number], (given.condition, cos, sin, first_value)
            tokens = run_block(block, tokens, *inputs, recompute=self.recompute)
            if number == 0 and self.config.value_residual:
                tokens, first_value = tokens
            if self.projectors is not None and self.training and number == self.config.aligned_block - 1:
                aligned = tokens
        return _Passed(tokens, first_value, aligned)

    def _joined(self, whole: Tensor, sparse: Tensor, kept: KeptTokens | None, path: Tensor | None) -> Tensor:
        """Return all tokens behind the blocks that leave some out, ``[B, T, D]``.

        Args:
            whole: all tokens in front of these blocks, ``[B, T, D]``.
            sparse: the kept ones behind them, ``[B, K, D]``.
            kept: which these are; None: all.
            path: ``sparse_path``.
        """
        if self.mask_token is None or self.fusion_proj is None:
            return sparse if kept is None else kept.back_in(whole, sparse)
        padded = sparse if kept is None else kept.back_in(self.mask_token.expand_as(whole), sparse)
        if path is not None:  # the blocks run for nothing, as published: every parameter has a gradient in every step
            padded = torch.where(path[:, None, None], padded, self.mask_token)
        joined: Tensor = self.fusion_proj(torch.cat([whole, padded], dim=2))  # -> [B, T, 2D] -> [B, T, D]
        return joined

    def _angles(self, tokens: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Cosines and sines for the tokens of classes and the patches; None: without rotation."""
        config = self.config
        if not config.rotary:
            return None, None
        extra = config.in_context + config.leading
        return rotary_table(config.side, config.head_width, extra, tokens.dtype, tokens.device)

    def _unpatchify(self, tokens: Tensor) -> Tensor:
        """``[B, T, p * p * C_out] -> [B, C_out, H, W]``."""
        batch, patch, size = tokens.shape[0], self.config.patch, self.config.size
        side = size // patch
        pixels = tokens.reshape(batch, side, side, patch, patch, -1)  # -> [B, H/p, W/p, p, p, C_out]
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(
            batch, -1, size, size
        )  # -> [B, C_out, H/p, p, W/p, p] -> [B, C_out, H, W]


def _table_of(table: Tensor | None, tokens: Tensor, kept: KeptTokens | None) -> Tensor | None:
    """Return the rows of the tokens, of a table that may have further ones in front: ``[T, d]`` or ``[B, K, d]``."""
    if table is None:
        return None
    return table[-tokens.shape[1] :] if kept is None else kept.of_table(table)
