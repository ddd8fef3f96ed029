"""The own parts of ``make demo-t2i``; its other commands have their own tests."""

import json
import re
import shlex
import sys
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fastdiff.checkpoint.manifest import committed
from fastdiff.cli import demo_t2i
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.presets.digits import text_dit
from fastdiff.models.build import build_model
from fastdiff.models.pixart.network import PixArt
from fastdiff.models.pretrained.pipeline import Pretrained
from tests.support.injected.holding import HOLD, held_at
from tests.support.processes import ROOT
from tests.support.scripts import Launcher
from tests.support.waiting import wait_until


def test_images_and_captions(tmp_path: Path) -> None:
    demo_t2i.write_images(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 1797
    assert {row["text"] for row in rows} == {demo_t2i.caption(digit) for digit in range(10)}
    assert rows[0] == {"file_name": "0000.png", "text": "a handwritten zero"}
    with Image.open(tmp_path / "0000.png") as image:
        assert (image.size, image.mode) == ((32, 32), "RGB")


@pytest.mark.nightly
@pytest.mark.parametrize("network", demo_t2i.PIPELINES)
def test_the_autoencoder_learns_and_its_scale_is_that_of_its_latents(tmp_path: Path, network: str) -> None:
    worse = demo_t2i.write_pipeline(tmp_path / "short", network, steps=1)
    better = demo_t2i.write_pipeline(tmp_path / "long", network, steps=12)
    assert better < 0.7 * worse
    vae = Pretrained(str(tmp_path / "long")).autoencoder().module
    with torch.no_grad():
        latents = vae.encode(demo_t2i._pixels()[::4]).latent_dist.mean * vae.config.scaling_factor
    assert float(latents.std()) == pytest.approx(1.0, rel=1e-3)
    found = demo_t2i.judge(tmp_path / "long", tmp_path / "drawn" / "digits.png", per_class=1)
    assert found["samples"] == 10
    assert 0 <= found["accuracy"] <= 0.6, "its network has learned nothing"
    assert (tmp_path / "drawn" / "digits.png").stat().st_size > 100


def test_a_folder_of_the_user_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "metadata.jsonl").write_text("years of work")
    monkeypatch.setattr(sys, "argv", ["demo_t2i", "prepare", str(tmp_path)])
    assert demo_t2i.main() == 2
    assert f"{tmp_path} exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["images", "metadata.jsonl"]
    assert (tmp_path / "images" / "metadata.jsonl").read_text() == "years of work"


def test_the_captions_of_the_text_dit_differ_in_one_token(tmp_path: Path) -> None:
    """In front of the network, too: with the published initial weights, embeddings of unit size would be as one."""
    demo_t2i.PIPELINES["dit"](tmp_path)
    found = Pretrained(str(tmp_path)).text()([demo_t2i.caption(digit) for digit in range(10)])
    assert found["context_mask"].sum(1).tolist() == [4] * 10  # with the end
    network = build_model(text_dit().model)
    assert isinstance(network, PixArt)
    with torch.no_grad():
        tokens = network.caption_projection(found["context"][:, :4])
    between = torch.pdist(tokens[:, 2]) / tokens[:, 2].norm(dim=1).mean()
    assert float(between.min()) > 0.5
    assert float(tokens.square().mean().sqrt()) > 0.1


@pytest.mark.nightly
def test_the_training_is_killed_and_resumes(digits: Path, tmp_path: Path) -> None:
    run, small = tmp_path / "run", ("--model.depth", "1", "--model.hidden", "32", "--model.heads", "2")
    flags = ["--preset", "digits", "--data.path", str(digits), *small, "--output.sample-every", "0"]
    flags += ["--output.checkpoint-every", "20", "--output.log-every", "2", "--output.callbacks", HOLD]
    words = ["train", str(run), "--", "--steps", "120", *flags]
    log = tmp_path / "run.log"
    with ExitStack() as held:
        held.enter_context(held_at(100, run))
        with Launcher(ROOT / "fastdiff" / "cli" / "demo_t2i.py", *words, cwd=tmp_path) as script:
            ended = script.process
            wait_until(lambda: not ended.is_alive() or (log.exists() and "SIGKILL" in log.read_text()), "the kill")
            held.close()
            done = script.wait(550)
    assert done.code == 0, done.output
    assert re.search(r"At step \d+ rank 0 got a SIGKILL", done.output), done.output
    assert next(path.name for path in committed(run / "checkpoints")) == "step-00000120"


@pytest.mark.parametrize("model", ["unet", "dit"])
def test_the_preset_is_what_the_makefile_prepares(model: str) -> None:
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line == "demo-t2i: $(INSTALLED)"]
    recipe = takewhile(lambda line: line.startswith("\t"), lines[starts[("unet", "dit").index(model)] :])
    prepare, encode, train, export, judge = (shlex.split(line.rpartition("|| ")[2]) for line in recipe)
    assert train[-1] == "$(DEVICE)"  # empty, but for CUDA=cpu
    config = parse(train[train.index("--preset") : -1])[1]
    folder = prepare[4]
    assert prepare[5:] == ([] if model == "unet" else ["--model", model])
    assert config.pretrained.path == f"{folder}/pipeline" == encode[encode.index("--pretrained") + 1]
    assert (encode[2], config.data.path) == (f"{folder}/images", encode[3])
    assert config.output.folder == export[2]
    assert train[4:6] == [export[2], "--"] or model == "unet"
    assert export[3] == judge[4]
