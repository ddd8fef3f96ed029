"""``bench features``: real features and runs, and a test of losses that finds a difference where there is one."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.shards import int8_latents
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.evaluation import validation_files
from fastdiff.evaluation.comparison import MeasuredRun, compare
from fastdiff.evaluation.validation_files import Validated
from fastdiff.parallel.world import World
from fastdiff_bench.__main__ import main
from fastdiff_bench.commands.features import BASELINE, comparisons, report
from fastdiff_bench.records import readme, record
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Log
from fastdiff_bench.trainers import crops, features
from fastdiff_bench.trainers.crops import EXACT, HELD_OUT, STORAGES
from fastdiff_bench.trainers.features import Trained, Trial, in_velocity

TEXT = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
BASE, X = f"velocity, {BASELINE}", f"x, {BASELINE}"
CHANGES = {BASE: 0.0, "velocity, int8": 0.0, "velocity, 3 bits": 0.1, X: -0.2}
"""Shares of the loss by which made-up runs differ from the first."""
TINY = Trial(width=32, depth=1, steps=4, batch=16, seed=0, prediction="velocity", storage="int8")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    crops.prepare(folder, stride=96, steps=2)
    return folder


def x0(folder: Path) -> Any:
    """All features as networks are trained on them."""
    import torch

    with LatentReader(folder) as reader:
        found = {name: torch.from_numpy(value) for name, value in reader.read(np.arange(len(reader))).items()}
        found["position"] = torch.arange(len(reader))
        return Normaliser(reader.info, torch.device("cpu"))(found).latents


def test_storages_differ_by_their_rounding_alone(root: Path) -> None:
    exact = x0(root / EXACT)
    errors = {name: float((x0(root / name.replace(" ", "-")) - exact).std()) for name in STORAGES}
    assert errors[EXACT] == 0
    assert 0 < errors["bfloat16"] < errors["int8"] < 0.01 < 0.06 < errors["3 bits"]
    assert int8_latents.LEVELS == 255
    infos = {name: DatasetInfo.read(root / name.replace(" ", "-")) for name in (*STORAGES, HELD_OUT)}
    assert len({info.normalisation for info in infos.values()}) == 1, "the same x0"
    assert infos[HELD_OUT].provenance.source != infos[EXACT].provenance.source
    assert infos[EXACT].latent.shape == (64, 4, 4)


def test_a_run_leaves_errors_of_the_velocity(world: World, root: Path) -> None:
    assert features.finished(TINY, root) is None
    features.run(TINY, root)
    found = features.finished(TINY, root)
    assert found is not None
    # A velocity has this error already; the weight of small t alone is another one.
    as_trained = validation_files.read(TINY.folder(root), TINY.steps)
    above = as_trained.log_snr < 2 * np.log(0.95 / 0.05)
    np.testing.assert_allclose(found.validated.loss[above], as_trained.loss[above], rtol=1e-4)
    assert (found.validated.loss[~above] < as_trained.loss[~above]).all()
    assert not (TINY.folder(root) / "checkpoints").exists()


def trained(seed: int, name: str, change: float) -> Trained:
    """A run that differs from the baseline by a share of the loss, and by chance."""
    prediction, storage = name.split(", ")
    drawn = np.random.default_rng([seed, len(name)])
    levels = np.linspace(-10, 10, 320).astype(np.float32)
    t = 1 / (1 + np.exp(levels.astype(np.float64) / 2))
    errors = (1 + 0.1 * seed) * t * t * (1 + change + 1e-3 * drawn.standard_normal())
    about = {"data": "crops", "seed": 1, "objective": {"prediction": prediction}, "unit": "mse"}
    validated = in_velocity(Validated(np.arange(320), levels, errors, errors, about))
    return Trained(Trial(48, 1, 4, 16, seed, prediction, storage), validated, None)


def test_storages_and_predictions_are_compared_by_the_same_loss() -> None:
    runs = [trained(seed, name, change) for seed in range(3) for name, change in CHANGES.items()]
    found = {(name, other): one for (_, name, other), one in comparisons(runs, Path()).items()}
    assert set(found) == {(name, f"velocity, {BASELINE}") for name in list(CHANGES)[1:]}
    assert found["velocity, int8", f"velocity, {BASELINE}"].faults == []
    assert found["velocity, 3 bits", f"velocity, {BASELINE}"].differs
    assert found[f"x, {BASELINE}", f"velocity, {BASELINE}"].total.mean == pytest.approx(-20, abs=0.5)
    a, b = (MeasuredRun(Path(), runs[place].validated) for place in (0, 3))
    assert compare(a, b).unit.startswith("loss (squared error of the velocity")


def test_the_tables_have_the_numbers_of_the_record(tmp_path: Path) -> None:
    runs = [trained(seed, name, change) for seed in range(3) for name, change in CHANGES.items()]
    with Log(tmp_path / "features.jsonl") as log:
        report(runs, tmp_path, log)
    found = {m.quantity: m for m in record.read(tmp_path / "features.jsonl").measurements if m.provider == X}
    total, level = found[f"difference from {BASE}"], found[f"difference from {BASE}, log SNR 0.00 to 1.25"]
    kinds = ("features", "features-by-level")
    markers = "".join(f"<!-- bench: {kind} . -->\n<!-- end bench -->\n" for kind in kinds)
    text = readme.rendered(markers, tmp_path)
    figures = f"3 | {total.value:+.3f} | {total.facts['standard_error']:.3f} | < 0.001 | < 0.001 |"
    assert f"| {runs[0].trial.case} | {X} | {BASE} | {figures}" in text
    assert f"| 0.00 to 1.25 | {level.value:+.1f} ± {level.facts['standard_error']:.1f} |" in text
    assert "3 bits | velocity" in text.partition("log SNR")[0]


def test_the_documented_record_says_what_int8_does() -> None:
    (folder,) = set(re.findall(r"^<!-- bench: features\S* (.+) -->$", TEXT, re.MULTILINE))
    rows = [m for one in record.read_all([ROOT / folder]) for m in one.measurements]
    found = {(m.provider, m.case): m for m in rows if m.quantity.startswith("difference") and "SNR" not in m.quantity}
    assert {name for name, _ in found} == {"velocity, int8", "velocity, 3 bits", X, "x, int8"}
    assert len({case for _, case in found}) == 2, "narrower and wider than the channels"
    for (name, _), m in found.items():
        assert int(str(m.facts["seeds"])) >= 3
        if name.endswith("int8"):
            assert abs(m.value) < 0.1
            assert float(str(m.facts["p"])) > 0.05


@pytest.mark.nightly
def test_the_record_has_all_storages(tmp_path: Path) -> None:
    assert main(["features", "--smoke", "--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    rows = record.read(tmp_path / "features.jsonl").measurements
    losses = {row.provider for row in rows if row.quantity == "validation loss, seed 1"}
    assert {f"velocity, {name}" for name in STORAGES if name != EXACT} <= losses
    tests = {row.provider for row in rows if row.quantity == f"difference from velocity, {BASELINE}"}
    assert {"velocity, int8", "velocity, 3 bits"} <= tests
