"""Pipelines from the hub, through the library's own client, to a server on this machine and an empty cache."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.forked import WITHOUT_GPU
from tests.support.processes import DIE_WITH_TESTS, ROOT, Finished
from tests.support.servers.hub_server import serve

USE = """
import json, os, sys
import huggingface_hub.constants
import torch
from pathlib import Path
from fastdiff.export.weights import ExportedWeights
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.models.load import build_network, download, pretrained, resolve
from fastdiff.export.pipeline import write_pipeline
from tests.support.inputs.text_runs import text_run
import fastdiff.models.pretrained.tiny_pipeline, diffusers.pipelines.pipeline_utils, transformers.models.clip

def use(repository, out, variant):
    start = PretrainedConfig(path=repository, variant=variant, weights=True)
    config = resolve(text_run(out, out, out, pretrained=start, data__online=True))
    print("revision", config.pretrained.revision)
    print("at first", sorted(path.name for path in pretrained(config.pretrained).folder.rglob("*.safetensors")))
    download(config.pretrained, online=config.data.online)
    weights = dict(build_network(config).named_parameters())
    os.environ["HF_HUB_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # what download brought is enough for all ranks
    print("digest", pretrained(config.pretrained).digest("vae"))
    print("text", tuple(pretrained(config.pretrained).text()(["a cat"])["context"].shape))
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    out.mkdir()
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    write_pipeline(out, ExportedWeights(shapes, lambda name: weights[name].detach()), config, torch.float32)

for line in sys.stdin:
    repository, out, variant, output = json.loads(line)
    if (child := os.fork()) == 0:
        with open(output, "w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        use(repository, Path(out), variant)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A program that has imported everything, with an empty cache, and forks for each use of a repository."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serve(Path(), "") as server:
        yield server


@pytest.fixture(scope="module")
def user(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    cache = {"HF_HOME": str(tmp_path_factory.mktemp("cache"))}
    command = [*DIE_WITH_TESTS, sys.executable, "-c", USE]
    given = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**given, "OMP_NUM_THREADS": "1", **WITHOUT_GPU, **server.environment, **cache}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def use(user: subprocess.Popen[str], repository: str, tmp_path: Path, variant: str | None = None) -> Finished:
    output = tmp_path / "output"
    assert user.stdin is not None
    assert user.stdout is not None
    user.stdin.write(json.dumps([repository, str(tmp_path / "out"), variant, str(output)]) + "\n")
    user.stdin.flush()
    code = user.stdout.readline()
    assert code, "the program has ended"
    return Finished(int(code), output.read_text())


def publish(server: Any, folder: Path, repository: str) -> str:
    """Serve a folder under a name that the cache does not know."""
    server.folder, server.repository = folder, repository
    server.sent.clear()
    return repository


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Every file twice, with a variant that is not asked for; a safety checker, without which diffusers can do."""
    folder = build(tmp_path / "published")
    for path in list(folder.rglob("*.safetensors")):
        shutil.copyfile(path, path.with_suffix(".other.safetensors"))
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "config.json").write_text("{}")
    (folder / "safety_checker" / "pytorch_model.bin").write_bytes(b"a pickle")
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_what_a_run_needs_is_downloaded_once_and_its_export_is_whole(
    server: Any, user: subprocess.Popen[str], published: Path, tmp_path: Path
) -> None:
    from diffusers import StableDiffusionPipeline

    done = use(user, publish(server, published, "me/pipeline"), tmp_path)
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
    assert (tmp_path / "out" / "tokenizer" / "chat_template.jinja").is_file()
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    assert loaded.safety_checker is None
    loaded.set_progress_bar_config(disable=True)
    assert loaded("a cat", num_inference_steps=1).images[0].size == (32, 32)


@pytest.mark.nightly
def test_a_safety_checker_and_the_variant_of_the_unet_come_along(
    server: Any, user: subprocess.Popen[str], published: Path, tmp_path: Path
) -> None:
    """As Stable Diffusion 1.5 is laid out: of the variant there is the UNet alone."""
    for part in ("vae", "text_encoder"):
        next((published / part).glob("*.other.safetensors")).unlink()
    checker = published / "safety_checker" / "model.safetensors"
    shutil.copyfile(published / "text_encoder" / "model.safetensors", checker)
    unet = published / "unet" / "diffusion_pytorch_model.other.safetensors"
    weights = {name: value + 1 for name, value in load_file(unet).items()}
    save_file(weights, unet)
    done = use(user, publish(server, published, "me/checked"), tmp_path, "other")
    assert done.code == 0, done.output
    assert "unet/diffusion_pytorch_model.safetensors" not in server.sent
    out = tmp_path / "out"
    assert (out / "safety_checker" / "model.safetensors").read_bytes() == checker.read_bytes()
    assert json.loads((out / "model_index.json").read_text())["safety_checker"][0] == "stable_diffusion"
    found = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(bool((found[name] == value).all()) for name, value in weights.items())
