"""A DiT as diffusers' ``DiTTransformer2DModel``.

It is equivalent except for the timestep frequencies: diffusers computes ``10000^(-k / 127)``, the published DiT
``10000^(-k / 128)``. No weight can compensate for that. The frequencies are an attribute of the timestep embeddings and
not part of the configuration; ``SAME_TIMES`` sets them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.errors import require
from fastdiff.export.card_text import Place, conventions, python
from fastdiff.export.diffusers_model import Source, Sources, layer, projections, write_model
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.weights import ExportedWeights

FOLDER = "transformer"
"""Subfolder that diffusers' pipeline expects."""
SAME_TIMES = "for block in model.transformer_blocks:\n    block.norm1.emb.time_proj.downscale_freq_shift = 0\n"
"""Code that makes ``model`` equivalent to ours."""


def to_diffusers(model: DiTConfig) -> dict[str, Any]:
    """Return the arguments of ``DiTTransformer2DModel``.

    Raises:
        ConfigError: it has no network of this shape.
    """
    require(
        int(model.hidden * model.mlp_ratio) == 4 * model.hidden,
        f"--format diffusers: DiTTransformer2DModel has an MLP ratio of 4, the run has --model.mlp_ratio "
        f"{model.mlp_ratio}; use dit or safetensors",
    )
    return {
        "num_attention_heads": model.heads,
        "attention_head_dim": model.hidden // model.heads,
        "in_channels": model.channels,
        "out_channels": model.channels * (2 if model.learn_sigma else 1),
        "num_layers": model.depth,
        "sample_size": model.size,
        "patch_size": model.patch,
        "num_embeds_ada_norm": model.classes,
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
    }


def write_transformer(folder: Path, weights: ExportedWeights, model: DiTConfig, dtype: torch.dtype) -> None:
    """Write ``transformer/``; see ``diffusers_model.write_model``.

    Raises:
        ConfigError: diffusers has no equivalent network.
    """
    config = to_diffusers(model)
    log.warning(
        "DiTTransformer2DModel has other timestep frequencies; the code in the model card, README.md, sets those of DiT"
    )
    write_model(folder / FOLDER, "DiTTransformer2DModel", config, _sources(model), weights, dtype)


def _sources(model: DiTConfig) -> Sources:
    found = {
        **layer("pos_embed.proj", "x_embedder.proj"),
        **layer("proj_out_1", "final_layer.adaLN_modulation.1"),
        **layer("proj_out_2", "final_layer.linear"),
    }
    for number in range(model.depth):
        found |= _block(f"transformer_blocks.{number}", f"blocks.{number}", model.heads)
    return found


def _block(theirs: str, ours: str, heads: int) -> Sources:
    """Map one block; diffusers has embeddings in each block, and all blocks get the same ones."""
    condition = f"{theirs}.norm1.emb"
    return {
        **layer(f"{condition}.timestep_embedder.linear_1", "t_embedder.mlp.0"),
        **layer(f"{condition}.timestep_embedder.linear_2", "t_embedder.mlp.2"),
        f"{condition}.class_embedder.embedding_table.weight": Source("y_embedder.embedding_table.weight"),
        **layer(f"{theirs}.norm1.linear", f"{ours}.adaLN_modulation.1"),
        **projections(f"{theirs}.attn1", f"{ours}.attn.qkv", heads, ("qkv", "heads")),
        **layer(f"{theirs}.attn1.to_out.0", f"{ours}.attn.proj"),
        **layer(f"{theirs}.ff.net.0.proj", f"{ours}.mlp.fc1"),
        **layer(f"{theirs}.ff.net.2", f"{ours}.mlp.fc2"),
    }


def _write(folder: Path, exported: Exported) -> None:
    write_transformer(folder, exported.weights, cast(DiTConfig, exported.config.model), exported.dtype)


def _use(config: RunConfig, place: Place, step: int) -> str:
    code = "from diffusers import DiTTransformer2DModel\n\n"
    code += f'model = DiTTransformer2DModel.from_pretrained("{place}", subfolder="{FOLDER}")\n{SAME_TIMES.rstrip()}'
    return (
        python(code) + "\nThe last two lines set the timestep frequencies of the published DiT, with which this model "
        f"was trained; those of diffusers differ. Class {config.model.classes} is the null class.\n"
    ) + conventions(config, diffusers=True)


DIFFUSERS = ExportFormat(write=_write, use=_use, library="diffusers")
