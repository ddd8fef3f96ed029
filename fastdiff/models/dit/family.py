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
from fastdiff.models.embeddings import position_table
from fastdiff.models.family import ModelFamily, PublishedClass
from fastdiff.models.pretrained.repa import refuse_repa
from fastdiff_kernels.names import AttentionBackend

_POSITIONS = "pos_embed"
_ROUNDED = 5e-3
"""Tolerance for a position table: bf16 rounds it by 2e-3, and its moving average, which DiT's training keeps as for any
weight, drifts by 2e-4."""


def _build(config: DiTConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> DiT:
    return DiT(config, recompute=recompute, attention=attention)


def _multiply_adds(config: DiTConfig) -> float:
    tokens = (config.size // config.patch) ** 2
    width, patch = config.hidden, config.channels * config.patch**2
    out = patch * (2 if config.learn_sigma else 1)
    per_token = 4 * width**2 + 2 * config.mlp_ratio * width**2 + 2 * tokens * width
    per_sample = 6 * width**2  # adaLN of a block
    embedders = tokens * width * (patch + out) + 256 * width + width**2 + 2 * width**2
    return config.depth * (tokens * per_token + per_sample) + embedders


def _input_multiply_adds(config: DiTConfig) -> float:
    return float(config.hidden * (config.size**2 * config.channels + 256))


def _published(config: DiTConfig) -> PublishedClass:
    return PublishedClass(
        owner="the published DiT",
        call=f"DiT(input_size={config.size}, patch_size={config.patch}, in_channels={config.channels}, "
        f"hidden_size={config.hidden}, depth={config.depth}, num_heads={config.heads}, mlp_ratio={config.mlp_ratio}, "
        f"num_classes={config.classes}, learn_sigma={config.learn_sigma})",
        sampler="DiT",
        samples_previous_x=False,
    )


def _buffers(config: DiTConfig) -> dict[str, Tensor]:
    return {_POSITIONS: position_table(config.hidden, config.size // config.patch)}


def _check_published(path: Path, names: Collection[str], buffers: Mapping[str, Tensor]) -> None:
    refuse_repa(path, names)
    _check_positions(path, buffers)


def _check_positions(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that were trained with another position table than that of ``DiT``, which files do not replace.

    Tables of another grid are accepted: a DiT may be trained further with larger or smaller images.
    """
    if (table := weights.get(_POSITIONS)) is None:
        return
    tokens, hidden = table.shape[1:] if table.dim() == 3 else (0, 0)
    side = math.isqrt(tokens)
    possible = table.numel() > 0 and table.shape == (1, side**2, hidden) and hidden % 4 == 0
    if not possible or not torch.allclose(table.float(), position_table(hidden, side), rtol=0, atol=_ROUNDED):
        raise ConfigError(
            f"{path}: its pos_embed, of shape {tuple(table.shape)}, is not the fixed sine-cosine table of a DiT; "
            "this network has no other, so give weights that were trained with that table"
        )


DIT = ModelFamily(
    config=DiTConfig,
    build=_build,
    multiply_adds=_multiply_adds,
    input_multiply_adds=_input_multiply_adds,
    draws_on_meta=True,
    fp8_block=Fp8DiTBlock,
    subject=lambda config: "A class-conditional diffusion transformer",
    published=_published,
    script_format="dit-training",
    formats={
        "diffusers": "fastdiff.export.diffusers_dit:DIFFUSERS",
        "dit": "fastdiff.export.original_checkpoint:DIT",
        "dit-training": "fastdiff.export.original_checkpoint:DIT_TRAINING",
    },
    buffers=_buffers,
    check_published=_check_published,
)
