"""Pipelines of PixArt: their networks are fine-tuned here, and ours are drawn by diffusers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.conditions import image_conditions
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.errors import ConfigError
from fastdiff.export.card_text import Place
from fastdiff.export.formats import Exported, format_of
from fastdiff.export.model_card import use_of
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.load import build_network, build_on_meta, pretrained, resolve
from fastdiff.models.pretrained.tiny_pixart import PIPELINES, PIXARTS, Kind, build
from fastdiff.sampling.pipeline_sampler import pipeline_sampler, with_scheduler
from fastdiff.sampling.solvers import _generator, sample
from fastdiff.sampling.text import encode_prompts
from tests.support.references.pixart_reference import built
from tests.support.references.unet_reference import difference

kinds = pytest.mark.parametrize("kind", PIXARTS)
_TOKENS = 30
_FACTOR = 4
"""Of the autoencoder of the tiny pipelines."""


def run(base: Path, **changes: Any) -> RunConfig:
    """Fine-tune a pipeline."""
    config = RunConfig(
        pretrained=PretrainedConfig(path=str(base), weights=True),
        objective=DdpmConfig(schedule="linear", prediction="auto"),
    )
    return replace(config, **changes)


@kinds
def test_a_published_pipeline_is_fine_tuned(tmp_path: Path, kind: Kind) -> None:
    """Also under the name of the class that published pipelines have."""
    from diffusers import PixArtTransformer2DModel

    base = build(tmp_path / "base", kind=kind)
    index = json.loads((base / "model_index.json").read_text())
    index["transformer"][1] = "Transformer2DModel"
    (base / "model_index.json").write_text(json.dumps(index))
    config = resolve(run(base))
    assert config.model == PIXARTS[kind]
    assert config.objective.prediction == "epsilon"
    expected = PixArtTransformer2DModel.from_pretrained(base, subfolder="transformer").state_dict()
    found = build_network(config).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    _, weights = build_on_meta(config)
    assert all(torch.equal(value, expected[name]) for name, value in weights)


def test_an_adapter_is_on_every_projection_of_the_attention(tmp_path: Path) -> None:
    base = build(tmp_path / "base")
    model = build_network(replace(resolve(run(base)), lora=LoraConfig(rank=2)))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = {name.partition(".lora_")[0] for name in trained}
    depth = PIXARTS["sigma"].depth
    assert len(layers) == depth * 2 * 4
    assert {name.rpartition("attn")[2] for name in layers} == {
        f"{n}.{layer}" for n in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0")
    }


def embedded(pipeline: Any, prompts: list[str]) -> dict[str, Tensor]:
    """Conditions of prompts, as diffusers' pipelines make them."""
    tokens = pipeline.tokenizer(prompts, padding="max_length", max_length=_TOKENS, truncation=True, return_tensors="pt")
    with torch.no_grad():
        context = pipeline.text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
    mask = tokens.attention_mask.bool()
    return {"context": context * mask[..., None], "context_mask": mask}


@pytest.mark.parametrize(("height", "width"), [(128, 128), (96, 160)])
@kinds
def test_the_pipeline_of_a_run_draws_what_we_draw(tmp_path: Path, kind: Kind, height: int, width: int) -> None:
    from diffusers import DiffusionPipeline

    config = resolve(run(build(tmp_path / "base", kind=kind)))
    ours = built(PIXARTS[kind]).eval()
    state = {name: value.detach() for name, value in ours.named_parameters()}
    weights = ExportedWeights({name: tuple(value.shape) for name, value in state.items()}, state.__getitem__)
    out = tmp_path / "out"
    out.mkdir()
    format_of(config.model, "diffusers").write(out, Exported(None, config, weights, torch.float32))
    pipeline = DiffusionPipeline.from_pretrained(out)
    assert type(pipeline).__name__ == PIPELINES[kind]
    assert type(pipeline.transformer).__name__ == "PixArtTransformer2DModel"
    pipeline.set_progress_bar_config(disable=True)
    prompts, steps, scale = ["a red cat", "two birds"], 5, 3.0
    found = pipeline(
        prompts, height=height, width=width, num_inference_steps=steps, guidance_scale=scale, output_type="latent",
        generator=[_generator(0, number) for number in range(2)], use_resolution_binning=False, clean_caption=False,
        max_sequence_length=_TOKENS,
    ).images  # fmt: skip
    condition, null = embedded(pipeline, prompts), embedded(pipeline, [""])
    sizes = image_conditions(config.model.conditions, (height, width), (0, 0), (height, width))
    condition |= {name: torch.tensor(values).expand(2, -1) for name, values in sizes.items()}
    shape = config.model.channels, height // _FACTOR, width // _FACTOR
    sampler = SamplerConfig(steps=steps, cfg=scale)
    unconditional = {name: value[0] for name, value in null.items()}
    expected = sample(ours, config.objective, condition, sampler, shape=shape, null=unconditional)
    assert expected.std() > 0.1
    card = use_of(config, "diffusers", Place(out))
    assert ", use_resolution_binning=False, clean_caption=False).images[0]" in card
    assert difference(found, expected) < 1e-5


@kinds
def test_a_fine_tuned_network_draws_by_the_defaults_of_its_pipeline(tmp_path: Path, kind: Kind) -> None:
    from diffusers import DiffusionPipeline

    base = build(tmp_path / "base", kind=kind)
    config = resolve(run(base))
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    prompts, usual = ["a red cat", "two birds"], pipeline_sampler(config)
    found = pipeline(
        prompts, output_type="latent", generator=[_generator(0, number) for number in range(2)],
        use_resolution_binning=False, clean_caption=False, max_sequence_length=_TOKENS,
    ).images  # fmt: skip
    sampler = with_scheduler(config.sampler(usual), config)
    condition, null = encode_prompts(pretrained(config.pretrained), prompts, config.model)
    shape = config.model.channels, config.model.size, config.model.size
    expected = sample(build_network(config).eval(), config.objective, condition, sampler, shape=shape, null=null)
    assert expected.std() > 0.1
    assert difference(found, expected) < 1e-4


@pytest.mark.parametrize(("kind", "size"), [("alpha", 64), ("sigma", 128)])
def test_a_pipeline_that_passes_no_sizes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, size: int
) -> None:
    """diffusers' pipelines fail to draw with such a network, by an error that does not name the reason."""
    from diffusers import DiffusionPipeline

    network = replace(PIXARTS["alpha"], size=size)
    config = resolve(run(build(tmp_path / "base", kind=kind, model=network)))
    assert config.model == network
    state = {name: value.detach() for name, value in built(network).named_parameters()}
    weights = ExportedWeights({name: tuple(value.shape) for name, value in state.items()}, state.__getitem__)
    exported, out = Exported(None, config, weights, torch.float32), tmp_path / "out"
    out.mkdir()
    said = (
        rf"{PIPELINES[kind]} could not draw: .* its latents are {size} x {size}, but .* only PixArtAlphaPipeline "
        "passes sizes, and only if latents are 128 x 128; export the network alone with --format safetensors"
    )
    with pytest.raises(ConfigError, match=said):
        format_of(config.model, "diffusers").write(out, exported)
    assert not list(out.iterdir())
    monkeypatch.setattr(PixArtConfig, "problem_in", lambda *_: None)
    format_of(config.model, "diffusers").write(out, exported)
    pipeline = DiffusionPipeline.from_pretrained(out)
    with pytest.raises(AttributeError, match="NoneType"):
        pipeline("a cat", num_inference_steps=1, use_resolution_binning=False, output_type="latent")
