"""Family of the DiT."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.errors import ConfigError
from fastdiff.models.dit.fp8 import Fp8DiTBlock
from fastdiff.models.dit.network import DiT
from fastdiff.models.dit.rotary import rotary_table
from fastdiff.models.embeddings import position_table
from fastdiff.models.family import ModelFamily, PublishedClass
from fastdiff.models.fused import ONE, SQUARES, Declared, Fused
from fastdiff.models.pretrained.repa import refuse_repa
from fastdiff_kernels.names import AttentionBackend

_POSITIONS = "pos_embed"
_ANGLES = {f"{owner}.freqs_{wave}" for owner in ("feat_rope", "feat_rope_incontext") for wave in ("cos", "sin")}
_ROUNDED = 5e-3
"""Tolerance for a table: bf16 rounds it by 2e-3, and its moving average, which DiT's training keeps as for any
weight, drifts by 2e-4."""


def _build(config: DiTConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> DiT:
    return DiT(config, recompute=recompute, attention=attention)


def _multiply_adds(config: DiTConfig) -> float:
    blocks = sum(_block_multiply_adds(config, config.tokens(number)) for number in range(config.depth))
    modulations = {"adaln": 6 * config.depth + 2, "adaln-single": 6}[config.modulation]
    out = config.patch**2 * config.channels * (2 if config.learn_sigma else 1)
    patches = config.side**2 * (sum(_patch_multiply_adds(config)) + config.hidden * out)
    token = 2 * config.teacher_width * config.hidden
    time = 256 * config.hidden + config.hidden**2
    route = config.route
    fusion = 2 * config.hidden**2 * route.tokens if route is not None and config.has_sparse_path else 0
    head = (config.side**2 + config.aligned_token) * _head_multiply_adds(config)
    return float(blocks + modulations * config.hidden**2 + patches + token + time + fusion + head)


def _head_multiply_adds(config: DiTConfig) -> int:
    """Per token: of the head for the features of a teacher."""
    if not config.aligned_width:
        return 0
    return config.aligned_hidden * (config.hidden + config.aligned_hidden + config.aligned_width)


def _saved_multiply_adds(config: DiTConfig) -> float:
    if (route := config.route) is None:
        return 0.0
    return float(
        len(route.blocks) * (_block_multiply_adds(config, route.tokens) - _block_multiply_adds(config, route.kept))
    )


def _block_multiply_adds(config: DiTConfig, tokens: int) -> int:
    attention = config.heads * config.head_width
    layers = {"gelu": 2, "swiglu": 3}[config.mlp]
    return tokens * (4 * config.hidden * attention + layers * config.hidden * config.inner + 2 * tokens * attention)


def _patch_multiply_adds(config: DiTConfig) -> tuple[int, int]:
    """Per patch: of the layer that takes the noisy latents, and of the one behind it."""
    pixels, narrow = config.patch**2 * config.channels, config.patch_bottleneck
    return (pixels * narrow, narrow * config.hidden) if narrow else (pixels * config.hidden, 0)


def _input_multiply_adds(config: DiTConfig) -> float:
    patches = config.side**2 * _patch_multiply_adds(config)[0]
    return float(patches + config.teacher_width * config.hidden + 256 * config.hidden)


def _published(config: DiTConfig) -> PublishedClass | None:
    if config.options:
        return None
    return PublishedClass(
        owner="the published DiT",
        call=f"DiT(input_size={config.size}, patch_size={config.patch}, in_channels={config.channels}, "
        f"hidden_size={config.hidden}, depth={config.depth}, num_heads={config.heads}, mlp_ratio={config.mlp_ratio}, "
        f"num_classes={config.classes}, learn_sigma={config.learn_sigma})",
        sampler="DiT",
        samples_previous_x=False,
    )


def _buffers(config: DiTConfig) -> dict[str, Tensor]:
    if config.positions != "sincos":
        return {}
    return {_POSITIONS: position_table(config.hidden, config.side, config.leading)}


def _tables(config: DiTConfig) -> frozenset[str]:
    return frozenset(_ANGLES) if config.rotary else frozenset()


def _check_published(path: Path, names: Collection[str], buffers: Mapping[str, Tensor]) -> None:
    refuse_repa(path, names)
    _check_positions(path, buffers)
    _check_angles(path, buffers)


def _check_positions(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that were trained with another position table than that of ``DiT``, which files do not replace.

    Tables of another grid are accepted: a DiT may be trained further with larger or smaller images.
    """
    if (table := weights.get(_POSITIONS)) is None:
        return
    ours = _positions_like(table.float()) if table.dim() == 3 and table.shape[2] % 4 == 0 else None
    if ours is None or not torch.allclose(table.float(), ours, rtol=0, atol=_ROUNDED):
        raise ConfigError(
            f"{path}: its pos_embed, of shape {tuple(table.shape)}, is not the fixed sine-cosine table of a DiT; "
            "this network has no other, so give weights that were trained with that table"
        )


def _positions_like(table: Tensor) -> Tensor | None:
    """Return the position table of a grid of this size, behind as many rows of zeros; None: no grid."""
    leading = int((table[0].abs().amax(1) < _ROUNDED).long().cumprod(0).sum()) if table.numel() else 0
    side = math.isqrt(table.shape[1] - leading)
    ours = position_table(table.shape[2], side, leading)
    return ours if side and ours.shape == table.shape else None


def _check_angles(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that were trained with other angles of the rotation than those of ``rotary_table``."""
    for name in sorted(_ANGLES & weights.keys()):
        table, sine = weights[name].float(), name.endswith("sin")
        ours = _angles_like(table, sine) if table.dim() == 2 and table.shape[1] % 4 == 0 else None
        if ours is None or not torch.allclose(table, ours, rtol=0, atol=_ROUNDED):
            raise ConfigError(
                f"{path}: its {name}, of shape {tuple(table.shape)}, is not that of neighbouring channels that turn by "
                "the row, then the column, with the base 10,000, as --model.rotary does; give weights that were "
                "trained with it"
            )


def _angles_like(table: Tensor, sine: bool) -> Tensor | None:
    """Return the cosines or sines of a grid of this size, ``[tokens, d]``, the channels of a pair alike; None: no grid.

    It begins with the tokens that are not turned, as ``table`` does; the first patch is not turned, either.
    """
    still = (table - (0 if sine else 1)).abs().amax(1) < _ROUNDED
    further = int(still.long().cumprod(0).sum()) - 1
    side = math.isqrt(len(table) - further) if further >= 0 else 0
    if side**2 + further != len(table):
        return None
    return rotary_table(side, table.shape[1], further)[int(sine)].repeat_interleave(2, dim=1)


_MATRICES: Declared = {
    "blocks.*.attn.qkv.weight": Fused((1, 1, 1)),
    "blocks.*.attn.proj.weight": ONE,
    "blocks.*.mlp.w12.weight": Fused((1, 1)),
    "blocks.*.mlp.*.weight": ONE,
    "blocks.*.adaLN_modulation.1.weight": SQUARES,
    "blocks.*.scale_shift_table": None,
    "t_block.1.weight": SQUARES,
    "t_embedder.mlp.0.weight": None,
    "t_embedder.mlp.2.weight": ONE,
    "x_embedder.*": None,
    "y_embedder.*": None,
    "cls_projectors.weight": None,
    "in_context_posemb": None,
    "mask_token": None,
    "fusion_proj.weight": ONE,
    "projectors.0.4.weight": None,
    "projectors.*.weight": ONE,
    "final_layer.*": None,
}


DIT = ModelFamily(
    config=DiTConfig,
    build=_build,
    multiply_adds=_multiply_adds,
    input_multiply_adds=_input_multiply_adds,
    saved_multiply_adds=_saved_multiply_adds,
    draws_on_meta=True,
    fp8_block=Fp8DiTBlock,
    subject=lambda config: "A class-conditional diffusion transformer",
    published=_published,
    options=lambda config: config.options,
    script_format="dit-training",
    formats={
        "diffusers": "fastdiff.export.diffusers_dit:DIFFUSERS",
        "dit": "fastdiff.export.original_checkpoint:DIT",
        "dit-training": "fastdiff.export.original_checkpoint:DIT_TRAINING",
    },
    training_only="projectors.",
    buffers=_buffers,
    tables=_tables,
    matrices=lambda config: _MATRICES,
    check_published=_check_published,
)
