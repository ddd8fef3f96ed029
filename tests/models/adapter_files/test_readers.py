"""The programs change every layer by what the adapter says: diffusers as it runs, ComfyUI and kohya by their rules.

The rules are stated again here from what the programs do. ComfyUI: ``model_lora_keys_unet`` (comfy/lora.py at ec93dca),
the tables of comfy/utils.py at 09708ea, ``LoRAAdapter`` (comfy/weight_adapter/lora.py at 6f98b15). kohya:
``create_network_from_weights``, for the blocks that it names (sd-scripts at 48d368f, musubi-tuner at 2a1eac8).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastdiff.models.adapter_files import forms
from fastdiff.models.adapter_files.forms import Form, metadata_of, tensors_of
from fastdiff.models.adapter_files.low_rank import LowRank
from fastdiff.models.adapter_files.native_names import NamedNetwork
from fastdiff.models.adapter_files.readers import COMFYUI, DIFFUSERS_READER, KOHYA_READER, Reader
from tests.support.inputs import tiny_transformers as tiny

RANK, ALPHA = 4, 2.0
FORMS = {"diffusers": forms.DIFFUSERS, "native": forms.NATIVE, "kohya": forms.KOHYA, "names": forms.KOHYA_DIFFUSERS}
OTHERWISE = {("Flux2Transformer2DModel", "native"): ["norm_out.linear"]}
"""Layers that diffusers reads from a form, and changes otherwise."""


def cases(reader: Reader) -> list[tuple[str, str]]:
    found = [(kind, name) for kind in tiny.NETWORKS for name in FORMS if reader.reads(FORMS[name], tiny.class_of(kind))]
    # kohya's form has diffusers' names for SD 1.5 alone.
    of_kohya = ("names" if kind == "sd15" else "kohya" for kind, _ in found)
    return [
        (kind, name) for (kind, name), own in zip(found, of_kohya, strict=True) if name in ("diffusers", "native", own)
    ]


def file_of(form: Form, names: NamedNetwork, changes: dict[str, LowRank]) -> dict[str, Tensor]:
    return tensors_of(form, forms.in_native_layout(changes, names) if form.native else changes, names.part)


def equal(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(("kind", "form"), cases(DIFFUSERS_READER))
def test_diffusers_changes_all_layers_but_those_of_its_row(kind: str, form: str, tmp_path: Path) -> None:
    names = tiny.network(kind)
    changes = tiny.adapter(names, RANK, ALPHA)
    metadata = metadata_of(FORMS[form], names.part, RANK, ALPHA, list(changes))
    tensors = {name: value.contiguous() for name, value in file_of(FORMS[form], names, changes).items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    found = tiny.changes_in_diffusers(tiny.transformer(kind), tmp_path / "a.safetensors")
    dropped = DIFFUSERS_READER.dropped(FORMS[form], names.diffusers_class, list(changes))
    otherwise = OTHERWISE.get((kind, form), [])
    assert set(found) == set(changes) - set(dropped) | set(otherwise)
    for layer, change in found.items():
        assert equal(change, changes[layer].change()) == (layer not in otherwise), layer


class Target(NamedTuple):
    """What a key of ComfyUI's map changes."""

    weight: str
    third: int | None = None
    swapped: bool = False


COMFYUI_NAMES: Mapping[str, tuple[str, str]] = {
    "Flux2Transformer2DModel": (
        r"""
        transformer_blocks\.(\d+)\.attn\.to_(out\.0) = double_blocks.{}.img_attn.proj
        transformer_blocks\.(\d+)\.attn\.to_(add_out) = double_blocks.{}.txt_attn.proj
        transformer_blocks\.(\d+)\.ff\.linear_(in) = double_blocks.{}.img_mlp.0
        transformer_blocks\.(\d+)\.ff\.linear_(out) = double_blocks.{}.img_mlp.2
        transformer_blocks\.(\d+)\.ff_context\.linear_(in) = double_blocks.{}.txt_mlp.0
        transformer_blocks\.(\d+)\.ff_context\.linear_(out) = double_blocks.{}.txt_mlp.2
        transformer_blocks\.(\d+)\.attn\.to_([qkv]) = double_blocks.{}.img_attn.qkv third
        transformer_blocks\.(\d+)\.attn\.add_([qkv])_proj = double_blocks.{}.txt_attn.qkv third
        single_transformer_blocks\.(\d+)\.attn\.(to_qkv_mlp_proj) = single_blocks.{}.linear1
        single_transformer_blocks\.(\d+)\.attn\.(to_out) = single_blocks.{}.linear2
        ()(x_embedder) = img_in
        ()(context_embedder) = txt_in
        ()(proj_out) = final_layer.linear
        ()norm_(out)\.linear = final_layer.adaLN_modulation.1 swapped""",
        "transformer. lycoris_ lora_transformer_ ."),
    "ZImageTransformer2DModel": (
        r"""
        ((?:layers|noise_refiner|context_refiner)\.\d+)\.attention\.to_([qkv]) = {}.attention.qkv third
        ((?:layers|noise_refiner|context_refiner)\.\d+)\.attention\.to_(out\.0) = {}.attention.out
        ((?:layers|noise_refiner|context_refiner)\.\d+\.feed_forward\.w[123])() = {}
        ((?:layers|noise_refiner)\.\d+\.adaLN_modulation\.0)() = {}
        (cap_embedder\.1|t_embedder\.mlp\.[02])() = {}
        all_final_layer\.2-1\.(linear|adaLN_modulation\.1)() = final_layer.{}
        ()all_(x)_embedder\.2-1 = x_embedder""",
        "diffusion_model. transformer. lycoris_ ."),
    "SD3Transformer2DModel": (
        r"""
        transformer_blocks\.(\d+)\.attn\.to_([qkv]) = joint_blocks.{}.x_block.attn.qkv third
        transformer_blocks\.(\d+)\.attn2\.to_([qkv]) = joint_blocks.{}.x_block.attn2.qkv third
        transformer_blocks\.(\d+)\.attn\.add_([qkv])_proj = joint_blocks.{}.context_block.attn.qkv third
        transformer_blocks\.(\d+)\.attn\.to_(out\.0) = joint_blocks.{}.x_block.attn.proj
        transformer_blocks\.(\d+)\.attn2\.to_(out\.0) = joint_blocks.{}.x_block.attn2.proj
        transformer_blocks\.(\d+)\.attn\.to_(add_out) = joint_blocks.{}.context_block.attn.proj
        transformer_blocks\.(\d+)\.ff\.net\.(0)\.proj = joint_blocks.{}.x_block.mlp.fc1
        transformer_blocks\.(\d+)\.ff\.net\.(2) = joint_blocks.{}.x_block.mlp.fc2
        transformer_blocks\.(\d+)\.ff_context\.net\.(0)\.proj = joint_blocks.{}.context_block.mlp.fc1
        transformer_blocks\.(\d+)\.ff_context\.net\.(2) = joint_blocks.{}.context_block.mlp.fc2
        transformer_blocks\.(\d+)\.(norm1)\.linear = joint_blocks.{}.x_block.adaLN_modulation.1
        transformer_blocks\.(11)\.norm1_(context)\.linear = joint_blocks.{}.context_block.adaLN_modulation.1 swapped
        transformer_blocks\.(\d+)\.norm1_(context)\.linear = joint_blocks.{}.context_block.adaLN_modulation.1
        (context_embedder)() = {}
        ()pos_embed\.(proj) = x_embedder.proj
        ()time_text_embed\.timestep_embedder\.linear_(1) = t_embedder.mlp.0
        ()time_text_embed\.timestep_embedder\.linear_(2) = t_embedder.mlp.2
        ()time_text_embed\.text_embedder\.linear_(1) = y_embedder.mlp.0
        ()time_text_embed\.text_embedder\.linear_(2) = y_embedder.mlp.2
        ()(proj_out) = final_layer.linear
        ()norm_(out)\.linear = final_layer.adaLN_modulation.1 swapped""",
        "transformer. base_model.model. lycoris_ lora_transformer_"),
    "QwenImageTransformer2DModel": (r"(.*)() = {}", ". transformer. lycoris_"),
}  # fmt: skip
"""diffusers' names that ComfyUI knows, with the native weight, and the prefixes before them; ``.`` is none."""


def known_to_comfyui(kind: str, names: NamedNetwork) -> dict[str, Target]:
    """ComfyUI's map from keys to weights of its network."""
    found = {}
    for native in names.natives:
        target = Target(native.name)
        found |= {f"diffusion_model.{native.name}": target, f"lora_unet_{native.name.replace('.', '_')}": target}
        if kind in tiny.UNET_KINDS:
            (layer,) = native.parts
            spelt = re.sub(r"\.to_out\.0$", ".to_out", layer.replace(".to_", ".processor.to_"))
            found |= dict.fromkeys((f"lora_unet_{layer.replace('.', '_')}", spelt, f"unet.{spelt}"), target)
    rows, prefixes = COMFYUI_NAMES.get(kind, ("", ""))
    for layer in names.layers:
        for target in _target_of(layer, rows):
            for prefix in prefixes.split():
                key = layer.replace(".", "_") if prefix.endswith("_") else layer
                found[prefix.removeprefix(".") + key] = target
    return found


def _target_of(layer: str, rows: str) -> Iterator[Target]:
    for row in rows.strip().splitlines():
        pattern, _, rest = row.strip().partition(" = ")
        native, _, how = rest.partition(" ")
        if match := re.fullmatch(pattern, layer):
            third = "qkv".index(match[2]) if how == "third" else None
            yield Target(native.format(match[1]), third, how == "swapped")
            return


KOHYA_BLOCKS = {
    "sd15": r"(down|mid|up)_block.*\.(attentions|resnets|downsamplers|upsamplers)\..*",
    "sdxl": r"(?!input_blocks\.0\.)(input_blocks|middle_block|output_blocks)\..*",
    "SD3Transformer2DModel": r"joint_blocks\..*|(context|t|x|y)_embedder\b.*|final_layer\..*",
    "Flux2Transformer2DModel": r"(double|single)_blocks\..*",
    "QwenImageTransformer2DModel": r"transformer_blocks\..*",
}
"""Layers of which kohya's scripts make a LoRA, by the names in their networks: that of SD 1.5 has diffusers' names."""


def known_to_kohya(kind: str, names: NamedNetwork) -> dict[str, Target]:
    """kohya's names of layers, with the weight of its network."""
    own = {native.parts[0] if kind == "sd15" else native.name: Target(native.name) for native in names.natives}
    adapted = {layer: target for layer, target in own.items() if re.fullmatch(KOHYA_BLOCKS[kind], layer)}
    return {f"lora_unet_{layer.replace('.', '_')}": target for layer, target in adapted.items()}


def changed(
    names: NamedNetwork, known: Mapping[str, Target], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str]]:
    """What a program adds to each weight of its network, and the tensors that it does not know."""
    endings = (".lora_up.weight", ".lora_down.weight"), (".lora_B.weight", ".lora_A.weight")
    zeros = {layer: torch.zeros(shape) for layer, shape in names.layers.items()}
    found, unknown = tiny.in_native_layout(names, zeros), set(tensors)
    for key, target in known.items():
        for up, down in endings:
            if key + up not in tensors:
                continue
            b, a, alpha = tensors[key + up], tensors[key + down], tensors.get(f"{key}.alpha")
            unknown -= {key + up, key + down, f"{key}.alpha"}
            scale = 1.0 if alpha is None else alpha.item() / len(a)
            change, weight = scale * (b.flatten(1) @ a.flatten(1)), found[target.weight]
            part = weight if target.third is None else weight.chunk(3)[target.third]
            part += (torch.cat(change.chunk(2)[::-1]) if target.swapped else change).view(part.shape)
    return found, unknown


@pytest.mark.parametrize(("kind", "form"), cases(COMFYUI))
def test_comfyui_changes_all_layers_but_those_of_its_row(kind: str, form: str) -> None:
    require_changes(COMFYUI, kind, form, known_to_comfyui)


@pytest.mark.parametrize(("kind", "form"), cases(KOHYA_READER))
def test_kohyas_scripts_change_all_layers_but_those_of_their_row(kind: str, form: str) -> None:
    require_changes(KOHYA_READER, kind, form, known_to_kohya)


def require_changes(
    reader: Reader, kind: str, form: str, known: Callable[[str, NamedNetwork], Mapping[str, Target]]
) -> None:
    names = tiny.network(kind)
    changes = tiny.adapter(names, RANK, ALPHA)
    found, unknown = changed(names, known(kind, names), file_of(FORMS[form], names, changes))
    dropped = reader.dropped(FORMS[form], names.diffusers_class, list(changes))
    assert len(unknown) == (3 if FORMS[form].alpha else 2) * len(dropped)
    kept = {layer: change.change() for layer, change in changes.items() if layer not in dropped}
    nothing = {layer: torch.zeros(names.layers[layer]) for layer in dropped}
    for layer, expected in tiny.in_native_layout(names, kept | nothing).items():
        assert equal(found[layer], expected), layer
