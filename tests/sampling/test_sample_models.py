"""Sample sets of every kind of model: without classes, of small images, of prompts and of latents."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from fastdiff.cli.main import main
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from fastdiff.models.load import null_label
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import IMAGE_SIZE, build
from fastdiff.parallel.launcher import Place
from fastdiff.parallel.world import World
from fastdiff.sampling.conditions import SampleRequest
from fastdiff.sampling.npz import comment_of, read_npz
from fastdiff.sampling.pixels import PixelDecoder, autoencoder_of
from fastdiff.sampling.run import Run
from fastdiff.sampling.sample_set import SetOptions, draw_set
from fastdiff.sampling.solvers import sample
from fastdiff.sampling.text import as_bytes
from fastdiff.training.loop import train
from tests.support.inputs.text_runs import encode, text_run
from tests.support.runs import launch, newest, tiny

ADM = AdmConfig(
    channels=1, size=8, width=16, channel_mult=(1, 1), res_blocks=1, attention_resolutions=(4,), heads=2,
    norm_num_groups=8,
)  # fmt: skip


def adm(world: World, data: Path, folder: Path, **changes: Any) -> Path:
    train(tiny(data, folder, steps=2, model=dataclasses.replace(ADM, **changes)), launch(0), world)
    return folder


def channels_last(latents: Tensor) -> Any:
    return as_bytes(latents).permute(0, 2, 3, 1).numpy()


def refused(arguments: list[str | Path], capsys: Any) -> str:
    assert main(["sample", *map(str, arguments)]) in (2, 65)
    error: str = capsys.readouterr().err
    return error


# ---- without classes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unconditional(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adm(world, digits, tmp_path_factory.mktemp("unconditional") / "run")


def test_a_model_without_classes_draws_numbers_of_images(unconditional: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    command = ["sample", str(unconditional), "--num", "10", "--batch", "4", "--steps", "3", "--npz", str(out)]
    assert main(command) == 0
    images, labels = read_npz(out)
    assert labels is None
    run = Run(unconditional)
    latents = sample(
        lambda noisy, time, **_: run.model(noisy, time),  # told nothing of classes
        run.config.objective,
        {"label": torch.zeros(10, dtype=torch.int64)},
        SamplerConfig(steps=3, clip=True),
        shape=(1, 8, 8),
        null={},
    )
    assert abs(images.astype(int) - channels_last(latents)).max() <= 1


def test_options_of_classes_are_refused_without_classes(unconditional: Path, tmp_path: Path, capsys: Any) -> None:
    npz = [unconditional, "--npz", tmp_path / "out.npz"]
    assert "--cfg 2: " in (error := refused([*npz, "--num", "2", "--cfg", "2"], capsys))
    assert "has no classes to guide to" in error
    assert "--classes 3: the model was trained with no classes" in refused([*npz, "--classes", "3"], capsys)
    assert "trained with no classes; use --num" in refused([*npz, "--per-class", "2"], capsys)
    assert "--classes 3: the model was trained with no classes" in refused([unconditional, "--classes", "3"], capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_grid_of_a_model_without_classes(unconditional: Path, tmp_path: Path) -> None:
    assert main(["sample", str(unconditional), "--steps", "2", "--grid", str(tmp_path / "grid.png")]) == 0
    assert (tmp_path / "grid.png").exists()


# ---- classes that were never dropped -------------------------------------------------------------------


def undropped(world: World, data: Path, folder: Path, **changes: Any) -> Path:
    train(tiny(data, folder, steps=1, **{"objective__condition_dropout": 0.0, **changes}), launch(0), world)
    return folder


def test_without_dropped_classes_there_is_no_guidance(world: World, digits: Path, tmp_path: Path, capsys: Any) -> None:
    folder = undropped(world, digits, tmp_path / "run")
    run = Run(folder)
    assert run.decided(SamplerConfig()).cfg == 1.0
    assert run.decided(SamplerConfig(cfg=1.0)).cfg == 1.0
    for options in (["--npz", str(tmp_path / "out.npz"), "--num", "2"], ["--grid", str(tmp_path / "out.png")]):
        for cfg in ("3", "0"):
            error = refused([folder, *options, "--cfg", cfg], capsys)
            assert f"--cfg {cfg}: {folder} was trained with --objective.condition_dropout 0" in error
            assert "leave --cfg out, or train with --objective.condition_dropout 0.1" in error
        error = refused([folder, *options, "--cfg-channels", "1"], capsys)
        assert "--cfg-channels 1: there is no guidance with --cfg 1, the default of this model" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_dropped_classes_are_guided_to(world: World, digits: Path, tmp_path: Path) -> None:
    run = Run(undropped(world, digits, tmp_path / "run", objective__condition_dropout=0.1))
    assert run.decided(SamplerConfig()).cfg == 1.5
    assert run.decided(SamplerConfig(cfg=3.0, cfg_channels=1)) == SamplerConfig(
        cfg=3.0, cfg_channels=1, clip=True, shift=1.0
    )


def test_a_fine_tuned_model_may_have_learned_to_do_without_before(world: World, digits: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file(build_model(tiny(digits, tmp_path / "run").model).state_dict(), weights)
    pretrained = {"pretrained__path": str(weights), "pretrained__weights": True}
    run = Run(undropped(world, digits, tmp_path / "run", **pretrained))
    assert run.decided(SamplerConfig()).cfg == 1.0
    assert run.decided(SamplerConfig(cfg=3.0)).cfg == 3.0


# ---- small images that are enlarged --------------------------------------------------------------------


@pytest.fixture(scope="module")
def enlarging(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adm(world, digits, tmp_path_factory.mktemp("enlarging") / "run", classes=10, low_res_size=4)


def base(path: Path, side: int = 4, labels: Any = range(10)) -> Path:
    """Ten small images of noise, and perhaps their classes."""
    images = np.random.default_rng(0).integers(0, 256, (10, side, side, 1), dtype=np.uint8)
    np.savez(path, images) if labels is None else np.savez(path, images, np.array(labels))
    return path


def test_each_image_enlarges_its_own(enlarging: Path, tmp_path: Path) -> None:
    small, out = base(tmp_path / "base.npz"), tmp_path / "out.npz"
    options = ["--batch", "4", "--steps", "3", "--cfg", "2", "--npz", str(out)]
    assert main(["sample", str(enlarging), "--low-res", str(small), *options]) == 0
    images, labels = read_npz(out)
    assert images.shape == (10, 8, 8, 1)
    assert labels is not None
    assert labels.tolist() == list(range(10))
    run = Run(enlarging)
    pixels = torch.from_numpy(read_npz(small)[0]).permute(0, 3, 1, 2)
    latents = sample(
        run.model,
        run.config.objective,
        {"label": torch.arange(10), "low_res": pixels / 127.5 - 1},
        SamplerConfig(steps=3, cfg=2.0, clip=True),
        shape=(1, 8, 8),
        null={"label": null_label(run.config.model)},
    )
    assert abs(images.astype(int) - channels_last(latents)).max() <= 1
    unguided = tmp_path / "first.npz"
    assert main(["sample", str(enlarging), "--low-res", str(small), "--num", "3", "--npz", str(unguided)]) == 0
    assert len(read_npz(unguided)[0]) == 3


def test_small_images_that_do_not_fit_are_refused(
    enlarging: Path, unconditional: Path, tmp_path: Path, capsys: Any
) -> None:
    good, run = base(tmp_path / "base.npz"), [enlarging, "--npz", tmp_path / "out.npz"]
    assert "trained to enlarge images of 4 x 4; give them with --low-res" in refused([*run, "--num", "3"], capsys)
    assert "images; give them with --low-res, and --npz" in refused([enlarging], capsys)
    assert "was not trained to enlarge" in refused(
        [unconditional, "--npz", tmp_path / "out.npz", "--low-res", good], capsys
    )
    assert "cannot be combined with --low-res" in refused([*run, "--low-res", good, "--classes", "3"], capsys)
    assert "has 10 images; leave it out" in refused([*run, "--low-res", good, "--num", "11"], capsys)
    bad = [
        (base(tmp_path / "large.npz", side=5), "has images of (5, 5, 1), the model enlarges (4, 4, 1)"),
        (base(tmp_path / "no.npz", labels=None), "has no labels (arr_1), and the model was trained with 10 classes"),
        (base(tmp_path / "high.npz", labels=range(1, 11)), "has labels from 1 to 10, the model 0-9"),
        (base(tmp_path / "short.npz", labels=range(9)), "arr_1 int64 (9,); expected uint8 [N, H, W, C]"),
        (tmp_path / "missing.npz", "missing.npz: it is not a file"),
        (tmp_path / "text.npz", "text.npz"),
        (tmp_path / "other.npz", "other.npz has no arr_0; expected the images there"),
        (tmp_path / "pickle.npz", "holds Python objects (a pickle)"),
    ]
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    np.savez(tmp_path / "pickle.npz", np.array([{}]))
    for path, message in bad:
        assert message in refused([*run, "--low-res", path], capsys)
    assert not (tmp_path / "out.npz").exists()


def test_other_small_images_do_not_go_on(enlarging: Path, tmp_path: Path, capsys: Any) -> None:
    small, out = base(tmp_path / "base.npz"), tmp_path / "out.npz"
    command: list[str | Path] = [enlarging, "--low-res", small, "--steps", "1", "--npz", out]
    assert main(["sample", *map(str, command)]) == 0
    base(small, labels=[3] * 10)
    assert "exists, drawn with another plan (low_res: " in refused(command, capsys)


# ---- latents -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipeline") / "sd15")


@pytest.fixture(scope="module")
def latents(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DiT on noise in the shape of latents."""
    folder = tmp_path_factory.mktemp("latents")
    encode_synthetic(folder / "data", shape=(4, 8, 8), samples=32, classes=10)
    model = DiTConfig(depth=1, hidden=16, heads=2, patch=2, channels=4, size=8, classes=10)
    train(tiny(folder / "data", folder / "run", steps=1, model=model), launch(0), world)
    return folder / "run"


def test_latents_are_decoded(latents: Path, pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    run = Run(latents)
    options = SetOptions(out=out, batch=3, autoencoder=str(pipeline))
    for rank in range(2):
        draw_set(run, SampleRequest(num=5), SamplerConfig(steps=2, cfg=1.0), options, Place(rank, 2))
    images, labels = read_npz(out)
    assert images.shape == (5, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert labels is not None
    null = {"label": null_label(run.config.model)}
    drawn = run.sample(
        {"label": torch.from_numpy(labels)}, null, SamplerConfig(steps=2, cfg=1.0, clip=False), progress=False
    )
    assert abs(images.astype(int) - channels_last(Pretrained(str(pipeline)).autoencoder().decode(drawn))).max() <= 1


def test_latents_without_an_autoencoder_are_no_images(latents: Path, tmp_path: Path, capsys: Any) -> None:
    command = [latents, "--num", "3", "--npz", tmp_path / "out.npz"]
    error = refused(command, capsys)
    assert "their autoencoder is not known; name it with --autoencoder" in error
    assert "trained on 4 channels, and pixels have 1 or 3" in refused([*command, "--autoencoder", "identity"], capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_run_keeps_the_autoencoder_of_its_data(
    world: World, latents: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its data may be gone; an autoencoder that has changed meanwhile is told."""
    (tmp_path / "vae").symlink_to(pipeline)
    data = tmp_path / "data"
    shutil.copytree(Run(latents).config.data.path, data)
    info, digest = DatasetInfo.read(data), Pretrained(str(pipeline)).digest("vae")
    made_by = dataclasses.replace(info.provenance, autoencoder="vae", autoencoder_digest=digest)
    dataclasses.replace(info, provenance=made_by).write(data)
    monkeypatch.chdir(tmp_path)  # where the data set was encoded
    model = DiTConfig(depth=1, hidden=16, heads=2, patch=2, channels=4, size=8, classes=10)
    config = tiny(data, tmp_path / "run", steps=1, model=model)
    train(config, launch(0), world)
    train(dataclasses.replace(config, samples=32), launch(0), world)
    shutil.rmtree(data)
    monkeypatch.chdir(tmp_path.parent)
    assert newest(tmp_path / "run").manifest["autoencoder"] == digest
    command = ["sample", str(tmp_path / "run"), "--steps", "1"]
    capsys.readouterr()
    assert main([*command, "--num", "2", "--npz", str(tmp_path / "out.npz")]) == 0
    assert read_npz(tmp_path / "out.npz")[0].shape == (2, IMAGE_SIZE, IMAGE_SIZE, 3)
    grid = ["--per-class", "1", "--classes", "0-1", "--grid", str(tmp_path / "grid.png")]
    assert main([*command, *grid]) == 0
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.width > 2 * IMAGE_SIZE
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "whole"), "--format", "diffusers"]) == 0
    assert (tmp_path / "whole" / "model_index.json").is_file()
    assert "is not the one that encoded" not in capsys.readouterr().err

    (tmp_path / "vae").unlink()
    (tmp_path / "vae").symlink_to(build(tmp_path / "other", seed=1))
    assert main([*command, "--num", "2", "--npz", str(tmp_path / "2.npz")]) == 0
    assert f"is not the one that encoded the training data ({digest[:12]})" in capsys.readouterr().err
    (tmp_path / "vae").unlink()
    assert main([*command, *grid]) == 0
    assert "shows the latents themselves, because their autoencoder is not here" in capsys.readouterr().err


def test_the_autoencoder_of_an_older_run_is_that_of_its_data(latents: Path, pipeline: Path, tmp_path: Path) -> None:
    config = Run(latents).config
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, autoencoder=None))
    info = DatasetInfo.read(config.data.path)
    made_by = dataclasses.replace(info.provenance, autoencoder=str(pipeline))
    tmp_path.joinpath("data").mkdir()
    dataclasses.replace(info, provenance=made_by).write(tmp_path / "data")
    encoded = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(tmp_path / "data")))
    assert autoencoder_of(encoded) == str(pipeline)
    assert PixelDecoder(encoded, None, torch.device("cpu")).shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    gone = dataclasses.replace(config.data, path=str(tmp_path / "gone"))
    assert autoencoder_of(dataclasses.replace(config, data=gone)) is None
    assert autoencoder_of(dataclasses.replace(config, data=gone, model=ADM)) == "identity"


def test_the_decoder_decides_whether_a_set_is_clamped(unconditional: Path, tmp_path: Path) -> None:
    """Also where the data, which would tell, are on another machine."""
    run = Run(unconditional)
    model = DiTConfig(depth=1, hidden=16, heads=2, patch=2, channels=1, size=8)
    gone = dataclasses.replace(run.config.data, path=str(tmp_path / "gone"), autoencoder=None)
    run.config = dataclasses.replace(run.config, data=gone, model=model)
    assert run.decided(SamplerConfig()).clip is False
    for name, asked, clamped in (("default", None, True), ("off", False, False)):
        out = tmp_path / f"{name}.npz"
        draw_set(
            run, SampleRequest(num=2), SamplerConfig(steps=2, clip=asked), SetOptions(out=out, autoencoder="identity")
        )
        assert json.loads(comment_of(out))["clip"] is clamped


def test_an_autoencoder_of_other_channels_is_refused(unconditional: Path, pipeline: Path) -> None:
    with pytest.raises(ConfigError, match="decodes 4 channels, the model draws 1"):
        PixelDecoder(Run(unconditional).config, str(pipeline), torch.device("cpu"))


def test_prompts(world: World, pipeline: Path, tmp_path: Path, capsys: Any) -> None:
    data, out = encode(tmp_path / "data", pipeline), tmp_path / "out.npz"
    train(text_run(data, pipeline, tmp_path / "run", optim__lr=0.05), launch(0), world)
    prompts = ["--prompt", "a red cat", "--prompt", "two birds"]
    command: list[str | Path] = [tmp_path / "run", *prompts, "--steps", "2", "--batch", "3", "--npz", out]
    assert main(["sample", *map(str, command), "--per-prompt", "2"]) == 0
    images, labels = read_npz(out)
    assert labels is None
    run = Run(tmp_path / "run")
    condition, null = run.embedded(["a red cat", "two birds"] * 2, negative=None)
    drawn = run.sample(condition, null, run.sampler(steps=2), progress=False)
    expected = channels_last(Pretrained(str(pipeline)).autoencoder().decode(drawn))
    assert images.shape == expected.shape == (4, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert abs(images.astype(int) - expected).max() <= 1
    assert "--num is not for text-to-image models; set" in refused([*command, "--num", "7"], capsys)
    npz = ["--npz", tmp_path / "more.npz"]
    assert "trained with captions; give prompts with --prompt" in refused(
        [tmp_path / "run", "--num", "7", *npz], capsys
    )


def test_pixels_of_a_data_set_come_back() -> None:
    """x0 is uint8 / 127.5 - 1."""
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(as_bytes(levels / 127.5 - 1), levels)
