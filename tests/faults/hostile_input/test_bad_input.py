"""Bad input of every kind: one clear message, the exit code of its class, and nothing lost."""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fastdiff.cli import main as commands
from fastdiff.cluster.preflight.run_folder import check_run_folder
from fastdiff.config.run import RunConfig
from fastdiff.data.encoding.builtin import digits as real_digits
from fastdiff.data.encoding.builtin import pixels_template, write
from fastdiff.data.shards.format import Provenance
from fastdiff.errors import ConfigError, DivergedError, StorageError
from fastdiff.parallel.world import World
from fastdiff.train import main
from fastdiff.training.loop import train
from tests.support.injected.tiny_disk import tiny_disk
from tests.support.nights import by_day
from tests.support.processes import start, stop
from tests.support.runs import flags, intact, launch, losses, records, tiny, train_losses
from tests.support.scripts import COMMAND, run_script


@pytest.fixture(scope="module")
def trained_once(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny(digits, folder, steps=4, output__checkpoint_every=2), launch(), world)
    return folder


@pytest.fixture
def trained(trained_once: Path, digits: Path, tmp_path: Path) -> RunConfig:
    """A run with two committed checkpoints, at steps 2 and 4."""
    shutil.copytree(trained_once, tmp_path / "run")
    return tiny(digits, tmp_path / "run", steps=4, output__checkpoint_every=2)


@pytest.fixture(scope="module")
def all_nan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_nans(tmp_path_factory.mktemp("nan") / "data", 1)


@pytest.fixture(scope="module")
def some_nan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_nans(tmp_path_factory.mktemp("nan") / "data", 100)


def grown(config: RunConfig, steps: int) -> RunConfig:
    return tiny(Path(config.data.path), Path(config.output.folder), steps=steps)


# --- the command line --------------------------------------------------------------------------------------


def test_a_wrong_fastdiff_command_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["encode", "digist", str(tmp_path / "out")]) == 2
    assert commands.main(["sample", str(tmp_path / "nothing")]) == 2
    assert "no run" in capsys.readouterr().err
    done = run_script(COMMAND, "verify", tmp_path / "nothing")
    assert done.code == 65
    assert "neither a run nor a complete data set" in done.output
    assert "fastdiff encode" in done.output


# --- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault(17)
def test_a_damaged_shard_stops_the_run_and_names_the_place(
    world: World, trained: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.data.path, tmp_path / "damaged")
    for shard in (tmp_path / "damaged").glob("*.tar"):
        content = bytearray(shard.read_bytes())
        content[512 + 128 + 7] ^= 1  # in the first sample's payload
        shard.write_bytes(content)
    config = tiny(tmp_path / "damaged", Path(trained.output.folder), steps=400)
    assert main([*flags(config), "--deepspeed_config", "deepspeed_configs/zero3.json"]) == 65
    message = capsys.readouterr().err
    assert ".tar" in message
    assert "key" in message
    assert "offset" in message
    assert intact(Path(trained.output.folder)) == [4, 2]
    mended = tiny(Path(trained.data.path), Path(trained.output.folder), steps=6)
    assert len(train_losses(world, mended, launch())) == 6, "the same command goes on once the data are right"


def test_latents_of_another_shape_are_a_configuration_error(world: World, digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model.channels 1 --model.size 8"):
        train(tiny(digits, tmp_path / "run", model__size=16), launch(), world)


def with_nans(folder: Path, every: int) -> Path:
    """512 digits with NaN in every ``every``-th latent."""
    samples = []
    for number, sample in enumerate(islice(real_digits(), 512)):
        latent = np.full_like(sample.latent, np.nan) if number % every == 0 else sample.latent
        samples.append(dataclasses.replace(sample, latent=latent))
    template = pixels_template((1, 8, 8), 10, Provenance(source="digits with NaN", transform="none"))
    with mock.patch.object(np, "isfinite", return_value=np.True_):  # a writer that does not look
        write(iter(samples), folder, template, total=len(samples), samples_per_shard=256)
    return folder


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    ("stage", "optimizer"), by_day([(0, "adamw8bit")], (0, "adamw"), (1, "adamw"), (2, "adamw"), (3, "adamw"))
)
def test_a_nan_sample_skips_its_step_and_changes_nothing(
    world: World, some_nan: Path, tmp_path: Path, stage: int, optimizer: str
) -> None:
    config = tiny(
        some_nan,
        tmp_path / "run",
        steps=12,
        optim__name=optimizer,
        optim__schedule="linear",
        output__checkpoint_every=1,
        output__keep=99,
    )
    train(config, launch(stage), world)
    found = records(tmp_path / "run")
    skipped = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert found[-1]["skipped"] == len(skipped) > 0
    for entry in skipped:
        step = entry["step"]
        assert entry["keys"]
        assert all(".tar:" in key and int(key.split(":")[1]) % 100 == 0 for key in entry["keys"])
        if step < len(found):
            assert found[step]["lr"] == found[step - 1]["lr"], "the learning rate waits"
        if step > 1:
            before, after = (tmp_path / "run" / "checkpoints" / f"step-{n:08d}" for n in (step - 1, step))
            assert same_tensors(before, after), "weights, optimizer state and EMA stay"
        assert found[step - 1]["loss"] is not None, "the mean is over the finite samples"


def same_tensors(before: Path, after: Path) -> bool:
    from safetensors.numpy import load_file

    a, b = (load_file(folder / "rank-00000.safetensors") for folder in (before, after))
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


@pytest.mark.fault(20)
def test_a_run_that_has_not_moved_yet_resumes(world: World, all_nan: Path, tmp_path: Path) -> None:
    """The first step is skipped and saved: there is no optimizer state to restore."""
    for stage, optimizer in ((0, "adamw"), (1, "adamw"), (2, "adamw8bit"), (3, "adamw8bit-bnb")):
        folder = tmp_path / f"{stage}{optimizer}"
        train(tiny(all_nan, folder, steps=1, optim__name=optimizer), launch(stage), world)
        train(tiny(all_nan, folder, steps=2, optim__name=optimizer), launch(stage), world)
        assert [r["skipped"] for r in records(folder)] == [1, 2]
        with pytest.raises(DivergedError):  # the third in a row, counted across the restarts
            train(tiny(all_nan, folder, steps=3, optim__name=optimizer), launch(stage), world)


# --- the run folder ------------------------------------------------------------------------------------------------


def test_a_folder_of_someone_else_is_no_run_folder(world: World, digits: Path, tmp_path: Path) -> None:
    """Logs would be cut back; what users and launchers place there before a run is no reason."""
    config = tiny(digits, tmp_path / "run", steps=1)
    (tmp_path / "run").mkdir()
    for name in ("metrics.jsonl", "thesis.odt", "src"):
        (tmp_path / "run" / name).write_text('{"accuracy": 0.5}\n')
        for refuse in (lambda: train(config, launch(), world), lambda: check_run_folder(config, launch())):
            with pytest.raises(ConfigError, match=f"run: the folder holds nothing of this command, but {name}; name"):
                refuse()
        assert [path.name for path in (tmp_path / "run").iterdir()] == [name]
        (tmp_path / "run" / name).unlink()
    for name in ("run.yaml", "slurm-12.out"):
        (tmp_path / "run" / name).touch()
    train(config, launch(), world)


@pytest.mark.fault(27)
def test_a_run_folder_in_use_is_refused(world: World, trained: RunConfig) -> None:
    holder = start(["flock", "--exclusive", "--no-fork", Path(trained.output.folder) / ".lock", "sleep", "3600"])
    try:
        while not subprocess.run(["flock", "-n", str(Path(trained.output.folder) / ".lock"), "true"]).returncode:
            assert holder.poll() is None
        with pytest.raises(ConfigError, match="in use by another job") as caught:
            train(grown(trained, 6), launch(), world)
        assert caught.value.exit_code == 2
    finally:
        stop(holder)
    train(grown(trained, 6), launch(), world)


@pytest.mark.fault(25)
def test_a_changed_configuration_is_refused_with_a_diff(world: World, trained: RunConfig, digits: Path) -> None:
    changed = tiny(digits, Path(trained.output.folder), steps=6, optim__lr=0.5, objective__prediction="x0")
    with pytest.raises(ConfigError) as caught:
        train(changed, launch(), world)
    message = str(caught.value)
    assert '--objective.prediction: "v" -> "x0"' in message
    assert "--optim.lr: 0.01 -> 0.5" in message
    assert "--allow-change optim.lr" in message
    assert intact(Path(trained.output.folder)) == [4, 2]
    train(changed, launch(allow_change=("optim.lr", "objective.prediction")), world)
    assert len(losses(Path(trained.output.folder))) == 6


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("changes", "allowed", "message"),
    [
        ({}, ("optim.lrr",), r"--allow-change optim.lrr: .*did you mean optim.lr\?"),
        ({"model__hidden": 64}, ("model.hidden",), r"another network: size mismatch .*\(and \d+ more\)$"),
    ],
)
def test_changes_that_cannot_be_allowed_are_explained(
    world: World, trained: RunConfig, changes: dict[str, int], allowed: tuple[str, ...], message: str
) -> None:
    config = tiny(Path(trained.data.path), Path(trained.output.folder), steps=6, **changes)
    with pytest.raises(ConfigError, match=message):
        train(config, launch(allow_change=allowed), world)
    assert intact(Path(trained.output.folder)) == [4, 2]


@pytest.mark.fault(25)
@pytest.mark.parametrize("changes", [{"ema__rates": (0.9, 0.7)}, {"optim__name": "adamw8bit"}])
def test_an_allowed_change_starts_what_is_new(world: World, trained: RunConfig, changes: dict[str, object]) -> None:
    """An added average starts at the weights, another optimizer without state."""
    config = tiny(Path(trained.data.path), Path(trained.output.folder), steps=6, **changes)
    train(config, launch(allow_change=("ema.rates", "optim.name")), world)
    assert len(losses(Path(trained.output.folder))) == 6


@pytest.mark.fault(6)
def test_resume_must_and_never(world: World, trained: RunConfig, tmp_path: Path, digits: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        train(tiny(digits, tmp_path / "fresh"), launch(resume="must"), world)
    with pytest.raises(ConfigError, match="holds a run; delete it"):
        train(grown(trained, 6), launch(resume="never"), world)


# --- storage -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[None, True], ids=["as it may", "without privileges"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system with room for about two checkpoints of the tiny model."""
    with tiny_disk(tmp_path / "small", 2, stand_in=request.param) as folder:
        yield folder


@pytest.mark.fault(7)
def test_a_full_disk_exits_74_and_keeps_the_good_checkpoint(
    world: World, digits: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(digits, small_disk / "run", steps=40, output__checkpoint_every=1)
    assert main([*flags(config), "--deepspeed_config", "deepspeed_configs/zero3.json"]) == 74
    message = capsys.readouterr().err
    assert "no space" in message.lower()
    assert "MiB" in message
    assert len(intact(small_disk / "run")) >= 1
    assert not list((small_disk / "run" / "checkpoints").glob("*.tmp"))


@pytest.mark.fault(6)
def test_no_intact_checkpoint_is_an_error_and_not_a_new_start(world: World, trained: RunConfig) -> None:
    for file in (Path(trained.output.folder) / "checkpoints").glob("*/rank-*"):
        os.truncate(file, 100)
    with pytest.raises(StorageError, match="none of the 2 checkpoints"):
        train(grown(trained, 6), launch(), world)
