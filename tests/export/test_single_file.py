"""Single-file checkpoints: the names of the original Stable Diffusion, and the same weights back in diffusers."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastdiff.cli.main import main
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.errors import ConfigError
from fastdiff.export.card_text import Place
from fastdiff.export.formats import Exported
from fastdiff.export.model_card import use_of
from fastdiff.export.single_file import FILE, write_single_file
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.build import build_model
from fastdiff.models.pretrained.tiny_pipeline import UNETS, Kind, build
from fastdiff.models.unet.original_names import original_weights
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.inputs.text_runs import encode, text_run
from tests.support.runs import launch, newest


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    return {kind: build(tmp_path_factory.mktemp("pipelines") / kind, kind=kind) for kind in UNETS}


SD15 = """
input_blocks: 0.0 1.0 1.1 2.0 2.1 3.0 4.0 4.1 5.0 5.1 6.0 7.0 7.1 8.0 8.1 9.0 10.0 11.0
middle_block: 0 1 2
output_blocks: 0.0 1.0 2.0 2.1 3.0 3.1 4.0 4.1 5.0 5.1 5.2 6.0 6.1 7.0 7.1 8.0 8.1 8.2 9.0 9.1 10.0 10.1 11.0 11.1
time_embed: 0 2
out: 0 2
"""
SDXL = """
input_blocks: 0.0 1.0 2.0 3.0 4.0 4.1 5.0 5.1 6.0 7.0 7.1 8.0 8.1
middle_block: 0 1 2
output_blocks: 0.0 0.1 1.0 1.1 2.0 2.1 2.2 3.0 3.1 4.0 4.1 5.0 5.1 5.2 6.0 7.0 8.0
time_embed: 0 2
label_emb: 0.0 0.2
out: 0 2
"""
"""The parts of the published checkpoints."""
WITHIN: dict[str, dict[str, tuple[int, ...]]] = {
    "sd15": {
        "input_blocks.0.0.weight": (320, 4, 3, 3),
        "input_blocks.3.0.op.weight": (320, 320, 3, 3),
        "input_blocks.4.0.skip_connection.weight": (640, 320, 1, 1),
        "input_blocks.1.1.proj_in.weight": (320, 320, 1, 1),
        "middle_block.1.transformer_blocks.0.attn2.to_k.weight": (1280, 768),
        "output_blocks.2.1.conv.weight": (1280, 1280, 3, 3),
        "output_blocks.5.2.conv.bias": (1280,),
        "output_blocks.11.0.in_layers.2.weight": (320, 640, 3, 3),
        "output_blocks.8.0.emb_layers.1.weight": (640, 1280),
        "out.2.weight": (4, 320, 3, 3),
    },
    "sdxl": {
        "input_blocks.7.1.transformer_blocks.9.attn2.to_v.weight": (1280, 2048),
        "input_blocks.4.1.proj_in.weight": (640, 640),
        "output_blocks.2.2.conv.weight": (1280, 1280, 3, 3),
        "output_blocks.5.2.conv.weight": (640, 640, 3, 3),
        "label_emb.0.0.weight": (1280, 2816),
        "time_embed.2.bias": (1280,),
    },
}


def parts_of(table: str) -> set[str]:
    rows = [row.split(": ") for row in table.strip().splitlines()]
    return {f"{block}.{number}" for block, numbers in rows for number in numbers.split()}


@pytest.mark.parametrize(
    ("kind", "model", "parts", "count"),
    [("sd15", UNetConfig(), SD15, 686), ("sdxl", preset("sdxl-lora").model, SDXL, 1680)],
)
def test_the_names_are_those_of_the_published_checkpoints(kind: str, model: UNetConfig, parts: str, count: int) -> None:
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in build_model(model).named_parameters()}
    names = original_weights(shapes, model)
    assert len(names) == len(shapes) == count, "each weight under one name"
    known = parts_of(parts)
    block = re.compile(r"(input_blocks\.\d+\.\d|output_blocks\.\d+\.\d|label_emb\.0\.\d|\w+\.\d)\.")
    assert {found[1] for name in names if (found := block.match(name))} == known
    for name, shape in WITHIN[kind].items():
        assert shapes[names[name]] == shape


def written(folder: Path, config: RunConfig, dtype: torch.dtype = torch.float32) -> tuple[Path, dict[str, Tensor]]:
    """A file with random weights of the UNet, and these weights."""
    weights = {name: value.detach() for name, value in build_model(config.model, seed=5).named_parameters()}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    folder.mkdir()
    write_single_file(folder, Exported(None, config, ExportedWeights(shapes, weights.__getitem__), dtype))
    return folder / FILE, weights


@pytest.mark.parametrize("kind", list(UNETS))
def test_diffusers_reads_the_same_weights(tmp_path: Path, pipelines: Mapping[Kind, Path], kind: Kind) -> None:
    """Through its own converters: UNet, autoencoder and every text encoder."""
    import diffusers

    base = pipelines[kind]
    file, weights = written(tmp_path / "out", run_of(base, tmp_path, kind))
    unet = diffusers.UNet2DConditionModel.from_single_file(str(file), config=str(base), subfolder="unet")
    assert all(torch.equal(value, weights[name]) for name, value in unet.state_dict().items())
    vae = diffusers.AutoencoderKL.from_single_file(str(file), config=str(base), subfolder="vae")
    given: Any = diffusers.DiffusionPipeline.from_pretrained(base)
    same(vae.state_dict(), given.vae.state_dict())
    for name, found in texts_of(kind, load_file(file), given).items():
        own = given.components[name].state_dict()
        same(*({name.removeprefix("text_model."): value for name, value in each.items()} for each in (found, own)))


def run_of(base: Path, folder: Path, kind: Kind) -> RunConfig:
    objective = DdpmConfig(schedule="scaled_linear", prediction="v" if kind == "sd2" else "epsilon")
    return text_run(folder, base, folder, kind=kind, objective=objective)


def texts_of(kind: Kind, content: dict[str, Tensor], given: Any) -> dict[str, dict[str, Tensor]]:
    """The text encoders as diffusers converts them; by their width it would take the tiny ones for each other."""
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint, convert_open_clip_checkpoint

    if kind == "sd2":
        return {"text_encoder": convert_open_clip_checkpoint(given.text_encoder, content)}
    found = {"text_encoder": convert_ldm_clip_checkpoint(content)}
    if kind == "sdxl":
        start = "conditioner.embedders.1.model."
        found["text_encoder_2"] = convert_open_clip_checkpoint(given.text_encoder_2, content, start)
    return found


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


TEXT: dict[str, dict[str, tuple[int, ...]]] = {
    "sd15": {"cond_stage_model.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight": (32, 32)},
    "sd2": {
        "cond_stage_model.model.transformer.resblocks.1.attn.in_proj_weight": (96, 32),
        "cond_stage_model.model.transformer.resblocks.0.mlp.c_fc.bias": (64,),
        "cond_stage_model.model.positional_embedding": (77, 32),
        "cond_stage_model.model.ln_final.weight": (32,),
    },
    "sdxl": {
        "conditioner.embedders.0.transformer.text_model.embeddings.position_embedding.weight": (77, 32),
        "conditioner.embedders.1.model.transformer.resblocks.0.attn.out_proj.bias": (32,),
        "conditioner.embedders.1.model.text_projection": (32, 32),
    },
}
VAE: dict[str, tuple[int, ...]] = {
    "first_stage_model.encoder.down.0.block.0.norm1.weight": (16,),
    "first_stage_model.encoder.down.1.block.0.nin_shortcut.weight": (32, 16, 1, 1),
    "first_stage_model.encoder.down.0.downsample.conv.bias": (16,),
    "first_stage_model.encoder.mid.attn_1.q.weight": (32, 32, 1, 1),
    "first_stage_model.encoder.norm_out.weight": (32,),
    "first_stage_model.decoder.mid.block_2.conv2.weight": (32, 32, 3, 3),
    "first_stage_model.decoder.up.0.block.1.conv1.weight": (16, 16, 3, 3),
    "first_stage_model.decoder.up.2.upsample.conv.weight": (32, 32, 3, 3),
    "first_stage_model.decoder.mid.attn_1.proj_out.bias": (32,),
    "first_stage_model.post_quant_conv.weight": (4, 4, 1, 1),
}


@pytest.mark.parametrize("kind", list(UNETS))
def test_the_other_parts_have_their_original_names(tmp_path: Path, pipelines: Mapping[Kind, Path], kind: Kind) -> None:
    file, _ = written(tmp_path / "out", run_of(pipelines[kind], tmp_path, kind))
    shapes = {name: tuple(value.shape) for name, value in load_file(file).items()}
    assert {name: shapes.get(name) for name in VAE | TEXT[kind]} == VAE | TEXT[kind]
    starts = {"sd15": "cond_stage_model.transformer", "sd2": "cond_stage_model.model", "sdxl": "conditioner.embedders"}
    own = ("model.diffusion_model.", "first_stage_model.", starts[kind])
    assert {name for name in shapes if not name.startswith(own)} == ({"v_pred"} if kind == "sd2" else set())


def test_the_code_of_the_card_draws_the_run(
    world: World, pipelines: Mapping[Kind, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pipelines["sd15"]
    data = encode(tmp_path / "data", base)
    config = text_run(data, base, tmp_path / "run", steps=1, objective__prediction="epsilon")
    train(replace(config, validation=replace(config.validation, prompts=("two birds",), every=0)), launch(1), world)
    (tmp_path / "sd15").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "out", "--format", "single-file"]) == 0
    [code] = re.findall(r"```python\n(.*?)```", Path("out", "README.md").read_text(), re.DOTALL)
    assert 'pipeline(prompt="two birds")' in code
    scope: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), scope)
    expected = newest(tmp_path / "run").weights(0.9)
    assert all(torch.equal(value, expected[name]) for name, value in scope["pipeline"].unet.state_dict().items())
    assert Path("image.png").is_file()


def test_a_unet_without_a_pipeline_is_alone_in_its_file(tmp_path: Path) -> None:
    objective = DdpmConfig(schedule="scaled_linear", prediction="epsilon")
    config = text_run(tmp_path, tmp_path, tmp_path, objective=objective, pretrained=PretrainedConfig())
    file, _ = written(tmp_path / "out", config, torch.bfloat16)
    content = load_file(file)
    assert all(name.startswith("model.diffusion_model.") for name in content)
    assert {value.dtype for value in content.values()} == {torch.bfloat16}
    assert "the UNet alone" in use_of(config, "single-file", Place(tmp_path))


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (FlowConfig(), "--objective.process flow; use safetensors"),
        (DdpmConfig(schedule="cosine", prediction="epsilon"), "1000 of cosine and epsilon; use diffusers"),
        (DdpmConfig(schedule="scaled_linear", prediction="x0"), "1000 of scaled_linear and x0; use diffusers"),
    ],
)
def test_runs_that_such_programs_draw_wrong_are_refused(
    tmp_path: Path, objective: ObjectiveConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tmp_path / "out", text_run(tmp_path, tmp_path, tmp_path, objective=objective))
