"""Damaged checkpoints: all ranks find them before a weight changes, and ``fastdiff verify`` reports them."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.checkpoint.manifest import FORMAT, MANIFEST, VERSION, verify
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.cli.main import main as command
from fastdiff.config.run import RunConfig
from fastdiff.errors import StorageError
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.loop import train
from fastdiff.training.state import TrainState
from tests.support.forked import forked_ranks, values
from tests.support.runs import hexes, intact, launch, losses, renew_digest, tiny, train_losses

pytestmark = pytest.mark.timeout(600)
LAST = 4


def config_of(data: Path, folder: Path) -> RunConfig:
    return tiny(data, folder, steps=LAST, batch__micro=8, output__checkpoint_every=2)


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks, with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    values(forked_ranks(train_losses, config_of(digits, folder), launch()))
    return folder


def flip(place: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte": flip(0.0),
    "middle byte": flip(0.5),
    "last byte": flip(1.0),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "removed": Path.unlink,
}
FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "MANIFEST.json")


def digest_of_weights(state: TrainState) -> str:
    weights = torch.cat([flat.master for flat in state.engine.flats])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def resume_without_a_step(world: World, data: Path, folders: list[Path]) -> list[tuple[int, str]]:
    """The step from which each goes on, and this rank's weights then."""
    found = []
    for folder in folders:
        with ExitStack() as stack:
            state = build(config_of(data, folder), launch(), world, stack).state
            found.append((state.progress.steps, digest_of_weights(state)))
    return found


@pytest.mark.fault(5)
def test_every_damaged_file_is_found_before_any_weight_changes(
    trained: Path, digits: Path, tmp_path: Path, nightly: bool
) -> None:
    """By both ranks, which then have the weights of the checkpoint before; the losses are those of the whole run."""
    damaged = []
    for file, (name, damage) in itertools.product(FILES, DAMAGES.items()):
        folder = tmp_path / f"{file} {name}"
        shutil.copytree(trained, folder)
        damage(folder / "checkpoints" / f"step-{LAST:08d}" / file)
        damaged.append(folder)
        assert intact(folder) == [2], folder.name
    older = tmp_path / "older"
    shutil.copytree(trained, older)
    shutil.rmtree(older / "checkpoints" / f"step-{LAST:08d}")
    built = damaged if nightly else damaged[:: len(DAMAGES) + 1] + damaged[-1:]
    for rank in values(forked_ranks(resume_without_a_step, digits, [older, *built], timeout_s=500)):
        (_, expected), *found = rank
        for folder, (step, weights) in zip(built, found, strict=True):
            assert step == 2, folder.name
            assert weights == expected, folder.name
    for rank in values(forked_ranks(newest_steps, damaged)):
        assert rank == [2] * len(damaged)
    assert hexes(values(forked_ranks(train_losses, config_of(digits, damaged[1]), launch()))[0]) == hexes(
        losses(trained)
    )


def newest_steps(world: World, folders: list[Path]) -> list[int]:
    found = [Checkpoints(folder / "checkpoints", 2, world).newest() for folder in folders]
    return [saved.manifest["progress"]["steps"] for saved in found if saved is not None]


def test_verify_tells_what_is_damaged(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    assert command(["verify", str(folder)]) == 0
    told = capsys.readouterr().out.splitlines()[1:]
    assert [line.partition(", ")[0] for line in told] == [
        "checkpoint of step 4: intact",
        "checkpoint of step 2: intact",
    ]
    flip(0.5)(folder / "checkpoints" / "step-00000002" / FILES[1])
    assert command(["verify", str(folder)]) == 0, "the newest is intact"
    assert "checkpoint of step 2: damaged" in capsys.readouterr().out
    for name in FILES[:2]:
        flip(0.5)(folder / "checkpoints" / "step-00000004" / name)
    assert command(["verify", str(folder)]) == 74
    message = capsys.readouterr().err
    assert all(f"step-00000004/{name}: sha256 differs from the manifest" in message for name in FILES[:2])
    shutil.rmtree(folder / "checkpoints")
    assert command(["verify", str(folder)]) == 74
    assert "no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before the read", "amid the read", "of all"])
def test_a_checkpoint_that_an_active_run_prunes_is_no_damage(
    when: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the first is read, the run removes it, or saves a third one and removes both."""
    folder, pruned = tmp_path / "run", [4] if when != "of all" else [4, 2]
    shutil.copytree(trained, folder)
    checkpoints = folder / "checkpoints"
    shutil.copytree(checkpoints / "step-00000002", tmp_path / "third")

    def read_beside_a_run(path: Path) -> list[str]:
        found = verify(path) if when == "amid the read" else []
        while pruned:
            shutil.rmtree(checkpoints / f"step-{pruned.pop(0):08d}")
        if when == "of all" and (tmp_path / "third").exists():
            shutil.move(tmp_path / "third", checkpoints / "step-00000006")
            manifest = checkpoints / "step-00000006" / "MANIFEST.json"
            manifest.write_text(manifest.read_text().replace('"steps": 2', '"steps": 6'))
            renew_digest(manifest)
        return found or verify(path)

    monkeypatch.setattr("fastdiff.checkpoint.verify.verify", read_beside_a_run)
    assert command(["verify", str(folder)]) == 0
    said = capsys.readouterr()
    assert "damaged" not in said.out + said.err
    assert f"checkpoint of step {6 if when == 'of all' else 2}: intact" in said.out
    assert "step 4" not in said.out


def test_verify_looks_at_snapshots_too(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(digits, tmp_path / "run", steps=2, ema__power_stds=(0.05, 0.1), ema__snapshot_every=1)
    train(config, launch(), world)
    assert command(["verify", str(tmp_path / "run")]) == 0
    assert "snapshot of step 2: intact" in capsys.readouterr().out
    (tmp_path / "run" / "ema" / "step-00000002" / FILES[0]).unlink()
    assert command(["verify", str(tmp_path / "run")]) == 74
    assert "snapshot of step 2: damaged" in capsys.readouterr().err


def manifest_of(**changes: Any) -> str:
    files = {"rank-00000.safetensors": {"bytes": 8, "sha256": "0"}}
    return json.dumps({"format": FORMAT, "version": VERSION, "files": files, **changes})


MALFORMED = {
    "a list": "[]",
    "files in a list": manifest_of(files=[]),
    "a file without a size": manifest_of(files={"rank-00000.safetensors": {"sha256": "0"}}),
    "a file that is a number": manifest_of(files={"rank-00000.safetensors": 7}),
    "a size in words": manifest_of(files={"rank-00000.safetensors": {"bytes": "8", "sha256": "0"}}),
    "a file outside": manifest_of(files={"../rank-00000.safetensors": {"bytes": 8, "sha256": "0"}}),
    "an absolute path": manifest_of(files={"/etc/hostname": {"bytes": 8, "sha256": "0"}}),
    "nested": "[" * 100_000,
    "no text": "\0\udcff",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_manifest_is_one_problem(text: str, tmp_path: Path) -> None:
    """And no traceback on the rank that reads it, for which the others would wait."""
    (tmp_path / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    [problem] = verify(tmp_path)
    assert problem.startswith(f"{tmp_path / MANIFEST}: not a readable manifest")


def test_a_manifest_of_any_size_and_a_pipe_are_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    os.truncate(tmp_path / MANIFEST, 2**40)
    assert "at most 67108864 are read" in verify(tmp_path)[0]
    (tmp_path / MANIFEST).unlink()
    os.mkfifo(tmp_path / MANIFEST)
    assert "it is not a file" in verify(tmp_path)[0]


def test_no_memory_is_asked_for_that_the_files_do_not_fill(tmp_path: Path) -> None:
    """A manifest that speaks of a parameter of 2^60 elements, of which there are three."""
    file = tmp_path / "rank-00000.safetensors"
    save_file({"master/w": torch.ones(3)}, file, {"starts": json.dumps({"master/w": 0})})
    (tmp_path / MANIFEST).write_text(manifest_of(parameters={"w": [2**60]}, ema_rates=[]))
    with pytest.raises(StorageError, match=rf"holds 3 of {2**60} elements of master/w"):
        Checkpoint(tmp_path).weights()


@pytest.mark.parametrize("metadata", [None, {}, {"starts": "[]"}, {"starts": '{"other": 0}'}, {"starts": '{"w": "x"}'}])
def test_a_file_that_does_not_tell_its_starts_is_refused(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "rank-00000.safetensors", metadata)
    (tmp_path / MANIFEST).write_text(manifest_of())
    with pytest.raises(StorageError, match="do not give the starts of its slices"):
        Checkpoint(tmp_path)
