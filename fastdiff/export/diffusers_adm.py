"""The UNet of IDDPM and ADM as diffusers' ``UNet2DModel``, if that has an equivalent network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.errors import require
from fastdiff.export.card_text import Place, conventions, python
from fastdiff.export.diffusers_model import Source, Sources, layer, projections, write_model
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.schedulers import drawing_loop, told, write_sampler
from fastdiff.export.weights import ExportedWeights, Shapes

FOLDER = "unet"
"""Subfolder that diffusers' pipelines expect."""
_RES_BLOCK = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3",
}  # fmt: skip
_PACKING = {"head_major": ("heads", "qkv"), "qkv_major": ("qkv", "heads")}
_INSTEAD = "use iddpm or safetensors"


def to_diffusers(model: AdmConfig) -> dict[str, Any]:
    """Return the arguments of ``UNet2DModel``, with the null class as its last; ConfigError: no equivalent network."""
    widths, attended = model.widths, _attended(model)
    require(
        not model.low_res_size,
        f"--format diffusers: UNet2DModel takes no low-resolution image, the run has --model.low_res_size "
        f"{model.low_res_size}; {_INSTEAD}",
    )
    require(
        widths[0] == model.width,
        f"--format diffusers: UNet2DModel has time sinusoids as wide as its first level, {widths[0]}, the "
        f"run has --model.width {model.width}; {_INSTEAD}",
    )
    head_dims = {
        width: width // model.heads_of(width)
        for width in (*(w for w, given in zip(widths, attended, strict=True) if given), widths[-1])
    }
    require(
        len(set(head_dims.values())) == 1,
        f"--format diffusers: UNet2DModel has heads of one size, the run has heads of {_sizes(head_dims)}, because "
        f"--model.heads sets their number (--model.head_channels sets their size); {_INSTEAD}",
    )
    down, up = zip(*(_block_types(given, resnets=model.resblock_updown) for given in attended), strict=True)
    resize = "resnet" if model.resblock_updown else "conv"
    return {
        "sample_size": model.size,
        "in_channels": model.channels,
        "out_channels": model.channels * (2 if model.learn_sigma else 1),
        "block_out_channels": list(widths),
        "layers_per_block": model.res_blocks,
        "down_block_types": list(down),
        "up_block_types": list(reversed(up)),
        "downsample_type": resize,
        "upsample_type": resize,
        "downsample_padding": 1,
        "attention_head_dim": head_dims[widths[-1]],
        "norm_num_groups": model.norm_num_groups,
        "attn_norm_num_groups": model.norm_num_groups,
        "norm_eps": 1e-5,
        "act_fn": "silu",
        "dropout": model.dropout,
        "resnet_time_scale_shift": "scale_shift" if model.scale_shift_norm else "default",
        "time_embedding_type": "positional",
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "num_class_embeds": model.classes + 1 if model.classes else None,
    }


def write_unet2d(folder: Path, weights: ExportedWeights, model: AdmConfig, dtype: torch.dtype) -> None:
    """Write ``unet/``; see ``diffusers_model.write_model``; ConfigError if diffusers has no equivalent network."""
    config = to_diffusers(model)
    write_model(folder / FOLDER, "UNet2DModel", config, sources(model, weights.shapes), weights, dtype)


def sources(model: AdmConfig, known: Shapes) -> Sources:
    """Return the source of every weight of the ``UNet2DModel``; ``known`` are the shapes of our parameters."""
    found = {
        **layer("time_embedding.linear_1", "time_embed.0"),
        **layer("time_embedding.linear_2", "time_embed.2"),
        **layer("conv_in", "input_blocks.0.0"),
        **layer("conv_norm_out", "out.0"),
        **layer("conv_out", "out.2"),
    }
    if model.classes:
        found["class_embedding.weight"] = Source("label_emb.weight", _with_no_class)
    for theirs, ours, width in _layers(model):
        found |= _layer(theirs, ours, model, width, known)
    return found


def _attended(model: AdmConfig) -> list[bool]:
    """Return whether each level has attention after its residual blocks, finest level first."""
    return [model.size >> level in model.attention_resolutions for level in range(len(model.widths))]


def _sizes(head_dims: dict[int, int]) -> str:
    return ", ".join(f"{size} channels at a width of {width}" for width, size in sorted(head_dims.items()))


def _block_types(attended: bool, *, resnets: bool) -> tuple[str, str]:
    if attended:
        return "AttnDownBlock2D", "AttnUpBlock2D"
    return ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D") if resnets else ("DownBlock2D", "UpBlock2D")


def _with_no_class(table: Tensor) -> Tensor:
    """Append a null class: ``[classes, D] -> [classes + 1, D]``; its embedding is zero."""
    return torch.cat([table, table.new_zeros(1, table.shape[1])])


def _layer(theirs: str, ours: str, model: AdmConfig, width: int, known: Shapes) -> Sources:
    if f"{ours}.qkv.weight" in known:
        heads, packing = model.heads_of(width), _PACKING[model.qkv_order]
        return {
            **layer(f"{theirs}.group_norm", f"{ours}.norm"),
            **projections(theirs, f"{ours}.qkv", heads, packing),
            f"{theirs}.to_out.0.weight": Source(f"{ours}.proj_out.weight", lambda weight: weight.flatten(1)),
            f"{theirs}.to_out.0.bias": Source(f"{ours}.proj_out.bias"),
        }
    for name in ("op", "conv"):
        if f"{ours}.{name}.weight" in known:
            return layer(f"{theirs}.conv", f"{ours}.{name}")
    found: Sources = {}
    for part, own in _RES_BLOCK.items():
        found |= layer(f"{theirs}.{part}", f"{ours}.{own}")
    if f"{ours}.skip_connection.weight" in known:
        found |= layer(f"{theirs}.conv_shortcut", f"{ours}.skip_connection")
    return found


def _layers(model: AdmConfig) -> Iterator[tuple[str, str, int]]:
    """Yield their name, our name and the width of every layer between the first convolution and the last norm."""
    widths, attended = model.widths, _attended(model)
    number = 0
    for level, width in enumerate(widths):
        for block in range(model.res_blocks):
            number += 1
            yield f"down_blocks.{level}.resnets.{block}", f"input_blocks.{number}.0", width
            if attended[level]:
                yield f"down_blocks.{level}.attentions.{block}", f"input_blocks.{number}.1", width
        if level + 1 < len(widths):
            number += 1
            yield f"down_blocks.{level}.downsamplers.0", f"input_blocks.{number}.0", width
    for part, theirs in enumerate(("resnets.0", "attentions.0", "resnets.1")):
        yield f"mid_block.{theirs}", f"middle_block.{part}", widths[-1]
    number = 0
    for up, level in enumerate(reversed(range(len(widths)))):
        for block in range(model.res_blocks + 1):
            yield f"up_blocks.{up}.resnets.{block}", f"output_blocks.{number}.0", widths[level]
            if attended[level]:
                yield f"up_blocks.{up}.attentions.{block}", f"output_blocks.{number}.1", widths[level]
            if level and block == model.res_blocks:
                last = 2 if attended[level] else 1
                yield f"up_blocks.{up}.upsamplers.0", f"output_blocks.{number}.{last}", widths[level]
            number += 1


def _write(folder: Path, exported: Exported) -> None:
    config = exported.config
    write_unet2d(folder, exported.weights, cast(AdmConfig, config.model), exported.dtype)
    if write_sampler(folder, config) is not None:
        log.info(told(config).strip())


def _use(config: RunConfig, place: Place, step: int) -> str:
    draw, scheduler = drawing_loop(config, place, classes=bool(config.model.classes))
    load = f'model = UNet2DModel.from_pretrained("{place}", subfolder="{FOLDER}"){draw}'
    none = f"\nClass {config.model.classes} is the null class.\n" if config.model.classes else ""
    code = python(f"import torch\nfrom diffusers import UNet2DModel{scheduler}\n\n{load}")
    return code + none + told(config) + conventions(config.model, config.objective, diffusers=True)


DIFFUSERS = ExportFormat(write=_write, use=_use, library="diffusers")
