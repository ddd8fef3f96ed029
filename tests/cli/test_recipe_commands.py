"""The commands in the docstring of a published recipe, one after another, on eight pictures and a tiny autoencoder."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fastdiff.cli.main import main
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.presets import commands, encode_command, preset
from tests.support.inputs import recipes
from tests.support.installed.standins import captioned, of_classes

INPUTS: dict[str, dict[str, Callable[[Path], None]]] = {
    "sit-xl-2-256": {"IMAGENET": of_classes, "stabilityai/sd-vae-ft-ema": recipes.sd_vae},
    "lightningdit-xl-1-256": {
        "IMAGENET": of_classes,
        "vavae-imagenet256-f16d32-dinov2.pt": recipes.va_vae,
        "latents_stats.pt": recipes.latent_statistics,
    },
    "jit-b-16-256": {"IMAGENET": of_classes},
    "pixart-256": {"IMAGES": captioned, "PixArt-alpha/PixArt-Sigma-XL-2-512-MS": recipes.sigma},
    "rit-xl-256": {
        "IMAGENET": of_classes,
        "nyu-visionx/RAE-dinov2-wReg-small-ViTXL-n08": recipes.features_of_dino,
    },
    "sr-dit-b-1-256": {
        "IMAGENET": of_classes,
        "e2e-invae-400k.pt": recipes.va_vae,
        "facebook/dinov2-base": recipes.dinov2_base,
    },
}
"""What the commands of each preset read; a folder in place of a name of the hub."""


def dry_run(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    capsys.readouterr()
    assert main(["train", *flags, "--dry-run"]) == 0
    return json.loads(capsys.readouterr().out)["config"]


def as_in_data(model: ModelConfig) -> dict[str, Any]:
    """The network of the recipe, for the two classes of the pictures, or the width and the captions of a tiny T5."""
    found = asdict(model)
    return found | ({"caption_dim": 32, "caption_tokens": 16} if model.text_conditional else {"classes": 2})


@pytest.mark.parametrize("name", INPUTS)
def test_the_commands_of_a_recipe_make_the_data_of_its_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, write in INPUTS[name].items():
        write(tmp_path / path)
    *before, train = map(shlex.split, commands(name))
    assert [" ".join(words) for words in before] == encode_command(name, before[-1][3]).split(" && ")
    for words in before:
        assert main(words[1:]) == 0, words
    assert train[:2] == ["fastdiff", "train"]
    config = dry_run(capsys, *train[2:])
    assert config["model"] == as_in_data(preset(name).model)
    assert (tmp_path / config["data"]["path"] / "dataset.json").is_file(), "the folder that the preset reads"
