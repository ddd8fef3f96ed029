"""The ADM UNet in real runs: any number of ranks, stopped and resumed, with dropout, and enlarging small images."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageChops
from safetensors.torch import save_file

from fastdiff.cli.main import main
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.loading.training_set import open_data
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.diffusion.noise_shaping import small_images
from fastdiff.diffusion.processes import build_process
from fastdiff.errors import ConfigError
from fastdiff.evaluation import digits as measures
from fastdiff.evaluation.likelihood import NllOptions, measure, read_clean
from fastdiff.evaluation.validation_files import LINES
from fastdiff.models.build import build_model
from fastdiff.models.load import null_label
from fastdiff.parallel.world import World
from fastdiff.sampling.image_grid import image_grid
from fastdiff.sampling.run import Run
from fastdiff.training.callbacks.previews import SampleGrid
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.runs import held_out, hexes, launch, tiny, train_losses

SHAPE: dict[str, Any] = {
    "channels": 1, "size": 8, "width": 16, "channel_mult": (1, 2), "res_blocks": 1, "attention_resolutions": (4,),
    "heads": 2, "norm_num_groups": 8, "classes": 10, "learn_sigma": True,
}  # fmt: skip
HYBRID = DdpmConfig(
    schedule="cosine", timesteps=400, rescale_timesteps=True, variance="learned_range", loss="rescaled_mse"
)


def adm(digits: Path, folder: Path, steps: int = 6, **shape: Any) -> RunConfig:
    """As IDDPM trains: hybrid loss, importance sampling."""
    return tiny(
        digits,
        folder,
        steps=steps,
        model=AdmConfig(**SHAPE | shape),
        objective=HYBRID,
        timesteps=TimestepConfig(density="importance"),
        optim__lr=1e-3,
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes that tests start: other sums would round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "shape",
    by_day([{"low_res_size": 4, "resblock_updown": True}], {"dropout": 0.3}),
    ids=str,
)
def test_the_losses_do_not_depend_on_ranks_and_zero(
    world: World, digits: Path, tmp_path: Path, shape: dict[str, Any]
) -> None:
    alone = train_losses(world, adm(digits, tmp_path / "alone", **shape), launch(0))
    config = adm(digits, tmp_path / "together", **shape)
    config = replace(config, performance=replace(config.performance, recompute=True))
    together = values(forked_ranks(train_losses, config, launch(3)))[0]
    assert together == pytest.approx(alone, rel=2e-5)
    assert alone[-1] < alone[0]


def test_dropout_acts_and_is_that_of_the_position(world: World, digits: Path, tmp_path: Path) -> None:
    plain, dropped, again = (
        train_losses(world, adm(digits, tmp_path / name, steps=3, dropout=share), launch(0))
        for name, share in (("plain", 0.0), ("dropped", 0.3), ("again", 0.3))
    )
    # A fresh network predicts 0, whatever is dropped; from the first step on it matters.
    assert dropped[0] == plain[0]
    assert dropped[2] != plain[2]
    assert hexes(dropped) == hexes(again)


def test_small_images_are_means_over_areas_with_noise_that_belongs_to_the_position() -> None:
    clean = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    position = torch.arange(64)
    small = small_images(clean, 4, noise=0.0, seed=3, position=position)
    torch.testing.assert_close(small, clean.view(64, 3, 4, 2, 4, 2).mean(dim=(3, 5)))
    noisy = small_images(clean, 4, noise=0.5, seed=3, position=position)
    deviations = (noisy - small).flatten(1).std(dim=1)
    assert deviations.max() < 0.5 * 1.5
    assert deviations.min() < 0.1
    assert deviations.mean() == pytest.approx(0.25, abs=0.08)
    half = small_images(clean[32:], 4, noise=0.5, seed=3, position=position[32:])
    assert torch.equal(half, noisy[32:])


def test_a_rescaled_time_is_on_the_scale_of_a_thousand_steps() -> None:
    levels = build_process(HYBRID, "cpu").levels(torch.tensor([0, 1, 399]))
    assert levels.time.tolist() == [0.0, 2.5, 997.5]
    assert levels.row.tolist() == [0, 1, 399]
    plain = build_process(replace(HYBRID, rescale_timesteps=False), "cpu").levels(torch.tensor([399]))
    assert plain.time.tolist() == [399]
    with pytest.raises(ConfigError, match=r"rescale_timesteps True is for --objective.process ddpm"):
        parse(["--preset", "digits", "--objective.process", "flow", "--objective.rescale_timesteps"])


def test_neither_validation_nor_likelihood_drops_anything(world: World, digits: Path, tmp_path: Path) -> None:
    """Networks of equal weights have equal losses on held-out data, with a dropout in training or without."""
    found = {}
    for share in (0.0, 0.3):
        config = adm(digits, tmp_path / str(share), steps=1, dropout=share)
        start = tmp_path / f"{share}.safetensors"
        save_file({name: value + 0.01 for name, value in build_model(config.model).state_dict().items()}, start)
        validation = ValidationConfig(data=str(held_out(digits)), samples=32)
        config = replace(
            config,
            pretrained=PretrainedConfig(path=str(start), weights=True),
            optim=replace(config.optim, lr=1e-12),
            validation=validation,
        )
        loss = train_losses(world, config, launch(0))[0]
        line = json.loads((tmp_path / str(share) / LINES).read_text().splitlines()[-1])
        found[share] = (loss, line["val_loss"])
    assert found[0.3][0] != found[0.0][0]
    assert found[0.3][1] == pytest.approx(found[0.0][1], rel=1e-6)


def test_the_likelihood_is_that_of_the_time_the_model_was_told_and_of_the_small_images(digits: Path) -> None:
    objective, told = replace(HYBRID, timesteps=40), []

    def model(noisy: torch.Tensor, time: torch.Tensor, low_res: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        told.append(time)
        assert low_res.shape == (len(noisy), 1, 4, 4)
        return torch.zeros(len(noisy), 2, 8, 8)

    with LatentReader(digits) as reader:
        index = np.arange(3)
        batches = list(read_clean(reader, index, ("label",), torch.device("cpu"), seed=1, low_res_size=4))
        measure(model, objective, batches, NllOptions())
    torch.testing.assert_close(batches[0].condition["low_res"], F.avg_pool2d(batches[0].latents, 2))
    assert torch.cat(told).unique().tolist() == [25.0 * step for step in range(40)]


def test_options_without_effect_are_refused(digits: Path, tmp_path: Path) -> None:
    config = adm(digits, tmp_path)
    with pytest.raises(ConfigError, match=r"--objective.low_res_noise 0.5 is for super-resolution"):
        replace(config, objective=replace(HYBRID, low_res_noise=0.5))
    shards = tmp_path / "without classes"
    template = DatasetInfo(
        columns={"latent": Column(dtype="float32", shape=(1, 8, 8))},
        normalisation=Normalisation(shift=(0.0,), scale=(1.0,)),
        provenance=Provenance(source="test", transform="none"),
    )
    with ShardWriter(shards, template, samples_per_shard=8) as writer:
        for n in range(16):
            writer.add(f"{n:09d}", {"latent": np.zeros((1, 8, 8), np.float32)})
    config = replace(config, data=replace(config.data, path=str(shards)))
    with pytest.raises(ConfigError, match=r"has no classes, but the model has 10, which would never be trained"):
        open_data(config, torch.device("cpu"))
    open_data(replace(config, model=replace(config.model, classes=0)), torch.device("cpu")).close()


def test_grids_of_enlarged_images_are_refused(digits: Path, tmp_path: Path) -> None:
    config = adm(digits, tmp_path, low_res_size=4)
    with pytest.raises(ConfigError, match="fastdiff sample --low-res"):
        replace(config, output=replace(config.output, sample_every=1))


def test_a_run_that_enlarges_digits_is_measured_on_scans_that_it_has_not_seen(
    world: World,
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    nightly: bool,
) -> None:
    """In 8 images of each; by day 2, which take seconds less."""
    draws = measures._DRAWS
    assert draws == 8
    if not nightly:
        draws = 2
        monkeypatch.setattr(measures, "_DRAWS", draws)
    encode_digits(tmp_path / "train", split="train")
    found = {}
    for name, data in (("seen", digits), ("unseen", tmp_path / "train")):
        config = adm(data, tmp_path / name, steps=2, low_res_size=4, width=8, attention_resolutions=())
        train(config, launch(0), world)
        found[name] = main(["evaluate", str(tmp_path / name)])
    assert found == {"seen": 2, "unseen": 0}
    assert "which includes the scans of the evaluation" in capsys.readouterr().err
    result = json.loads((tmp_path / "unseen" / "evaluation.json").read_text())
    assert (result["images"], result["draws"]) == (382, draws)
    assert result["psnr_of_mean"] < result["psnr_of_bicubic"] < 14, "two steps are too few"
    with Image.open(tmp_path / "unseen" / "enlarged.png") as picture:
        assert picture.width > 3 * picture.height
    assert not (tmp_path / "seen" / "evaluation.json").exists()


def test_pixels_are_clamped_where_a_run_is_drawn(world: World, digits: Path, tmp_path: Path) -> None:
    """In the grids of the training, and where the digits are measured; without it this model leaves their range."""
    config = adm(digits, tmp_path / "run", steps=2)
    config = replace(config, output=replace(config.output, sample_every=2, sample_steps=10))
    train(config, launch(0), world)
    run = Run(tmp_path / "run")
    output, labels = config.output, torch.arange(10).repeat(SampleGrid.rows)
    drawing = SamplerConfig(
        scheduler="dpmsolver++", steps=output.sample_steps, cfg=output.sample_cfg, clip=True, seed=config.seed
    )
    null = {"label": null_label(config.model)}
    clamped, free = (run.sample({"label": labels}, null, replace(drawing, clip=clip)) for clip in (True, False))
    assert free.abs().max() > 2
    with Image.open(next((tmp_path / "run" / "samples").glob("*.png"))) as drawn:
        assert ImageChops.difference(drawn, image_grid(clamped, rows=SampleGrid.rows)).getbbox() is None
        assert ImageChops.difference(drawn, image_grid(free, rows=SampleGrid.rows)).getbbox() is not None
    measured = run.draw(labels, replace(drawing, clip=None), progress=False)
    assert torch.equal(measured, clamped)
