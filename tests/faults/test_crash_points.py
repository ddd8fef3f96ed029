"""A kill at every file operation of a save, on each of two ranks under ZeRO-3: the resumed run is equal."""

import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from fastdiff.checkpoint.async_saves import AsyncSaves
from fastdiff.checkpoint.manifest import committed, read_manifest
from fastdiff.checkpoint.staging import Share
from fastdiff.checkpoint.step_folders import Draft
from fastdiff.config.run import RunConfig
from fastdiff.parallel.world import World
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.injected.crash_points import LOSSES, CrashPoints, Operation, cut_power, operations
from tests.support.runs import hexes, intact, launch, tiny, train_losses

pytestmark = pytest.mark.timeout(900)

RANKS = 2
DIES_IN = 4
"""Step whose save is watched; 2 and 3 are saved, and it prunes 2."""
END = 5


def config_of(data: Path, folder: Path, steps: int) -> RunConfig:
    return tiny(data, folder, steps=steps, batch__micro=8, output__checkpoint_every=1)


def journal_of(folder: Path, rank: int) -> Path:
    return folder.with_name(f"{folder.name}-rank-{rank}.jsonl")


def train_watched(world: World, config: RunConfig) -> int:
    """Train; return how many operations this rank made for its checkpoints."""
    folder = Path(config.output.folder)
    points = CrashPoints(folder / "checkpoints", journal_of(folder, world.rank))
    with points.watched():
        train(config, launch(), world)
    return points.done


def save_and_die(world: World, folder: Path, model: Path, rank: int, operation: int) -> None:
    """Save what the checkpoint ``model`` holds, as the training does, and die on one rank in that."""
    points = CrashPoints(
        folder / "checkpoints", journal_of(folder, world.rank), operation if world.rank == rank else None
    )
    content = (model / f"rank-{world.rank:05d}.safetensors").read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    share = Share((content[:head], content[head:]))
    manifest = {key: value for key, value in read_manifest(model).items() if key != "files"}
    with points.watched(), AsyncSaves(world, allowed=0) as background:
        checkpoints = Checkpoints(folder / "checkpoints", 2, background.world)
        checkpoints.newest()
        background.begin("checkpoint", DIES_IN, partial(checkpoints.commit, Draft(DIES_IN, share, manifest)))
        background.wait_for_all()


def resume_all(world: World, data: Path, folders: list[Path]) -> list[list[float]]:
    return [train_losses(world, config_of(data, folder, END), launch()) for folder in folders]


@dataclass(frozen=True, eq=False)
class Trial:
    """The files that a kill left."""

    folder: Path
    rank: int
    operation: int
    done: list[Operation]

    def __str__(self) -> str:
        last = self.done[-1]
        return f"rank {self.rank}, operation {self.operation} ({last['op']} {Path(last['path']).name})"


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return hexes(values(forked_ranks(resume_all, digits, [folder]))[0][0])


@pytest.fixture(scope="module")
def trials(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
    """One per operation and rank."""
    root = tmp_path_factory.mktemp("trials")
    values(forked_ranks(train_losses, config_of(digits, root / "start", DIES_IN - 1), launch()))
    shutil.copytree(root / "start", root / "unharmed")
    counts = values(forked_ranks(train_watched, config_of(digits, root / "unharmed", DIES_IN)))
    done = operations([journal_of(root / "unharmed", rank) for rank in range(RANKS)])
    kinds = Counter(record["op"] for record in done)
    assert kinds.keys() == {"mkdir", "create", "reserve", "write", "fsync", "rename", "unlink", "rmdir"}
    assert kinds["create"] == RANKS + 1, "a file of each rank and the manifest"
    assert kinds["rename"] == 2, "one to commit, one to prune"
    model = root / "unharmed" / "checkpoints" / f"step-{DIES_IN:08d}"
    return [
        die(root / "start", model, root / f"rank{rank}-{operation}", rank, operation)
        for rank, count in enumerate(counts)
        for operation in range(count)
    ]


def die(start: Path, model: Path, folder: Path, rank: int, operation: int) -> Trial:
    """Kill one rank at one operation of a save in a copy of ``start``."""
    shutil.copytree(start, folder)
    shutil.copy(model.parent.parent / "metrics.jsonl", folder)  # that of a step is written before it is saved
    ended = forked_ranks(save_and_die, folder, model, rank, operation)
    assert ended[rank].code == -signal.SIGKILL, ended[rank].trace
    done = operations([journal_of(folder, rank) for rank in range(RANKS)])
    assert done[-1]["path"].startswith(str(folder))
    return Trial(folder, rank, operation, done)


@pytest.mark.nightly
@pytest.mark.fault(2)
@pytest.mark.fault(3)
def test_a_kill_at_every_file_operation_of_a_save(
    trials: list[Trial],
    whole: list[str],
    digits: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """All remains are checked, and resumed."""
    record_property("trials", len(trials))
    for trial in trials:
        assert intact(trial.folder)[0] in (DIES_IN - 1, DIES_IN), str(trial)
        assert len(intact(trial.folder)) >= 2, f"{trial}: pruned too early"
    assert {intact(trial.folder)[0] for trial in trials} == {DIES_IN - 1, DIES_IN}, "before and after the commit"
    resumed = {trial: trial.folder.with_name(f"{trial.folder.name}-resumed") for trial in trials}
    for trial, folder in resumed.items():
        shutil.copytree(trial.folder, folder)
    losses, _ = values(forked_ranks(resume_all, digits, list(resumed.values()), timeout_s=800))
    for (trial, folder), found in zip(resumed.items(), losses, strict=True):
        assert hexes(found) == whole, str(trial)
        left = {path.name for path in (folder / "checkpoints").iterdir()}
        assert left == {path.name for path in committed(folder / "checkpoints")}, f"{trial}: nothing half-done is left"


@pytest.mark.nightly
@pytest.mark.fault(4)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_power_cut_at_every_file_operation_of_a_save(
    trials: list[Trial], whole: list[str], digits: Path, tmp_path: Path, loss: str
) -> None:
    """Everything that was not fsynced is lost. All remains are checked, and resumed."""
    folders = []
    for trial in trials:
        folder = tmp_path / trial.folder.name
        shutil.copytree(trial.folder, folder)
        cut_power(folder / "checkpoints", trial.done, loss)
        steps = intact(folder)
        assert steps, f"{trial}: nothing is left"
        assert steps[0] in (DIES_IN - 1, DIES_IN), str(trial)
        folders.append(folder)
    for folder, found in zip(folders, values(forked_ranks(resume_all, digits, folders, timeout_s=800))[0], strict=True):
        assert hexes(found) == whole, folder.name
