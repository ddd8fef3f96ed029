"""The targets of speed name figures that are measured, and the page says which of them are met."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdiff_bench import cases
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.records.targets import TARGETS, Target, page
from fastdiff_kernels.names import ATTENTION_BACKENDS
from tests.bench.commands.test_bench_gpu_script import PARTS
from tests.support.benches import bench_records

ROOT = Path(__file__).parents[3]


def measured(target: Target, value: float, case: str, provider: str, unit: str = "1") -> Measurement:
    better = "lower" if target.most is not None or target.quantity in ("time", "step time") else "higher"
    return Measurement(
        bench=target.bench,
        case=case,
        provider=provider,
        quantity=target.quantity,
        unit=unit,
        value=value,
        better=better,
    )


def case_and_provider(target: Target) -> tuple[str, str] | None:
    """A case and a provider that the program which measures the target would write, if it measures it at all."""
    if target.bench == "op":
        shapes = cases.cases((target.part.removeprefix("op-"),))
        names = [f"{case} {way}" for case in shapes for way in ("forward", "backward")]
        found = next((name for name in names if re.search(target.case, name)), None)
        providers = ("triton", "compile", "bitsandbytes", *ATTENTION_BACKENDS)
        return found and (found, next(p for p in providers if re.fullmatch(target.provider, p)))
    preset = "sd2-512" if target.part in ("step-sd2", "peer-diffusers") else "dit-xl-2-256"
    preset = "dit-s-2-256" if target.part == "peer-plain" else preset
    flat = Workload(preset=preset, batch=256, precision="bf16", deepspeed="ddp")
    workload = replace(flat, **_CHOICES.get(target.part, {}))
    case = workload.case
    if target.bench == "peer":
        peer = {"peer-dit": "dit", "peer-plain": "plain", "peer-diffusers": "diffusers"}[target.part]
        return f"{case}, cached", f"{workload.provider} over {peer}, best flags"
    return case, workload.provider


_CHOICES: dict[str, dict[str, Any]] = {
    "step-dit-zero1": {"deepspeed": "zero1"},
    "step-dit-graph": {"cuda_graph": True},
    "step-dit-short": {"attention": "short"},
    "step-dit-fp8": {"fp8": True},
    "step-dit-fp8-wgrad": {"fp8": True, "fp8_weight_gradients": "bf16"},
    "step-dit-32": {"batch": 32},
    "step-dit-deterministic": {"deterministic": True},
    "start-warm": {"batch": 64, "compile": True},
    "checkpoint": {"deepspeed": "zero1"},
}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.what)
def test_every_target_is_found_in_what_a_part_of_the_script_writes(target: Target) -> None:
    assert target.part in PARTS
    written = case_and_provider(target)
    assert written is not None, "no such case"
    row = measured(target, 1.0, *written)
    assert target.of([row]) is row
    for other in (replace(row, bench="other"), replace(row, quantity="other"), replace(row, provider="other")):
        assert target.of([other]) is None
    if target.least is not None:
        assert [target.verdict(target.least), target.verdict(target.least * 0.999)] == ["met", "missed"]
    elif target.most is not None:
        assert [target.verdict(target.most), target.verdict(target.most + 0.001)] == ["met", "missed"]
    else:
        assert target.verdict(1.0) == ""


def test_the_best_case_counts_or_the_worst() -> None:
    best = next(target for target in TARGETS if target.quantity == "throughput" and target.part == "step-dit")
    case, provider = case_and_provider(best) or ("", "")
    rows = [measured(best, value, case, provider) for value in (500.0, 720.0, 600.0)]
    assert best.of(rows) is rows[1]
    fastest = next(target for target in TARGETS if target.quantity == "step time")
    rows = [measured(fastest, value, case, provider) for value in (5.0, 7.0)]
    assert fastest.of(rows) is rows[0]
    worst = next(target for target in TARGETS if target.in_every_case and target.least is not None)
    case, provider = case_and_provider(worst) or ("", "")
    rows = [measured(worst, value, case, provider) for value in (1.5, 1.1)]
    assert worst.of(rows) is rows[1]


def test_a_graph_break_in_one_batch_size_is_missed() -> None:
    for target in (target for target in TARGETS if target.quantity == "graph breaks in code"):
        case, provider = case_and_provider(target) or ("", "")
        rows = [replace(measured(target, value, case, provider), better="lower") for value in (0.0, 2.0)]
        assert target.of(rows) is rows[1]
        assert target.verdict(rows[1].value) == "missed"


def cells(text: str, what: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {what} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_says_what_is_met_missed_and_missing(tmp_path: Path) -> None:
    best = next(target for target in TARGETS if target.quantity == "throughput" and target.part == "step-dit")
    wanted = next(target for target in TARGETS if target.quantity == "speed-up" and target.part == "peer-dit")
    for target, value, unit in ((best, 720.5, "samples/s"), (wanted, 0.9, "1")):
        case, provider = case_and_provider(target) or ("", "")
        with Log(tmp_path / f"{target.bench}.jsonl") as log:
            log.write(replace(measured(target, value, case, provider, unit), p20=value - 1, p80=value + 1, n=5))
            log.write(Failure(bench=target.bench, case=case, provider="other", reason="out of\nmemory"))
    (tmp_path / "cut.jsonl").write_text("")
    (tmp_path / "summary.txt").write_text("step-dit: passed, 200 s\n")
    text = page(tmp_path)
    assert cells(text, best.what)[1:6] == ["at least 670", "at least 620", "720 samples/s", "720 to 722", "met"]
    assert cells(text, wanted.what)[5] == "missed"
    missing = next(target for target in TARGETS if target.part == "step-sd2")
    assert cells(text, missing.what)[3:7] == ["", "", "", "`bash bench/gpu.sh step-sd2`"]
    assert f"1 of 2 measured targets are met; {len(TARGETS) - 2} are not measured." in text
    assert text.count("out of memory") == 2
    assert "cut.jsonl" in text
    assert text.endswith("step-dit: passed, 200 s\n```\n")
    assert len(re.findall(r"^\|", text, re.MULTILINE)) == len(TARGETS) + 2


def test_an_h100_has_targets_of_its_own() -> None:
    fp8 = next(target for target in TARGETS if target.part == "step-dit-fp8")
    assert [fp8.on(f"NVIDIA {gpu}").verdict(750) for gpu in ("H200", "H100 80GB HBM3")] == ["missed", "met"]
    same = next(target for target in TARGETS if target.quantity == "speed-up")
    assert same.on("NVIDIA H100 80GB HBM3") is same


def test_plausible_records_fill_most_of_the_page(tmp_path: Path) -> None:
    bench_records.write(tmp_path, "step")
    shown = subprocess.run(
        [sys.executable, "-m", "fastdiff_bench.records.targets", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert cells(shown.stdout, "DiT-XL/2, 256 px: waiting for data in a step")[5] == "met"


def test_a_folder_without_records_has_a_page(tmp_path: Path) -> None:
    assert f"0 of 0 measured targets are met; {len(TARGETS)} are not measured." in page(tmp_path)
