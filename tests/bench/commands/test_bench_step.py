"""``bench step``: it times the real loop, its figures add up, and it finds the largest batch."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.presets import preset
from fastdiff.data.shards.reader import LatentReader
from fastdiff.models.cost.flops import training_flops
from fastdiff_bench.__main__ import main
from fastdiff_bench.measure import largest_batch, roofline, stepping, sweep
from fastdiff_bench.measure.interleaved import Result
from fastdiff_bench.measure.session import Steps
from fastdiff_bench.measure.synthetic import write
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Measurement, Record
from fastdiff_bench.tracing.classes import CLASSES, IDLE
from tests.support.benches import programs
from tests.support.benches.programs import BROKEN_BATCH

CASE = "digits, 1x8x8, batch 16, fp32, micro 8"
QUANTITIES = {
    "step time", "throughput", "processor time", "of matmul", "peak resident", "graph breaks in code", "compilations",
    "start", "parts of graphs compiled", "parts of graphs from a cache",
    "marked step time",
    "phase data", "phase objective", "phase forward", "phase backward", "phase optimizer", "phase ema", "phase other",
}  # fmt: skip
TRACED_QUANTITIES = {
    "traced step time", "traced idle share", *(f"traced {kind}" for kind in (*CLASSES, IDLE)),
    *(f"launches in {phase}" for phase in ("data", "forward", "backward", "step", "averages", "other")),
}  # fmt: skip


def values(read: Record, case: str) -> dict[str, Measurement]:
    return {row.quantity: row for row in read.measurements if row.case == case}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a batch for which there is not enough memory, and of one for which there is."""
    out = tmp_path_factory.mktemp("swept")
    command = ["step", "--smoke", "--device", "cpu", "--sweep", f"batch={BROKEN_BATCH},16", "--micro", "8", "--trace"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepping, "run_fastdiff", programs.ours)
        patch.setattr(roofline, "measure", programs.small_limits)
        assert main([*command, "--out", str(out)]) == 0
    return record.read(out / "step.jsonl")


@pytest.fixture(scope="module")
def found(swept: Record) -> dict[str, Measurement]:
    return values(swept, CASE)


@pytest.mark.nightly
def test_a_sweep_goes_on_after_a_configuration_that_does_not_fit(swept: Record) -> None:
    (failure,) = swept.failures
    assert failure.case == f"digits, 1x8x8, batch {BROKEN_BATCH}, fp32, micro 8"
    assert failure.reason == "OutOfMemoryError: CUDA out of memory"
    assert {row.case for row in swept.measurements} == {"limits", CASE}


def test_a_traced_step_is_all_classes_and_idleness(found: dict[str, Measurement]) -> None:
    times = [found[f"traced {kind}"].value for kind in (*CLASSES, IDLE)]
    assert min(times) >= 0
    assert sum(times) == pytest.approx(found["traced step time"].value)
    assert 0 < found["traced idle share"].value < 1
    assert all(found[f"launches in {phase}"].value > 0 for phase in ("forward", "backward", "step", "averages"))


def test_the_record_of_a_configuration_is_whole(found: dict[str, Measurement]) -> None:
    assert set(found) == QUANTITIES | TRACED_QUANTITIES
    assert all(row.provider == "fastdiff zero1" and row.facts["batch"] == 16 for row in found.values())
    rate, time = found["throughput"], found["step time"]
    assert rate.value == pytest.approx(1e3 * 16 / time.value)
    assert (rate.n, time.n) == (4, 4)
    assert time.p20 is not None
    assert time.p80 is not None
    assert time.p20 <= time.value <= time.p80
    assert found["graph breaks in code"].value == found["compilations"].value == 0


def test_phases_add_up_to_the_step(found: dict[str, Measurement]) -> None:
    """A step has two micro-batches; a phase that is not marked, or only in one of them, would count as "other"."""
    phases = {name: row.value for name, row in found.items() if name.startswith("phase")}
    marked = found["marked step time"].value
    assert found["phase other"].facts["marked_step_ms"] == marked
    assert sum(phases.values()) == pytest.approx(marked, rel=0.5), "the median of a sum is not the sum of medians"
    assert all(value > 0 for value in phases.values()), phases
    assert phases["phase other"] < 0.1 * marked, phases
    assert phases["phase forward"] > phases["phase data"]


def test_unmarked_time_is_other() -> None:
    """So that in every step the phases add up."""
    parts = {name: [0.1, 0.2] for name in stepping.PHASES[:-1]}
    result = Result(sessions=[Steps([1.0, 2.0], parts), Steps([0.7, 1.3], {**parts, "ema": [0.0, 0.0]})])
    seconds = stepping.phases_of(result)
    assert list(seconds) == list(stepping.PHASES)
    assert seconds["ema"] == [0.1, 0.2, 0.0, 0.0]
    assert seconds["other"] == pytest.approx([0.4, 0.8, 0.2, 0.3])
    assert [sum(step) for step in zip(*seconds.values(), strict=True)] == pytest.approx(result.seconds)


def test_utilisation_is_operations_over_the_measured_limit(swept: Record, found: dict[str, Measurement]) -> None:
    flops = training_flops(preset("digits").model)
    assert found["throughput"].facts["flops_per_sample"] == flops
    limit = values(swept, "limits")["matmul rate fp32"]
    assert found["of matmul"].value == pytest.approx(found["throughput"].value * flops / (1e12 * limit.value))


@pytest.mark.nightly
def test_the_largest_batch_is_found_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program whose memory per sample is known: what is left over is less than 8 samples and 4 % need."""
    monkeypatch.setattr(stepping, "run_fastdiff", programs.growing)
    command = ["step", "--smoke", "--device", "cpu", "--find-batch", "--memory", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    read = record.read(tmp_path / "step.jsonl")
    (largest,) = values(read, "digits, 1x8x8, any batch, fp32").values()
    batch = int(largest.value)
    assert largest.quantity == "largest batch"
    assert batch == largest.facts["batch"]
    assert batch % 8 == 0
    peak, trials = largest.facts["peak_gib"], largest.facts["trials"]
    assert isinstance(peak, float)
    assert isinstance(trials, int)
    assert largest.facts["limit_gib"] == 1.0
    assert 1 - programs.PER_SAMPLE * (8 + 0.05 * batch) / 2**30 <= peak <= 1
    assert 3 <= trials <= 6
    measured = values(read, f"digits, 1x8x8, batch {batch}, fp32")
    assert set(measured) == QUANTITIES
    assert measured["peak resident"].value == pytest.approx(peak, rel=0.1)


@pytest.mark.usefixtures("small_limits")
def test_a_search_that_fails_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the trial fails for another reason than memory."""
    monkeypatch.setattr(stepping, "run_fastdiff", programs.wrong)
    assert main(["step", "--smoke", "--device", "cpu", "--find-batch", "--out", str(tmp_path)]) == 1
    (failure,) = record.read(tmp_path / "step.jsonl").failures
    assert (failure.case, failure.reason) == ("digits, 1x8x8, any batch, fp32", "batch 8: ValueError: wrong")
    assert f"FAILED: {failure.reason}" in capsys.readouterr().out


@pytest.mark.usefixtures("small_limits")
def test_measurements_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean steps are kept where the marked ones, or whoever stops the command, come to nothing."""
    monkeypatch.setattr(stepping, "run_fastdiff", programs.failing_with_marks)
    command = ["step", "--smoke", "--device", "cpu", "--batch", "16", "--micro", "8", "--out", str(tmp_path)]
    assert main(command) == 1
    read = record.read(tmp_path / "step.jsonl")
    assert set(values(read, CASE)) == {name for name in QUANTITIES if not re.match("launches|marked|phase", name)}
    assert [failure.reason for failure in read.failures] == ["ValueError: marked"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("told", [True, False], ids=["measured", "out of memory"])
@pytest.mark.parametrize(
    ("base", "per_sample", "noise"), [(700, 1, 0), (700, 0.05, 2), (10_000, 300, 500), (100, 25, 0), (990, 8, 0)]
)
def test_the_search_ends_near_the_largest_batch(
    base: float, per_sample: float, noise: float, told: bool, seed: int
) -> None:
    """In few trials, whether a batch that is too large runs (on a CPU) or not (on a GPU)."""
    limit, tried = (140_000 if base == 10_000 else 1000), []
    generator = random.Random(seed)

    def peak(batch: int) -> int:
        tried.append(batch)
        used = int(base + per_sample * batch + generator.uniform(-noise, noise))
        if used > limit and not told:
            raise largest_batch.DoesNotFit("no")
        return used

    found = largest_batch.largest(peak, limit)
    true = (limit - base) / per_sample
    unit = 8 if true >= 8 else 1
    assert found.batch % unit == 0
    assert 0.93 * (true - noise / per_sample) - unit <= found.batch <= true + noise / per_sample
    assert found.trials == len(tried) == len(set(tried)) <= largest_batch.TRIALS
    assert found.peak <= limit


def test_the_search_reports_that_nothing_fits() -> None:
    tried: Counter[int] = Counter()

    def peak(batch: int) -> int:
        tried[batch] += 1
        return 2**31

    with pytest.raises(largest_batch.DoesNotFit, match=r"not even one sample fits into 1\.00 GiB"):
        largest_batch.largest(peak, 2**30)
    assert tried == {8: 1, 1: 1}


def test_compilations_and_graph_breaks_are_named() -> None:
    """A compilation that falls into the time, and a graph that breaks."""
    from fastdiff_bench.trainers.ours import AfterStep

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    timer: Any = SimpleNamespace(facts={}, after_step=lambda: None)
    callback = AfterStep(timer)

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    compiled = torch.compile(broken, backend="eager")
    state: Any = SimpleNamespace(forward_backward=SimpleNamespace(captures=0))
    for x in (torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2)):
        compiled(x)
        callback.on_step(state)
    torch._dynamo.reset()
    assert timer.facts["last_compilation"] == 3, "for the other type"
    assert timer.facts["compilations"] >= 4, "two graphs for each"
    assert timer.facts["graph_breaks"] >= 1
    result = Result(sessions=[Steps([1.0])], facts=timer.facts)
    again, breaks = stepping.problems(result, warm_up=2)
    assert again.startswith("torch.compile recompiled in step 3")
    assert breaks.endswith("graph breaks: the blocks are not compiled as a whole")
    assert len(stepping.problems(result, warm_up=3)) == 1
    state.forward_backward.captures += 2
    callback.on_step(state)
    assert (
        stepping.problems(result, warm_up=4)[0] == "a CUDA graph was captured in step 5, after the 4 steps of warm-up"
    )
    assert len(stepping.problems(result, warm_up=5)) == 1
    result.sessions += [Steps([1.0], allocation_retries=2), Steps([1.0], allocation_retries=3)]
    assert "retried 5 times" in stepping.problems(result, warm_up=3)[-1]


@pytest.mark.usefixtures("small_limits")
def test_captures_and_steps_before_fp8_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Graphs are captured in the third step, which is the last of the warm-up, and all steps multiply in FP8."""
    found, problems = [], stepping.problems

    def noted(result: Result, warm_up: int) -> list[str]:
        found.append(result.facts)
        return problems(result, warm_up)

    monkeypatch.setattr(stepping, "problems", noted)
    monkeypatch.setattr(stepping, "run_fastdiff", programs.watched)
    monkeypatch.setattr(sweep, "require_engine", lambda *_: None)
    network = ["--model", "depth=3", "hidden=64", "heads=4", "patch=2", "--precision", "bf16", "--fp8", "--no-compile"]
    command = [
        "step",
        "--smoke",
        "--device",
        "cpu",
        "--deepspeed-config",
        "ddp",
        "--batch",
        "8",
        "--cuda-graph",
        *network,
    ]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert "problem" not in capsys.readouterr().out
    assert [(facts["last_capture"], facts["in_16_bits"]) for facts in found] == [(3, 0)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sweep bach=8", "there is no 'bach'; did you mean batch?"),
        ("--sweep batch=8,many", "--sweep batch=8,many: Input should be a valid integer, .* given 'many'"),
        ("--sweep compile=perhaps", "valid boolean, .* given 'perhaps'"),
        ("--sweep batch=8 --sweep batch=16", "each name once"),
        ("--sweep precision=fp32,fp17", "performance.precision: Input should be 'fp32', 'bf16' or 'fp16'"),
        ("--sweep preset=digist", "did you mean digits?"),
        ("--batch 0", "--batch.samples 0: at least 1"),
        ("--batch 8 --micro 3", "8 is not divisible by 3"),
        ("--kernels fast", "'fast' is none of auto"),
        ("--deepspeed-config zero9", "zero9: no such file; expected the path of one, or a name: ddp, zero1"),
        ("--cuda-graph --deepspeed-config ddp", "--performance.cuda_graph on a cpu: .* leave the flag out"),
        ("--find-batch --batch 8", "leave out batch and micro"),
        ("--find-batch --sweep batch=8", "leave out batch and micro"),
        ("--find-batch --memory -1", "--memory -1.0: GiB, above 0"),
        ("--memory 4", "add --find-batch"),
        ("--find-batch --peer plain", "largest for fastdiff alone, .* give --batch"),
        (
            f"--sweep deepspeed=zero1,{ROOT}/deepspeed_configs/zero1.json",
            "two configurations have the name .* fastdiff zero1 in the record",
        ),
        ("--rounds 1", "at least 2 rounds and 1 step"),
    ],
)
def test_a_mistake_is_one_clear_error(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["step", "--smoke", "--device", "cpu", "--out", str(tmp_path / "out"), *flags.split()]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert not (tmp_path / "out").exists(), "nothing was begun"


def test_a_workload_takes_the_batch_of_its_preset_or_the_given_one() -> None:
    """And does not accumulate a batch that was not the preset's."""
    automatic = Workload(preset="sd2-512")
    assert automatic.case == "sd2-512, 4x64x64, batch 2048, bf16, micro auto"
    decided = automatic.decided({"micro": 16})
    assert (decided.case, decided.facts["micro"]) == ("sd2-512, 4x64x64, batch 2048, bf16, micro 16", 16)
    assert Workload(preset="digits").decided({"micro": 3}) == Workload(preset="digits")
    assert Workload(preset="sd2-512", batch=8).case == "sd2-512, 4x64x64, batch 8, bf16"
    named = Workload(preset="digits", deepspeed="zero3", compile=True, kernels="reference", recompute=True)
    assert named.provider == "fastdiff zero3 compiled recompute kernels=reference"
    assert "deepspeed_file" not in named.facts
    fixed = Workload(preset="digits", deterministic=True)
    assert fixed.provider == "fastdiff zero1 deterministic"
    assert fixed.config(Path(), Path()).performance.deterministic
    assert (fixed.facts["deterministic"], named.facts["deterministic"]) == (True, False)
    graph = Workload(preset="digits", deepspeed="ddp", cuda_graph=True)
    assert graph.provider == "fastdiff ddp graph"
    assert graph.config(Path(), Path()).performance.cuda_graph
    assert (graph.facts["cuda_graph"], named.facts["cuda_graph"]) == (True, False)
    file = ROOT / "deepspeed_configs" / "zero2.json"
    facts = Workload(preset="digits", deepspeed=str(file)).facts
    assert (facts["deepspeed"], facts["deepspeed_file"]) == ("zero2", os.path.relpath(file))


def test_a_workload_runs_under_what_ranks_without_a_file_do() -> None:
    workload = Workload(preset="digits")
    config = workload.config(Path(), Path())
    assert deepspeed_config.resolve(workload.deepspeed_json(), config, 2) == deepspeed_config.resolve(None, config, 2)


@pytest.mark.parametrize("name", ["dit-s-8-256", "digits-t2i"])
def test_synthetic_data_have_the_shapes_of_the_model(name: str, tmp_path: Path) -> None:
    model = preset(name).model
    with LatentReader(write(tmp_path / "data", model, 3)) as reader:
        info = reader.info
    assert info.samples == 3
    channels = model.channels * (2 if info.kind == "posterior" else 1)
    assert info.latent.shape == (channels, model.size, model.size)
    assert json.loads((tmp_path / "data" / "dataset.json").read_text())["samples"] == 3


def test_values_of_the_network_are_part_of_the_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workload = Workload(preset="digits", model=("depth=2", "mlp_ratio=2.0"), fp8=False)
    config = workload.config(Path(), Path())
    assert isinstance(config.model, DiTConfig)
    assert (config.model.depth, config.model.mlp_ratio) == (2, 2.0)
    assert workload.case.startswith("digits depth=2 mlp_ratio=2.0, 1x8x8, batch")
    for given, reason in (("depth", "--model depth: expected NAME=VALUE"), ("deep=2", "deep")):
        assert main(["step", "--smoke", "--model", given, "--out", str(tmp_path)]) == 2
        assert reason in capsys.readouterr().err
