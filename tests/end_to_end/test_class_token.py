"""A run with the class token of a teacher on tiny features: ranks, a kill, resume, previews, validation, sampling."""

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.cli.main import main
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.sampling.run import Run
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.inputs.autoencoders import tiny_autoencoder
from tests.support.inputs.encoding import classed, encode
from tests.support.killed import train_killed
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, records, tiny, train_losses

SIDE, CHANNELS = 64, 64
MODEL = DiTConfig(
    depth=3, hidden=32, heads=2, patch=1, size=4, channels=CHANNELS, classes=2, norm="rms-weight", mlp="swiglu",
    rotary=True, qk_norm=True, in_context=2, in_context_from=1, teacher_width=CHANNELS,
)  # fmt: skip
STEPS = 4


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("features")
    classed(root / "images", range(16), SIDE)
    classed(root / "others", range(16, 24), SIDE)
    rae = tiny_autoencoder(root / "rae", "rae", statistics=False)
    encode(root / "images", root / "encoded", rae, resolution=SIDE, flip=True)
    encode(root / "others", root / "held-out", rae, resolution=SIDE, statistics=str(root / "encoded"))
    return root / "encoded"


def config_of(features: Path, folder: Path, **changes: Any) -> RunConfig:
    config = tiny(
        features, folder, steps=STEPS, batch__micro=changes.pop("batch__micro", 4),
        output__checkpoint_every=1, output__sample_every=STEPS, output__sample_steps=3,
        validation=ValidationConfig(data=str(features.with_name("held-out")), every=STEPS, samples=8), **changes,
    )  # fmt: skip
    return replace(config, model=MODEL, objective=FlowConfig(teacher_weight=0.2))


def test_a_run_is_killed_and_goes_on_equal_to_the_bit(features: Path, tmp_path: Path, world: World) -> None:
    """On two ranks with ZeRO-3; on one rank without it the losses are equal up to rounding."""
    whole = values(forked_ranks(train_losses, config_of(features, tmp_path / "whole"), launch()))[0]
    config = config_of(features, tmp_path / "killed")
    ended = forked_ranks(train_killed, config)
    assert ended[1].code == -signal.SIGKILL, ended[1].trace
    assert intact(tmp_path / "killed")[0] < STEPS
    found = values(forked_ranks(train_losses, config, launch()))[0]
    assert hexes(found) == hexes(whole)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "killed")
    alone = train_losses(world, config_of(features, tmp_path / "alone", batch__micro=8), launch(0))
    assert alone == pytest.approx(whole, rel=2e-5)
    for record in records(tmp_path / "whole"):
        assert record["loss_latents"] + record["loss_teacher"] == pytest.approx(record["loss"], rel=1e-5)
        assert record["loss_teacher"] > 0


def test_a_trained_run_validates_draws_and_says_what_it_cannot(
    features: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(config_of(features, folder), launch(0), world)
    assert (folder / "samples" / f"step-{STEPS:08d}.png").is_file()
    (line,) = (folder / "validation.jsonl").read_text().splitlines()
    assert "squared error of flow + 0.2 times that of the class token" in line

    run, labels = Run(folder, device=torch.device("cpu")), torch.tensor([0, 1, 1])
    sampler = SamplerConfig(steps=3, cfg=2.0)
    latents = run.draw(labels, sampler, progress=False)
    assert latents.shape == (3, CHANNELS, 4, 4)
    assert math.isfinite(latents.abs().max())
    one = run.sample({"label": labels}, {"label": torch.tensor(2)}, sampler, batch=1, progress=False)
    torch.testing.assert_close(one, latents, rtol=1e-4, atol=1e-4)
    out = tmp_path / "weights"
    assert main(["export", str(folder), str(out), "--format", "safetensors"]) == 0
    capsys.readouterr()
    assert main(["export", str(folder), str(tmp_path / "none"), "--format", "diffusers"]) != 0
    assert "--model.teacher_width 64 of the run; use safetensors" in capsys.readouterr().err


def test_data_without_the_token_or_with_another_width_are_refused(features: Path, tmp_path: Path, world: World) -> None:
    config = config_of(features, tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"holds teacher_token of 64, the model takes 65; use --model.teacher_width 64"
    ):
        train(replace(config, model=replace(MODEL, teacher_width=65)), launch(0), world)
    encode_digits(tmp_path / "digits")
    digits = replace(
        config,
        model=replace(MODEL, channels=1, size=8, classes=10),
        data=replace(config.data, path=str(tmp_path / "digits")),
    )
    with pytest.raises(ConfigError, match=r"holds no teacher_token, the model takes teacher_token of 64; encode with"):
        train(digits, launch(0), world)
