"""The goals of speed name figures that are measured, and the page says which of them are met."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff_bench import cases
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records.goals import GOALS, Goal, page
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_kernels.names import ATTENTION_BACKENDS
from tests.bench.commands.test_bench_gpu_script import PARTS
from tests.support.benches import bench_records

ROOT = Path(__file__).parents[3]


def measured(goal: Goal, value: float, case: str, provider: str, unit: str = "1") -> Measurement:
    better = "lower" if goal.most is not None or goal.quantity in ("time", "step time") else "higher"
    return Measurement(
        bench=goal.bench, case=case, provider=provider, quantity=goal.quantity, unit=unit, value=value, better=better
    )


def case_and_provider(goal: Goal) -> tuple[str, str] | None:
    """A case and a provider that the program which measures the goal would write, if it measures it at all."""
    if goal.bench == "op":
        shapes = cases.cases((goal.part.removeprefix("op-"),))
        names = [f"{case} {way}" for case in shapes for way in ("forward", "backward")]
        found = next((name for name in names if re.search(goal.case, name)), None)
        providers = ("triton", "compile", "bitsandbytes", *ATTENTION_BACKENDS)
        return found and (found, next(p for p in providers if re.fullmatch(goal.provider, p)))
    if goal.bench == "data":
        return "151 KB samples, batch 64, warm", "fastdiff reader"
    preset = "dit-s-2-256" if goal.part == "peer-plain" else "sd2-512" if "SD 2" in goal.what else "dit-xl-2-256"
    preset = "sd2-512" if goal.part == "peer-diffusers" else preset
    workload = Workload(preset=preset, batch=64, precision="bf16", compile=False if "eager" in goal.part else None)
    case = workload.case_of_any_batch if goal.part.startswith("largest") else workload.case
    if goal.bench == "peer":
        peer = {"peer-dit": "dit", "peer-plain": "plain", "peer-diffusers": "diffusers"}[goal.part]
        return f"{case}, cached", f"{workload.provider} over {peer}, best flags"
    return case, workload.provider


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.what)
def test_every_goal_is_found_in_what_a_part_of_the_script_writes(goal: Goal) -> None:
    assert goal.part in PARTS
    written = case_and_provider(goal)
    assert written is not None, "no such case"
    row = measured(goal, 1.0, *written)
    assert goal.of([row]) is row
    for other in (replace(row, bench="other"), replace(row, quantity="other"), replace(row, provider="other")):
        assert goal.of([other]) is None
    if goal.least is not None:
        assert [goal.verdict(goal.least), goal.verdict(goal.least * 0.999)] == ["met", "missed"]
    elif goal.most is not None:
        assert [goal.verdict(goal.most), goal.verdict(goal.most + 0.001)] == ["met", "missed"]
    else:
        assert goal.verdict(1.0) == ""


def test_the_best_case_counts_or_the_worst() -> None:
    best = next(goal for goal in GOALS if goal.quantity == "throughput" and goal.part == "step-dit")
    case, provider = case_and_provider(best) or ("", "")
    rows = [measured(best, value, case, provider) for value in (500.0, 720.0, 600.0)]
    assert best.of(rows) is rows[1]
    fastest = next(goal for goal in GOALS if goal.quantity == "step time")
    rows = [measured(fastest, value, case, provider) for value in (5.0, 7.0)]
    assert fastest.of(rows) is rows[0]
    worst = next(goal for goal in GOALS if goal.in_every_case and goal.least is not None)
    case, provider = case_and_provider(worst) or ("", "")
    rows = [measured(worst, value, case, provider) for value in (1.5, 1.1)]
    assert worst.of(rows) is rows[1]


def test_a_graph_break_in_one_batch_size_is_missed() -> None:
    for goal in (goal for goal in GOALS if goal.quantity == "graph breaks in code"):
        case, provider = case_and_provider(goal) or ("", "")
        rows = [replace(measured(goal, value, case, provider), better="lower") for value in (0.0, 2.0)]
        assert goal.of(rows) is rows[1]
        assert goal.verdict(rows[1].value) == "missed"


def cells(text: str, what: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {what} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_says_what_is_met_missed_and_missing(tmp_path: Path) -> None:
    best = next(goal for goal in GOALS if goal.quantity == "throughput" and goal.part == "step-dit")
    wanted = next(goal for goal in GOALS if goal.quantity == "speed-up" and goal.part == "peer-dit")
    for goal, value, unit in ((best, 720.5, "samples/s"), (wanted, 0.9, "1")):
        case, provider = case_and_provider(goal) or ("", "")
        with Log(tmp_path / f"{goal.bench}.jsonl") as log:
            log.write(replace(measured(goal, value, case, provider, unit), p20=value - 1, p80=value + 1, n=5))
            log.write(Failure(bench=goal.bench, case=case, provider="other", reason="out of\nmemory"))
    (tmp_path / "cut.jsonl").write_text("")
    (tmp_path / "summary.txt").write_text("step-dit: passed, 200 s\n")
    text = page(tmp_path)
    assert cells(text, best.what)[1:5] == ["at least 700", "720 samples/s", "720 to 722", "met"]
    assert cells(text, wanted.what)[4] == "missed"
    missing = next(goal for goal in GOALS if goal.part == "step-sd2")
    assert cells(text, missing.what)[2:6] == ["", "", "", "`bash bench/gpu.sh step-sd2`"]
    assert f"1 of 2 measured goals are met; {len(GOALS) - 2} figures are not measured." in text
    assert text.count("out of memory") == 2
    assert "cut.jsonl" in text
    assert text.endswith("step-dit: passed, 200 s\n```\n")
    assert len(re.findall(r"^\|", text, re.MULTILINE)) == len(GOALS) + 2


def test_plausible_records_fill_most_of_the_page(tmp_path: Path) -> None:
    bench_records.write(tmp_path, "step", "data")
    shown = subprocess.run(
        [sys.executable, "-m", "fastdiff_bench.records.goals", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert cells(shown.stdout, "shards read, samples per second")[4] == "met"


def test_a_folder_without_records_has_a_page(tmp_path: Path) -> None:
    assert f"0 of 0 measured goals are met; {len(GOALS)} figures are not measured." in page(tmp_path)
