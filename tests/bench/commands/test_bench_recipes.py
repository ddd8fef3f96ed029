"""``bench recipes``: real runs, a sweep that goes on beyond its end, and comparisons that find what is there."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.errors import DivergedError
from fastdiff.evaluation.validation_files import Validated
from fastdiff.parallel.world import World
from fastdiff_bench.__main__ import main
from fastdiff_bench.commands.recipes import arms, best_rates, comparisons, report, sweep
from fastdiff_bench.measure.speed_up import Curve
from fastdiff_bench.records import readme, record
from fastdiff_bench.records.record import Log
from fastdiff_bench.trainers import recipes
from fastdiff_bench.trainers.recipes import ARMS, BASELINE, SWEEP, TASKS, Trained, Trial

OTHER = "8-bit AdamW"
ALIGNED = f"{BASELINE} + alignment"
RUN = ("recipes", "--smoke", "--task", "digits", "--only", OTHER, ALIGNED, "--seeds", "2")


def trained(arm: str, rate: float, seed: int, losses: list[float]) -> Trained:
    """A run with these losses, at the end in every sample alike."""
    about = {"data": "digits", "seed": 1, "objective": {}, "unit": "velocity"}
    levels = np.linspace(-10, 10, 320).astype(np.float32)
    errors = np.full(320, losses[-1]) * (1 + 1e-3 * np.random.default_rng([seed, len(arm)]).standard_normal(320))
    validated = Validated(np.arange(320), levels, errors, errors, about)
    trial = Trial("digits", arm, rate, seed, 40)
    drawn = {} if seed == SWEEP else {"accuracy": 0.5, "frechet distance": 2.0}
    ms, gib = (10.0, 0.5) if arm == BASELINE else (20.0, 0.5625)
    return Trained(trial, Curve([10, 20, 30, 40], losses), validated, ms, gib, drawn, None)


def of_sweep(losses: dict[float, float]) -> list[Trained]:
    return [trained(BASELINE, rate, SWEEP, [loss] * 4) for rate, loss in losses.items()]


def test_a_sweep_goes_on_while_an_end_is_best_and_tries_no_run_again() -> None:
    tried: list[float] = []

    def train(new: Sequence[Trial]) -> list[Trained]:
        """Fail at 0.064; otherwise the loss is lower, the higher the rate is."""
        tried.extend(trial.rate for trial in new)
        return [trained(one.arm, one.rate, SWEEP, [1 / one.rate] * 4) for one in new if one.rate < 0.064]

    done, failed = sweep("digits", Namespace(only=[BASELINE], smoke=False), train)
    assert tried == [0.002, 0.004, 0.008, 0.016, 0.032, 0.064], "the last one once, although it failed"
    assert (best_rates(done), failed) == ({BASELINE: 0.032}, 1)


def test_every_task_has_the_baseline_first() -> None:
    for task in TASKS:
        assert arms(task, None)[0] == BASELINE
        assert arms(task, [OTHER]) == [BASELINE, OTHER]


def made_up() -> list[Trained]:
    """A method that takes half the steps of the baseline, twice the time for each, and 64 MiB more."""
    runs = []
    for seed in range(3):
        last = 0.5 + 0.01 * seed
        runs.append(trained(BASELINE, 4e-3, seed, [0.9, 0.7, 0.6, last]))
        runs.append(trained(OTHER, 2e-3, seed, [0.7, last - 1e-3 * seed, 0.45, 0.4]))
    return [*of_sweep({4e-3: 0.1}), *reversed(runs)]


def test_methods_are_compared_with_the_baseline_by_seeds() -> None:
    found = {name: one for (_, name), one in comparisons(made_up()).items()}
    assert list(found) == [f"{BASELINE}, lr 0.004", f"{OTHER}, lr 0.002"], "in the order of the methods, and no sweep"
    gain = found[f"{OTHER}, lr 0.002"]
    assert gain.speed_up.mean == pytest.approx(2, abs=0.05)
    assert gain.speed_up.verdict == "gain"
    assert gain.cost == 2
    assert gain.more_memory == 64
    assert gain.tested(Path()).total.mean == pytest.approx(-21, abs=2)


def test_a_method_that_failed_at_a_seed_is_not_compared() -> None:
    left = [one for one in made_up() if (one.trial.arm, one.trial.seed) != (OTHER, 1)]
    assert [name for _, name in comparisons(left)] == [f"{BASELINE}, lr 0.004"]


def test_a_run_that_diverged_fails(world: World, tmp_path: Path) -> None:
    recipes.prepare("digits", tmp_path, few=True)
    trial = Trial("digits", BASELINE, rate=1e30, seed=0, steps=2, tiny=True)
    with pytest.raises(DivergedError, match=r"held-out loss at step \d is not finite"):
        recipes.run(trial, tmp_path)
    assert recipes.finished(trial, tmp_path) is None


def test_the_record_the_table_and_the_picture_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path / "recipes.jsonl") as log:
        report(made_up(), tmp_path, log)
    rows = {(m.provider, m.quantity): m for m in record.read(tmp_path / "recipes.jsonl").measurements}
    steps, time = (rows[f"{OTHER}, lr 0.002", f"speed-up in {what}"] for what in ("steps", "time"))
    assert time.value == pytest.approx(steps.value / 2)
    assert rows[f"{OTHER}, lr 0.002", f"difference from {BASELINE}"].value < -10
    text = readme.rendered("<!-- bench: recipes . -->\n<!-- end bench -->\n", tmp_path)
    assert f"| {OTHER}, lr 0.002 | {rows[f'{OTHER}, lr 0.002', 'validation loss'].value:.4f} | " in text
    assert f"| {steps.value:.2f} | " in text
    assert f"| 2.00 | {time.value:.2f} | +64.0 | " in text
    assert "| gain |" in text
    assert "gain" in capsys.readouterr().out
    with Image.open(tmp_path / "recipes.png") as picture:
        assert picture.width > picture.height


def test_runs_are_trained_and_not_anew_at_a_second_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*RUN, "--folder", str(tmp_path / "runs"), "--out", str(tmp_path))
    assert main(flags) == 0
    measured = record.read(tmp_path / "recipes.jsonl").measurements
    assert [m.facts["trained on"] for m in measured if "saw labels" in m.provider] == ["labels of the training half"]
    rows = [m for m in measured if m.quantity.startswith("validation loss")]
    assert {m.provider.rpartition(", ")[0] for m in rows} == {BASELINE, OTHER, ALIGNED}
    compared = [m for m in rows if m.quantity.endswith(("seed 0", "seed 1"))]
    assert len({m.provider for m in compared}) == 3, "each at one rate"
    losses = {m.quantity: [o.value for o in compared if o.quantity == m.quantity] for m in compared}
    for found in losses.values():
        assert len(set(found)) == 3, "the methods differ"
        assert found == pytest.approx([found[0]] * 3, rel=2e-3), "the data, the noise and the initial weights do not"
    peaks = [m.value for m in measured if m.quantity.startswith("peak memory") and m.unit == "GiB"]
    assert len(peaks) == len([m for m in measured if m.unit == "ms"]) > 6, "of each run, as its time"
    assert all(0.1 < peak < 10 for peak in peaks), "of the process, with its libraries"
    folders = sorted(tmp_path.glob("runs/runs/*/*/*/metrics.jsonl"))
    aligned = {folder for folder in folders if "loss_alignment" in folder.read_text()}
    assert aligned == {folder for folder in folders if "alignment" in folder.parent.name}
    written = [folder.stat().st_mtime_ns for folder in folders]
    assert main(flags) == 0
    assert [folder.stat().st_mtime_ns for folder in folders] == written
    assert "accuracy" in capsys.readouterr().out


def test_flags_that_compare_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("recipes", "--seeds", "1")) == 2
    assert "--seeds 1" in capsys.readouterr().err
    assert main(("recipes", "--only", "magic")) == 2
    assert "magic" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", TASKS)
def test_every_method_trains_on_every_task(task: str, tmp_path: Path) -> None:
    words = ("recipes", "--smoke", "--seeds", "2", "--task", task, "--folder", str(tmp_path / "runs"))
    assert main((*words, "--out", str(tmp_path))) == 0
    rows = record.read(tmp_path / "recipes.jsonl").measurements
    assert {m.facts["arm"] for m in rows if m.quantity == "speed-up in steps"} == {
        name for name, arm in ARMS.items() if task in arm.tasks
    }
