"""TensorBoard and wandb show the numbers of a run, read back from the files that they write."""

import importlib.util
import io
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.buffered_writes import WholeFiles
from fastdiff.config.trackers import require_usable
from fastdiff.errors import ConfigError, FastdiffError, Preempted
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.training.callbacks import loss_map
from fastdiff.training.loop import train
from fastdiff.training.trackers import build, tensorboard, wandb_run
from fastdiff.training.trackers.background import BackgroundTracker
from fastdiff.training.trackers.build import Trackers
from fastdiff.training.trackers.tags import shown
from tests.support.injected.tiny_disk import fill, tiny_disk
from tests.support.runs import launch, losses, records, tiny
from tests.support.scripts import TRAIN, run_script
from tests.support.servers import loopback
from tests.support.servers.loopback import Quiet


def test_tensorboard_shows_numbers_pictures_and_the_configuration(world: World, digits: Path, tmp_path: Path) -> None:
    secret = "https://me:hunter2@host/fastdiff"
    config = tiny(digits, tmp_path / "run", steps=4, output__sample_every=2, output__sample_steps=2)
    train(replace(config, output=replace(config.output, project=secret)), launch(0), world)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"images": 0}).Reload()
    tags = events.Tags()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses(tmp_path / "run"), start=1)
    ]
    assert {"lr", "grad_norm", "samples_per_s"} <= set(tags["scalars"])
    (grid,) = (tag for tag in tags["images"] if tag.startswith("samples/"))
    assert [event.step for event in events.Images(grid)] == [2, 4]
    drawn = events.Images(grid)[-1].encoded_image_string
    kept = (tmp_path / "run" / "samples" / "step-00000004.png").read_bytes()
    assert _pixels(drawn).tolist() == _pixels(kept).tolist()
    assert [event.step for event in events.Images("loss/by log SNR, over the steps")] == [2, 4]
    assert {"loss/depth 0..0.25", "loss/depth 0.75..1", "loss/log_snr -1.25..0"} <= set(tags["scalars"])
    assert not any("snr_" in tag.replace("log_snr", "") or "_q" in tag for tag in tags["scalars"])
    assert "loss_snr_07" in records(tmp_path / "run")[0], "the names of metrics.jsonl are a contract"
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("configuration"))
    assert '"report_to"' in text
    assert "hunter2" not in text


def _pixels(content: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def test_the_heat_map_shows_where_the_loss_falls() -> None:
    """Every row from its largest loss (yellow) to its smallest (blue); grey where no sample fell."""
    lines = [{f"loss_snr_{n:02d}": (None if n == 3 else 10.0 * 0.9**step) for n in range(16)} for step in range(50)]
    values = loss_map.by_level(lines)
    assert values.shape == (16, 50)
    assert loss_map.by_level([]).shape == (16, 0)
    assert loss_map.by_level(lines * 20).shape == (16, 240)
    pixels = loss_map.picture(values)[0]
    first, last = pixels[:, 7, 112].tolist(), pixels[:, 7, -2].tolist()
    assert (first, last) == ([240, 249, 33], [13, 8, 135])
    empty = pixels[:, (15 - 3) * 14 + 7, 112:]
    assert empty.unique().tolist() == [225]


def test_tags_name_the_ranges() -> None:
    assert [shown(f"loss_snr_{n:02d}") for n in (0, 7, 15)] == [
        "loss/log_snr below -8.75", "loss/log_snr -1.25..0", "loss/log_snr above 8.75",
    ]  # fmt: skip
    assert shown("mse_q3") == "mse/depth 0.75..1"
    assert shown("val_loss_snr_08") == "val_loss/log_snr 0..1.25"
    assert [shown(name) for name in ("loss", "lr", "loss_scale", "val_loss_se")] == [
        "loss", "lr", "loss_scale", "val_loss_se",
    ]  # fmt: skip


def test_trackio_gets_numbers_images_and_the_configuration(digits: Path, tmp_path: Path) -> None:
    """The real trackio, on this machine, in a process whose TRACKIO_DIR is a new folder; a resume goes on."""
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    run = tmp_path / "run"
    for steps in ("2", "3"):
        flags = [
            "--preset", "digits", "--data.path", str(digits), "--steps", steps, "--batch.samples", "16",
            "--model.depth", "1", "--model.hidden", "32", "--model.heads", "2",
            "--output.folder", str(run), "--output.log-every", "1", "--output.sample-every", "2",
            "--output.sample-steps", "2", "--output.report-to", "trackio", "--output.project", "proved",
            "--allow-change", "samples",
        ]  # fmt: skip
        done = run_script(TRAIN, *flags, **environment)
        assert done.code == 0, done.output
        assert "trackio show --project proved" in done.output
    script = tmp_path / "read.py"
    script.write_text(
        "import json; from trackio.sqlite_storage import SQLiteStorage as Stored; names = Stored.get_runs('proved'); "
        "found = [Stored.get_run_config('proved', names[0]), Stored.get_logs('proved', names[0])]; "
        "print(json.dumps([len(names), *found], default=str))"
    )
    read = run_script(script, **environment)
    assert read.code == 0, read.output
    count, config, history = json.loads(read.output.splitlines()[-1])
    assert count == 1, "a resume goes on with the same run"
    assert config["data"]["path"] == str(digits)
    assert [row["step"] for row in history if "loss" in row] == [1, 2, 3]
    assert [row["loss"] for row in history if "loss" in row] == pytest.approx(losses(run))
    assert any("loss/by log SNR, over the steps" in row for row in history)
    assert any("samples/one column per class" in row for row in history)


def test_tensorboard_hides_the_steps_after_a_resume(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start repeats step 3, whose first event must go, and no other.

    TensorBoard reads the files in the order of their names: here those of the numbers 9 and 10 of one second.
    """
    monkeypatch.setattr(tensorboard, "time", SimpleNamespace(time=lambda: 1.8e9))
    monkeypatch.setattr(tensorboard, "_OPENED", itertools.count(9))
    run = tmp_path / "run"
    train(tiny(digits, run, steps=3, output__checkpoint_every=2), launch(0), world)
    (run / "checkpoints" / "step-00000003").rename(tmp_path / "lost")
    train(tiny(digits, run, steps=4, output__checkpoint_every=2), launch(0, allow_change=("samples",)), world)
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_no_tracker_is_asked_for(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=1, output__report_to=()), launch(0), world)
    assert len(records(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_tracker_is_refused_before_anything_is_built(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked, *rest: None if asked == name else known(asked, *rest)
    )
    with pytest.raises(ConfigError, match=f"pip install '{name}>="):
        train(tiny(digits, tmp_path / "run", steps=1, output__report_to=(name,)), launch(0), world)
    assert not (tmp_path / "run").exists()
    require_usable(("tensorboard",))


def test_wandb_gets_numbers_and_images(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wandb, offline: what it would upload is read back from its own file."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
    state.folder.mkdir()
    pixels = torch.arange(2 * 3 * 64, dtype=torch.uint8).view(2, 3, 8, 8)
    with Trackers(state) as trackers:  # type: ignore[arg-type]
        trackers.scalars({"loss": 0.25, "lr": 1e-4}, 7)
        trackers.images({"a red cat": pixels}, 7)
    wandb.teardown()  # waits until its process has written all
    found = _wandb_history(state.folder)
    assert found["loss"] == 0.25
    assert found["_step"] == 7
    assert found["validation.captions"] == ["a red cat", "a red cat"]
    assert len(list(state.folder.glob("wandb/offline-run-*/files/media/images/*.png"))) == 2
    first = (state.folder / "wandb-id").read_text()
    with Trackers(state):  # type: ignore[arg-type]
        pass
    wandb.teardown()
    assert (state.folder / "wandb-id").read_text() == first, "a resume goes on with the same run"


GIVEN = {
    "PROJECT": "their-project", "NAME": "their name", "ENTITY": "their-team", "RUN_GROUP": "their-group",
    "TAGS": "one,two", "NOTES": "what is new", "RUN_ID": "their-id", "JOB_TYPE": "their-job", "RESUME": "must",
}  # fmt: skip


def offline(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in {"MODE": "offline", "SILENT": "true", **variables}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def test_what_the_user_sets_for_wandb_goes_before_our_defaults(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    (tmp_path / "elsewhere").mkdir()
    offline(monkeypatch, **GIVEN, DIR=str(tmp_path / "elsewhere"), INIT_TIMEOUT="7", FINISH_TIMEOUT="8")
    state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
    state.folder.mkdir()
    with Trackers(state) as trackers:  # type: ignore[arg-type]
        (background,) = trackers._trackers
        assert background.finish_s == 8
        assert wandb.run is not None
        assert wandb.run.settings.init_timeout == 7
        assert wandb.run.settings.resume == "must"
    wandb.teardown()
    assert not (state.folder / "wandb").exists()
    (run,) = (record.run for record in _wandb_records(tmp_path / "elsewhere") if record.HasField("run"))
    found = (run.project, run.display_name, run.entity, run.run_group, ",".join(run.tags), run.notes, run.run_id)
    assert found == tuple(list(GIVEN.values())[:7])
    assert run.job_type == "their-job"
    assert (state.folder / "wandb-id").read_text() == "their-id", "a resume without the variable goes on with it"


def test_a_project_that_is_typed_goes_before_the_variable(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is the default; wandb's settings file goes before the default, as the variable does."""
    import wandb

    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nproject = of-the-file\n")
    found = []
    for number, (typed, variable) in enumerate([("fastdiff", "theirs"), (None, "theirs"), (None, None), (None, "")]):
        offline(monkeypatch, **({} if variable is None else {"PROJECT": variable}))
        if number == 3:
            (tmp_path / "wandb" / "settings").unlink()
        config = tiny(tmp_path, tmp_path / f"run-{number}", output__report_to=("wandb",), output__project=typed)
        state = _State(config, world)
        state.folder.mkdir()
        with Trackers(state):  # type: ignore[arg-type]
            assert wandb.run is not None
            found.append(wandb.run.project)
        wandb.teardown()
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert found == ["fastdiff", "theirs", "of-the-file", "fastdiff"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"INIT_TIMEOUT": "soon"}, "its setting init_timeout, WANDB_INIT_TIMEOUT"),
        ({"RUN_ID": "a/b"}, "refuses the run"),
    ],
)
def test_a_variable_that_wandb_refuses_is_an_error_with_its_name(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    import wandb

    offline(monkeypatch, **variables)
    state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
    state.folder.mkdir()
    with pytest.raises(ConfigError, match=said):
        Trackers(state)  # type: ignore[arg-type]
    wandb.teardown()
    assert not (state.folder / "wandb-id").exists()


def test_wandb_that_is_disabled_writes_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    offline(monkeypatch, MODE="disabled", RUN_ID="their-id", DISABLED="true")
    state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
    state.folder.mkdir()
    with Trackers(state) as trackers:  # type: ignore[arg-type]
        trackers.scalars({"loss": 0.25}, 1)
    wandb.teardown()
    assert not list(state.folder.iterdir())
    assert "WANDB_MODE=disabled switches it off" in "".join(capsys.readouterr())


@pytest.mark.fault(29)
def test_wandb_on_a_full_disk_costs_a_warning(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(logging, "raiseExceptions", True)
    with tiny_disk(tmp_path / "disk", 1) as disk:
        state = _State(tiny(tmp_path, disk / "run", output__report_to=("wandb",), output__failed_saves=9), world)
        state.folder.mkdir()
        fill(disk)
        with Trackers(state) as trackers:  # type: ignore[arg-type]
            for step in range(5):
                trackers.scalars({"loss": 0.25}, step)
        wandb.teardown()
        said = "".join(capfd.readouterr())
        assert "Traceback" not in said
        assert said.count("WARNING a tracker") <= 1
        assert not (state.folder / "wandb-id").exists()
        (disk / "ballast").unlink()
        state.files.close()
        assert len((state.folder / "wandb-id").read_text()) == 16


@pytest.mark.parametrize("error", [None, Preempted("asked to stop"), ConfigError("what ends a run")], ids=str)
def test_wandb_is_told_how_a_run_ended(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: FastdiffError | None
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
    state.folder.mkdir()
    monkeypatch.setattr(build, "BROKEN_OFF_S", 240.0)
    with suppress(FastdiffError), Trackers(state) as trackers:  # type: ignore[arg-type]
        trackers.scalars({"loss": 0.25}, 1)
        if error is not None:
            raise error
    wandb.teardown()
    codes = [record.exit.exit_code for record in _wandb_records(state.folder) if record.HasField("exit")]
    assert codes == [int(isinstance(error, ConfigError))]


@contextmanager
def wandb_server() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A server that speaks to wandb.

    Yields:
        Its address, an event that makes it stall, and an event that is set once it was asked while it stalled.
    """
    stalls, asked, end = threading.Event(), threading.Event(), threading.Event()
    bucket = {"id": "b", "name": "x", "displayName": "x", "config": "{}", "sweepName": None, "historyLineCount": 0}
    project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
    found = {
        "viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
        "serverInfo": {"features": []},
        "model": {"bucket": None, "id": "x"},
        "upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True},
    }

    class Handler(Quiet):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if stalls.is_set():
                asked.set()
                end.wait(120)
                return
            self.answer({"data": found})

        do_GET = do_POST

    with loopback.serve(Handler) as server:
        try:
            yield server.address, stalls, asked
        finally:
            end.set()


def to_server(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for name, value in (("BASE_URL", address), ("API_KEY", "0" * 40), ("SILENT", "true"), ("MODE", "online")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr(wandb_run, "INIT_S", 240.0)
    monkeypatch.setattr(wandb_run, "FINISH_S", 2.0)


@pytest.mark.fault(29)
def test_a_tracker_that_stalls_does_not_hold_up_a_preemption(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real wandb, whose server stalls: a rank that is about to be killed does not wait for it to give up."""
    import wandb

    stop = StopRequest()
    with wandb_server() as (address, stalls, _):
        to_server(monkeypatch, address)
        monkeypatch.setattr(wandb_run, "FINISH_S", 3600.0)
        monkeypatch.setattr(build, "BROKEN_OFF_S", 1.0)
        log = wandb_run.WandbRun.scalars

        def logged(self: Any, values: Any, step: int) -> None:
            stalls.set()
            log(self, values, step)
            stop.make("a test")

        monkeypatch.setattr(wandb_run.WandbRun, "scalars", logged)
        with pytest.raises(Preempted):
            train(tiny(digits, tmp_path / "run", steps=10_000, output__report_to=("wandb",)), launch(0), world, stop)
    wandb.teardown()
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert "did not take all within 1 s" in "".join(capsys.readouterr())


@pytest.mark.nightly
@pytest.mark.fault(29)
def test_a_tracker_that_does_not_answer_at_the_start_is_left_out(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    with wandb_server() as (address, stalls, asked):
        stalls.set()
        to_server(monkeypatch, address)
        monkeypatch.setattr(wandb_run, "INIT_S", 12.0)
        monkeypatch.setattr(wandb_run, "FINISH_S", 240.0)
        wandb.setup()  # starts its process, which would take a part of those seconds
        state = _State(tiny(tmp_path, tmp_path / "run", output__report_to=("wandb",)), world)
        state.folder.mkdir()
        with Trackers(state) as trackers:  # type: ignore[arg-type]
            assert asked.wait(120)
            trackers.scalars({"loss": 0.25}, 1)
    wandb.teardown()
    assert "does not answer within 12 s" in "".join(capsys.readouterr())
    assert _wandb_history(state.folder)["loss"] == 0.25


class _Stuck:
    """A tracker that takes nothing until ``go`` is set."""

    finish_s = 60.0

    def __init__(self) -> None:
        self.go, self.shown, self.closed = threading.Event(), list[int](), list[bool]()

    def scalars(self, values: Any, step: int) -> None:
        self.go.wait(600)
        self.shown.append(step)
        if step == 2:
            raise OSError("what https://me:pw@server/?key=1 says")

    def images(self, images: Any, step: int, section: str) -> None:
        pass

    def close(self, *, failed: bool, patience_s: float) -> None:
        self.closed.append(failed)


@pytest.mark.fault(29)
def test_a_tracker_that_is_stuck_is_left_behind_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    stuck = _Stuck()
    tracker = BackgroundTracker(stuck)
    for step in range(1000):
        tracker.scalars({"loss": 1.0}, step)
    tracker.close(failed=False, patience_s=0.1)
    shown = list(stuck.shown)
    stuck.go.set()
    assert not shown
    assert "".join(capsys.readouterr()).count("WARNING a tracker") == 1


@pytest.mark.fault(29)
def test_a_tracker_that_fails_goes_on_with_the_next_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    stuck = _Stuck()
    stuck.go.set()
    tracker = BackgroundTracker(stuck)
    for step in range(5):
        tracker.scalars({"loss": 1.0}, step)
    tracker.close(failed=True, patience_s=60.0)
    assert (stuck.shown, stuck.closed) == ([0, 1, 2, 3, 4], [True])
    assert "failed (what https://server/ says)" in "".join(capsys.readouterr())


class _State:
    """The part of a run's state that the trackers read."""

    def __init__(self, config: Any, world: World) -> None:
        self.config, self.world = config, world
        self.folder = Path(config.output.folder)
        self.files = WholeFiles(buffered=config.output.failed_saves > 0)


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
