"""Pipelines of diffusers, opened part by part; the tiny ones are complete."""

import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff.config.command_line import config_file
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.data.loading.training_set import check_provenance
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.diffusion.schedules import betas
from fastdiff.errors import ConfigError
from fastdiff.models.load import build_network, resolve
from fastdiff.models.pretrained import tiny_pipeline
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.sampling.text import encode_prompts
from tests.support.inputs.text_runs import encode, text_run

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


def test_prompts_need_every_condition_of_the_network(pipelines: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="gives context, but not pooled, which the network takes; use the pipeline"):
        encode_prompts(Pretrained(str(pipelines["sd15"])), ["a cat"], tiny_pipeline.UNETS["sdxl"])


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
    weights = Pretrained(str(copied), variant="fp16").weights("unet")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    parts = [path.with_name(f"diffusion_pytorch_model.fp16-0000{n}-of-00002.safetensors") for n in (1, 2)]
    path.with_suffix(".fp16.safetensors").rename(parts[0])
    shutil.copy(parts[0], parts[1])
    assert Pretrained(str(copied), variant="fp16").weight_files("unet") == parts
    assert Pretrained(str(copied)).weight_files("unet") == [path]
    with pytest.raises(ConfigError, match=r"no diffusion_pytorch_model\.non_ema\.safetensors; it has .*variant"):
        Pretrained(str(copied), variant="non_ema").weights("unet")


def test_a_variant_of_the_unet_alone(copied: Path) -> None:
    """As in Stable Diffusion 1.5, where only the UNet has non_ema."""
    plain, with_variant = Pretrained(str(copied)), Pretrained(str(copied), variant="non_ema")
    assert torch.equal(with_variant.text()(CAPTIONS)["context"], plain.text()(CAPTIONS)["context"])
    assert with_variant.latent_space == plain.latent_space
    assert with_variant.digest("vae") == plain.digest("vae")


def test_an_autoencoder_alone(pipelines: dict[str, Path]) -> None:
    alone, whole = Pretrained(str(pipelines["sd15"] / "vae")), Pretrained(str(pipelines["sd15"]))
    assert alone.is_autoencoder
    assert not whole.is_autoencoder
    assert alone.digest("vae") == whole.digest("vae")
    pixels = torch.zeros(1, 3, 32, 32)
    assert torch.equal(alone.autoencoder().encode(pixels), whole.autoencoder().encode(pixels))


def test_parts_are_frozen(pipelines: dict[str, Path]) -> None:
    vae = Pretrained(str(pipelines["sd15"])).autoencoder(dtype=torch.bfloat16).module
    assert not vae.training
    assert {(p.requires_grad, p.dtype) for p in vae.parameters()} == {(False, torch.bfloat16)}


def test_statistics_per_channel_are_undone_as_they_are_applied(copied: Path) -> None:
    mean, std = [0.5, -1.0, 0.0, 2.0], [2.0, 1.0, 0.5, 4.0]
    path = copied / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latents_mean": mean, "latents_std": std}))
    found = Pretrained(str(copied)).autoencoder()
    assert found.space.shift == tuple(mean)
    assert found.space.scale == tuple(0.18215 / each for each in std)
    normalised = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    stored = normalised * torch.tensor(std)[:, None, None] / 0.18215 + torch.tensor(mean)[:, None, None]
    with torch.no_grad():
        expected = found.module.decode(stored).sample.clamp(-1, 1)
    torch.testing.assert_close(found.decode(normalised), expected, rtol=0, atol=1e-5)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"block_out_channels": None}))
    with pytest.raises(ConfigError, match=r"vae does not describe the latents of its autoencoder \(TypeError"):
        _ = Pretrained(str(copied)).latent_space


def test_a_transformer_that_nobody_registers_is_named(copied: Path) -> None:
    (copied / "unet").rename(copied / "transformer")
    index = json.loads((copied / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "FluxTransformer2DModel"]
    (copied / "model_index.json").write_text(json.dumps(index))
    found = Pretrained(str(copied))
    assert found.denoiser == "transformer"
    with pytest.raises(ConfigError, match="a network of class FluxTransformer2DModel; expected UNet2DConditionModel"):
        found.network_config()


@pytest.mark.parametrize(
    ("text", "message"), [("no/pipeline", "neither a folder"), ("no such thing", "neither a folder")]
)
def test_folders_that_are_no_pipeline_are_refused(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        Pretrained(text).network_config()


def test_the_message_names_the_flag_that_was_typed() -> None:
    for path in ("./no/such/folder", "/no/such/folder", "~/pipeline"):
        with pytest.raises(
            ConfigError, match=rf"^--pretrained {re.escape(path)}: neither a folder .*; check the path$"
        ):
            Pretrained(path, flag="--pretrained").network_config()


def test_an_incomplete_pipeline_is_refused(copied: Path) -> None:
    shutil.rmtree(copied / "text_encoder")
    with pytest.raises(ConfigError, match="has no text_encoder"):
        Pretrained(str(copied)).text()
    (copied / "unet" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        Pretrained(str(copied)).network_config()


@pytest.mark.parametrize(("part", "load"), [("text_encoder", "text"), ("vae", "autoencoder")])
def test_missing_weights_are_no_random_ones(copied: Path, part: str, load: str) -> None:
    [path] = (copied / part).glob("*.safetensors")
    weights = load_file(path)
    name = sorted(weights)[3]
    without = {key: value for key, value in weights.items() if key != name}
    save_file(without, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=re.escape(name.removeprefix("text_model."))):
        getattr(Pretrained(str(copied)), load)()
    save_file(without | {name: torch.zeros(3, 3, 3)}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=part):
        getattr(Pretrained(str(copied)), load)()


@pytest.mark.parametrize("part", ["text_encoder", "vae", "unet"])
def test_a_truncated_file_is_named(copied: Path, part: str) -> None:
    [path] = (copied / part).glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    found = Pretrained(str(copied))
    loads = {"text_encoder": found.text, "vae": found.autoencoder, "unet": lambda: found.weights("unet")}
    for load in (lambda: found.digest(part), loads[part]):
        with pytest.raises(ConfigError, match=rf"{part}.* cannot be read"):
            load()


def test_a_text_encoder_of_another_kind_is_refused(pipelines: dict[str, Path], copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "tokenizer")
    with pytest.raises(ConfigError, match=r"tokenizer has no vocab\.json"):
        Pretrained(str(copied)).text()
    path = copied / "text_encoder" / "config.json"
    path.write_text(path.read_text().replace('"clip_text_model"', '"t5"'))
    with pytest.raises(ConfigError, match="has model_type t5, expected clip_text_model"):
        Pretrained(str(copied)).text()
    refiner = Path(shutil.copytree(pipelines["sdxl"], tmp_path / "refiner"))
    shutil.rmtree(refiner / "text_encoder")
    with pytest.raises(ConfigError, match="has no text_encoder but text_encoder_2, like the refiner"):
        Pretrained(str(refiner)).text()


def test_a_tokenizer_without_a_length_is_refused(copied: Path) -> None:
    (copied / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="the text encoder has room for 77"):
        Pretrained(str(copied)).text()


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


def test_the_betas_of_a_scheduler_are_read(copied: Path) -> None:
    path = copied / "scheduler" / "scheduler_config.json"
    scheduler = json.loads(path.read_text())
    table = betas(finetune(copied, prediction="v").objective)
    path.write_text(json.dumps(scheduler | {"beta_schedule": "linear", "trained_betas": table.tolist()}))
    assert resolve(finetune(copied)).objective.prediction == "epsilon"
    path.write_text(json.dumps(scheduler | {"trained_betas": (table / 2).tolist()}))
    with pytest.raises(ConfigError, match=r"which differs from --objective\.schedule"):
        resolve(finetune(copied))
    path.write_text(json.dumps(scheduler | {"prediction_type": "flow_prediction"}))
    with pytest.raises(ConfigError, match="'flow_prediction', expected epsilon, v_prediction, sample"):
        resolve(finetune(copied))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_damaged_file_of_weights_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"dit{suffix}"
    config = replace(preset("digits"), pretrained=PretrainedConfig(path=str(path), weights=True))
    pickles = [pickle.dumps(content, protocol=2) for content in (os.getcwd, [1])]
    for content in (None, b"", b"no weights at all", *pickles):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"dit\{suffix}.*(no such file|cannot be read)"):
            build_network(config)


def test_data_of_another_pipeline_are_refused(pipelines: dict[str, Path], copied: Path, tmp_path: Path) -> None:
    """By its weights, and not by where it lies."""
    data = encode(tmp_path / "data", pipelines["sd15"])
    info = DatasetInfo.read(data)
    run = text_run(data, copied, tmp_path / "run")
    check_provenance(run.pretrained, run.data, info)
    for part, name in (("text_encoder", "text encoder"), ("vae", "autoencoder")):
        [path] = (copied / part).glob("*.safetensors")
        save_file({key: value + 1 for key, value in load_file(path).items()}, path)
        with pytest.raises(ConfigError, match=rf"another {name} \(digest \w{{12}}\) than .*\(digest \w{{12}}\)"):
            check_provenance(run.pretrained, run.data, info)


def test_features_that_need_a_pipeline_say_so() -> None:
    file = PretrainedConfig(path="dit.pt", weights=True)
    for flag, change in (
        ("--validation.prompts", {"validation": ValidationConfig(prompts=("a cat",))}),
        ("--data.online", {"data": DataConfig(online=True)}),
    ):
        with pytest.raises(ConfigError, match=f"{flag} needs --pretrained.path, a pipeline of diffusers; given dit.pt"):
            replace(preset("digits"), pretrained=file, **change)
    with pytest.raises(ConfigError, match=r"--lora.rank 4 needs --pretrained.weights"):
        replace(preset("sd15-512"), lora=LoraConfig(rank=4))


def test_a_run_that_names_no_pipeline_is_left_alone() -> None:
    assert resolve(preset("digits")) == preset("digits")


def laid(base: RunConfig, path: Path) -> RunConfig:
    return config_file.lay_over(base, config_file.read(str(path)).fields, "file")


def test_the_kind_of_model_in_a_file_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {kind: unet, cross_attention_dim: 32}")
    assert laid(preset("digits"), path).model == UNetConfig(cross_attention_dim=32)
    path.write_text("model: {kind: unet, depth: 2}")
    with pytest.raises(ConfigError, match=r"unknown field model\.depth"):
        laid(preset("digits"), path)
    config = preset("sd15-512")
    path.write_text("seed: 3")
    assert laid(config, path) == replace(config, seed=3)
