"""A run on features with measured statistics: what it draws, shows and exports is decoded by them."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fastdiff.cli.main import main
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import ConfigError
from fastdiff.export.run import Choice, export
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.parallel.world import World
from fastdiff.sampling.npz import read_npz
from fastdiff.sampling.pixels import PixelDecoder
from fastdiff.sampling.run import Run
from fastdiff.sampling.text import as_bytes
from fastdiff.training.loop import train
from tests.support.inputs.autoencoders import tiny_autoencoder
from tests.support.inputs.encoding import classed, encode
from tests.support.runs import launch, tiny


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    classed(folder / "images", range(8), 64)
    encode(folder / "images", folder / "data", tiny_autoencoder(folder / "rae", "rae", statistics=False), resolution=64)
    model = DiTConfig(size=4, channels=64, patch=1, hidden=32, depth=1, heads=2, classes=2)
    train(tiny(folder / "data", folder / "run", steps=2, model=model), launch(0), world)
    shutil.move(folder / "data", folder / "gone")  # the run keeps the statistics, so its data need not be there
    return folder


def test_what_is_drawn_is_decoded_by_the_statistics_of_the_data(trained: Path, tmp_path: Path) -> None:
    run = Run(trained / "run")
    info = DatasetInfo.read(trained / "gone")
    latents = torch.randn(2, 64, 4, 4)
    decoder = PixelDecoder(run.config, None, torch.device("cpu"), run.encoded_by, run.statistics)
    shift, scale = (torch.tensor(each).view(64, 4, 4) for each in (info.normalisation.shift, info.normalisation.scale))
    module = Pretrained(str(trained / "rae")).autoencoder().module
    with torch.no_grad():
        expected = module.decode((latents / scale + shift) / (1 + 1e-5)).sample * 2 - 1  # type: ignore[operator]
    torch.testing.assert_close(decoder.decoded(latents), expected.clamp(-1, 1), rtol=1e-4, atol=1e-4)
    drawn = tmp_path / "drawn.npz"
    sampler = ["--steps", "2", "--cfg", "1"]
    assert main(["sample", str(trained / "run"), "--npz", str(drawn), "--num", "4", *sampler]) == 0
    images, labels = read_npz(drawn)
    assert images.shape == (4, 64, 64, 3)
    condition = {"label": torch.from_numpy(np.asarray(labels))}
    latents = run.sample(condition, {"label": torch.tensor(2)}, SamplerConfig(steps=2, cfg=1.0), batch=4)
    assert np.abs(as_bytes(decoder.decoded(latents)).permute(0, 2, 3, 1).numpy().astype(int) - images).max() <= 1


def test_an_export_has_the_statistics_and_no_pipeline_that_ignores_them(trained: Path, tmp_path: Path) -> None:
    export(trained / "run", tmp_path / "out", Choice(format="diffusers"))
    assert not (tmp_path / "out" / "vae").exists()
    assert not (tmp_path / "out" / "model_index.json").exists()
    found, info = load_file(tmp_path / "out" / "latent_statistics.safetensors"), DatasetInfo.read(trained / "gone")
    np.testing.assert_array_equal(found["shift"], np.float32(info.normalisation.shift))
    np.testing.assert_array_equal(found["scale"], np.float32(info.normalisation.scale))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Latents | (z - shift) * scale of the autoencoder's z, both in `latent_statistics.safetensors`" in card


def test_another_autoencoder_is_refused(trained: Path, tmp_path: Path) -> None:
    run = Run(trained / "run")
    other = tiny_autoencoder(tmp_path / "kl", "kl4")
    with pytest.raises(ConfigError, match="decodes 4 channels, the model draws 64"):
        PixelDecoder(run.config, str(other), torch.device("cpu"), run.encoded_by, run.statistics)
    assert run.statistics is not None
    cut = replace(run.statistics, shift=run.statistics.shift[:16], scale=run.statistics.scale[:16])
    with pytest.raises(ConfigError, match="16 values of shift"):
        PixelDecoder(run.config, None, torch.device("cpu"), run.encoded_by, cut)
