"""A trained UNet as one checkpoint in the layout of the original Stable Diffusion, for ComfyUI and AUTOMATIC1111.

The names of its weights say which version it is: SD 1.x has CLIP's text encoder as in transformers, SD 2.x that of
OpenCLIP, and XL both.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.errors import ConfigError, require
from fastdiff.export.card_text import Place, base_name, drawing, load_safetensors, python, where_base_is
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.original_names import autoencoder_weight, open_clip_weight
from fastdiff.export.weights import ExportedWeights, representable
from fastdiff.models.load import pretrained
from fastdiff.models.pipeline_files import readable
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.unet.original_names import original_weights

FILE = "model.safetensors"
_UNET, _AUTOENCODER = "model.diffusion_model.", "first_stage_model."
_CLIP = "cond_stage_model.transformer.text_model."
_OPEN_CLIP = "cond_stage_model.model."
_CLIP_XL = "conditioner.embedders.0.transformer.text_model."
_OPEN_CLIP_XL = "conditioner.embedders.1.model."


class _Weight(NamedTuple):
    """A tensor that is read when it is written."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


_Weights = dict[str, _Weight]


def write_single_file(folder: Path, exported: Exported) -> None:
    """Write ``model.safetensors`` with the UNet and, if the run has a pretrained pipeline, the rest of it.

    A run of v prediction, or of zero terminal SNR, is marked by an empty tensor ``v_pred`` or ``ztsnr``, as by other
    trainers.

    Raises:
        ConfigError: a part of the pipeline is missing, or programs with such files cannot draw with the run's noise.
        OSError: the file cannot be written, for example because the disk is full.
    """
    config, dtype = exported.config, exported.dtype
    model, objective = cast(UNetConfig, config.model), _checked(config.objective)
    found = _unet(exported.weights, model)
    if config.pretrained.path:
        found |= _other_parts(pretrained(config.pretrained), model)
    marks = {"v_pred": objective.predicted == "v", "ztsnr": objective.zero_terminal_snr}
    found |= {name: _Weight((0,), lambda: torch.empty(0)) for name, given in marks.items() if given}
    shapes = {name: weight.shape for name, weight in found.items()}
    write_tensors(folder / FILE, shapes, dtype, lambda name: representable(name, found[name].read(), dtype))


def _checked(objective: ObjectiveConfig) -> DdpmConfig:
    if not isinstance(objective, DdpmConfig):
        raise ConfigError(
            f"--format single-file: programs with such files draw with discrete timesteps, the run has "
            f"--objective.process {objective.process}; use safetensors, or `fastdiff sample`"
        )
    usual = objective.schedule == "scaled_linear" and objective.timesteps == 1000
    require(
        usual and objective.predicted in ("epsilon", "v"),
        "--format single-file: such a file has no scheduler, and the programs draw with 1000 timesteps of "
        f"scaled_linear noise and predictions of epsilon or v; the run has {objective.timesteps} of "
        f"{objective.schedule} and {objective.predicted}; use diffusers",
    )
    return objective


def _unet(weights: ExportedWeights, model: UNetConfig) -> _Weights:
    names = original_weights(weights.shapes, model)
    return {
        _UNET + theirs: _Weight(weights.shapes[ours], partial(weights.read, ours)) for theirs, ours in names.items()
    }


def _other_parts(pipeline: Pretrained, model: UNetConfig) -> _Weights:
    found = _autoencoder(pipeline)
    text = _text(pipeline, "text_encoder")
    if model.pooled_dim:
        return found | _named(text, _CLIP_XL) | _open_clip(_text(pipeline, "text_encoder_2"), _OPEN_CLIP_XL)
    return found | (_open_clip(text, _OPEN_CLIP) if model.use_linear_projection else _named(text, _CLIP))


def _autoencoder(pipeline: Pretrained) -> _Weights:
    """Return the autoencoder; its attention has 1x1 convolutions in the original."""
    levels = len(pipeline.json("vae/config.json").get("block_out_channels", (64,)))
    found: _Weights = {}
    for name, weight in _saved(pipeline, "vae"):
        theirs = _AUTOENCODER + autoencoder_weight(name, levels)
        matrix = ".attn" in theirs and len(weight.shape) == 2
        found[theirs] = _changed(weight, (*weight.shape, 1, 1), _as_convolution) if matrix else weight
    return found


def _text(pipeline: Pretrained, part: str) -> _Weights:
    """Return a text encoder under the names of transformers without ``text_model.``, which not all versions save."""
    return {
        name.removeprefix("text_model."): weight
        for name, weight in _saved(pipeline, part)
        if not name.endswith("position_ids")
    }


def _named(weights: _Weights, prefix: str) -> _Weights:
    return {prefix + name: weight for name, weight in weights.items()}


def _open_clip(weights: _Weights, prefix: str) -> _Weights:
    """Return a text encoder in OpenCLIP's layout: packed queries, keys and values, and a transposed projection."""
    found: _Weights = {}
    for name, weight in weights.items():
        layer, projection, kind = name.rpartition("_proj.")
        if layer.endswith(("self_attn.k", "self_attn.v")):
            continue
        if layer.endswith("self_attn.q"):
            packed = [weights[f"{layer[:-1]}{letter}{projection}{kind}"] for letter in "qkv"]
            shape = (3 * weight.shape[0], *weight.shape[1:])
            theirs = f"{open_clip_weight(layer[:-2])}.in_proj_{kind}"
            found[prefix + theirs] = _Weight(shape, partial(_joined, packed))
            continue
        theirs = open_clip_weight(name)
        transposed = theirs == "text_projection"
        found[prefix + theirs] = _changed(weight, weight.shape[::-1], Tensor.t) if transposed else weight
    return found


def _saved(pipeline: Pretrained, part: str) -> Iterator[tuple[str, _Weight]]:
    """Yield the weights of a part of the pipeline, which are read later."""
    from safetensors import safe_open

    for path in pipeline.weight_files(part):
        with readable(path):
            file: Any = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, _Weight(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name))


def _changed(weight: _Weight, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> _Weight:
    return _Weight(shape, lambda: change(weight.read()))


def _as_convolution(matrix: Tensor) -> Tensor:
    return matrix[:, :, None, None]


def _joined(weights: list[_Weight]) -> Tensor:
    return torch.cat([weight.read() for weight in weights])


def _use(config: RunConfig, place: Place, step: int) -> str:
    told = (
        "\nComfyUI reads it from `models/checkpoints`, AUTOMATIC1111 from `models/Stable-diffusion`; give it a name of "
        "its own there.\n"
    )
    if not config.pretrained.path:
        return (
            load_safetensors(config.model, config.objective, place, FILE)
            + "\nIt has the UNet alone, without text encoder and autoencoder.\n"
        )
    kind = "StableDiffusionXLPipeline" if cast(UNetConfig, config.model).pooled_dim else "StableDiffusionPipeline"
    load = f'{kind}.from_single_file({place.file(FILE)}, config="{base_name(config.pretrained)}")'
    code = f"{place.imports}from diffusers import {kind}\n\npipeline = {load}\n{drawing(config)}"
    return python(code) + where_base_is(config.pretrained) + told


SINGLE_FILE = ExportFormat(write=write_single_file, use=_use, library="diffusers")
