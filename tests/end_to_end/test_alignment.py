"""A run that is aligned with a teacher, on tiny pictures: ranks, a kill, resume, previews, validation, export."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastdiff.cli.main import main
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.errors import ConfigError
from fastdiff.evaluation import validation_files
from fastdiff.models.build import build_model
from fastdiff.parallel.world import World
from fastdiff.sampling.run import Run
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.inputs.encoding import classed, encode
from tests.support.inputs.teachers import tiny_teacher
from tests.support.killed import train_killed
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, records, tiny, train_losses

PIXELS, WIDTH, STEPS = 16, 6, 4
MODEL = DiTConfig(
    depth=2, hidden=32, heads=2, patch=4, size=PIXELS, channels=3, classes=2, aligned_width=WIDTH, aligned_block=1,
    aligned_hidden=32,
)  # fmt: skip
OBJECTIVE = FlowConfig(alignment_weight=0.5, alignment_steps=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("aligned")
    classed(root / "images", range(16), PIXELS)
    classed(root / "others", range(16, 24), PIXELS)
    teacher = str(tiny_teacher(root / "teacher", "clip"))
    pixels: dict[str, Any] = {"autoencoder": "identity", "resolution": PIXELS}
    features = {"teacher": teacher, "teacher_side": PIXELS // 4, "teacher_width": WIDTH, "batch": 4}
    encode(root / "images", root / "encoded", "", **pixels, **features, flip=True)
    encode(root / "images", root / "unmirrored", "", **pixels, **features)
    encode(root / "others", root / "held-out", "", **pixels, batch=16)  # the default, which alone pixels may have
    return root


def config_of(root: Path, folder: Path, data: str = "encoded", **changes: Any) -> RunConfig:
    config = tiny(
        root / data, folder, steps=STEPS, batch__micro=changes.pop("batch__micro", 4),
        output__checkpoint_every=1, output__sample_every=STEPS, output__sample_steps=3,
        validation=ValidationConfig(data=str(root / "held-out"), every=STEPS, samples=8), **changes,
    )  # fmt: skip
    return replace(config, model=MODEL, objective=OBJECTIVE, data=replace(config.data, random_flip=data == "encoded"))


def test_a_run_is_killed_and_goes_on_equal_to_the_bit(root: Path, tmp_path: Path, world: World) -> None:
    """On two ranks with ZeRO-3; on one rank without it the losses are equal up to rounding."""
    whole = values(forked_ranks(train_losses, config_of(root, tmp_path / "whole"), launch()))[0]
    config = config_of(root, tmp_path / "killed")
    ended = forked_ranks(train_killed, config)
    assert ended[1].code == -signal.SIGKILL, ended[1].trace
    assert intact(tmp_path / "killed")[0] < STEPS
    assert hexes(values(forked_ranks(train_losses, config, launch()))[0]) == hexes(whole)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "killed")
    alone = train_losses(world, config_of(root, tmp_path / "alone", batch__micro=8), launch(0))
    assert alone == pytest.approx(whole, rel=2e-5)
    found = records(tmp_path / "whole")
    for record in found:
        assert record["loss_latents"] + record["loss_alignment"] == pytest.approx(record["loss"], rel=1e-5)
    assert [record["loss_alignment"] != 0 for record in found] == [True, True, True, False], "it ends after 3 steps"
    validated = validation_files.read(tmp_path / "whole", STEPS)
    assert validated.about["objective"]["alignment_weight"] == 0, "the head takes no part in a validation"


def test_what_is_exported_is_the_network_without_the_head(
    root: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(config_of(root, folder), launch(0), world)
    assert (folder / "samples" / f"step-{STEPS:08d}.png").is_file()
    labels = torch.tensor([0, 1])
    drawn = Run(folder, device=torch.device("cpu")).draw(labels, SamplerConfig(steps=3, cfg=2.0), progress=False)
    assert torch.isfinite(drawn).all()
    for name in ("safetensors", "dit-training"):
        assert main(["export", str(folder), str(tmp_path / name), "--format", name]) == 0, capsys.readouterr().err
    (file,) = (tmp_path / "safetensors").glob("*.safetensors")
    plain = {name for name, _ in build_model(replace(MODEL, aligned_width=0)).named_parameters()}
    assert set(load_file(file)) >= plain
    assert not [name for name in load_file(file) if name.startswith("projectors.")]


def test_data_that_do_not_fit_are_refused(root: Path, tmp_path: Path, world: World) -> None:
    def start(config: RunConfig) -> None:
        train(config, launch(0), world)

    config = config_of(root, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds features of a teacher of the width 6; use --model.aligned_width 6"):
        start(replace(config, model=replace(MODEL, aligned_width=7)))
    with pytest.raises(ConfigError, match=r"holds 4 x 4 features .* the model has 8 x 8 patches; .*--teacher-side 8"):
        start(replace(config, model=replace(MODEL, patch=2)))
    with pytest.raises(ConfigError, match=r"holds no features of a teacher, .*encode with --teacher ID --teacher-side"):
        start(config_of(root, tmp_path / "run", "held-out"))
    unmirrored = config_of(root, tmp_path / "run", "unmirrored")
    with pytest.raises(ConfigError, match=r"holds the features of the pictures as they are; encode with --flip"):
        start(replace(unmirrored, data=replace(unmirrored.data, random_flip=True)))
