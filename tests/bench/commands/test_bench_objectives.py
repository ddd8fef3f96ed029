"""``bench objectives``: real runs, a strict record and the table of the documentation, whose names exist."""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from PIL import Image

from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.registry import networks
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import (
    PROCESSES,
    FlowPath,
    LossName,
    Prediction,
    Process,
    ScheduleName,
    Variance,
    Weighting,
)
from fastdiff.config.sections.timesteps import Density
from fastdiff.evaluation.comparison import compare, read_both
from fastdiff_bench import BenchError
from fastdiff_bench.__main__ import main
from fastdiff_bench.commands import objectives
from fastdiff_bench.commands.objectives import OBJECTIVES, Outcome
from fastdiff_bench.records import readme, record
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Log, Record
from tests.support.scripts import run_script

TEXT = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
NAME = "hybrid, learned range, importance"


def forked(command: Sequence[str]) -> None:
    """Run the trainer in a fork instead of a new process."""
    assert command[0] == sys.executable
    done = run_script(Path(command[1]), *command[2:])
    assert done.code == 0, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, nightly: bool) -> Path:
    """Where one objective was tried out: ``runs`` and ``out``; by night the trainer is a new process."""
    folder = tmp_path_factory.mktemp("objectives")
    places = ["--folder", str(folder / "runs"), "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        if not nightly:
            patch.setattr(objectives, "finish", forked)
        assert main(["objectives", "--smoke", "--only", NAME, *places]) == 0
    return folder


def values(read: Record) -> dict[tuple[str, str], float]:
    return {(row.provider, row.quantity): row.value for row in read.measurements}


@pytest.mark.nightly
def test_the_record_says_what_the_run_left(folder: Path) -> None:
    (run,) = (path.parent for path in folder.glob("runs/*/run.json"))
    read = record.read(folder / "out" / "objectives.jsonl")
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert values(read) == {
        (NAME, "accuracy"): evaluation["accuracy"],
        (NAME, "frechet distance"): evaluation["frechet_distance"],
    }
    assert {row.case for row in read.measurements} == {"digits, 4 steps"}
    assert all(row.facts == {"flags": OBJECTIVES[NAME], "steps": 4} for row in read.measurements)
    config = json.loads((run / "run.json").read_text())["config"]
    assert (config["objective"]["variance"], config["timesteps"]["density"]) == ("learned_range", "importance")


def test_the_picture_has_ten_digits_in_a_row(folder: Path) -> None:
    with Image.open(folder / "out" / "objectives.png") as picture:
        assert picture.size == (10 * 66 + 2, 66 + 2)


def test_the_table_has_the_numbers_of_the_record(folder: Path) -> None:
    text = readme.rendered("<!-- bench: objectives out -->\n<!-- end bench -->\n", folder)
    found = values(record.read(folder / "out" / "objectives.jsonl"))
    figures = [f"{found[NAME, 'accuracy']:.3f}", f"{found[NAME, 'frechet distance']:.2f}"]
    assert f"| {NAME} | `{OBJECTIVES[NAME]}` | 4 | {' | '.join(figures)} |" in text


@pytest.mark.nightly
def test_pairs_of_seeds_are_compared_on_unseen_digits(tmp_path: Path) -> None:
    names = ("flow, logit-normal", "flow, x0, logit-normal")
    places = ["--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main(["objectives", "--smoke", "--seeds", "2", "--only", *names, *places]) == 0
    folders = [[tmp_path / "runs" / f"seed-{seed}" / name for name in ("flow-logit-normal", "flow-x0-logit-normal")]
               for seed in range(2)]  # fmt: skip
    percent = [100 * compare(*read_both(*pair)).total.relative for pair in folders]
    rows = {row.quantity: row for row in record.read(tmp_path / "out" / "objectives.jsonl").measurements}
    total = rows[f"difference from {names[0]}"]
    assert (total.provider, total.case, total.unit) == (names[1], "digits of other forms", "%")
    assert total.value == pytest.approx(sum(percent) / 2)
    assert total.facts["standard_error"] == pytest.approx(abs(percent[0] - percent[1]) / 2)
    assert len(rows) > 5, "noise levels, too"


def test_one_objective_has_nothing_to_be_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["objectives", "--seeds", "3", "--only", NAME, "--folder", str(tmp_path)]) != 0
    assert "--seeds 3 compares objectives; name two or more with --only" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_failures_are_in_the_record_and_the_exit_code(tmp_path: Path) -> None:
    done = Outcome(1000, 0.958, 0.31, torch.zeros(10, 1, 8, 8))
    with Log(tmp_path / "objectives.jsonl") as log:
        assert objectives.report({"v": done, "x0": "the trainer ended with exit code 70"}, log) == 1
    read = record.read(tmp_path / "objectives.jsonl")
    assert [(row.provider, row.reason) for row in read.failures] == [("x0", "the trainer ended with exit code 70")]
    text = readme.rendered("<!-- bench: objectives . -->\n<!-- end bench -->\n", tmp_path)
    assert f"| v | `{OBJECTIVES['v']}` | 1000 | 0.958 | 0.31 |" in text
    assert "- x0 (digits): the trainer ended with exit code 70" in text


def test_a_trainer_that_fails_is_a_failure() -> None:
    objectives.finish([sys.executable, "-c", "pass"])
    with pytest.raises(BenchError, match="exit code 70"):
        objectives.finish([sys.executable, "-c", "raise SystemExit(70)"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_flags_of_each_make_a_run(name: str) -> None:
    _, config = parse(["--preset", "digits", *OBJECTIVES[name].split()])
    assert config.steps == 1000


def test_the_documented_record_has_each_objective() -> None:
    (folders,) = re.findall(r"^<!-- bench: objectives (.+) -->$", TEXT, re.MULTILINE)
    rows = [m for one in record.read_all([ROOT / f for f in folders.split()]) for m in one.measurements]
    accuracies = {m.provider: m.value for m in rows if m.quantity == "accuracy"}
    assert list(accuracies) == list(OBJECTIVES)
    assert all(m.facts == {"flags": OBJECTIVES[m.provider], "steps": 1000} for m in rows)
    assert min(accuracies.values()) >= 0.95, accuracies


def test_every_choice_is_documented() -> None:
    quoted = set(re.findall(r"`([a-z0-9_]+)`", TEXT))
    for choices in (Process, ScheduleName, FlowPath, Prediction, Variance, LossName, Weighting, Density):
        assert set(get_args(choices)) <= quoted, choices


def test_every_flag_that_is_named_exists() -> None:
    flags = {f"model.{field.name}" for kind in networks().values() for field in dataclasses.fields(kind)}
    flags |= {f"objective.{field.name}" for kind in PROCESSES.values() for field in dataclasses.fields(kind)}
    for group in dataclasses.fields(RunConfig):
        if group.default_factory is not dataclasses.MISSING:
            flags |= {f"{group.name}.{field.name}" for field in dataclasses.fields(group.default_factory())}
    found = set(re.findall(r"--(\w+\.\w+)", TEXT))
    assert len(found) > 30
    assert found <= flags, found - flags
