"""Checkpoints: their contents, how many are kept, and resumes from older versions."""

import errno
import json
import os
import resource
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastdiff import files
from fastdiff.checkpoint import staging, step_folders
from fastdiff.checkpoint.manifest import committed
from fastdiff.checkpoint.reader import METERS, Checkpoint
from fastdiff.checkpoint.staging import HostCopy
from fastdiff.checkpoint.step_folders import StepFolders
from fastdiff.config.sections.divergence import DivergenceConfig
from fastdiff.errors import ConfigError, StorageError
from fastdiff.files import file_digest
from fastdiff.parallel.world import World
from fastdiff.progress import Progress
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.runs import distance, hexes, intact, launch, newest, tiny, train_losses

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def test_retention_keeps_the_newest(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=6, output__checkpoint_every=1, output__keep=3), launch(), world)
    assert [p.name for p in committed(tmp_path / "run" / "checkpoints")] == [f"step-{n:08d}" for n in (6, 5, 4)]


def test_one_checkpoint_may_be_kept(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=3, output__checkpoint_every=1, output__keep=1), launch(), world)
    assert [p.name for p in committed(tmp_path / "run" / "checkpoints")] == ["step-00000003"]
    train(tiny(digits, tmp_path / "run", steps=4, output__checkpoint_every=1, output__keep=1), launch(), world)
    assert [p.name for p in committed(tmp_path / "run" / "checkpoints")] == ["step-00000004"]
    rewinding = {"output__checkpoint_every": 1, "divergence": DivergenceConfig(policy="rewind")}
    with pytest.raises(ConfigError, match="rewind goes back behind a spike, and --output"):
        tiny(digits, tmp_path / "run", **rewinding, output__keep=1)


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
    assert manifest["progress"] == asdict(Progress(samples=96, steps=6))
    assert manifest["config"]["optim"]["lr"] == config.optim.lr
    assert manifest["versions"]["torch"]
    assert manifest["ema_rates"] == [0.9, 0.5]
    assert {p.name for p in folder.iterdir()} == {"MANIFEST.json", "rank-00000.safetensors"}, "no pickle, no scripts"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_is_what_safetensors_reads(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype, across the blocks of the memory, which is used again for the next copy."""
    monkeypatch.setattr(staging, "_BLOCK", 64)
    copy = HostCopy()
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(37, generator=generator)
        tensors = {f"{kind}": (100 * noise).to(kind) for kind in DTYPES} | {"none": torch.empty(0), "one": noise[0]}
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        tensors["slice"] = tensors["torch.float32"][3:9]
        share = copy.take(tensors, {"slice": 3})
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        path = tmp_path / f"{seed}.safetensors"
        entry = files.write_file(path, share.parts)
        assert entry == {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        assert share.bytes == path.stat().st_size
        with safe_open(path, framework="pt") as file:
            assert json.loads(file.metadata()["starts"]) == {"slice": 3}
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            assert found[name].dtype == wanted.dtype
            assert torch.equal(found[name], wanted.cpu()), name
    assert sum(len(block) for block in copy._blocks) == share.bytes - len(share.parts[0]), "the same memory"
    assert all(block.is_pinned() for block in copy._blocks) == (device == "cuda")


def test_a_copy_is_rounded_as_torch_does(tmp_path: Path) -> None:
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    files.write_file(tmp_path / "a", HostCopy().take({"a": noise}, {}, torch.float16).parts)
    assert torch.equal(load_file(tmp_path / "a")["a"], noise.half())


def test_memory_that_cannot_be_pinned_is_taken_as_it_is() -> None:
    copy = HostCopy()
    copy._make_room(100, pinned=True)
    assert [len(block) for block in copy._blocks] == [100]
    assert copy._blocks[0].is_pinned() == torch.cuda.is_available()


def _copy_without_memory(world: World, folder: Path) -> str:
    if world.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # Room for the arenas of threads that begin later, 128 MiB of addresses each; the copy does not fit.
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**32, resource.RLIM_INFINITY))
    large = torch.zeros(1).expand(2**31 if world.rank == 1 else 1)
    try:
        StepFolders(folder, world, "a checkpoint").draft(world, 1, {"large": large}, {}, {})
    except StorageError as error:
        torch.empty(2**29 if world.rank == 1 else 0)  # what was taken of the 4 GiB is free again
        return str(error)
    return "no error"


def test_a_host_without_memory_fails_all_ranks(tmp_path: Path) -> None:
    for message in values(forked_ranks(_copy_without_memory, tmp_path)):
        assert "no host memory for a copy of 8.00 GiB" in message


def test_the_cause_of_a_failure_is_reported_even_if_cleaning_up_fails(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    folders = StepFolders(tmp_path, world, "a checkpoint")
    draft = folders.draft(world, 1, {"a": torch.ones(3)}, {}, {})
    monkeypatch.setattr(files, "_fallocate", lambda *_: errno.ENOSPC)
    monkeypatch.setattr(step_folders.shutil, "rmtree", fails)
    with pytest.raises(StorageError, match="no space on"):
        folders.commit(draft)


def test_a_checkpoint_is_pruned_beside_the_leftover_of_another_prune(world: World, tmp_path: Path) -> None:
    """A kill in a removal leaves a part of the folder under the name to which the next removal renames."""
    folders = StepFolders(tmp_path, world, "a checkpoint")
    final = folders.commit(folders.draft(world, 1, {"a": torch.ones(3)}, {"a": 0}, {}))
    leftover = tmp_path / "step-00000001.tmp"
    leftover.mkdir()
    (leftover / "rank-00000.safetensors").write_bytes(b"-")
    folders.remove([final])
    assert not list(tmp_path.iterdir())


def test_weights_do_not_depend_on_ranks_or_stage(world: World, digits: Path, tmp_path: Path) -> None:
    """The same run written by one rank at ZeRO-0 and by two at ZeRO-3: equal parameters, equal averages."""
    train(tiny(digits, tmp_path / "one", batch__micro=8), launch(0), world)
    values(forked_ranks(train_losses, tiny(digits, tmp_path / "two", batch__micro=8), launch(3)))
    one, two = (Checkpoint(committed(tmp_path / name / "checkpoints")[0]) for name in ("one", "two"))
    for rate in (None, 0.9, 0.5):
        assert distance(two.weights(rate), one.weights(rate)) < 1e-5


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


def test_a_checkpoint_of_an_older_version_resumes(world: World, digits: Path, tmp_path: Path) -> None:
    """Rewritten to what it was: no widths, timesteps and count of the optimizer, fewer fields, one sum of losses."""
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
    del manifest["ema_stds"], manifest["sha256"], config["timesteps"], manifest["optimizer_steps"]
    assert config["objective"].keys() > OLD_OBJECTIVE
    config["objective"] = {key: value for key, value in config["objective"].items() if key in OLD_OBJECTIVE}
    config["ema"] = {key: config["ema"][key] for key in ("rates", "warmup")}
    for key in ("data", "samples"):
        del config["validation"][key]
    manifest["files"] = {path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("every", "expected"), [(1000, [6, 5, 4, 3, 2]), (0, [6])])
def test_a_checkpoint_follows_when_its_time_has_come(
    digits: Path, tmp_path: Path, every: int, expected: list[int]
) -> None:
    """By the clock of rank 0, of which all ranks hear with the next step; without checkpoints there are none."""
    output = {"output__checkpoint_every": every, "output__checkpoint_minutes": 1e-9, "output__keep": 10}
    values(forked_ranks(train_losses, tiny(digits, tmp_path / "run", **output), launch(1)))
    assert intact(tmp_path / "run") == expected
