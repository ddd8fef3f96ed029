"""Images of prompts: those drawn while training, and those of ``fastdiff sample``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.cli.main import main
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.errors import ConfigError, NoMemoryError
from fastdiff.models.pretrained.tiny_pipeline import IMAGE_SIZE, build
from fastdiff.parallel import fragments
from fastdiff.parallel.world import World
from fastdiff.training.callbacks import previews
from fastdiff.training.loop import train
from tests.support.inputs.captioned_pictures import in_grid
from tests.support.inputs.text_runs import encode, text_run
from tests.support.nights import by_day
from tests.support.processes import run_ranks
from tests.support.runs import launch, tiny

PROMPTS = ("a red cat", "two birds")
DRAWN = ValidationConfig(prompts=PROMPTS, every=1, images_per_prompt=2, steps=3, guidance_scale=3.0)
SAME = ["--steps", "3", "--cfg", "3", "--per-prompt", "2", "--seed", "0"]


def plain(path: Path) -> Any:
    """The images of a grid of two prompts and two images each, by place."""
    whole, side = np.asarray(Image.open(path), int), 2 * IMAGE_SIZE + 2
    return np.stack([whole[y + 2 : y + side, x + 2 : x + side] for y in (0, side) for x in (0, side)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for kind in ("sd15", "sdxl"):
        encode(folder / f"{kind}-data", build(folder / kind, kind=kind))
    return folder


@pytest.mark.parametrize("kind", by_day(["sdxl"], "sd15"))
def test_images_while_training_are_those_of_the_averaged_weights(
    world: World, made: Path, tmp_path: Path, kind: Any
) -> None:
    """The finished run draws the same from the same seed, through the command and from the checkpoint."""
    run = tmp_path / "run"
    train(
        text_run(made / f"{kind}-data", made / kind, run, kind=kind, validation=DRAWN, optim__lr=0.05), launch(3), world
    )
    shown = [in_grid(run / "samples" / f"step-{step:08d}.png") for step in (1, 2)]
    assert np.array_equal(shown[0]["base"], shown[1]["base"])
    drawn = [shown[step - 1][f"step {step}"] for step in (1, 2)]
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert {tag for tag in events.Tags()["images"] if "log SNR" not in tag} == {f"validation/{one}" for one in PROMPTS}
    pairs = [shown.width for shown in events.Images("validation/two birds")]
    assert pairs == [2 * 8 + 2 * 2 * IMAGE_SIZE + 2] * 2, "enlarged to 64, beside the base"
    assert abs(drawn[0] - drawn[1]).max() > 1, "the weights have moved"
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    assert main(["sample", str(run), *prompts, *SAME, "--grid", str(tmp_path / "same.png")]) == 0
    assert abs(plain(tmp_path / "same.png") - drawn[1]).max() <= 1
    assert main(["sample", str(run), *prompts, *SAME, "--ema", "0.5", "--grid", str(tmp_path / "other.png")]) == 0
    assert abs(plain(tmp_path / "other.png") - drawn[1]).max() > 1
    negative = ["--negative-prompt", "a blue dog"]
    assert main(["sample", str(run), *prompts, *SAME, *negative, "--grid", str(tmp_path / "negative.png")]) == 0
    assert abs(plain(tmp_path / "negative.png") - drawn[1]).max() > 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("text", [], "give prompts with --prompt"),
        ("text", ["--classes", "0-3"], "give prompts with --prompt"),
        ("text", ["--prompt", "a cat", "--per-class", "2"], "--classes and --per-class are for models of classes"),
        ("digits", ["--prompt", "a cat"], "was trained with classes"),
        ("digits", ["--per-prompt", "3"], "need --prompt"),
        ("digits", ["--negative-prompt", "a dog"], "need --prompt"),
    ],
)
def test_flags_of_the_other_kind_are_refused(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], kind: str, options: list[str], message: str
) -> None:
    assert main(["sample", str(runs[kind]), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def runs(world: World, made: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    train(text_run(made / "sd15-data", made / "sd15", folder / "text", steps=1), launch(1), world)
    train(tiny(digits, folder / "digits", steps=1), launch(1), world)
    return {"text": folder / "text", "digits": folder / "digits"}


def _train_without_memory(world: World, config: RunConfig, start: Launch, where: str) -> str:
    """Train where the second rank has no memory for images, or for the copy of the network that draws them."""

    def full(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    if world.rank == 1:
        setattr(previews if where == "sample" else fragments.Room, where, full)
    try:
        train(config, start, world)
    except NoMemoryError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("where", ["sample", "reserve"])
def test_a_rank_that_cannot_draw_stops_all(made: Path, tmp_path: Path, where: str) -> None:
    """At one sample, before the first step; with more the ranks start again."""
    config = text_run(made / "sd15-data", made / "sd15", tmp_path / "run", validation=DRAWN, batch__micro=1)
    found = run_ranks(_train_without_memory, config, launch(3), where, ranks=2)
    assert found[0] == found[1]
    assert "out of memory in the averaged model beside the training" in found[0]
    assert "--validation.every 0" in found[0]


def test_images_that_could_never_be_drawn_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--validation.steps 2000: at most --objective.timesteps 1000"):
        text_run(tmp_path, tmp_path, tmp_path, validation=ValidationConfig(prompts=PROMPTS, steps=2000))
    with pytest.raises(ConfigError, match=r"--validation.every 0"):
        text_run(
            tmp_path, tmp_path, tmp_path, validation=DRAWN, objective__zero_terminal_snr=True,
            objective__prediction="epsilon",
        )  # fmt: skip
