"""The native names against diffusers' converters of original checkpoints."""

import copy
import importlib

import pytest
import torch
from torch import nn

from tests.support.inputs.tiny_transformers import in_native_layout, network, transformer

CONVERTERS = {
    "Flux2Transformer2DModel": "convert_flux2_transformer_checkpoint_to_diffusers",
    "ZImageTransformer2DModel": "convert_z_image_transformer_checkpoint_to_diffusers",
    "SD3Transformer2DModel": "convert_sd3_transformer_checkpoint_to_diffusers",
}


@pytest.mark.parametrize("kind", CONVERTERS)
def test_a_converter_of_diffusers_takes_the_native_layers(kind: str) -> None:
    """It returns every weight and bias as it was."""
    names, model = network(kind), transformer(kind)
    native, expected = {}, {}
    for part in ("weight", "bias"):
        modules = {layer: model.get_submodule(layer) for layer in names.layers}
        values = {layer: getattr(module, part).detach() for layer, module in modules.items() if _has(module, part)}
        native |= {f"{layer}.{part}": value for layer, value in in_native_layout(names, values).items()}
        expected |= {f"{layer}.{part}": value for layer, value in values.items()}
    if kind == "SD3Transformer2DModel":
        native["pos_embed"] = model.pos_embed.pos_embed
    convert = getattr(importlib.import_module("diffusers.loaders.single_file_utils"), CONVERTERS[kind])
    found = convert(copy.copy(native))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_the_layers_of_qwen_have_equal_names() -> None:
    names = network("QwenImageTransformer2DModel")
    assert [(native.name, native.parts, native.swapped) for native in names.natives] == [
        (layer, (layer,), False) for layer in names.layers
    ]


def _has(module: nn.Module, part: str) -> bool:
    return getattr(module, part) is not None
