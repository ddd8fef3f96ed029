"""The commit protocol: a kill between any two of its file operations leaves a good checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fastdiff import commit
from fastdiff.dist import World
from fastdiff.saved import METERS, Saved, committed, file_digest
from fastdiff.train import train
from tests.processes import run_ranks
from tests.runs import hexes, intact, launch, losses, newest, tiny, train_losses


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing runs after it."""


def kill_at(operation: int, within: str = "checkpoints") -> tuple[Callable[[], None], Callable[[], int]]:
    """Make file operation number ``operation`` in the folder ``within`` the last one; returns undo, and a counter."""
    done = 0
    patched: list[tuple[Any, str, Any]] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            nonlocal done
            if not any(within in Path(str(a)).parts for a in args) and owner is not os:
                return original(*args, **options)
            if done == operation:
                raise Killed
            done += 1
            return original(*args, **options)

        patched.append((owner, name, original))
        setattr(owner, name, call)

    watch(commit, "save_file")
    watch(commit, "fsync")
    watch(commit.shutil, "rmtree")
    for name in ("mkdir", "write_text", "rename", "unlink"):
        watch(Path, name)

    def undo() -> None:
        for owner, name, original in reversed(patched):
            setattr(owner, name, original)

    return undo, lambda: done


def test_a_kill_at_every_file_operation_leaves_a_good_checkpoint(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Save at step 4 with checkpoints 2 and 3 there and 1 to be pruned; die at operation 0, 1, 2, ... of that save."""
    whole = train_losses(world, tiny(digits, tmp_path / "whole", steps=5), launch())
    operation = 0
    while True:
        folder = tmp_path / f"run{operation}"
        train(tiny(digits, folder, steps=3, output__checkpoint_every=1), launch(), world)
        undo, count = kill_at(operation)
        try:
            train(tiny(digits, folder, steps=4, output__checkpoint_every=1), launch(), world)
            survived = True
        except Killed:
            survived = False
        finally:
            undo()
        good = intact(folder)
        assert good[0] in (3, 4), f"killed at operation {operation}: {good} are left"
        capsys.readouterr()
        resumed = train_losses(world, tiny(digits, folder, steps=5), launch())
        assert f"resuming from step {good[0]}" in capsys.readouterr().out
        assert hexes(resumed) == hexes(whole), f"killed at operation {operation}"
        left = {path.name for path in (folder / "checkpoints").iterdir()}
        assert left == {"step-00000005", f"step-0000000{good[0]}"}, "the next save cleans up"
        if survived:
            assert count() >= 8, "the operations were really watched"
            return
        operation += 1


def test_retention_keeps_the_newest(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=6, output__checkpoint_every=1, output__keep=3), launch(), world)
    assert [p.name for p in committed(tmp_path / "run" / "checkpoints")] == [f"step-{n:08d}" for n in (6, 5, 4)]


def test_nothing_is_pruned_while_fewer_than_two_are_intact(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", steps=2, output__checkpoint_every=1)
    train(config, launch(), world)
    for file in (tmp_path / "run" / "checkpoints" / "step-00000002").glob("rank-*"):
        os.truncate(file, 10)
    train(tiny(digits, tmp_path / "run", steps=3, output__checkpoint_every=3), launch(), world)
    assert [p.name for p in committed(tmp_path / "run" / "checkpoints")][-1] == "step-00000001"


def test_a_manifest_tells_what_is_in_it(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run")
    train(config, launch(), world)
    folder = committed(tmp_path / "run" / "checkpoints")[0]
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["progress"] == {"samples": 96, "steps": 6, "skipped": 0, "skipped_in_a_row": 0}
    assert manifest["config"]["optim"]["lr"] == config.optim.lr
    assert manifest["versions"]["torch"]
    assert manifest["ema_rates"] == [0.9, 0.5]
    assert {p.name for p in folder.iterdir()} == {"MANIFEST.json", "rank-00000.safetensors"}, "no pickle, no scripts"


def test_weights_do_not_depend_on_ranks_or_stage(world: World, digits: Path, tmp_path: Path) -> None:
    """The same run written by one rank at ZeRO-0 and by two at ZeRO-3: equal parameters, equal averages."""
    train(tiny(digits, tmp_path / "one", batch__micro=8), launch(0), world)
    run_ranks(train_losses, tiny(digits, tmp_path / "two", batch__micro=8), launch(3), ranks=2)
    one, two = (Saved(committed(tmp_path / name / "checkpoints")[0]) for name in ("one", "two"))
    for rate in (None, 0.9, 0.5):
        a, b = one.weights(rate), two.weights(rate)
        assert a.keys() == b.keys()
        assert all((a[name] - b[name]).abs().max() < 1e-5 for name in a)


def test_a_failed_rank_fails_all_and_leaves_nothing_half_written(
    torch_extensions: Path, digits: Path, tmp_path: Path
) -> None:
    for message in run_ranks(_fail_on_rank_1, digits, tmp_path / "run", ranks=2):
        assert "rank-00001" in message, "every rank names the file that failed"
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def _fail_on_rank_1(world: World, digits: Path, folder: Path) -> str:
    from safetensors import SafetensorError

    def fail(tensors: Any, path: Path, metadata: Any = None) -> None:
        raise SafetensorError("No space left on device")

    if world.rank == 1:
        commit.save_file = fail  # type: ignore[assignment]
    try:
        train(tiny(digits, folder, steps=1), launch(), world)
    except commit.StorageError as error:
        return str(error)
    return "no error"


def test_losses_file_drops_what_a_resume_writes_again(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=3), launch(), world)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    train(tiny(digits, tmp_path / "run", steps=6), launch(), world)
    assert len(losses(tmp_path / "run")) == 6


OLD_OBJECTIVE = {
    "schedule",
    "timesteps",
    "zero_terminal_snr",
    "prediction",
    "weighting",
    "min_snr_gamma",
    "noise_offset",
    "input_perturbation",
    "dream",
    "dream_detail_preservation",
    "condition_dropout",
}


def test_a_checkpoint_from_before_the_objectives_goes_on(world: World, digits: Path, tmp_path: Path) -> None:
    """Rewritten to what it was: no widths, no draw of timesteps, fewer fields, and one sum of losses."""
    whole = train_losses(world, tiny(digits, tmp_path / "whole", steps=4), launch())
    run = tmp_path / "run"
    train(tiny(digits, run, steps=2), launch(), world)
    _make_old(newest(run).folder)
    resumed = train_losses(world, tiny(digits, run, steps=4), launch())
    assert hexes(resumed) == hexes(whole)
    one, other = newest(run), newest(tmp_path / "whole")
    for rate in (None, 0.9, 0.5):
        assert all(torch.equal(values, other.weights(rate)[name]) for name, values in one.weights(rate).items())
    assert (one.ema_stds, one.timesteps()) == ((), {})


def _make_old(folder: Path) -> None:
    path, manifest = folder / "rank-00000.safetensors", json.loads((folder / "MANIFEST.json").read_text())
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    tensors[METERS] = torch.zeros(2, dtype=torch.float64)
    save_file(tensors, path, metadata)
    config = manifest["config"]
    del manifest["ema_stds"], config["timesteps"]
    assert config["objective"].keys() > OLD_OBJECTIVE
    config["objective"] = {key: value for key, value in config["objective"].items() if key in OLD_OBJECTIVE}
    config["ema"] = {key: config["ema"][key] for key in ("rates", "warmup")}
    for key in ("data", "samples"):
        del config["validation"][key]
    manifest["files"] = {path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
