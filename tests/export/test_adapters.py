"""The files of adapters: diffusers and ComfyUI find every matrix in them, and read its right strength."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.errors import ConfigError
from fastdiff.export.adapters import WEIGHTS_FILE, changes_of, file_of
from fastdiff.export.card_text import Place
from fastdiff.export.formats import Exported, format_of
from fastdiff.export.model_card import use_of
from fastdiff.export.unet_adapters import as_training_script, kohya_form, with_base
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.adapter_files.forms import DIFFUSERS
from fastdiff.models.adapter_files.native_names import named_network
from fastdiff.models.adapter_files.published import read_adapter
from fastdiff.models.adapter_kinds.lokr import LOKR as LOKR_KIND
from fastdiff.models.build import build_model, load_model
from fastdiff.models.lora import add_lora
from fastdiff.models.pretrained.tiny_pipeline import UNETS, Kind, build
from tests.support.inputs.text_runs import CAPTIONS, encode, text_run
from tests.support.inputs.tiny_transformers import changes_in_diffusers
from tests.support.nights import by_day
from tests.support.references.transformer_families import FAMILIES

DIT = DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=4, size=8, classes=10)
TARGETS: dict[str, tuple[str, ...]] = {
    "attention": (),
    "everywhere": (
        "to_q", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "conv1", "conv2", "conv_shortcut",
        "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv", "conv_in", "conv_out",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    return {kind: build(tmp_path_factory.mktemp("pipelines") / kind, kind=kind) for kind in UNETS}


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Weights that an adapter could have after training: B is not 0."""
    generator = torch.Generator().manual_seed(6)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in trainable.items()}


def inputs(model: UNetConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {"noisy": torch.randn(2, 4, 8, 8, generator=generator), "time": torch.tensor([7, 800])}
    found["context"] = torch.randn(2, 9, model.cross_attention_dim, generator=generator)
    if model.pooled_dim:
        found["pooled"] = torch.randn(2, model.pooled_dim, generator=generator)
        found["time_ids"] = torch.tensor([[32.0, 32, 0, 0, 32, 32], [40, 32, 4, 0, 32, 32]])
    return found


def write(
    folder: Path, weights: Mapping[str, Tensor], config: RunConfig, form: str, dtype: torch.dtype = torch.float32
) -> Path:
    """Write the files of a format as an export does, and return that of the weights."""
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    folder.mkdir()
    exported = Exported(None, config, ExportedWeights(shapes, weights.__getitem__), dtype)
    format_of(config.model, form).write(folder, exported)
    return folder / WEIGHTS_FILE


@pytest.mark.parametrize("form", by_day(["lora"], "lora-diffusers"))
@pytest.mark.parametrize(
    ("kind", "alpha", "targets"),
    [("sd15", None, "attention"), ("sd15", 7.3, "everywhere"), ("sd2", 1.5, "everywhere"), ("sdxl", 1.5, "attention"),
     ("sdxl", 7.3, "everywhere")],
)  # fmt: skip
def test_diffusers_loads_the_file_and_changes_as_we_do(
    form: str, kind: Kind, alpha: float | None, targets: str, tmp_path: Path, pipelines: Mapping[Kind, Path]
) -> None:
    """With the metadata of the file and without, which not every program reads."""
    import diffusers

    config, model = LoraConfig(rank=4, alpha=alpha, targets=TARGETS[targets]), UNETS[kind]
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(pipelines[kind])
    plain = load_model(model, pipeline.unet.state_dict())
    ours = load_model(model, pipeline.unet.state_dict())
    add_lora(ours, config, seed=1)
    weights = trained(ours)
    ours.load_state_dict(weights, strict=False)
    given = inputs(model)

    def theirs() -> Tensor:
        added = {"text_embeds": given["pooled"], "time_ids": given["time_ids"]} if kind == "sdxl" else None
        out = pipeline.unet(given["noisy"], given["time"], given["context"], added_cond_kwargs=added)
        return out.sample  # type: ignore[no-any-return]

    file = write(
        tmp_path / "lora", weights, text_run(tmp_path, pipelines[kind], tmp_path, kind=kind, lora=config), form
    )
    with torch.no_grad():
        before, delta = theirs(), ours(**given) - plain(**given)
        assert float(delta.norm()) > 0.1 * float(before.norm()), "the adapter matters"
        for source in (tmp_path / "lora", load_file(file)):
            pipeline.load_lora_weights(source)
            torch.testing.assert_close(theirs() - before, delta, rtol=1e-4, atol=1e-4 * float(delta.abs().max()))
            pipeline.unload_lora_weights()


COMFY_SD15 = {
    "down_blocks_0_attentions_0": "input_blocks_1_1", "down_blocks_0_attentions_1": "input_blocks_2_1",
    "down_blocks_1_attentions_0": "input_blocks_4_1", "down_blocks_1_attentions_1": "input_blocks_5_1",
    "down_blocks_2_attentions_0": "input_blocks_7_1", "down_blocks_2_attentions_1": "input_blocks_8_1",
    "mid_block_attentions_0": "middle_block_1",
    "up_blocks_1_attentions_0": "output_blocks_3_1", "up_blocks_1_attentions_1": "output_blocks_4_1",
    "up_blocks_1_attentions_2": "output_blocks_5_1", "up_blocks_2_attentions_0": "output_blocks_6_1",
    "up_blocks_2_attentions_1": "output_blocks_7_1", "up_blocks_2_attentions_2": "output_blocks_8_1",
    "up_blocks_3_attentions_0": "output_blocks_9_1", "up_blocks_3_attentions_1": "output_blocks_10_1",
    "up_blocks_3_attentions_2": "output_blocks_11_1",
}  # fmt: skip
"""The attention of SD 1.5 in diffusers, and in the checkpoint of CompVis, by which ComfyUI knows it."""
COMFY_SDXL = {
    "input_blocks_4_1": 2, "input_blocks_5_1": 2, "input_blocks_7_1": 10, "input_blocks_8_1": 10, "middle_block_1": 10,
    "output_blocks_0_1": 10, "output_blocks_1_1": 10, "output_blocks_2_1": 10, "output_blocks_3_1": 2,
    "output_blocks_4_1": 2, "output_blocks_5_1": 2,
}  # fmt: skip
"""The transformers of SDXL's checkpoint, and their blocks."""
MATRICES = [f"{a}_{b}" for a, b in product(("attn1", "attn2"), ("to_q", "to_k", "to_v", "to_out_0"))]


def comfy_names(places: Mapping[str, int]) -> set[str]:
    return {
        f"lora_unet_{place}_transformer_blocks_{block}_{matrix}"
        for place, blocks in places.items()
        for block in range(blocks)
        for matrix in MATRICES
    }


@pytest.mark.parametrize(
    ("model", "known", "count"),
    [
        (UNetConfig(), comfy_names(dict.fromkeys(COMFY_SD15, 1)), 128),
        (preset("sdxl-lora").model, comfy_names(COMFY_SDXL), 560),
    ],
    ids=["sd15", "sdxl"],
)
def test_comfyui_knows_every_matrix(model: UNetConfig, known: set[str], count: int) -> None:
    """It has a name for every layer: a matrix under another one would be left out in silence."""
    with torch.device("meta"):
        network = build_model(model)
    ends = tuple(f".{target}" for target in model.lora_targets)
    layers = [name for name, _ in network.named_modules() if name.endswith(ends)]
    empty = {f"{layer}.lora_{part}.default.weight": torch.empty(0) for layer in layers for part in "AB"}
    found, _ = file_of(kohya_form(model), empty, LoraConfig(rank=4, alpha=3.0), model)
    assert {name.partition(".")[0] for name in found} == known
    assert len(known) == count
    assert len(found) == 3 * count, "lora_down, lora_up and alpha of each"


def test_comfyui_reads_the_strength_of_the_run() -> None:
    """Its rule: alpha over the rows of lora_down, and 1 without alpha."""
    config, model = LoraConfig(rank=4, alpha=7.0, targets=("to_q", "conv1")), UNETS["sd15"]
    network = build_model(model)
    add_lora(network, config, seed=1)
    weights = trained(network)
    found, _ = file_of(kohya_form(model), weights, config, model)
    for layer in {name.partition(".lora_")[0] for name in weights}:
        name = f"lora_unet_{layer.replace('.', '_')}"
        up, down = found[f"{name}.lora_up.weight"].flatten(1), found[f"{name}.lora_down.weight"].flatten(1)
        ours = 7 / 4 * weights[f"{layer}.lora_B.default.weight"].flatten(1)
        expected = ours @ weights[f"{layer}.lora_A.default.weight"].flatten(1)
        torch.testing.assert_close(found[f"{name}.alpha"] / len(down) * (up @ down), expected)


@pytest.mark.parametrize(
    ("kind", "base", "is_2"),
    [("sd15", "sd_v1", "False"), ("sd2", "sd_v2", "True"), ("sdxl", "sdxl_base_v1-0", "False")],
)
def test_automatic1111_offers_the_adapter_for_its_base(kind: Kind, base: str, is_2: str) -> None:
    _, metadata = with_base(UNETS[kind], {}, {})
    assert (metadata["ss_base_model_version"], metadata["ss_v2"]) == (base, is_2)


def test_alpha_keeps_its_value_in_16_bits(tmp_path: Path, pipelines: Mapping[Kind, Path]) -> None:
    config = LoraConfig(rank=4, alpha=7.3)
    network = build_model(UNETS["sd15"])
    add_lora(network, config, seed=1)
    run = text_run(tmp_path, pipelines["sd15"], tmp_path, lora=config)
    found = load_file(write(tmp_path / "out", trained(network), run, "lora", torch.bfloat16))
    assert {value.dtype for name, value in found.items() if name.endswith(".weight")} == {torch.bfloat16}
    assert {float(value) for name, value in found.items() if name.endswith(".alpha")} == {float(torch.tensor(7.3))}
    too_large = {name: value * 60_000 for name, value in trained(network).items()}
    with pytest.raises(ConfigError, match=r"--dtype fp16: .* has entries up to"):
        write(tmp_path / "large", too_large, run, "lora-diffusers", torch.float16)


def test_a_layer_that_a_program_of_the_format_drops_is_an_error(tmp_path: Path, pipelines: Mapping[Kind, Path]) -> None:
    """kohya's scripts have no LoRA of the first convolution; the other formats of this network have one."""
    config = LoraConfig(rank=2, targets=("to_q", "conv_in"))
    network = build_model(UNETS["sd15"])
    add_lora(network, config, seed=1)
    run = text_run(tmp_path, pipelines["sd15"], tmp_path, lora=config)
    with pytest.raises(ConfigError, match=r"kohya's scripts would drop 1 of the 9 adapted layers .*: conv_in; use"):
        write(tmp_path / "lora-kohya", trained(network), run, "lora-kohya")
    for form in ("lora", "lora-diffusers", "lora-native"):
        assert write(tmp_path / form, trained(network), run, form).exists()


def theirs_of(model: ModelConfig) -> Any:
    import diffusers

    return getattr(diffusers, model.diffusers_class)(**model.to_diffusers())


def transformer_run(kind: str, lora: LoraConfig) -> RunConfig:
    model = FAMILIES[kind].config
    objective = FlowConfig(convention=model.flow_convention)
    return RunConfig(model=model, lora=lora, objective=objective, pretrained=PretrainedConfig(path="p", weights=True))


@pytest.mark.filterwarnings("error:.*inconsistency was discovered")
@pytest.mark.parametrize("kind", by_day(["flux2"], *(kind for kind in FAMILIES if kind != "flux2")))
def test_each_format_of_a_transformer_is_read_back(kind: str, tmp_path: Path) -> None:
    """Of the layers that its usual script adapts; their programs drop none."""
    model, config = FAMILIES[kind].config, LoraConfig(rank=2, alpha=3.0)
    network = build_model(model)
    add_lora(network, config, seed=1)
    weights, expected = trained(network), changes_of(trained(network), config)
    run = transformer_run(kind, config)
    for form in ("lora", "lora-diffusers", "lora-native", "lora-kohya"):
        found = read_adapter(write(tmp_path / form, weights, run, form), named_network(model))
        assert found.keys() == expected.keys()
        for layer, change in expected.items():
            torch.testing.assert_close(found[layer].change(), change.change(), rtol=1e-6, atol=1e-6)
        if form in ("lora", "lora-diffusers"):
            theirs = changes_in_diffusers(theirs_of(model), tmp_path / form / WEIGHTS_FILE)
            assert theirs.keys() == expected.keys()
            for layer, change in expected.items():
                torch.testing.assert_close(theirs[layer], change.change(), rtol=1e-5, atol=1e-6)
        card = use_of(run, form, Place(tmp_path))
        assert "ComfyUI" in card
        assert ("load_lora_weights" in card) == (form in ("lora", "lora-diffusers"))


LOKR = {
    "flux2": ({"lora", "lora-diffusers"}, "a layer of 96 outputs is 3 layers in diffusers, .*; use --format lora"),
    "z-image": ({"lora", "lora-diffusers"}, "is 3 layers in diffusers, .*its parts have a w2 each"),
    "sd3": ({"lora"}, "is 3 layers in diffusers|diffusers reads no LoKr of"),
    "qwen-image": ({"lora", "lora-native", "lora-kohya"}, "diffusers reads no LoKr of .*; use --format lora for other"),
    "sd15": ({"lora", "lora-native", "lora-kohya"}, "diffusers reads no LoKr of a UNet .*or --format diffusers for"),
}
"""Formats in which a program applies it, and what the others say."""


@pytest.mark.parametrize("kind", by_day(["flux2", "sd15"], *(kind for kind in LOKR if kind not in ("flux2", "sd15"))))
def test_each_format_of_a_lokr_is_read_back_or_refused(kind: str, tmp_path: Path) -> None:
    """diffusers loads those that we call right for it, and changes every layer as we do; the scale is not 1."""
    model = UNETS["sd15"] if kind == "sd15" else FAMILIES[kind].config
    config, (formats, refusal) = LoraConfig(kind="lokr", rank=2, alpha=3.0, factor=4), LOKR[kind]
    network = build_model(model)
    add_lora(network, config, seed=1)
    weights, expected = trained(network), changes_of(trained(network), config)
    run = transformer_run(kind, config) if kind in FAMILIES else text_run(tmp_path, tmp_path, tmp_path, lora=config)
    for form in ("lora", "lora-diffusers", "lora-native", "lora-kohya"):
        card = use_of(run, form, Place(tmp_path))
        if form not in formats:
            with pytest.raises(ConfigError, match=refusal):
                write(tmp_path / form, weights, run, form)
            continue
        file = write(tmp_path / form, weights, run, form)
        found = read_adapter(file, named_network(model), LOKR_KIND)
        assert found.keys() == expected.keys()
        for layer, change in expected.items():
            torch.testing.assert_close(found[layer].change(), change.change(), rtol=1e-6, atol=1e-6)  # type: ignore[attr-defined]
        assert ("load_lora_weights" in card) == ("lora-diffusers" in formats)
        if "lora-diffusers" in formats:
            theirs = changes_in_diffusers(theirs_of(model), file)
            assert theirs.keys() == expected.keys()
            for layer, change in expected.items():
                torch.testing.assert_close(theirs[layer], change.change(), rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
        else:
            assert "`fastdiff export --format diffusers` writes a whole pipeline with it" in card


def test_diffusers_finds_no_factor_of_several(tmp_path: Path) -> None:
    """128 divided by 16 has 8 as the smaller number, by which it would not divide the other layers."""
    config = LoraConfig(kind="lokr", rank=1, factor=16, targets=("to_q", "x_embedder", "ff.linear_in"))
    network = build_model(replace(FAMILIES["flux2"].config, num_attention_heads=16))  # type: ignore[arg-type]
    add_lora(network, config, seed=1)
    run = transformer_run("flux2", config)
    with pytest.raises(ConfigError, match=r"diffusers would not load this LoKr: it looks for one factor that divides"):
        write(tmp_path / "a", trained(network), run, "lora-diffusers")
    tensors, _ = file_of(DIFFUSERS, trained(network), config, network.config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="Could not infer a `decompose_factor`"):
        changes_in_diffusers(theirs_of(network.config), tmp_path / "b.safetensors")


def test_the_modulation_of_flux2_is_in_the_format_of_one_program(tmp_path: Path) -> None:
    config = LoraConfig(rank=2, targets=("to_q", "double_stream_modulation_img.linear"))
    network = build_model(FAMILIES["flux2"].config)
    add_lora(network, config, seed=1)
    run = transformer_run("flux2", config)
    dropped = r"would drop 1 of the 3 adapted layers from a file of this format: double_stream_modulation_img"
    for form, program in (("lora", "ComfyUI"), ("lora-kohya", "kohya's scripts")):
        with pytest.raises(ConfigError, match=f"{program} {dropped}"):
            write(tmp_path / form, trained(network), run, form)
    for form in ("lora-diffusers", "lora-native"):
        assert write(tmp_path / form, trained(network), run, form).exists()


def test_names_are_those_of_pefts_own_export() -> None:
    """And, if all of it is attention, those of diffusers' training script."""
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import get_peft_model_state_dict

    for targets, convert in ((), convert_state_dict_to_diffusers), (("to_q", "ff.net.2"), dict):
        config, model = LoraConfig(rank=2, targets=targets), UNETS["sd15"]
        network: Any = build_model(model)
        add_lora(network, config, seed=1)
        weights = trained(network)
        network.load_state_dict(weights, strict=False)
        expected = {f"unet.{name}": value for name, value in convert(get_peft_model_state_dict(network)).items()}
        found = as_training_script(model, *file_of(DIFFUSERS, weights, config, model))[0]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_file_of_a_dit(tmp_path: Path) -> None:
    """It has no other program; its scale is in B."""
    config = LoraConfig(rank=2, alpha=3.0)
    network = build_model(DIT)
    add_lora(network, config, seed=1)
    weights = trained(network)
    run = RunConfig(model=DIT, lora=config, pretrained=PretrainedConfig(path="dit.pt", weights=True))
    with safe_open(write(tmp_path / "out", weights, run, "lora"), "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    assert metadata == {
        "transformer.r": 2,
        "transformer.lora_alpha": 2,
        "transformer.target_modules": [f"blocks.{i}.attn.{name}" for i in range(2) for name in ("qkv", "proj")],
    }
    assert len(found) == len(weights)
    name = "blocks.1.attn.qkv.lora_B"
    assert torch.equal(found[f"transformer.{name}.weight"], 1.5 * weights[f"{name}.default.weight"])


def test_the_card_draws_a_prompt_of_the_run(tmp_path: Path) -> None:
    config = text_run(tmp_path, tmp_path, tmp_path, lora=LoraConfig(rank=2))
    asked = replace(config, validation=replace(config.validation, prompts=('a "red" shoe', "a hat")))
    for form in ("lora", "lora-diffusers", "diffusers"):
        assert r'pipeline(prompt="a \"red\" shoe")' in use_of(asked, form, Place(tmp_path))
        assert "cat" not in use_of(config, form, Place(tmp_path))


def test_a_card_publishes_no_caption_of_the_data(tmp_path: Path) -> None:
    config = text_run(encode(tmp_path / "data", build(tmp_path / "pipeline"), captioned=True), tmp_path, tmp_path)
    card = use_of(config, "diffusers", Place(tmp_path))
    assert "a caption like those of the training" in card
    assert not any(caption in card for caption in CAPTIONS if caption)
