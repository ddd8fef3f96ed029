"""The files of a LoRA adapter of Stable Diffusion's UNet: kohya's names, and those of diffusers' training scripts."""

from typing import cast

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.export.adapters import (
    WEIGHTS_FILE,
    Metadata,
    Tensors,
    adapter_format,
    in_comfyui,
    in_diffusers,
    reads,
    use_in_diffusers,
    use_kohya,
)
from fastdiff.export.card_text import Place
from fastdiff.models.adapter_files import forms
from fastdiff.models.adapter_files.readers import COMFYUI, DIFFUSERS_READER, KOHYA_READER
from fastdiff.models.adapter_kinds.kinds import kind_of


def kohya_form(model: ModelConfig) -> forms.Form:
    """Return kohya's form: SD 1.x and 2.x have diffusers' names of the blocks, and SDXL the original ones."""
    return forms.KOHYA if cast(UNetConfig, model).pooled_dim else forms.KOHYA_DIFFUSERS


def with_base(model: ModelConfig, tensors: Tensors, metadata: Metadata) -> tuple[Tensors, Metadata]:
    """Add the base in kohya's words to the metadata; AUTOMATIC1111 offers the adapter for these base models."""
    unet = cast(UNetConfig, model)
    of_2 = unet.use_linear_projection and not unet.pooled_dim
    base = "sdxl_base_v1-0" if unet.pooled_dim else "sd_v2" if of_2 else "sd_v1"
    return tensors, metadata | {"ss_base_model_version": base, "ss_v2": str(of_2)}


def as_training_script(model: ModelConfig, tensors: Tensors, metadata: Metadata) -> tuple[Tensors, Metadata]:
    """Give diffusers' form the names of its training scripts.

    They write ``to_q.lora.down.weight`` for the attention, and ``lora_A.weight`` for all other layers. From a file with
    both diffusers loads only the latter, so the former is used only if it fits every name.
    """
    from diffusers.utils import convert_state_dict_to_diffusers

    plain = {name.removeprefix("unet."): value for name, value in tensors.items()}
    converted = dict(convert_state_dict_to_diffusers(plain))
    named = plain if any(name in plain for name in converted) else converted
    return {f"unet.{name}": value for name, value in named.items()}, metadata


def _use_everywhere(config: RunConfig, place: Place, step: int) -> str:
    if not reads(DIFFUSERS_READER, kohya_form(config.model), config.model, kind_of(config.lora)):
        return in_comfyui(
            config,
            "AUTOMATIC1111 (`models/Lora`) reads it, too. The layers have kohya's names, with alpha beside each.",
        )
    return in_diffusers(config, place) + (
        f"\n`{WEIGHTS_FILE}` has kohya's names, with alpha beside each layer: ComfyUI (`models/loras`) and "
        "AUTOMATIC1111 (`models/Lora`) read the same file with the same strength; give it a name of its own there.\n"
    )


EVERYWHERE = adapter_format(kohya_form, _use_everywhere, DIFFUSERS_READER, COMFYUI, finish=with_base)
"""``lora``."""
FOR_DIFFUSERS = adapter_format(
    lambda model: forms.DIFFUSERS, use_in_diffusers, DIFFUSERS_READER, finish=as_training_script
)
"""``lora-diffusers``."""
KOHYA = adapter_format(kohya_form, use_kohya, COMFYUI, KOHYA_READER, finish=with_base)
"""``lora-kohya``."""
