"""The own parts of ``make demo-t2i``; its other commands have their own tests."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fastdiff.cli import demo_t2i
from fastdiff.config.command_line.train_flags import parse
from fastdiff.models.pretrained.pipeline import Pretrained
from tests.support.processes import ROOT


def test_images_and_captions(tmp_path: Path) -> None:
    demo_t2i.write_images(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 1797
    assert {row["text"] for row in rows} == {demo_t2i.caption(digit) for digit in range(10)}
    assert rows[0] == {"file_name": "0000.png", "text": "a handwritten zero"}
    with Image.open(tmp_path / "0000.png") as image:
        assert (image.size, image.mode) == ((32, 32), "RGB")


@pytest.mark.nightly
def test_the_autoencoder_learns_and_its_scale_is_that_of_its_latents(tmp_path: Path) -> None:
    worse = demo_t2i.write_pipeline(tmp_path / "short", steps=1)
    better = demo_t2i.write_pipeline(tmp_path / "long", steps=12)
    assert better < 0.7 * worse
    vae = Pretrained(str(tmp_path / "long")).autoencoder().module
    with torch.no_grad():
        latents = vae.encode(demo_t2i._pixels()[::4]).latent_dist.mean * vae.config.scaling_factor
    assert float(latents.std()) == pytest.approx(1.0, rel=1e-3)
    found = demo_t2i.judge(tmp_path / "long", tmp_path / "drawn" / "digits.png", per_class=1)
    assert found["samples"] == 10
    assert 0 <= found["accuracy"] <= 0.6, "its UNet has learned nothing"
    assert (tmp_path / "drawn" / "digits.png").stat().st_size > 100


def test_a_folder_of_the_user_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "metadata.jsonl").write_text("years of work")
    monkeypatch.setattr(sys, "argv", ["demo_t2i", "prepare", str(tmp_path)])
    assert demo_t2i.main() == 2
    assert f"{tmp_path} exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["images", "metadata.jsonl"]
    assert (tmp_path / "images" / "metadata.jsonl").read_text() == "years of work"


def test_the_preset_is_what_the_makefile_prepares() -> None:
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    recipe = lines[lines.index("demo-t2i: $(INSTALLED)") + 1 :]
    commands = [shlex.split(line.rpartition("|| ")[2]) for line in recipe[: recipe.index("")]]
    prepare, encode, train, export, judge = commands
    assert train[-1] == "$(DEVICE)"  # empty, but for CUDA=cpu
    config = parse(train[2:-1])[1]
    assert config.pretrained.path == f"{prepare[-1]}/pipeline" == encode[encode.index("--pretrained") + 1]
    assert (encode[2], config.data.path) == (f"{prepare[-1]}/images", encode[3])
    assert config.output.folder == export[2]
    assert export[3] == judge[4]
