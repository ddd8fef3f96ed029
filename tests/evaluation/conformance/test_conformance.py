"""References and the comparison with them: honest runs conform, deviations are dated, and bad files are refused."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.cli.main import main
from fastdiff.config.presets import preset
from fastdiff.config.run_record import as_json
from fastdiff.errors import ConfigError
from fastdiff.evaluation.conformance import reference
from fastdiff.evaluation.conformance.causes import likely, table
from fastdiff.evaluation.conformance.comparison import Conformance, Deviation, Difference, compare, two_sided
from fastdiff.evaluation.conformance.curve import compare_with_curve, read_curve
from fastdiff.evaluation.conformance.numbers import Number, Numbers, read_numbers, windows_of
from fastdiff.evaluation.conformance.reference import Expected, Reference, encode, make, read
from fastdiff.parallel.world import World
from fastdiff.training.callbacks.conformance import MAY_DIFFER
from fastdiff.training.loop import train
from tests.support.runs import launch, tiny
from tests.support.sabotages import inject

STEPS = 60
NAMES = tuple(f"loss_snr_{n:02d}" for n in range(16))
AFTER = (100, 200, 300, 400, 500)


def drawn(seed: int, shift: Callable[[str, int], float] = lambda name, step: 0.0) -> Numbers:
    """Numbers of a run whose seeds lie twice as far apart as its own errors say."""
    generator = np.random.default_rng(seed)
    return {
        (name, step): Number(1.0 + shift(name, step) + 0.02 * generator.standard_normal(), 0.01)
        for name in NAMES
        for step in AFTER
    }


def reference_of(runs: list[Numbers]) -> Reference:
    expected = {place: reference._expected([run[place] for run in runs]) for place in runs[0]}
    return Reference("", len(runs), tuple(range(len(runs))), {}, (), expected)


def test_honest_runs_conform_as_often_as_promised() -> None:
    """Of 400 runs with 80 numbers each, no more than one in twenty has any number beyond two sigma."""
    honest = 0
    for trial in range(400):
        expected = reference_of([drawn(10 * trial + n) for n in range(5)])
        found = compare(drawn(10 * trial + 9), expected)
        assert found.compared == 80
        honest += not found.deviations and not found.once
    assert honest >= 380 - 15


def test_a_deviation_is_dated() -> None:
    """One level that is off by seven of its spreads from step 300 on; a single outlier elsewhere does not count."""

    def off(name: str, step: int) -> float:
        if name == NAMES[3]:
            return 0.2 * (step >= 300)
        return 0.3 * ((name, step) == (NAMES[8], 200))

    found = compare(drawn(99, off), reference_of([drawn(n) for n in range(6)]))
    assert [(one.name, one.since, one.last.place[1]) for one in found.deviations] == [(NAMES[3], 300, 500)]
    assert {one.place for one in found.once} == {(NAMES[8], 200)}


def test_a_run_may_be_compared_as_it_goes() -> None:
    """The correction counts all numbers of the reference from the start: later looks accuse of nothing new."""
    expected = reference_of([drawn(n) for n in range(6)])
    whole = drawn(50, lambda name, step: 0.2)
    early = {place: number for place, number in whole.items() if place[1] <= 200}
    few, all_of_them = compare(early, expected), compare(whole, expected)
    assert few.compared == 32
    of_few, of_all = ({one.name for one in found.deviations} for found in (few, all_of_them))
    assert of_few <= of_all == set(NAMES)
    (first,) = compare({("loss_snr_00", 100): whole["loss_snr_00", 100]}, expected).once
    assert first.p == pytest.approx(80 * two_sided(first.sigmas, 4 * 5.0)), (
        "of 80, with five degrees at each of 4 steps"
    )


def test_one_run_is_compared_by_its_own_errors_alone() -> None:
    expected = {("loss", step): Expected(1.0, None, 0.01) for step in AFTER}
    expected |= {("weights/a", step): Expected(1.0, None, None) for step in AFTER}
    run: Numbers = {("loss", step): Number(1.2, 0.01) for step in AFTER}
    run |= {("weights/a", step): Number(2.0, None) for step in AFTER}
    found = compare(run, Reference("", 1, (0,), {}, (), expected))
    assert [one.name for one in found.deviations] == ["loss"]
    assert found.deviations[0].first.sigmas == pytest.approx(0.2 / math.sqrt(2e-4 + 1e-6))
    assert found.unknown == ["weights/a"]


@pytest.mark.parametrize("degrees", [3.0, 40.0])
def test_the_probabilities_are_those_of_student(degrees: float) -> None:
    assert two_sided(2.5, degrees) == pytest.approx(2 * stats.t.sf(2.5, degrees))
    assert two_sided(2.0, math.inf) == pytest.approx(0.0455, rel=1e-3)


def test_windows_grow_with_the_run() -> None:
    found = windows_of(range(20, 20001, 20))
    assert found[:3] == [(0, 100), (100, 200), (200, 300)]
    assert all(after[0] == before[1] for before, after in pairwise(found))
    assert len(found) < 35


def deviating(*names: str, among: tuple[str, ...]) -> Conformance:
    one = Difference(("", 1), 2.0, 1.0, 9.0, 0.0)
    deviations = [Deviation(name, 1, one, one) for name in names]
    return Conformance(len(among), 1, frozenset(among), deviations, [], [], [])


def test_causes_are_told_apart_by_what_stays_the_same() -> None:
    among = (
        "latents/mean", "latents/std", "latents/skewness", "latents/kurtosis", "latents/roughness", "mirror/slant.0",
        "time/mean", "levels/mean", "condition/label/null", "target/size_snr_03", "target/kind_snr_03", "loss",
        "weights/a", "averages/0.99/distance",
    )  # fmt: skip
    assert len({cause.name for cause in table()}) == len(table())
    for cause, names in {
        "latent_scale": [
            "latents/std",
            "latents/mean",
            "target/size_snr_03",
            "target/kind_snr_03",
            "weights/a",
            "loss",
        ],
        "latent_shift": ["latents/mean", "target/size_snr_03", "loss"],
        "autoencoder": ["latents/std", "latents/kurtosis", "mirror/slant.0", "target/size_snr_03"],
        "weighting": ["target/size_snr_03", "loss", "weights/a"],
        "prediction": ["target/size_snr_03", "target/kind_snr_03", "loss", "weights/a"],
        "learning_rate": ["weights/a", "loss", "averages/0.99/distance"],
        "averages": ["averages/0.99/distance"],
    }.items():
        assert likely(deviating(*names, among=among))[0].name == cause
    assert likely(deviating("loss", among=among)) == []


def config_of(digits: Path, folder: Path, seed: int, **changes: Any) -> Any:
    return tiny(digits, folder, STEPS, seed=seed, objective__condition_dropout=0.1, output__log_every=2, **changes)


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """Runs of a tiny DiT: three seeds of a reference, an honest one, and one that predicts something else."""
    folder = tmp_path_factory.mktemp("conformance")
    for seed in range(4):
        train(config_of(digits, folder / str(seed), seed), launch(0), world)
    with ExitStack() as stack:
        inject("epsilon_for_v", stack)
        train(config_of(digits, folder / "wrong", 4), launch(0), world)
    return folder


@pytest.fixture(scope="module")
def made(runs: Path) -> Path:
    path = runs / "reference.json"
    assert main(["reference", "make", *(str(runs / name) for name in "012"), str(path)]) == 0
    return path


def test_the_file_has_every_number(runs: Path, made: Path, tmp_path: Path) -> None:
    expected, found = make([runs / name for name in "012"]), read(made)
    assert (found.runs, found.seeds, found.windows) == (3, (0, 1, 2), expected.windows)
    assert found.expected.keys() == expected.expected.keys()
    of_each = [read_numbers(runs / name, found.windows) for name in "012"]
    for place, one in found.expected.items():
        values = np.array([numbers[place].value for numbers in of_each])
        assert one.mean == pytest.approx(values.mean(), rel=1e-4, abs=1e-12)
        assert one.spread == pytest.approx(values.std(ddof=1), rel=1e-4, abs=1e-6)
    kinds = {name.partition("/")[0].partition("_snr")[0] for name, _ in found.expected}
    assert kinds >= {
        "loss",
        "grad_norm",
        "lr",
        "latents",
        "mirror",
        "time",
        "condition",
        "target",
        "weights",
        "averages",
    }
    assert read_written_again(found, tmp_path) == found
    assert "output" not in found.config, "no paths of the machine that made it"


def read_written_again(found: Reference, folder: Path) -> Reference:
    path = folder / f"{found.name}.json"
    path.write_bytes(encode(found))
    return read(path)


def test_an_honest_run_conforms(runs: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", str(runs / "3"), str(made)]) == 0
    assert ", within 2 sigma (" in capsys.readouterr().out


def test_another_prediction_is_found(runs: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code of a training that went wrong, the levels, and the cause first."""
    assert main(["conform", str(runs / "wrong"), str(made), "--json"]) == 70
    found = json.loads(capsys.readouterr().out)
    assert not found["conforms"]
    assert found["causes"][0]["name"] == "prediction"
    assert any(one["name"].startswith("target/kind_snr") for one in found["deviations"])
    assert main(["conform", str(runs / "wrong"), str(made)]) == 70
    captured = capsys.readouterr()
    assert "1. wrong prediction type: check " in captured.out
    assert "deviates from" in captured.err


def test_other_fields_of_the_configuration_are_told(
    runs: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "3", tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["config"]["optim"]["lr"] = 0.5
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    assert main(["conform", str(tmp_path / "run"), str(made)]) == 0
    assert "--optim.lr: 0.01 -> 0.5" in capsys.readouterr().out
    assert main(["reference", "make", str(runs / "0"), str(tmp_path / "run"), str(tmp_path / "new.json")]) == 2
    assert "--optim.lr: 0.01 -> 0.5" in capsys.readouterr().err
    assert main(["reference", "make", str(runs / "0"), str(runs / "0"), str(tmp_path / "new.json")]) == 2
    assert "differ in --seed; given 0, 0" in capsys.readouterr().err


def test_a_run_without_statistics_is_compared_by_its_log(runs: Path, made: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "3", tmp_path / "run")
    (tmp_path / "run/statistics.jsonl").unlink()
    expected = read(made)
    found = compare(read_numbers(tmp_path / "run", expected.windows), expected)
    assert found.compared > 50
    assert "latents/std" in found.missing
    assert not found.deviations


def test_runs_of_older_versions_are_compared(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their records lack the fields that are newer."""
    for name in "013":
        shutil.copytree(runs / name, tmp_path / name)
        record = json.loads((tmp_path / name / "run.json").read_text())
        del record["config"]["sampling"], record["config"]["performance"]["grad_accum_dtype"]
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    old = str(tmp_path / "reference.json")
    assert main(["reference", "make", str(tmp_path / "0"), str(tmp_path / "1"), old]) == 0
    for run in (tmp_path / "3", runs / "3"):
        assert main(["conform", str(run), old]) == 0
    assert "the configuration differs" not in capsys.readouterr().out


def test_a_published_curve(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The own curve conforms, also with errors; one that is a fifth too low does not."""
    lines = [json.loads(line) for line in (runs / "3/metrics.jsonl").read_text().splitlines()]
    curve = tmp_path / "curve.csv"
    for factor, code in ((1.0, 0), (0.8, 70)):
        curve.write_text("step,loss\n" + "".join(f"{one['step']},{factor * one['loss']}\n" for one in lines))
        assert main(["conform", str(runs / "3"), str(curve)]) == code
    curve.write_text("loss,step,error\n" + "".join(f"{one['loss']},{one['step']},0.01\n" for one in lines))
    assert not compare_with_curve(runs / "3", read_curve(curve)).deviations
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step,value\n1,2\n", "columns step, value; expected step, loss"),
        ("step,loss\n1,two\n", "line 2: 1, two; expected finite numbers"),
        ("step,loss\n1,nan\n", "expected finite numbers"),
        ("step,loss\n", "no line below"),
    ],
)
def test_a_wrong_curve_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "curve.csv").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_curve(tmp_path / "curve.csv")


def test_a_wrong_reference_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reference.json").write_text('{"fastdiff_reference": 1}')
    (tmp_path / "newer.json").write_text('{"fastdiff_reference": 2, "rows": []}')
    for name, told in (
        (str(tmp_path / "reference.json"), "no reference"),
        (str(tmp_path / "newer.json"), "format 2 of references"),
        ("no-such-preset", "no such file, and no preset with a reference"),
    ):
        assert main(["conform", str(runs / "3"), name]) == 2
        assert told in capsys.readouterr().err


def test_a_name_that_only_one_has_is_told(runs: Path, made: Path) -> None:
    expected = read(made)
    more = replace(expected, expected={**expected.expected, ("condition/text/null", 50): Expected(0.1, 0.01, 0.01)})
    assert "condition/text/null" in compare(read_numbers(runs / "3", expected.windows), more).missing


@pytest.mark.parametrize("name", reference.shipped_names())
def test_a_shipped_reference_is_of_its_preset(name: str) -> None:
    """A preset that changes needs a new reference, or its runs are not compared."""
    found = reference.shipped(name)
    assert found is not None
    assert found.runs >= 3
    assert config_changes(dict(found.config), as_json(preset(name)), MAY_DIFFER) == {}


@pytest.fixture
def shipping(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference of the tiny run comes with fastdiff, as that of a preset "tiny"."""
    shutil.copy(made, tmp_path / "tiny.json")
    monkeypatch.setattr(reference, "_FOLDER", tmp_path)
    reference.shipped.cache_clear()
    yield
    reference.shipped.cache_clear()


@pytest.mark.usefixtures("shipping")
def test_a_run_of_a_preset_compares_itself(
    digits: Path, tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It says at the end that it is as its recipe; one without dropout is warned while it trains."""
    caplog.set_level("INFO", "fastdiff")
    train(config_of(digits, tmp_path / "honest", 5), launch(0, preset="tiny"), world)
    told = [record.getMessage() for record in caplog.records]
    assert sum("as the preset tiny, within 2 sigma (" in line for line in told) == 1
    assert not any("not as the preset" in line for line in told)
    caplog.clear()
    with ExitStack() as stack:
        inject("latents_half_as_large", stack)
        train(config_of(digits, tmp_path / "sabotaged", 6), launch(0), world)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in warned if "not as the preset tiny since step 1: " in line]) >= 2, "and at the end"
    assert any("; likely causes: scale of the latents (check " in line for line in warned)


@pytest.mark.usefixtures("shipping")
def test_a_run_with_another_configuration_says_why_it_is_not_compared(
    digits: Path, tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fastdiff")
    config = config_of(digits, tmp_path / "run", 5, optim__lr=2e-2)
    train(config, launch(0, preset="tiny"), world)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "not compared with the reference of the preset tiny" in told
    assert "as the configuration differs: --optim.lr: 0.01 -> 0.02" in told
    assert "within 2 sigma" not in told
