"""The line that a run begins with: its choices and its length."""

import re
import shlex
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdiff.cli.main import _parser
from fastdiff.config.presets import preset
from fastdiff.data import dali_trial
from fastdiff.data.loading import build
from fastdiff.data.shards.format import DatasetInfo, condition_columns
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.parallel.world import World
from fastdiff.training.callbacks.log import _shown
from fastdiff.training.callbacks.summary import _counted_network, _tf32, time_left
from fastdiff.training.loop import train
from tests.support.runs import launch, records, tiny


def test_it_says_epochs_and_why_the_loader_is_not_dali(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(digits, tmp_path / "dali", steps=1, data__loader="auto"), launch(1), world)
    assert "loader dali, blocks eager" in capsys.readouterr().err
    monkeypatch.setattr(dali_trial, "dali_installed", lambda: False)
    monkeypatch.setattr(build, "dali_problem", dali_trial.dali_problem.__wrapped__)  # tries again
    train(tiny(digits, tmp_path / "run", steps=30, data__loader="auto"), launch(1), world)
    said = capsys.readouterr().err
    assert "M parameters, 30 steps of 16 samples = 0.3 epochs of 1,797 images\n" in said
    assert "on cpu: 1 rank x 16 samples x 1 micro-batch, ZeRO-1, fp32, adamw\n" in said
    assert "loader prefetch (NVIDIA DALI is" in said
    held = r"weights [\d.]+, gradients [\d.]+, optimizer [\d.]+, averages [\d.]+"
    assert re.search(rf"planned: each rank holds [\d.]+ MiB \({held}\) and the activations of a micro-batch\n", said)
    train(tiny(digits, tmp_path / "asked", steps=1, data__loader="prefetch"), launch(1), world)
    assert "loader prefetch, blocks eager" in capsys.readouterr().err


def test_the_end_says_where_everything_is_and_what_is_next(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands parse, and the run that they read is there."""
    folder = tmp_path / "a run"
    train(tiny(digits, folder, steps=2, output__sample_every=2, output__sample_steps=2), launch(1), world)
    said = capsys.readouterr().err
    assert f"drawing 80 pictures of 2 steps to {folder}/samples/step-00000002.png" in said
    end = said[said.index(f"{folder}: done, 2 steps, loss {records(folder)[-1]['loss']:.4f}") :]
    assert f"checkpoint in {folder}/checkpoints, pictures in {folder}/samples\n" in end
    commands = [line.strip() for line in end.splitlines() if line.startswith("    fastdiff ")]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert Path(words[2]) == folder
        assert _parser().parse_args(words[1:]).run
    train(tiny(digits, folder, steps=2), launch(1), world)
    again = capsys.readouterr().err
    assert f"loading the weights of {folder}/checkpoints/step-00000002" in again
    assert f"{folder}: done, 2 steps\n" in again, "there was nothing to train"


def test_captions_that_the_network_does_not_take_are_told(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = DatasetInfo.read(digits)
    columns = {"latent": info.latent, **condition_columns({"context": (2, 3)}, "float16")}
    given = replace(info, columns=columns, shards=(), classes=None, class_names=(), captions=1, selection=None, null={})
    context = {"context": np.zeros((2, 3), np.float16)}
    with (
        LatentReader(digits) as reader,
        ShardWriter(tmp_path / "data", given, samples_per_shard=16, null=context) as to,
    ):
        for number, latent in enumerate(reader.read(np.arange(16))["latent"]):
            to.add(f"{number}", {"latent": latent, **context})
    train(tiny(tmp_path / "data", tmp_path / "run", steps=1), launch(1), world)
    told = f"the captions of {tmp_path / 'data'} are not read: a DiT takes none; a PixArt does, for example"
    assert told in capsys.readouterr().err
    train(tiny(digits, tmp_path / "of_classes", steps=1), launch(1), world)
    assert "are not read" not in capsys.readouterr().err


def test_the_time_left() -> None:
    now = datetime(2026, 1, 31, 22, 30)
    assert time_left(7200, 2.0, now) == "about 1 h 00 min to go, until Sat 31 Jan 23:30"
    assert time_left(150, 2.0, now) == "about 1 min 15 s to go, until Sat 31 Jan 22:31"


def test_tf32_is_told_where_there_is_tf32() -> None:
    assert _tf32(torch.device("cpu")) == ""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, told in ((True, ", TF32 on"), (False, ", TF32 off")):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert _tf32(torch.device("cuda", 0)) == told
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_the_parameters_of_a_lora_are_not_told_as_those_of_its_network() -> None:
    adapted, whole = preset("sd15-lora"), preset("digits")
    said = _counted_network(adapted.model, adapted.lora, 3_188_736)
    assert said == "a LoRA of rank 16, alpha 16, 3.19 M parameters, of a UNet of Stable Diffusion"
    assert _counted_network(whole.model, whole.lora, 1_300_000) == "a DiT of 1.30 M parameters"


def test_the_bar_shows_what_a_record_has() -> None:
    record = {"loss": 0.25, "grad_norm": None, "lr": 1e-4}
    assert _shown(record) == (["loss 0.2500"], ["lr 1.00e-04"])
    further = ["lr 1.00e-04", "gradient norm 1.23", "loss scale 65536"]
    assert _shown({**record, "grad_norm": 1.2345, "loss_scale": 65536.0}) == (["loss 0.2500"], further)
