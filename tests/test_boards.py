"""TensorBoard and wandb are shown what a run measures, as a user finds it in their files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.boards import Boards, require_installed
from fastdiff.dist import World
from fastdiff.errors import ConfigError
from fastdiff.train import train
from tests.runs import launch, losses, records, tiny


def test_tensorboard_shows_the_numbers_of_the_log(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", steps=3)
    train(config, launch(0), world)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = events.Scalars("loss")
    assert [event.step for event in shown] == [1, 2, 3]
    assert [event.value for event in shown] == pytest.approx(losses(tmp_path / "run"))
    assert {"lr", "grad_norm", "samples_per_s"} <= set(events.Tags()["scalars"])


def test_tensorboard_hides_the_steps_after_a_resume(world: World, digits: Path, tmp_path: Path) -> None:
    """The second start repeats step 3, whose first event must go, and no other."""
    run = tmp_path / "run"
    train(tiny(digits, run, steps=3, output__checkpoint_every=2), launch(0), world)
    (run / "checkpoints" / "step-00000003").rename(tmp_path / "lost")
    train(tiny(digits, run, steps=4, output__checkpoint_every=2), launch(0, allow_change=("samples",)), world)
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_no_board_is_asked_for(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=1, output__report_to=()), launch(0), world)
    assert len(records(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_missing_wandb_is_refused_before_anything_is_built(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else known(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"pip install 'fastdiff\[wandb\]'"):
        train(tiny(digits, tmp_path / "run", steps=1, output__report_to=("wandb",)), launch(0), world)
    assert not (tmp_path / "run").exists()
    require_installed(("tensorboard",))


def test_wandb_gets_numbers_and_images(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wandb, offline: what it would upload is read back from its own file."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
    state.folder.mkdir()
    pixels = torch.arange(2 * 3 * 64, dtype=torch.uint8).view(2, 3, 8, 8)
    with Boards(state) as boards:  # type: ignore[arg-type]
        boards.scalars({"loss": 0.25, "lr": 1e-4}, 7)
        boards.images({"a red cat": pixels}, 7)
    wandb.teardown()  # waits until its process has written all
    found = _wandb_history(state.folder)
    assert found["loss"] == 0.25
    assert found["_step"] == 7
    assert found["validation.captions"] == ["a red cat", "a red cat"]
    assert len(list(state.folder.glob("wandb/offline-run-*/files/media/images/*.png"))) == 2
    first = (state.folder / "wandb-id").read_text()
    with Boards(state):  # type: ignore[arg-type]
        pass
    assert (state.folder / "wandb-id").read_text() == first, "a resume goes on with the same run"


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_is_told_how_a_run_ended(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
    state.folder.mkdir()
    with suppress(ConfigError), Boards(state) as boards:  # type: ignore[arg-type]
        boards.scalars({"loss": 0.25}, 1)
        if failed:
            raise ConfigError("what ends a run")
    wandb.teardown()
    codes = [record.exit.exit_code for record in _wandb_records(state.folder) if record.HasField("exit")]
    assert codes == [int(failed)]


class _State:
    """What the boards read of a run."""

    def __init__(self, config: Any, world: World) -> None:
        self.config, self.world = config, world
        self.folder = Path(config.output.folder)


def _wandb_history(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in _wandb_records(folder):
        for item in record.history.item:
            found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


def _wandb_records(folder: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    for data in _log_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def _log_records(log: bytes) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB behind its 7 bytes: blocks of 32 KiB, records cut at their ends."""
    place, parts, full_or_last = 7, b"", (1, 4)
    while place + 7 <= len(log):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        parts += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in full_or_last:
            yield parts
            parts = b""
