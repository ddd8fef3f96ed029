"""Full, slow, failing or lying storage: the run survives or reports it, and earlier checkpoints stay intact."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastdiff import files
from fastdiff.checkpoint import async_saves
from fastdiff.checkpoint.async_saves import AsyncSaves
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.errors import Preempted, StorageError
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.train import main
from fastdiff.training.build import build
from fastdiff.training.callbacks.base import Callback, Callbacks
from fastdiff.training.loop import take_steps, train
from fastdiff.training.state import TrainState
from tests.support.forked import forked_ranks, values
from tests.support.injected.system_calls import strace
from tests.support.injected.tiny_disk import tiny_disk
from tests.support.processes import Finished
from tests.support.runs import flags, hexes, intact, launch, losses, tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
LAST = 4


def config_of(data: Path, folder: Path, steps: int = LAST, **changes: Any) -> RunConfig:
    return tiny(data, folder, steps=steps, batch__micro=8, output__checkpoint_every=2, **changes)


def temporaries(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob("*.tmp"))


# --- a full disk ----------------------------------------------------------------------------------------------------


@dataclass
class Neighbour:
    """Fills a disk up to ``left`` bytes when the file of a checkpoint is created, after the check of the free space."""

    disk: Path
    left: int
    at: str
    """Name of the folder of that checkpoint."""
    original: Callable[..., int] = field(default=os.open)

    def open(self, path: Any, *args: Any, **options: Any) -> int:
        if f"{self.at}.tmp/rank" in str(path):
            (self.disk / "filler").write_bytes(bytes(max(0, shutil.disk_usage(self.disk).free - self.left)))
        return self.original(path, *args, **options)


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    ("share", "stand_in", "reserves"),
    [
        (0.2, None, True),
        (0.6, True, False),
        (0.99, None, False),
        pytest.param(0.2, True, False, marks=pytest.mark.nightly),
        pytest.param(0.99, True, True, marks=pytest.mark.nightly),
    ],
)
def test_a_disk_that_fills_in_the_middle_of_a_save(
    world: World,
    digits: Path,
    tmp_path: Path,
    share: float,
    stand_in: bool | None,
    reserves: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --output.failed_saves 1 the run goes on and the next save works; with 0 it ends with 74.

    A share of a checkpoint still fits on the disk, and so do the lines of the log. Room for a checkpoint is reserved,
    or taken as it is written.
    """
    with tiny_disk(tmp_path / "disk", 6, stand_in=stand_in) as disk, monkeypatch.context() as patches:
        _fill_in_the_middle(world, digits, disk, share, patches, capsys, reserves=reserves)


def _fill_in_the_middle(
    world: World,
    digits: Path,
    disk: Path,
    share: float,
    patches: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    reserves: bool,
) -> None:
    folder = disk / "run"
    train(config_of(digits, folder, steps=2), launch(), world)
    size = sum(file.stat().st_size for file in (folder / "checkpoints").glob("*/rank-*"))
    neighbour = Neighbour(disk, int(share * size), "step-00000004")
    patches.setattr(os, "open", neighbour.open)
    if not reserves:
        patches.setattr(files, "reserve", lambda *_: None)
        patches.setattr(files, "_CHUNK", 10_000)
    config = config_of(digits, folder, steps=8)
    assert main([*flags(config), "--deepspeed_config", "deepspeed_configs/zero3.json"]) == 74
    message = capsys.readouterr().err
    assert f"no space on {folder / 'checkpoints' / 'step-00000004.tmp'}" in message
    assert "rank-00000.safetensors needs" in message
    assert "MiB are free" in message
    assert intact(folder) == [2]
    assert not temporaries(folder)

    (disk / "filler").unlink()
    surviving = config_of(digits, folder, steps=8, output__failed_saves=1)
    train_with(world, surviving, Freeing(disk / "filler", folder))
    said = capsys.readouterr().err
    assert "WARNING the checkpoint of step 4 failed, the run continues: no space on" in said
    assert intact(folder) == [8, 6]
    assert not temporaries(folder)


@dataclass
class Freeing(Callback):
    """Removes a file once the save has failed that it made fail."""

    file: Path
    folder: Path

    def on_step(self, state: TrainState) -> None:
        if state.progress.steps == 5:
            wait_until(lambda: self.file.exists() and not temporaries(self.folder), "the save to fail")
            self.file.unlink()


def train_with(
    world: World, config: RunConfig, *more: Callback, request: StopRequest | None = None, **options: Any
) -> None:
    """Train with more callbacks, which come after the run's own; ``options`` are those of the launch."""
    with ExitStack() as stack:
        run = build(config, launch(**options), world, stack, request)
        state, batches, callbacks = run.state, run.batches, run.callbacks
        if request is not None:
            request.arm(state.heartbeat)
        try:
            take_steps(state, batches, Callbacks([*callbacks._callbacks, *more]))
        except Preempted:
            callbacks.on_preempted(state)
            if request is not None:
                request.answered = True
            raise
        callbacks.on_end(state)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_reserves_nothing_is_written_all_the_same(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_fallocate", lambda *_: code)
    files.write_file(tmp_path / "file", [b"content"])
    assert (tmp_path / "file").read_bytes() == b"content"


def test_room_is_reserved_without_a_size(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    files.reserve(descriptor, 2**20)
    os.close(descriptor)
    found = (tmp_path / "file").stat()
    assert (found.st_size, found.st_blocks * 512) == (0, 2**20)


# --- storage that fails on one rank ---------------------------------------------------------------------------------


@dataclass
class Noting(Callback):
    """Notes the steps; at one of them this rank is asked to stop."""

    steps: list[int]
    request: StopRequest
    stops_in: int | None = None

    def on_step(self, state: TrainState) -> None:
        self.steps.append(state.progress.steps)
        if state.progress.steps == self.stops_in:
            self.request.make("a test")


def fail_on_rank_1(
    world: World, config: RunConfig, fails_in: tuple[int, ...], stops_in: int | None = None, below: str = "checkpoints"
) -> tuple[str, list[int]]:
    """Train while rank 1 cannot write the saves of some steps; return the error and the steps taken."""
    original = os.fsync
    saves = Path(config.output.folder).absolute() / below

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if world.rank == 1 and path.parent in [saves / f"step-{step:08d}.tmp" for step in fails_in]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(descriptor)

    os.fsync = fsync
    noting = Noting([], StopRequest(), stops_in if world.rank == 1 else None)
    try:
        train_with(world, config, noting, request=noting.request)
    except StorageError as error:
        return str(error), noting.steps
    return "", noting.steps


@pytest.mark.fault(7)
@pytest.mark.fault(10)
def test_all_ranks_stop_after_the_same_step_when_too_many_saves_fail(digits: Path, tmp_path: Path) -> None:
    config = config_of(digits, tmp_path / "run", steps=40, output__failed_saves=1)
    (error, steps), other = values(forked_ranks(fail_on_rank_1, config, (4, 8, 10)))
    assert (error, steps) == other
    assert "step-00000010.tmp/rank-00001.safetensors: could not be written (Input/output error)" in error
    assert 10 <= len(steps) <= 12, "one failure in a row is survived, a second one is not"
    assert intact(tmp_path / "run") == [6, 2], "what is before is intact"
    assert not temporaries(tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.fault(10)
@pytest.mark.parametrize("fails_in", [(), (3,)])
def test_a_run_that_is_preempted_saves_or_fails(digits: Path, tmp_path: Path, fails_in: tuple[int, ...]) -> None:
    """However many failed saves it survives: the failure at step 2 may be made good, the one at the end may not."""
    config = config_of(digits, tmp_path / "run", steps=40, output__failed_saves=9)
    ended = forked_ranks(fail_on_rank_1, config, (2, *fails_in), 2)
    if fails_in:
        (error, steps), other = values(ended)
        assert (error, steps) == other
        assert "step-00000003.tmp/rank-00001.safetensors: could not be written" in error
        assert intact(tmp_path / "run") == []
    else:
        assert all("Preempted" in (end.trace or "") for end in ended)
        assert intact(tmp_path / "run") == [3]
    assert not temporaries(tmp_path / "run")


@pytest.mark.fault(10)
def test_a_snapshot_that_fails_does_not_cost_a_preemption(digits: Path, tmp_path: Path) -> None:
    """The snapshot of step 3, at which the run ends, fails; its checkpoint matters more."""
    averages = EmaConfig(rates=(), power_stds=(0.05,), snapshot_every=3)
    config = config_of(digits, tmp_path / "run", steps=40, ema=averages)
    ended = forked_ranks(fail_on_rank_1, config, (3,), 2, "ema")
    assert all("Preempted" in (end.trace or "") for end in ended)
    assert intact(tmp_path / "run") == [3, 2]
    assert not list((tmp_path / "run" / "ema").iterdir())


# --- storage that fails for real: system calls that do ----------------------------------------------------------------


def main_under_strace(world: World, injection: str, config: RunConfig, output: Path) -> int:
    """Run the command in a process whose system calls of one kind fail or are slow."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    tracer = subprocess.Popen([*strace(injection), "-p", str(os.getpid())])
    wait_until(lambda: all(_traced(thread) for thread in Path("/proc/self/task").iterdir()), "strace")
    try:
        return main(flags(config))
    finally:
        tracer.terminate()
        tracer.wait()


def _traced(thread: Path) -> bool:
    return "\nTracerPid:\t0\n" not in (thread / "status").read_text()


def run_under_strace(injection: str, config: RunConfig) -> Finished:
    """Return its exit code, and what it printed."""
    output = Path(config.output.folder).with_suffix(".txt")
    (code,) = values(forked_ranks(main_under_strace, injection, config, output, ranks=1, timeout_s=300))
    return Finished(code, output.read_text())


@pytest.mark.fault(10)
def test_an_fsync_that_fails_costs_one_checkpoint(digits: Path, tmp_path: Path, nightly: bool) -> None:
    """The fsync of a file, or of the parent after the rename; nightly also of run folder, manifest and folder.

    The run goes on, and the next save works.
    """
    for number in (1, 2, 3, 4, 5) if nightly else (2, 5):
        folder = tmp_path / str(number)
        config = config_of(digits, folder, steps=6, output__failed_saves=1, output__keep=9)
        done = run_under_strace(f"fsync:error=EIO:when={number}", config)
        assert done.code == 0, done.output
        assert "WARNING the checkpoint of step 2 failed, the run continues: " in done.output
        assert "Input/output error" in done.output
        assert str(folder) in done.output.partition("the run continues: ")[2].partition("\n")[0]
        assert intact(folder)[:2] == [6, 4]
        assert not temporaries(folder)


# --- slow storage -----------------------------------------------------------------------------------------------------


def save_slowly(world: World, config: RunConfig, during: int) -> list[float]:
    """Train while the first save is not done before ``during`` more steps are taken."""
    taken = threading.Semaphore(0)
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if "step-00000004.tmp" in os.readlink(f"/proc/self/fd/{descriptor}") and during:
            for _ in range(during):
                assert taken.acquire(timeout=100), "the training waits for the save"
            os.fsync = original
        original(descriptor)

    class Count(Callback):
        def on_step(self, state: TrainState) -> None:
            if state.progress.steps > 4:
                taken.release()

    os.fsync = fsync
    try:
        train_with(world, config, Count())
    finally:
        os.fsync = original
    return losses(Path(config.output.folder))


def save_slowly_and_soon(world: World, slow: RunConfig, soon: RunConfig) -> tuple[list[float], list[float]]:
    return save_slowly(world, slow, during=3), save_slowly(world, soon, during=0)


@pytest.mark.fault(11)
def test_the_training_goes_on_during_a_save(digits: Path, tmp_path: Path) -> None:
    """On both ranks the first fsync of the save of step 4 returns only after three more steps."""
    configs = [
        tiny(digits, tmp_path / name, steps=7, batch__micro=8, output__checkpoint_every=4) for name in ("slow", "soon")
    ]
    slow, soon = values(forked_ranks(save_slowly_and_soon, *configs))[0]
    assert hexes(slow) == hexes(soon), "what is saved is not what the training has come to"
    assert [intact(tmp_path / name) for name in ("slow", "soon")] == [[7, 4], [7, 4]]
    one, other = (Checkpoint(tmp_path / name / "checkpoints" / "step-00000004") for name in ("slow", "soon"))
    assert one.manifest["files"] == other.manifest["files"]


def save_until_it_is_waited_for(world: World, config: RunConfig) -> list[str]:
    """Train while every fsync of the first save takes until the run has said that it waits for it; return its lines."""
    told, info, fsync, said = threading.Event(), async_saves.log.info, os.fsync, list[str]()

    def noted(message: str, *rest: Any) -> None:
        info(message, *rest)
        said.append(message)
        if "is still being written" in message:
            told.set()

    def slow(descriptor: int) -> None:
        if "step-00000002.tmp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            assert told.wait(100), "the run does not wait for its save"
        fsync(descriptor)

    async_saves.log.info, os.fsync = noted, slow  # type: ignore[method-assign,assignment]
    train(config, launch(), world)
    return said


@pytest.mark.nightly
@pytest.mark.fault(11)
def test_slow_storage_delays_and_does_not_end_a_run(digits: Path, tmp_path: Path) -> None:
    """The first save is still being written when the next one is due."""
    (said,) = values(forked_ranks(save_until_it_is_waited_for, config_of(digits, tmp_path / "run", steps=6), ranks=1))
    assert any("waiting: the checkpoint of step 2 is still being written" in line for line in said), said
    assert intact(tmp_path / "run") == [6, 4]


def beat_while_waiting(world: World, folder: Path) -> None:
    """Wait for a save, and at the end for another; each takes until it has been waited for over three heartbeats."""
    async_saves._SILENT_S = 0.01
    heartbeat, beats = Heartbeat(folder, world.rank, hang_timeout_s=3600), threading.Semaphore(0)

    def again() -> None:
        heartbeat.again()
        beats.release()

    def save() -> None:
        for _ in range(3):
            assert beats.acquire(timeout=100), "a wait without a heartbeat"

    heartbeat.beat(2, "callbacks")
    beaten_s = heartbeat.at_s
    with AsyncSaves(world, 0, again) as background:
        background.begin("checkpoint", 2, save)
        background.wait("checkpoint")
        assert heartbeat.at_s > beaten_s
        background.begin("checkpoint", 3, save)
        last = background._running["checkpoint"].done
    assert last.exception() is None
    heartbeat.close()


@pytest.mark.fault(11)
def test_a_save_that_is_slower_than_a_hang_is_none(tmp_path: Path) -> None:
    values(forked_ranks(beat_while_waiting, tmp_path / "run", ranks=1))


def test_a_failed_save_is_known_before_the_next_one_is_due(world: World) -> None:
    def fail() -> None:
        raise StorageError("no space")

    with AsyncSaves(world, 1) as background:
        for save, failed in ((lambda: None, False), (fail, True)):
            background.begin("checkpoint", 2, save)
            wait_until(lambda: not background.running, "the save to end")
            assert background.failed == failed
            background.wait("checkpoint")
            assert not background.failed, "told"
