"""What other programs read of adapter files, as data: the layers that each one drops, or reads wrongly, by form.

All three add ``alpha / rank * B A``, with alpha from a tensor beside the layer; without one the scale is 1. diffusers
takes alpha of its own form from the metadata. The rows of diffusers and ComfyUI were measured on every layer of tiny
networks, those of kohya's scripts are read from their sources. ``*`` stands for any text. A form without a row is not
read at all.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fastdiff.models.adapter_files.forms import DIFFUSERS, KOHYA, NATIVE, Form

_UNET, _FLUX2, _Z_IMAGE = "UNet2DConditionModel", "Flux2Transformer2DModel", "ZImageTransformer2DModel"
_SD3, _QWEN = "SD3Transformer2DModel", "QwenImageTransformer2DModel"
_EVERY = (_UNET, _FLUX2, _Z_IMAGE, _SD3, _QWEN)
_FLUX2_MODULATION = ("double_stream_modulation_*", "single_stream_modulation.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A program that reads adapter files."""

    name: str
    source: str
    """Where its rule is."""
    drops: Mapping[tuple[str, str], tuple[str, ...]]
    """Patterns of the layers, by their names in diffusers, that it does not change as they should be; by the class of
    the network in diffusers and the name of the form."""

    def reads(self, form: Form, diffusers_class: str) -> bool:
        """Whether it reads a form for a network."""
        return (diffusers_class, form.name) in self.drops

    def dropped(self, form: Form, diffusers_class: str, layers: Collection[str]) -> list[str]:
        """Return the layers that it drops of a form that it reads."""
        patterns = self.drops[diffusers_class, form.name]
        return [layer for layer in layers if any(fnmatchcase(layer, pattern) for pattern in patterns)]


DIFFUSERS_READER = Reader(
    name="diffusers",
    source="loaders/lora_pipeline.py and loaders/lora_conversion_utils.py of diffusers 0.42.1",
    drops={
        **{(kind, DIFFUSERS.name): () for kind in _EVERY},
        (_UNET, KOHYA.name): (),
        (_FLUX2, NATIVE.name): ("norm_out.linear",),  # read, its halves are not swapped
        (_FLUX2, KOHYA.name): (*_FLUX2_MODULATION, "norm_out.linear"),
        (_Z_IMAGE, NATIVE.name): ("*.attention.*", "all_*"),
        (_Z_IMAGE, KOHYA.name): ("all_*",),
        (_QWEN, NATIVE.name): (),
        (_QWEN, KOHYA.name): (),
    },
)
COMFYUI = Reader(
    name="ComfyUI",
    source="comfy/lora.py of ComfyUI at ec93dca, comfy/utils.py at 09708ea, comfy/weight_adapter/lora.py at 6f98b15",
    drops={
        **{(kind, form.name): () for kind in _EVERY for form in (NATIVE, KOHYA)},
        (_UNET, DIFFUSERS.name): ("*.attn1.*", "*.attn2.*"),
        (_FLUX2, DIFFUSERS.name): (*_FLUX2_MODULATION, "time_guidance_embed.*"),
        (_Z_IMAGE, DIFFUSERS.name): (),
        (_SD3, DIFFUSERS.name): (),
        (_QWEN, DIFFUSERS.name): (),
    },
)
_OUTSIDE_OF_UNET_BLOCKS = ("conv_in", "conv_out", "time_embedding.*", "add_embedding.*")
KOHYA_READER = Reader(
    name="kohya's scripts",
    source="networks/lora.py and networks/lora_sd3.py of sd-scripts at 48d368f; networks/lora_flux_2.py and "
    "networks/lora_qwen_image.py of musubi-tuner at 2a1eac8, whose Z-Image has diffusers' layers",
    drops={
        (_UNET, KOHYA.name): _OUTSIDE_OF_UNET_BLOCKS,
        (_SD3, KOHYA.name): (),
        (_FLUX2, KOHYA.name): (
            *_FLUX2_MODULATION, "time_guidance_embed.*", "x_embedder", "context_embedder", "norm_out.*", "proj_out",
        ),
        (_QWEN, KOHYA.name): ("time_text_embed.*", "img_in", "txt_in", "norm_out.*", "proj_out"),
    },
)  # fmt: skip
