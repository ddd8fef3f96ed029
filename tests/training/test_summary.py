"""The line that a run begins with: its choices and its length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastdiff.data import dali_trial
from fastdiff.data.loading import build
from fastdiff.parallel.world import World
from fastdiff.train import train
from fastdiff.training.callbacks.summary import _tf32
from tests.support.runs import launch, tiny


def test_it_says_epochs_and_why_the_loader_is_not_dali(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(digits, tmp_path / "dali", steps=1, data__loader="auto"), launch(1), world)
    assert "loader dali, blocks eager" in capsys.readouterr().err
    monkeypatch.setattr(dali_trial, "dali_installed", lambda: False)
    monkeypatch.setattr(build, "dali_problem", dali_trial.dali_problem.__wrapped__)  # tries again
    train(tiny(digits, tmp_path / "run", steps=30, data__loader="auto"), launch(1), world)
    said = capsys.readouterr().err
    assert "ZeRO-1, fp32, adamw; 480 samples of 1,797 images = 0.3 epochs; loader prefetch (NVIDIA DALI is" in said
    train(tiny(digits, tmp_path / "asked", steps=1, data__loader="prefetch"), launch(1), world)
    assert "loader prefetch, blocks eager" in capsys.readouterr().err


def test_tf32_is_told_where_there_is_tf32() -> None:
    assert _tf32(torch.device("cpu")) == ""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, told in ((True, ", TF32 on"), (False, ", TF32 off")):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert _tf32(torch.device("cuda", 0)) == told
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
