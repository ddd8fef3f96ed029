"""The variables of a launcher: those of a job, and those that cannot be."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastdiff.cli.main import main
from fastdiff.errors import ConfigError
from fastdiff.parallel.claims import Claims, in_turn
from fastdiff.parallel.launcher import VARIABLES, Place, master, place, place_in_any_job
from fastdiff.train import main as train_main
from tests.support.forked import fork_server
from tests.support.processes import ROOT

SENSIBLE = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {"SLURM_STEP_ID": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
WRONG = [
    ({"RANK": "-1"}, r"RANK is '-1', expected a number from 0 to 3 \(WORLD_SIZE is 4\).*`unset RANK WORLD_SIZE"),
    ({"RANK": "4"}, "RANK is '4', expected a number from 0 to 3"),
    ({"RANK": "one"}, "RANK is 'one'"),
    ({"RANK": ""}, "RANK is ''"),
    ({"RANK": "٣"}, "RANK is"),
    ({"RANK": "9" * 5000}, "RANK is"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', expected a number from 1"),
    ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE is '4.0'"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ({"LOCAL_RANK": "4"}, "LOCAL_RANK is '4'"),
    ({"LOCAL_SIZE": "0"}, "LOCAL_SIZE is '0'"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT is '0', expected a number from 1 to 65535"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR is ''"),
]


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_the_place_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() == place_in_any_job() == Place()
    put(monkeypatch, SLURM)
    assert place() == Place(), "a training in a step of Slurm is started by a launcher of its own"
    assert place_in_any_job() == Place(1, 4, 1, 1, ("SLURM_PROCID", "SLURM_NTASKS"))
    assert place_in_any_job() == Place(1, 4, 1, 1, ("SLURM_PROCID", "SLURM_NTASKS"))
    put(monkeypatch, SENSIBLE)
    assert place() == place_in_any_job() == Place(1, 4, 1, 2, ("RANK", "WORLD_SIZE"))
    assert master() == ("127.0.0.1", 29500)
    put(monkeypatch, {"LOCAL_SIZE": None, "LOCAL_WORLD_SIZE": "3"})
    assert place().local_size == 3, "torchrun's name"


@pytest.mark.parametrize(("variables", "message"), WRONG)
def test_numbers_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], message: str
) -> None:
    put(monkeypatch, SENSIBLE | variables)
    with pytest.raises(ConfigError, match=message):
        place(), master()


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"])
def test_numbers_of_slurm_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    put(monkeypatch, SLURM | {name: "-3"})
    with pytest.raises(ConfigError, match=f"{name} is '-3'.*`unset SLURM_STEP_ID`"):
        place_in_any_job()


@pytest.mark.parametrize("command", ["encode", "sample", "train.py"])
@pytest.mark.parametrize("wrong", [{"RANK": "8", "LOCAL_RANK": "0"}, {"RANK": "3", "WORLD_SIZE": "many"}])
def test_a_command_says_so_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    wrong: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # with the record of who has spoken in this job
    put(monkeypatch, SENSIBLE | wrong)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    ended = {
        "encode": lambda: main(["encode", "pictures", "out", "--autoencoder", "identity"]),
        "sample": lambda: main(["sample", "run", "--npz", "out.npz", "--num", "2"]),
        "train.py": lambda: train_main(["--preset", "digits", "--output.folder", "new"]),
    }[command]()
    assert ended == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "the environment variable " in line
    assert not (tmp_path / "new").exists()


def test_a_command_of_one_process_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 7 would leave its errors to rank 0, and the supervisor's ranks would inherit its variables."""
    put(monkeypatch, SENSIBLE | {"RANK": "7", "WORLD_SIZE": "8"})
    command = [sys.executable, "-m", "fastdiff", "train", "--preset", "digits", "--data.path", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 65
    said = " ".join(done.stderr.split())
    assert "ignoring RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR, MASTER_PORT of the environment" in said
    assert "error: " in said


def _take(folder: Path, number: int) -> None:
    sys.exit(0 if Claims(folder, "piece").take(number) else 1)


def test_a_piece_is_taken_once_and_given_back_by_the_end_of_its_process(tmp_path: Path) -> None:
    assert list(in_turn(1, 3, 8)) == [1, 4, 7, 6, 5, 3, 2, 0]
    assert list(in_turn(7, 8, 3)) == [2, 1, 0]
    first, second = (Claims(tmp_path / "work", "piece") for _ in range(2))
    assert first.take(0)
    assert not second.take(0)
    assert second.take(1)
    child = fork_server().Process(target=_take, args=(tmp_path / "work", 2))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert second.take(2), "its process has ended"
    for path in (tmp_path / "work").iterdir():
        path.unlink()
    (tmp_path / "work").rmdir()
    assert first.take(2), "the folder was removed with the locks: a new one counts"
    second.wait(2) if not first.release(2) else None
    second.release_all()
    first.release_all()
