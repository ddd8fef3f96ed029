"""The files of a LoRA adapter: kohya's names for the UNets, and those of diffusers and peft.

A layer changes by ``alpha / rank * B A``. No form of a file is read with this scale by all programs: kohya's stores
alpha as a tensor beside each layer, which diffusers, ComfyUI and AUTOMATIC1111 read; diffusers' own form stores it in
the metadata, which only diffusers reads. So the second form has the scale in B, and its alpha is the rank.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.export.card_text import (
    Place,
    base_name,
    drawing,
    from_pretrained,
    load_safetensors,
    python,
    where_base_is,
)
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.original_names import original_layer
from fastdiff.export.weights import representable
from fastdiff.models.family import family_of
from fastdiff.models.lora import lora_targets

WEIGHTS_FILE = "pytorch_lora_weights.safetensors"
"""File name of an adapter in a folder, as diffusers expects it."""

_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"


def kohya(weights: Mapping[str, Tensor], config: LoraConfig, model: UNetConfig) -> dict[str, Tensor]:
    """Return the matrices under kohya's names, with alpha beside them.

    kohya trains SD 1.x and 2.x under diffusers' names of the blocks, and SDXL under the original ones.

    Args:
        weights: every trained parameter, names as in ``model.named_parameters()``.
        config: configuration of the adapter.
        model: of the network.
    """
    found: dict[str, Tensor] = {}
    for layer in _layers(weights):
        theirs = original_layer(layer, model) if model.pooled_dim else layer
        name = f"lora_unet_{theirs.replace('.', '_')}"
        found[f"{name}.lora_down.weight"] = weights[layer + _DOWN]
        found[f"{name}.lora_up.weight"] = weights[layer + _UP]
        found[f"{name}.alpha"] = torch.tensor(float(config.numerator))
    return found


def kohya_metadata(config: LoraConfig, model: UNetConfig) -> dict[str, str]:
    """Return kohya's metadata; AUTOMATIC1111 takes from it the base models that it offers the adapter for."""
    of_2 = model.use_linear_projection and not model.pooled_dim
    base = "sdxl_base_v1-0" if model.pooled_dim else "sd_v2" if of_2 else "sd_v1"
    return {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(config.rank),
        "ss_network_alpha": f"{config.numerator:g}",
        "ss_base_model_version": base,
        "ss_v2": str(of_2),
    }


def scaled(weights: Mapping[str, Tensor], config: LoraConfig, model: ModelConfig) -> dict[str, Tensor]:
    """Return the matrices under the names of diffusers and peft, with ``alpha / rank`` in B.

    diffusers' training scripts write ``to_q.lora.down.weight`` for the attention of a UNet, and ``lora_A.weight`` for
    all other layers. From a file with both it loads only the latter, so the former is used only if it fits every name.

    Args:
        weights: every trained parameter, names as in ``model.named_parameters()``.
        config: configuration of the adapter.
        model: of the network.
    """
    from diffusers.utils import convert_state_dict_to_diffusers

    scale = config.numerator / config.rank
    plain = {
        f"{layer}.{part}.weight": value
        for layer in _layers(weights)
        for part, value in (("lora_A", weights[layer + _DOWN]), ("lora_B", scale * weights[layer + _UP]))
    }
    converted = dict(convert_state_dict_to_diffusers(plain))
    named = plain if any(name in plain for name in converted) else converted
    return {f"{family_of(model).pipeline_part}.{name}": value for name, value in named.items()}


def scaled_metadata(config: LoraConfig, model: ModelConfig) -> dict[str, str]:
    """Return diffusers' metadata of an adapter whose scale is 1."""
    metadata = {"r": config.rank, "lora_alpha": config.rank, "target_modules": list(lora_targets(config, model))}
    component = family_of(model).pipeline_part
    named = {f"{component}.{name}": value for name, value in metadata.items()}
    return {"lora_adapter_metadata": json.dumps(named, indent=2, sort_keys=True)}


def _layers(weights: Mapping[str, Tensor]) -> list[str]:
    return [name.removesuffix(_DOWN) for name in weights if name.endswith(_DOWN)]


def _read(exported: Exported) -> dict[str, Tensor]:
    return {name: exported.weights.read(name) for name in exported.weights.shapes}


def _save(folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype) -> None:
    """Write the file; a number stays in fp32, which rounds no alpha."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    dtypes = {name: dtype if shape else torch.float32 for name, shape in shapes.items()}
    write_tensors(
        folder / WEIGHTS_FILE, shapes, dtypes, lambda name: representable(name, tensors[name], dtypes[name]), metadata
    )


def _write_kohya(folder: Path, exported: Exported) -> None:
    config, model = exported.config.lora, cast(UNetConfig, exported.config.model)
    _save(folder, kohya(_read(exported), config, model), kohya_metadata(config, model), exported.dtype)


def write_scaled(folder: Path, exported: Exported) -> None:
    """Write the names of diffusers and peft; OSError if it cannot be written, for example because the disk is full."""
    config, model = exported.config.lora, exported.config.model
    _save(folder, scaled(_read(exported), config, model), scaled_metadata(config, model), exported.dtype)


def _in_diffusers(base: PretrainedConfig, validation: ValidationConfig, place: Place) -> str:
    given = {"revision": base.revision, "variant": base.variant}
    version = "".join(f', {name}="{value}"' for name, value in given.items() if value is not None)
    load = from_pretrained(base_name(base), version)
    code = f'{load}pipeline.load_lora_weights("{place}")\n{drawing(validation)}'
    return python(code) + where_base_is(base)


def _use_kohya(config: RunConfig, place: Place, step: int) -> str:
    return _in_diffusers(config.pretrained, config.validation, place) + (
        f"\n`{WEIGHTS_FILE}` has kohya's names, with alpha beside each layer: ComfyUI (`models/loras`) and "
        "AUTOMATIC1111 (`models/Lora`) read the same file with the same strength; give it a name of its own there.\n"
    )


def _use_scaled(config: RunConfig, place: Place, step: int) -> str:
    return _in_diffusers(config.pretrained, config.validation, place) + (
        "\nThe names are those of diffusers and peft, and the scale is in the weights (alpha is the rank). ComfyUI and "
        "AUTOMATIC1111 read `fastdiff export --format lora`.\n"
    )


def _use_of_another(config: RunConfig, place: Place, step: int) -> str:
    return load_safetensors(config.model, config.objective, place, WEIGHTS_FILE) + (
        "\nA layer changes by B A (`lora_B` times `lora_A`): the scale alpha / rank is in B.\n"
    )


KOHYA = ExportFormat(write=_write_kohya, use=_use_kohya, adapter=True)
SCALED = ExportFormat(write=write_scaled, use=_use_scaled, adapter=True)
LORA = ExportFormat(write=write_scaled, use=_use_of_another, adapter=True)
"""The adapter of a network that no program with adapters knows."""
