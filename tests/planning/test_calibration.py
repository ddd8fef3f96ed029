"""Measured steps in place of assumed efficiencies, and what a starting run says of its plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff.cli.main import main
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.planning import gpus
from fastdiff.planning.calibration import ASSUMED, Measured, calibrated, read
from fastdiff.planning.figures import figures
from fastdiff.planning.gpus import CPU, Gpus
from fastdiff.planning.network import Network, read_network
from fastdiff.planning.options import OF_STAGE, work_of
from fastdiff.planning.step_time import HOSTS
from fastdiff.training.loop import train
from fastdiff_bench.records import record
from tests.support.processes import ROOT
from tests.support.runs import launch, tiny

H100 = gpus.parse("8xH100", gpus.known())


def dit(micro: int) -> RunConfig:
    return replace(preset("dit-xl-2-256"), batch=BatchConfig(samples=8 * 64, micro=micro))


@pytest.fixture(scope="module")
def network() -> Network:
    return read_network(dit(64), torch.device("cuda"))


def test_a_measured_step_is_predicted_exactly_and_others_narrowly(network: Network) -> None:
    work = work_of(dit(64), OF_STAGE[1], network, 8)
    assumed = ASSUMED.step_time(work, H100).whole
    measured = Measured("a test", dit(64), OF_STAGE[1], 8, "NVIDIA H100 80GB HBM3", 1.4 * assumed.middle)
    basis = calibrated(measured, work, H100)
    found = basis.step_time(work, H100).whole
    assert found.middle == pytest.approx(measured.seconds, rel=0.05)
    assert (found.high - found.low) / found.middle == pytest.approx(0.2)
    assert "a test" in basis.words
    elsewhere = basis.step_time(work, gpus.parse("8xA100", gpus.known())).whole
    assert (elsewhere.high - elsewhere.low) / elsewhere.middle > 0.3, "the interval of another GPU stays wide"
    assert elsewhere.middle > ASSUMED.step_time(work, gpus.parse("8xA100", gpus.known())).whole.middle


@pytest.mark.parametrize(("name", "micro", "faster"), [("dit-s-2-256", 4, True), ("dit-xl-2-256", 64, False)])
def test_graphs_give_up_the_overlap_for_the_time_of_the_host(name: str, micro: int, faster: bool) -> None:
    """Which pays where the host limits."""
    config = replace(preset(name), batch=BatchConfig(samples=8 * micro, micro=micro))
    network = read_network(config, torch.device("cuda"))
    captured = replace(config, performance=replace(config.performance, cuda_graph=True))
    without, found = (ASSUMED.step_time(work_of(one, OF_STAGE[0], network, 8), H100) for one in (config, captured))
    assert faster or found.device.middle > without.device.middle
    assert found.host.middle < without.host.middle / 5
    assert (found.whole.middle < without.whole.middle) == faster


def test_phases_of_a_record_correct_passes_and_update_apart(network: Network) -> None:
    work = work_of(replace(dit(64), batch=BatchConfig(samples=64, micro=64)), OF_STAGE[0], network, 1)
    one = Gpus(H100.kind, 1, 1)
    plain = ASSUMED.step_time(work, one)
    measured = Measured(
        "a record", dit(64), OF_STAGE[0], 1, "NVIDIA H100 80GB HBM3", 2 * plain.passes + 3 * plain.update,
        passes=2 * plain.passes,
    )  # fmt: skip
    found = calibrated(measured, work, one).factors
    assert (found.passes, found.update) == (pytest.approx(2), pytest.approx(3))


def test_a_finished_run_calibrates_the_command(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(digits, tmp_path / "run", steps=4), launch(0), world)
    capsys.readouterr()
    assert main(["plan", "--preset", "digits", "--gpus", "1xH100", "--from", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "ms per step on 1xcpu" in found["options"][0]["basis"]
    measured = read(tmp_path / "run")
    assert (measured.device, measured.ranks) == ("cpu", 1)
    own = read_network(measured.config, torch.device("cpu"))
    work = work_of(measured.config, measured.deepspeed, own, 1)
    cpu = Gpus(CPU, 1, 1)
    basis = calibrated(measured, work, cpu)
    assert basis.step_time(work, cpu).whole.middle == pytest.approx(measured.seconds)
    twice = replace(work, micro=2 * work.micro)
    assert 1 < basis.step_time(twice, cpu).whole.middle / measured.seconds <= 2


def test_a_record_of_bench_step_is_read(tmp_path: Path) -> None:
    committed = ROOT / "bench" / "results" / "cpu-2-cores" / "2026-11-21_step" / "step.jsonl"
    record = tmp_path / "step.jsonl"
    record.write_text(committed.read_text().replace('"dit-s-4"', '"dit-s-4-256"'))  # its name today
    found = read(record)
    assert (found.device, found.config.batch.samples, found.ranks) == ("cpu", 16, 1)
    assert found.passes is not None
    assert 0 < found.passes < found.seconds


def test_what_is_no_measurement_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step time"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match=r"expected the folder of a run with run.json"):
        read(tmp_path)


def test_a_run_is_compared_with_its_figures() -> None:
    config = dit(32)
    ds_config = deepspeed_config.resolve(OF_STAGE[0], config, 8)
    found = figures(config, ds_config, 8, 8, "NVIDIA H100 80GB HBM3", flat=True)
    assert found is not None
    assert "GiB on each GPU" in found.words(1000)
    assert "images/s" in found.words(1000)
    assert found.step_s is not None
    as_planned = {"step_ms": 1e3 * found.step_s.middle, "peak_gib": found.peak_bytes / 2**30}
    assert found.departure(as_planned) is None
    slower = found.departure({**as_planned, "step_ms": 1.3e3 * found.step_s.high})
    assert slower is not None
    assert "ms per step instead of" in slower
    larger = found.departure({**as_planned, "peak_gib": 1.3 * as_planned["peak_gib"]})
    assert larger is not None
    assert "GiB on a GPU instead of" in larger


def test_a_device_without_an_entry_has_the_memory_alone() -> None:
    config = dit(32)
    ds_config = deepspeed_config.resolve(OF_STAGE[0], config, 8)
    unknown, known = (
        figures(config, ds_config, 8, 8, name, flat=True) for name in ("A GPU of 2030", "NVIDIA H100 80GB HBM3")
    )
    assert unknown is not None
    assert known is not None
    assert unknown.peak_bytes == known.peak_bytes
    assert unknown.step_s is None
    held = f"planned: up to {known.peak_bytes / 2**30:.3g} GiB on each GPU"
    assert unknown.words(1000) == f"{held}, with weights, gradients, optimizer and activations"
    assert unknown.departure({"step_ms": 1e9, "peak_gib": 1e9}) is None


def test_host_times_are_those_of_the_record() -> None:
    kept = record.read(record.PUBLISHED / "cpu-2-cores" / "2026-11-28_host" / "scale.jsonl").measurements
    found = {(row.facts["stage"], row.quantity): 1e-3 * row.value for row in kept}
    for stage, host in HOSTS.items():
        assert host.fixed == pytest.approx(found[stage, "host time, fixed"], rel=1e-3)
        assert host.per_tensor == pytest.approx(found[stage, "host time per tensor"], rel=1e-3)
