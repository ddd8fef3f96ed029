"""A run draws with the sampler of its recipe (``--sampling.*``), in training, by the command and by default."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageChops

from fastdiff.cli.main import main
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.sampler import Labels, SamplerConfig, SamplingConfig
from fastdiff.parallel.world import World
from fastdiff.sampling.conditions import SampleRequest
from fastdiff.sampling.image_grid import image_grid
from fastdiff.sampling.run import Run
from fastdiff.sampling.sample_set import draw_in_memory
from fastdiff.training.callbacks.previews import SampleGrid
from fastdiff.training.loop import train
from tests.support.runs import launch, tiny

OWN = SamplingConfig(scheduler="heun", steps=6, shift="latent", cfg=2.0, cfg_interval=(0.1, 0.8), labels="balanced")
SAMPLER = SamplerConfig(scheduler="heun", steps=6, shift=0.125, cfg=2.0, cfg_interval=(0.1, 0.8))
"""By hand: the latents have 1 x 8 x 8 elements."""


@pytest.fixture(scope="module")
def run(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    config = tiny(digits, folder, steps=4, objective=FlowConfig(prediction="x0", convention="sit"), sampling=OWN)
    train(replace(config, output=replace(config.output, sample_every=4, sample_steps=5)), launch(0), world)
    return folder


def by_hand(run: Path, sampler: SamplerConfig, labels: Labels) -> npt.NDArray[np.uint8]:
    return draw_in_memory(Run(run), SampleRequest(num=23, labels=labels), sampler, progress=False)


def by_command(run: Path, out: Path, *flags: str) -> dict[str, npt.NDArray[np.generic]]:
    assert main(["sample", str(run), "--num", "23", "--npz", str(out), *flags]) == 0
    with np.load(out) as file:
        return dict(file)


def test_the_command_draws_as_the_recipe_does(run: Path, tmp_path: Path) -> None:
    drawn = by_command(run, tmp_path / "own.npz")
    assert np.array_equal(drawn["arr_0"], by_hand(run, SAMPLER, "balanced"))
    assert drawn["arr_1"].tolist() == [number % 10 for number in range(23)]


def test_flags_go_before_the_recipe(run: Path, tmp_path: Path) -> None:
    flags = "--scheduler euler --steps 3 --shift 2 --cfg-interval 0 0.5 --labels random"
    sampler = SamplerConfig(scheduler="euler", steps=3, shift=2.0, cfg=2.0, cfg_interval=(0.0, 0.5))
    drawn = by_command(run, tmp_path / "flags.npz", *flags.split())
    assert np.array_equal(drawn["arr_0"], by_hand(run, sampler, "random"))
    assert drawn["arr_1"].tolist() != [number % 10 for number in range(23)]
    unguided = by_command(run, tmp_path / "unguided.npz", "--cfg", "1")
    expected = by_hand(run, SamplerConfig(scheduler="heun", steps=6, shift=0.125, cfg=1.0), "balanced")
    assert np.array_equal(unguided["arr_0"], expected)


def test_pictures_of_the_training_have_its_sampler_and_their_own_number_of_steps(run: Path) -> None:
    labels = torch.arange(10).repeat(SampleGrid.rows)
    latents, other = (
        Run(run).draw(labels, replace(SAMPLER, steps=5, clip=True, scheduler=scheduler), progress=False)
        for scheduler in ("heun", "euler")
    )
    with Image.open(next((run / "samples").glob("*.png"))) as drawn:
        assert ImageChops.difference(drawn, image_grid(latents, rows=SampleGrid.rows)).getbbox() is None
        assert ImageChops.difference(drawn, image_grid(other, rows=SampleGrid.rows)).getbbox() is not None


def test_a_solver_of_flow_and_labels_are_refused_where_they_cannot_be(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--labels", "balanced"], "--labels is for --npz FILE or --pngs FOLDER"),
        (["--npz", str(tmp_path / "x.npz"), "--per-class", "2", "--labels", "random"], "--labels random says how"),
        (["--cfg", "1", "--cfg-interval", "0", "0.5"], "--cfg-interval 0.0 0.5: there is no guidance with --cfg 1"),
        (["--shift", "0"], "0: expected a number above 0, or latent"),
        (["--respacing", "250"], "--respacing 250 chooses from the timesteps of ddpm"),
    ):
        assert main(["sample", str(run), *flags]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
