"""The manifest of a checkpoint: its schema, and what others may leave beside checkpoints."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.checkpoint.manifest import MANIFEST, committed, digest_of, read_manifest, step_of, verify
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.step_folders import StepFolders
from fastdiff.cli.main import main
from fastdiff.errors import StorageError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.injected.crash_points import CrashPoints, operations
from tests.support.nights import by_day
from tests.support.runs import launch, renew_digest, tiny, train_losses

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
WHOLE: dict[str, Any] = {
    "format": "fastdiff-checkpoint",
    "version": 1,
    "progress": {"samples": 32, "steps": 2, "skipped": 0, "skipped_in_a_row": 0, "rewinds": 0},
    "world_size": 2,
    "zero_stage": 1,
    "parameters": {"w": [3, 1], "b": []},
    "ema_rates": [0.9],
    "ema_stds": [0.05],
    "config": {"optim": {"name": "adamw"}},
    "dataset": "7c6c",
    "classes": 10,
    "base": None,
    "adapter": None,
    "versions": {"torch": "2.13.0"},
    "layout": "8489",
    "sliced_state": ["exp_avg"],
    "has_raw_state": False,
    "optimizer_steps": 2,
    "loss_scale": {"cur_scale": 65536.0, "cur_iter": 2},
    "files": {"rank-00000.safetensors": {"bytes": 8, "sha256": "0"}},
    "of a newer version": {"unknown": 1},
}
WRONG: list[tuple[str, Any]] = [
    ("format", 1),
    ("version", "1"),
    ("progress", [2]),
    ("progress", {"steps": 2}),
    ("progress", {"samples": 32, "steps": "2"}),
    ("progress", {"samples": 32, "steps": True}),
    ("progress", {"samples": 32, "steps": 2, "unknown": 1}),
    ("progress", {"samples": 32, "steps": -2}),
    ("world_size", 0),
    ("zero_stage", 4),
    ("parameters", {}),
    ("parameters", ["w"]),
    ("parameters", {"w": 3}),
    ("parameters", {"w": [3.5]}),
    ("parameters", {"w": [-3]}),
    ("ema_rates", 0.9),
    ("ema_rates", ["0.9"]),
    ("ema_stds", {}),
    ("config", []),
    ("dataset", 7),
    ("classes", "10"),
    ("classes", True),
    ("base", 7),
    ("adapter", 7),
    ("versions", {"torch": 2}),
    ("layout", None),
    ("sliced_state", "exp_avg"),
    ("has_raw_state", 0),
    ("optimizer_steps", 2.5),
    ("loss_scale", [1]),
    ("loss_scale", {"cur_scale": "1"}),
    ("files", {}),
    ("files", {"rank-00000.safetensors\n": {"bytes": 8, "sha256": "0"}}),
    ("sha256", 7),
]


FIELDS = ("progress", "parameters", "config", "classes", "ema_rates", "files")
COMMANDS = (["sample", "RUN", "--grid", "grid.png"], ["export", "RUN", "out", "--format", "safetensors"])


def write(folder: Path, manifest: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_whole_manifest_is_returned_as_it_was_written(tmp_path: Path) -> None:
    """Unknown fields included, which count in the digest."""
    write(tmp_path, WHOLE)
    found = read_manifest(tmp_path)
    assert found == WHOLE
    assert digest_of(found) == digest_of(WHOLE)
    assert type(found["loss_scale"]["cur_iter"]) is int


@pytest.mark.fault(28)
@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_type_is_one_storage_error(field: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, {**WHOLE, field: value})
    with pytest.raises(StorageError, match=rf"not a readable manifest \(.*{field}"):
        read_manifest(tmp_path)
    [problem] = verify(tmp_path)
    assert "\n" not in problem


@pytest.fixture(scope="module")
def trained(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny(digits, folder, steps=4, output__checkpoint_every=2), launch(), world)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("field", "value"),
    [("parameters", {}), ("parameters", None), ("progress", None), ("sliced_state", ["exp_avg"]), ("files", {})],
)
def test_a_resume_refuses_a_manifest_with_holes(world: World, digits: Path, run: Path, field: str, value: Any) -> None:
    """With a digest that fits; None: without the field."""
    for path in (run / "checkpoints").glob(f"*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        manifest[field] = value
        path.write_text(json.dumps({name: value for name, value in manifest.items() if value is not None}))
        renew_digest(path)
    with pytest.raises(StorageError, match="exp_avg_sq" if field == "sliced_state" else field):
        train(tiny(digits, run, steps=6, output__checkpoint_every=2), launch(allow_change=("samples",)), world)


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("command", "field", "change"),
    by_day(
        [(COMMANDS[n % 2], field, ("remove", "type")[n % 3 % 2]) for n, field in enumerate(FIELDS)],
        *product(COMMANDS, FIELDS, ("remove", "type")),
    ),
)
def test_a_command_answers_a_wrong_manifest_in_one_line(
    run: Path,
    tmp_path: Path,
    command: list[str],
    field: str,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a digest that fits, as of somebody who wanted it so."""
    for path in (run / "checkpoints").glob(f"*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        if change == "remove":
            del manifest[field]
        else:
            manifest[field] = 7.5
        path.write_text(json.dumps(manifest))
        renew_digest(path)
    monkeypatch.chdir(tmp_path)
    assert main([str(run) if word == "RUN" else word for word in command]) == 74
    said = capsys.readouterr().err
    assert field in said
    assert "Traceback" not in said


@pytest.mark.fault(6)
def test_copies_beside_the_checkpoints_do_not_count(
    world: World, run: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One under another name is no checkpoint; one under a later step is passed over, by name."""
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000002.bak2")
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000099")
    assert [step_of(folder) for folder in committed(checkpoints)] == [99, 4, 2]
    assert verify(checkpoints / "step-00000099") == [
        f"{checkpoints / 'step-00000099'}: holds step 2, a copy under another name; delete it, or move it out of this "
        "folder"
    ]
    assert main(["verify", str(run)]) == 74, "the newest is none"
    assert "holds step 2" in capsys.readouterr().err
    assert len(train_losses(world, tiny(digits, run, steps=6, output__checkpoint_every=2), launch())) == 6
    said = capsys.readouterr().err
    assert "passing over a damaged checkpoint" in said
    assert "resuming from step 4" in said
    shutil.rmtree(checkpoints / "step-00000099")
    assert main(["verify", str(run)]) == 0
    assert (checkpoints / "step-00000002.bak2").is_dir()


@pytest.mark.fault(28)
@pytest.mark.parametrize("name", ["step-00000005.tmp", "step-00000005", "step-00000005.old.tmp"])
@pytest.mark.parametrize("kind", ["file", "link", "link to nothing", "folder"])
def test_a_save_replaces_what_has_its_names_and_nothing_elsewhere(tmp_path: Path, name: str, kind: str) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "checkpoints"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    folder.mkdir()
    if kind == "file":
        (folder / name).write_text("")
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    folders = StepFolders(folder, ALONE, "a checkpoint")
    manifest = {name: value for name, value in WHOLE.items() if name != "files"}
    manifest["progress"] = {"samples": 80, "steps": 5}
    folders.commit(folders.draft(ALONE, 5, {"w": torch.ones(3)}, {"w": 0}, manifest))
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]
    assert verify(folder / "step-00000005") == []
    assert Checkpoint(folder / "step-00000005").folder.is_dir()
    assert (elsewhere / "kept").read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.fault(4)
def test_a_finished_commit_is_durable(tmp_path: Path) -> None:
    """Each file whole, then their folder, before the rename; the folder of the checkpoints after it."""
    folder, journal = tmp_path / "checkpoints", tmp_path / "journal"
    folder.mkdir()
    folders = StepFolders(folder, ALONE, "a checkpoint")
    manifest = {name: value for name, value in WHOLE.items() if name != "files"}
    draft = folders.draft(ALONE, 5, {"w": torch.ones(3)}, {"w": 0}, manifest)
    with CrashPoints(folder, journal).watched():
        final = folders.commit(draft)
    done = [record for record in operations([journal]) if record["op"] in ("fsync", "rename")]
    names = ["rank-00000.safetensors", MANIFEST]
    unnamed = final.with_suffix(".tmp")
    assert [(record["op"], record["path"]) for record in done] == [
        *(("fsync", str(unnamed / name)) for name in names),
        ("fsync", str(unnamed)),
        ("rename", str(unnamed)),
        ("fsync", str(folder)),
    ]
    sizes = [record["size"] for record in done[: len(names)]]
    assert sizes == [(final / name).stat().st_size for name in names], "all of it was written before"
