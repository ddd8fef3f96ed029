"""Pipelines from the hub, through the library's own client, to a server on this machine and an empty cache."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.hub_server import serve
from tests.support.processes import Finished, run

USE = """
import os, sys
import torch
from pathlib import Path
from dataclasses import replace
from fastdiff.export.weights import ExportedWeights
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.models.load import build_network, download, pretrained, resolve
from fastdiff.export.pipeline import write_pipeline
from tests.support.text_runs import text_run
out = Path(sys.argv[1])
start = PretrainedConfig(path="me/pipeline", variant=sys.argv[2] or None, weights=True)
config = resolve(text_run(out, out, out, pretrained=start, data__online=True))
print("revision", config.pretrained.revision)
print("at first", sorted(path.name for path in pretrained(config).folder.rglob("*.safetensors")))
download(config)
weights = dict(build_network(config).named_parameters())
os.environ["HF_HUB_OFFLINE"] = "1"
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = True  # what download brought is enough for all ranks
print("digest", pretrained(config).digest("vae"))
print("text", tuple(pretrained(config).text()(["a cat"])["context"].shape))
huggingface_hub.constants.HF_HUB_OFFLINE = False
out.mkdir()
shapes = {name: tuple(value.shape) for name, value in weights.items()}
write_pipeline(out, ExportedWeights(shapes, lambda name: weights[name].detach()), config, torch.float32)
"""


def use(server: Any, tmp_path: Path, variant: str = "") -> Finished:
    cache = {"HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": "."}
    return run([sys.executable, "-c", USE, tmp_path / "out", variant], **server.environment, **cache)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Every file twice, with a variant that is not asked for; a safety checker, without which diffusers can do."""
    folder = build(tmp_path / "published")
    for path in list(folder.rglob("*.safetensors")):
        shutil.copyfile(path, path.with_suffix(".other.safetensors"))
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "config.json").write_text("{}")
    (folder / "safety_checker" / "pytorch_model.bin").write_bytes(b"a pickle")
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_what_a_run_needs_is_downloaded_once_and_its_export_is_whole(published: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    with serve(published, "me/pipeline") as server:
        done = use(server, tmp_path)
    assert done.code == 0, done.output
    assert f"revision {'1' * 40}" in done.output, "pinned"
    assert "at first []" in done.output
    assert "text (1, 77, 32)" in done.output
    sent = [name for name in server.sent if name.endswith((".safetensors", ".bin"))]
    assert sorted(sent) == [
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    assert loaded.safety_checker is None
    loaded.set_progress_bar_config(disable=True)
    assert loaded("a cat", num_inference_steps=1).images[0].size == (32, 32)


def test_a_safety_checker_and_the_variant_of_the_unet_come_along(published: Path, tmp_path: Path) -> None:
    """As Stable Diffusion 1.5 is laid out: of the variant there is the UNet alone."""
    for part in ("vae", "text_encoder"):
        next((published / part).glob("*.other.safetensors")).unlink()
    checker = published / "safety_checker" / "model.safetensors"
    shutil.copyfile(published / "text_encoder" / "model.safetensors", checker)
    unet = published / "unet" / "diffusion_pytorch_model.other.safetensors"
    weights = {name: value + 1 for name, value in load_file(unet).items()}
    save_file(weights, unet)
    with serve(published, "me/pipeline") as server:
        done = use(server, tmp_path, "other")
    assert done.code == 0, done.output
    assert "unet/diffusion_pytorch_model.safetensors" not in server.sent
    out = tmp_path / "out"
    assert (out / "safety_checker" / "model.safetensors").read_bytes() == checker.read_bytes()
    assert json.loads((out / "model_index.json").read_text())["safety_checker"][0] == "stable_diffusion"
    found = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(bool((found[name] == value).all()) for name, value in weights.items())


def test_an_export_without_an_autoencoder_is_refused(published: Path, tmp_path: Path) -> None:
    for path in (published / "vae").glob("*.safetensors"):
        path.unlink()
    with serve(published, "me/pipeline") as server:
        done = use(server, tmp_path)
    assert done.code == 1
    assert re.search(r"ConfigError: \S*vae has no diffusion_pytorch_model\.safetensors", done.output)
