"""Pipelines of diffusers, opened part by part; the tiny ones are complete."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff import config_file, tiny_pipeline
from fastdiff.config import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.model_config import PretrainedConfig, UNetConfig
from fastdiff.network import resolve
from fastdiff.presets import preset
from fastdiff.pretrained import Pretrained

CAPTIONS = ["a handwritten seven", "", "a" * 500]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    return {kind: tiny_pipeline.build(folder / kind, kind=kind) for kind in ("sd15", "sd2", "sdxl")}


@pytest.fixture
def copied(pipelines: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipelines["sd15"], tmp_path / "copy"))


def test_text_is_what_the_pipelines_condition_on(pipelines: dict[str, Path]) -> None:
    import diffusers

    theirs: Any = diffusers.StableDiffusionPipeline.from_pretrained(pipelines["sd15"])
    with torch.no_grad():
        expected, _ = theirs.encode_prompt(CAPTIONS, "cpu", 1, False)
    found = Pretrained(str(pipelines["sd15"])).text()(CAPTIONS)
    assert found.keys() == {"context"}
    torch.testing.assert_close(found["context"], expected, rtol=0, atol=0)


def test_text_of_two_encoders(pipelines: dict[str, Path]) -> None:
    import diffusers

    theirs: Any = diffusers.StableDiffusionXLPipeline.from_pretrained(pipelines["sdxl"])
    with torch.no_grad():
        context, nothing, pooled, zeros = theirs.encode_prompt(CAPTIONS[0], device="cpu")
    text = Pretrained(str(pipelines["sdxl"])).text()
    found, null = text(CAPTIONS[:1]), text.null()
    torch.testing.assert_close(found["context"], context, rtol=0, atol=1e-6)
    torch.testing.assert_close(found["pooled"], pooled, rtol=0, atol=1e-6)
    # This pipeline starts its guidance from zeros, and so must what stands for a dropped caption.
    torch.testing.assert_close(null["context"], nothing[0], rtol=0, atol=0)
    torch.testing.assert_close(null["pooled"], zeros[0], rtol=0, atol=0)
    assert not null["context"].any()


def test_null_of_one_encoder_is_the_empty_caption(pipelines: dict[str, Path]) -> None:
    text = Pretrained(str(pipelines["sd15"])).text()
    assert torch.equal(text.null()["context"], text([""])["context"][0])


def test_a_digest_is_of_the_weights_and_not_of_the_files(copied: Path) -> None:
    before = {part: Pretrained(str(copied)).digest(part) for part in ("vae", "unet", "text_encoder")}
    assert len(set(before.values())) == 3
    path = copied / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    save_file(dict(reversed(weights.items())), path, metadata={"written": "again"})
    assert Pretrained(str(copied)).digest("vae") == before["vae"]
    weights[next(iter(weights))].view(-1)[0] += 1
    save_file(weights, path)
    assert Pretrained(str(copied)).digest("vae") != before["vae"]
    assert Pretrained(str(copied)).digest("unet") == before["unet"]


def test_variants_are_told_apart(copied: Path) -> None:
    path = copied / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: value.half() for name, value in load_file(path).items()}, path.with_suffix(".fp16.safetensors"))
    assert Pretrained(str(copied)).weight_files("unet") == [path]
    assert Pretrained(str(copied), variant="fp16").weight_files("unet")[0].name.endswith(".fp16.safetensors")
    weights = Pretrained(str(copied), variant="fp16").unet_weights()
    assert {value.dtype for value in weights.values()} == {torch.float32}
    parts = [path.with_name(f"diffusion_pytorch_model.fp16-0000{n}-of-00002.safetensors") for n in (1, 2)]
    path.with_suffix(".fp16.safetensors").rename(parts[0])
    shutil.copy(parts[0], parts[1])
    assert Pretrained(str(copied), variant="fp16").weight_files("unet") == parts
    assert Pretrained(str(copied)).weight_files("unet") == [path]
    with pytest.raises(ConfigError, match=r"no model\.non_ema\.safetensors; it has .*--pretrained.variant"):
        Pretrained(str(copied), variant="non_ema").text()


def test_an_autoencoder_alone(pipelines: dict[str, Path]) -> None:
    alone, whole = Pretrained(str(pipelines["sd15"] / "vae")), Pretrained(str(pipelines["sd15"]))
    assert alone.is_autoencoder
    assert not whole.is_autoencoder
    assert alone.digest("vae") == whole.digest("vae")
    pixels = torch.zeros(1, 3, 32, 32)
    assert torch.equal(alone.vae().encode(pixels).latent_dist.mean, whole.vae().encode(pixels).latent_dist.mean)


def test_parts_are_frozen(pipelines: dict[str, Path]) -> None:
    vae = Pretrained(str(pipelines["sd15"])).vae(dtype=torch.bfloat16)
    assert not vae.training
    assert {(p.requires_grad, p.dtype) for p in vae.parameters()} == {(False, torch.bfloat16)}


@pytest.mark.parametrize(
    ("text", "message"), [("no/pipeline", "neither a folder"), ("no such thing", "neither a folder")]
)
def test_what_is_no_pipeline_is_refused(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        Pretrained(text).unet_config()


def test_an_incomplete_pipeline_is_refused(copied: Path) -> None:
    shutil.rmtree(copied / "text_encoder")
    with pytest.raises(ConfigError, match="has no text_encoder"):
        Pretrained(str(copied)).text()
    (copied / "unet" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        Pretrained(str(copied)).unet_config()


# ---- what a pipeline decides of a run ------------------------------------------------------------------


def finetune(path: Path, **objective: Any) -> RunConfig:
    config = preset("sd15-finetune")
    pretrained = PretrainedConfig(path=str(path), weights=True)
    return replace(config, pretrained=pretrained, objective=replace(config.objective, **objective))


@pytest.mark.parametrize(("kind", "predicted"), [("sd15", "epsilon"), ("sd2", "v"), ("sdxl", "epsilon")])
def test_shape_and_prediction_come_from_the_pipeline(pipelines: dict[str, Path], kind: Any, predicted: str) -> None:
    config = resolve(finetune(pipelines[kind]))
    assert config.model == tiny_pipeline.UNETS[kind]
    assert config.objective.prediction == predicted
    assert resolve(finetune(pipelines[kind], prediction="x0")).objective.prediction == "x0"


def test_another_noise_schedule_is_refused(pipelines: dict[str, Path]) -> None:
    for wrong in ({"schedule": "linear"}, {"zero_terminal_snr": True, "prediction": "v"}, {"timesteps": 500}):
        with pytest.raises(ConfigError, match=r"beta_schedule scaled_linear from 0\.00085 to 0\.012"):
            resolve(finetune(pipelines["sd15"], **wrong))


def test_a_run_that_names_no_pipeline_is_left_alone() -> None:
    assert resolve(preset("digits")) == preset("digits")


def test_the_kind_of_model_in_a_file_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {kind: unet, cross_attention_dim: 32}")
    assert config_file.overlay(preset("digits"), str(path)).model == UNetConfig(cross_attention_dim=32)
    path.write_text("model: {kind: unet, depth: 2}")
    with pytest.raises(ConfigError, match=r"unknown field model\.depth"):
        config_file.overlay(preset("digits"), str(path))
    config = preset("sd15-512")
    path.write_text("seed: 3")
    assert config_file.overlay(config, str(path)) == replace(config, seed=3)


@pytest.mark.parametrize("changes", [{"act_fn": "gelu"}, {"resnet_time_scale_shift": "scale_shift"}, {"dropout": 0.1}])
def test_another_unet_is_refused(changes: dict[str, Any]) -> None:
    config = UNetConfig().to_diffusers()
    assert UNetConfig.from_diffusers(config) == UNetConfig()
    with pytest.raises(ConfigError, match=rf"config\.json has {next(iter(changes))} .*Stable Diffusion"):
        UNetConfig.from_diffusers(config | changes)
