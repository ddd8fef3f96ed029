"""A fine-tuning draws its prompts by the base model once, and shows these pictures beside every later one."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff.cli.main import main
from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.models.load import build_network, pretrained, resolve
from fastdiff.models.pretrained.tiny_pipeline import IMAGE_SIZE, build
from fastdiff.parallel.world import World
from fastdiff.sampling.pipeline_sampler import pipeline_sampler, with_scheduler
from fastdiff.sampling.solvers import sample
from fastdiff.sampling.text import as_bytes, encode_prompts, repeated
from fastdiff.training.loop import train
from tests.support.inputs.captioned_pictures import in_grid
from tests.support.inputs.text_runs import encode, text_run
from tests.support.nights import by_day
from tests.support.processes import run_ranks
from tests.support.runs import launch

PROMPTS = ("a red cat", "two birds")
DRAWN = ValidationConfig(prompts=PROMPTS, every=1, images_per_prompt=2, steps=3)
LORA = LoraConfig(rank=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    encode(folder / "data", build(folder / "pipeline"))
    return folder


def config(made: Path, run: Path, *, steps: int = 1, lora: LoraConfig | None = None, **changes: Any) -> RunConfig:
    adapted = {} if lora is None else {"lora": lora}
    return text_run(
        made / "data", made / "pipeline", run, steps=steps, validation=DRAWN, optim__lr=0.05,
        output__checkpoint_every=1, **adapted, **changes,
    )  # fmt: skip


def by_hand(config: RunConfig) -> Any:
    """The pictures of the pretrained network, ``[N, H, W, 3]``."""
    config = resolve(replace(config, lora=LoraConfig()))
    pipeline, model = pretrained(config.pretrained), config.model
    condition, null = encode_prompts(pipeline, PROMPTS, model)
    usual = pipeline_sampler(config)
    assert usual is not None
    sampler = with_scheduler(config.sampler(usual, steps=3), config)
    latents = sample(
        build_network(config).eval(), config.objective, repeated(condition, 2), sampler,
        shape=(model.channels, model.size, model.size), null=null,
    )  # fmt: skip
    return as_bytes(pipeline.autoencoder().decode(latents)).permute(0, 2, 3, 1).numpy().astype(int)


def shown(run: Path, step: int) -> dict[str, Any]:
    """The columns of the picture of a step, without the enlargement to 64 pixels."""
    return {name: found[:, ::2, ::2] for name, found in in_grid(run / "samples" / f"step-{step:08d}.png").items()}


@pytest.mark.parametrize("lora", [None, LORA, replace(LORA, kind="dora")], ids=["full", "lora", "dora"])
@pytest.mark.parametrize("stage", by_day([0, 3], 1, 2))
def test_the_base_stands_beside_the_pictures_of_every_step(
    world: World, made: Path, tmp_path: Path, lora: LoraConfig | None, stage: int
) -> None:
    start = config(made, tmp_path / "run", steps=2, lora=lora)
    train(start, launch(stage), world)
    first, second = shown(tmp_path / "run", 1), shown(tmp_path / "run", 2)
    assert (list(first), list(second)) == (["base", "step 1"], ["base", "step 2"])
    assert np.array_equal(first["base"], second["base"])
    assert abs(first["base"] - by_hand(start)).max() <= 1
    assert abs(second["step 2"] - second["base"]).max() > 1, "the weights have moved"
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    beside = ["--steps", "3", "--per-prompt", "2", "--beside-base", "--grid", str(tmp_path / "run" / "again.png")]
    assert main(["sample", str(tmp_path / "run"), *prompts, *beside]) == 0
    drawn = np.asarray(Image.open(tmp_path / "run" / "again.png"), int)
    there = np.asarray(Image.open(tmp_path / "run" / "samples" / "step-00000002.png"), int)
    assert abs(drawn - there).max() <= 1


def _trained(world: World, start: RunConfig, options: Launch) -> None:
    train(start, options, world)


def test_two_ranks_draw_the_base_of_sharded_weights(made: Path, tmp_path: Path) -> None:
    start = config(made, tmp_path / "run")
    run_ranks(_trained, start, launch(3), ranks=2)
    assert abs(shown(tmp_path / "run", 1)["base"] - by_hand(start)).max() <= 1


def repaint(path: Path, cut: int = 0) -> None:
    """Make a picture black, with so many rows less, and keep what it says of itself."""
    from PIL.PngImagePlugin import PngInfo

    with Image.open(path) as old:
        about = PngInfo()
        for keyword, text in old.text.items():  # type: ignore[attr-defined]
            about.add_text(keyword, text)
        Image.new("RGB", (old.width, old.height - cut)).save(path, pnginfo=about)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_resumed_run_takes_the_pictures_of_its_folder_or_draws_them_anew(
    world: World, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: LoraConfig | None
) -> None:
    run = tmp_path / "run"
    base = run / "samples" / "base.png"
    train(config(made, run, lora=lora), launch(0), world)
    expected = shown(run, 1)["base"]
    repaint(base)
    train(config(made, run, steps=2, lora=lora), launch(0), world)
    assert shown(run, 2)["base"].max() == 0, "not drawn again"

    base.unlink()
    train(config(made, run, steps=3, lora=lora), launch(0), world)
    assert abs(shown(run, 3)["base"] - expected).max() <= 1
    capsys.readouterr()
    other = replace(DRAWN, prompts=(PROMPTS[1], "a blue dog", PROMPTS[0]))
    train(replace(config(made, run, steps=4, lora=lora), validation=other), launch(0), world)
    assert "pictures of the base model are drawn anew: --validation.prompts changed" in capsys.readouterr().err
    assert abs(shown(run, 4)["base"].reshape(2, 3, -1)[0, 0] - expected.reshape(2, 2, -1)[0, 1]).max() > 1, "its noise"
    base.write_bytes(b"damaged")
    train(replace(config(made, run, steps=5, lora=lora), validation=other), launch(0), world)
    assert np.array_equal(shown(run, 5)["base"], shown(run, 4)["base"])
    repaint(base, cut=1)
    train(replace(config(made, run, steps=6, lora=lora), validation=other), launch(0), world)
    assert np.array_equal(shown(run, 6)["base"], shown(run, 4)["base"]), "no grid, so it was drawn again"


def test_a_base_that_cannot_be_drawn_any_more_is_told(
    world: World, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = shutil.copytree(made / "pipeline", tmp_path / "pipeline")
    start = {"pretrained__path": str(pipeline)}
    train(config(made, tmp_path / "run", **start), launch(0), world)
    name = "unet/diffusion_pytorch_model.safetensors"
    shutil.copyfile(build(tmp_path / "other", seed=1) / name, pipeline / name)
    train(config(made, tmp_path / "run", steps=2, **start), launch(0), world)
    assert list(shown(tmp_path / "run", 2)) == ["base", "step 2"], "kept from the first step"
    again = replace(config(made, tmp_path / "run", steps=3, **start), validation=replace(DRAWN, images_per_prompt=1))
    capsys.readouterr()
    train(again, launch(0), world)
    said = " ".join(capsys.readouterr().err.split())
    assert "the pictures have no column of the base model" in said
    assert "has changed since then" in said
    assert list(shown(tmp_path / "run", 3)) == ["step 3"]


def test_other_runs_keep_their_picture(world: World, made: Path, tmp_path: Path) -> None:
    """Trained from random weights, with the pipeline for its captions alone."""
    run = tmp_path / "run"
    start = config(made, run, pretrained__weights=False, objective__prediction="epsilon")
    train(start, launch(0), world)
    side = 2 * IMAGE_SIZE + 2
    with Image.open(run / "samples" / "step-00000001.png") as picture:
        assert (picture.size, picture.text) == ((2 * side + 2, 2 * side + 2), {})  # type: ignore[attr-defined]
    assert not (run / "samples" / "base.png").exists()
    assert main(["sample", str(run), "--prompt", "a cat", "--beside-base", "--grid", str(tmp_path / "a.png")]) == 2
    assert main(["sample", str(run), "--beside-base"]) == 2


def test_a_picture_of_a_quantized_base_is_that_of_the_training(world: World, made: Path, tmp_path: Path) -> None:
    """Its adapter is switched off, and its 4 bits stay."""
    start = config(made, tmp_path / "run", lora=replace(LORA, quantize="4bit"))
    train(start, launch(0), world)
    difference = abs(shown(tmp_path / "run", 1)["base"] - by_hand(start))
    assert difference.max() > 1
    assert torch.tensor(difference).float().mean() < 30
