"""A disk that is full for a while: with --output.failed_saves the run goes on, and later everything is whole.

Without it the run ends with one message, which names the file and a remedy.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import claim
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.evaluation import validation_files
from fastdiff.parallel.heartbeat import Heartbeat, stacks_path
from fastdiff.parallel.world import World
from fastdiff.train import main
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.loop import train
from fastdiff.training.state import TrainState
from tests.faults.test_storage_faults import train_with
from tests.support.independent_reader import leftovers, step_folder
from tests.support.injected.tiny_disk import fill, tiny_disk
from tests.support.runs import flags, held_out, intact, launch, losses, tiny
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.fault(7)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tiny_disk(tmp_path / "disk", 24) as folder:
        yield folder


@dataclass
class Filled(Callback):
    """The disk is full from one step to another; first the checkpoints of the steps ``kept`` are there, and no more."""

    disk: Path
    first: int
    last: int
    kept: tuple[int, ...] = ()

    def on_step(self, state: TrainState) -> None:
        if state.progress.steps == self.first:
            names = {f"step-{step:08d}" for step in self.kept}
            saved = self.disk / "run" / "checkpoints"
            if names:
                wait_until(lambda: {path.name for path in saved.iterdir()} == names, "the saves")
            fill(self.disk)
        if state.progress.steps == self.last:
            (self.disk / "ballast").unlink()


def config_of(digits: Path, disk: Path, steps: int, **changes: Any) -> RunConfig:
    """A run with every file that a run can have."""
    every: dict[str, Any] = {
        "ema": EmaConfig(rates=(0.9,), power_stds=(0.1,), snapshot_every=2),
        "validation": ValidationConfig(data=str(held_out(digits)), every=2, samples=64),
        "output__checkpoint_every": 1,
        "output__sample_every": 4,
        "output__sample_steps": 2,
    }
    return tiny(digits, disk / "run", steps=steps, **(every | changes))


def assert_whole(run: Path, steps: int) -> None:
    """Every record, picture and event is there once, and the newest saves are intact."""
    assert len(losses(run)) == steps
    every = list(range(2, steps + 1, 2))
    assert [json.loads(line)["step"] for line in (run / "validation.jsonl").read_text().splitlines()] == every
    assert validation_files.steps_of(run) == every
    assert all(len(validation_files.read(run, step).loss) == 64 for step in every)
    for step in range(4, steps + 1, 4):
        with Image.open(run / "samples" / f"step-{step:08d}.png") as picture:
            picture.load()
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, steps + 1))
    assert [event.step for event in events.Scalars("val_loss")] == every
    assert json.loads((run / "run.json").read_text())["config"]["seed"] == 0
    assert intact(run)[0] == steps
    for saved in sorted(run.glob("*/step-????????")):
        assert step_folder(saved)["progress"]["steps"] == int(saved.name.removeprefix("step-"))
    assert not leftovers(run)


def assert_calm(said: str, disk: Path) -> None:
    """No traceback, and one warning for the disk."""
    assert "Traceback" not in said
    waits = re.findall(r"WARNING (\S+): No space left on device; .* wait in memory until there is room", said)
    assert waits == [str(disk)]


@pytest.mark.nightly
def test_every_writer_outlasts_a_disk_that_is_full_for_forty_steps(
    world: World, digits: Path, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(digits, disk, 48, output__failed_saves=1000)
    train_with(world, config, Filled(disk, 3, 43, kept=(2, 3)))
    said = capfd.readouterr().err
    assert_calm(said, disk)
    assert re.search(r"the checkpoint of step \d+ failed; \d+ failed in a row, the run continues: no space on", said)
    assert_whole(disk / "run", 48)


@pytest.mark.nightly
def test_a_start_on_a_full_disk_goes_on(
    world: World, digits: Path, disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also one whose log has a record of a step that it takes again."""
    train(config_of(digits, disk, 4), launch(), world)
    shutil.rmtree(disk / "run" / "checkpoints" / "step-00000004")
    (disk / "run" / "run.json").unlink()
    fill(disk)
    config = config_of(digits, disk, 8, output__failed_saves=1000)
    train_with(world, config, Filled(disk, 4, 6), allow_change=("samples",))
    said = capfd.readouterr().err
    assert_calm(said, disk)
    assert_whole(disk / "run", 8)


@dataclass
class Filler:
    """Fills a disk when a file is created."""

    disk: Path
    name: str
    """Part of its path."""
    original: Callable[..., int] = os.open

    def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        found = self.original(path, flags, *args, **options)
        if self.name in str(path) and flags & os.O_CREAT:
            fill(self.disk)
        return found


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "metrics.jsonl",
        "events.out",
        "validation/step-00000002.npz",
        "samples/step-00000002.png",
    ],
)
def test_without_failed_saves_one_message_names_the_file_and_a_remedy(
    world: World,
    digits: Path,
    disk: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ema = EmaConfig(rates=(0.9,), power_stds=(0.1,))
    config = config_of(digits, disk, 4, ema=ema, output__checkpoint_every=0, output__sample_every=2)
    monkeypatch.setattr(os, "open", Filler(disk, name).open)
    assert main([*flags(config), "--deepspeed_config", "deepspeed_configs/zero1.json"]) == 74
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert len(re.findall("fastdiff: error", said)) == 1, said
    message = said.partition("fastdiff: error: ")[2]
    folder, _, file = name.rpartition("/")
    assert str(disk / "run" / folder) in message
    assert file in message
    assert re.search("free some space", message), message


def test_a_rank_without_room_for_its_stacks_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A disk without inodes: the folder of the stacks cannot be made."""
    with tiny_disk(tmp_path / "disk", 1, inodes=3) as disk:
        claim(disk / "run")()
        heartbeat = Heartbeat(disk / "run", 0, 0)
        heartbeat.close()
        assert not stacks_path(disk / "run", 0).exists()
    assert "the stacks of a hang would go to standard error" in capfd.readouterr().err


def test_a_lock_on_a_full_disk_is_a_lock(disk: Path) -> None:
    (disk / "run").mkdir()
    fill(disk)
    release = claim(disk / "run")
    with pytest.raises(Exception, match="is in use by another job"):
        claim(disk / "run")
    release()
    claim(disk / "run")()
