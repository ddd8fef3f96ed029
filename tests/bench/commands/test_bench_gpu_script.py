"""``bench/gpu.sh``: every part is a command that exists, keeps to its time, and is named when it fails."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fastdiff_bench import cases
from fastdiff_bench.__main__ import COMMANDS, module_of
from fastdiff_bench.commands import op
from fastdiff_bench.measure import baselines, sweep
from fastdiff_bench.records.fingerprint import ROOT
from tests.support.processes import DIE_WITH_TESTS, stop
from tests.support.waiting import wait_until

PARTS = [
    "step-dit", "step-dit-zero1", "step-dit-short", "step-dit-graph", "step-dit-fp8", "step-dit-fp8-wgrad",
    "step-sd2", "peer-dit", "peer-plain", "peer-diffusers", "op-adaln", "op-attention", "op-fp8", "op-gelu",
    "op-geglu", "op-swiglu", "op-rotary", "op-group_norm", "op-adamw8bit", "op-adamw", "op-weight_gradient",
    "op-bias_gradient", "op-loss", "op-noising", "op-dropout", "op-philox", "step-dit-32", "step-dit-deterministic",
    "start-cold", "start-warm", "checkpoint", "doctor", "ops", "gpu", "runs", "memcheck", "report",
]  # fmt: skip
NEEDS_A_GPU = {"step-dit-graph"}
WITHOUT_BENCH = {"doctor", "ops", "gpu", "runs", "memcheck"}

PYTHON = """
case "$*" in
    -) cat >/dev/null; echo nvidia-h200 139 ;;
    "- --smoke") cat >/dev/null; echo nvidia-h200 0 ;;
    *Fingerprint*) echo "device NVIDIA H200" ;;
    *find_spec*CUDA-device*) echo CUDA-device ;;
    *find_spec*|*"import "*) ;;
    *fastdiff_bench.records.targets*) echo "targets of $3" ;;
    *"tests/ops"*) echo "one test failed"; exit 3 ;;
    *"bench checkpoint"*) exit 5 ;;
    *) printf 'ran'; printf ' %q' "$@"; echo ;;
esac"""
"""Stands in for Python: the kernels' tests fail, and so do checkpoints, in another way."""

SANITIZER = 'while [[ $1 != python3 ]]; do shift; done; exec "$@"'

ENDLESS = PYTHON.replace("*) printf", "*) sleep 600; printf")


def begin(folder: Path, python: str, *arguments: str, timeout: str = "") -> subprocess.Popen[str]:
    """``bench/gpu.sh`` with these commands in place of Python's, and of ``timeout``'s."""
    for name, text in (("python3", python), ("timeout", timeout), ("compute-sanitizer", SANITIZER)):
        if text:
            (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (folder / name).chmod(0o755)
    given = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    # Where the tests themselves ignore SIGINT (behind nohup, or an "&" in a script) a shell could not trap it.
    command = [*DIE_WITH_TESTS, "env", "--default-signal=INT", "bash", "bench/gpu.sh", *arguments]
    return subprocess.Popen(
        [*DIE_WITH_TESTS, *command],
        cwd=ROOT,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def script(folder: Path, python: str, *arguments: str, timeout: str = "") -> subprocess.CompletedProcess[str]:
    process = begin(folder, python, *arguments, timeout=timeout)
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        stop(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def summary(out: Path) -> dict[str, str]:
    """Return the result of each part, without the seconds."""
    lines = (line.split(": ", 1) for line in (out / "summary.txt").read_text().splitlines())
    return {name: re.sub(r", \d+ s$", "", result) for name, result in lines}


def commands(out: Path) -> dict[str, list[str]]:
    """Return the arguments of Python in each part."""
    logs = {path.stem: path.read_text() for path in out.glob("*.log")}
    return {name: shlex.split(text)[1:] for name, text in logs.items() if text.startswith("ran ")}


def noting(file: Path) -> str:
    """Stands in for ``timeout``: notes the seconds of each part, and limits none."""
    return f'echo "$3" >>{file}; shift 3; exec "$@"'


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("full")
    return script(folder, PYTHON, str(folder / "out"), timeout=noting(folder / "limits")), folder / "out"


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smallest")
    script(folder, PYTHON, "--smoke", str(folder / "out"))
    return folder / "out"


def test_it_goes_on_after_failures_and_ends_with_the_code_of_the_first(
    full: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = full
    assert done.returncode == 5, done.stderr
    failed = {"ops": "failed (3)", "checkpoint": "failed (5)", "memcheck": "failed (3)"}
    assert summary(out) == dict.fromkeys(PARTS, "passed") | failed
    assert list(summary(out)) == PARTS
    assert {p.name for p in out.iterdir()} == {
        "environment.txt", "summary.txt", "README.md", *(f"{name}.log" for name in PARTS),
    }  # fmt: skip
    assert (out / "README.md").read_text() == f"targets of {out}\n"
    assert (out / "environment.txt").read_text() == "device NVIDIA H200\n"
    assert "one test failed" in done.stdout
    assert done.stdout.endswith(f"To take it away: tar -C {out.parent} -czf gpu.tar.gz out\n")


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    for name in COMMANDS:
        module_of(name).add(subparsers)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_command_exists_and_asks_for_what_there_is(
    full: tuple[subprocess.CompletedProcess[str], Path], smallest: Path, device: str
) -> None:
    """So that a flag, preset, op or peer that is renamed is renamed here too."""
    out = full[1] if device == "cuda" else smallest
    measuring = {name: words[2:] for name, words in commands(out).items() if words[:2] == ["-m", "fastdiff_bench"]}
    left_out = NEEDS_A_GPU if device == "cpu" else set()
    assert WITHOUT_BENCH | {"checkpoint"} | left_out == set(PARTS) - set(measuring)
    for name, words in measuring.items():
        given, group = parsed(words), name.split("-")[0]
        if group == "report":
            continue
        assert (given.out, given.smoke) == (out, device == "cpu")
        if group == "op":
            assert [given.ops] == [[name.removeprefix("op-")]]
            assert op._named(cases.chosen(given, cases.OPS), given.case)
            continue
        workloads = sweep.workloads(given, device)
        for workload in workloads if group == "peer" else []:
            baselines._check(workload, given.peer)
        assert device == "cpu" or {workload.config(Path(), Path()).performance.precision for workload in workloads} == {
            "bf16"
        }
        assert device == "cuda" or not any(
            ("-xl-" in workload.preset and not workload.model) or "512" in workload.preset for workload in workloads
        )
    assert {name.removeprefix("op-") for name in measuring if name.startswith("op-")} == set(cases.OPS)


def test_it_adapts_to_the_memory_and_logs_the_clocks(tmp_path: Path) -> None:
    out, smaller = tmp_path / "out", PYTHON.replace("nvidia-h200 139", "nvidia-h100 79")
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "1980, 690.1"\nexec sleep 600\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert script(tmp_path, smaller, str(out), "step").returncode == 0
    batches = {name: parsed(words[2:]).batch for name, words in commands(out).items()}
    assert batches["step-dit"] == batches["step-dit-fp8"] == 192
    assert (batches["step-sd2"], batches["step-dit-32"]) == (48, 32)
    assert (out / "clocks.csv").read_text() == "1980, 690.1\n"


def test_tests_that_are_named_exist(tmp_path: Path) -> None:
    echo = PYTHON.replace('*"tests/ops"*)', "never)")
    out = tmp_path / "out"
    assert script(tmp_path, echo, str(out), "ops", "gpu", "runs").returncode == 0
    found = commands(out)
    assert found["ops"][-1] == "tests/ops"
    assert found["runs"][-3:] == ["tests/gpu", "-m", "gpu"]
    files = {word for word in found["gpu"] if word.startswith("tests/")}
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("tests/**/test_*.py")
        if not {"ops", "gpu"} & set(path.relative_to(ROOT).parts) and re.search(r"mark[.]gpu\b", path.read_text())
    }
    assert "tests/bench/measure/test_bench_timing.py" in marked <= files
    assert "not dali" not in found["gpu"]
    without = echo.replace("*find_spec*|", '*"import nvidia.dali"*) exit 1 ;;\n    *find_spec*|')
    script(tmp_path, without, str(out), "gpu")
    assert commands(out)["gpu"][commands(out)["gpu"].index("-k") + 1] == "not dali"
    needs_it = "tests/data/images/test_image_decode.py"
    assert needs_it in found["gpu"]
    assert needs_it not in commands(out)["gpu"]


def test_a_problem_that_the_doctor_finds_is_a_failure(tmp_path: Path) -> None:
    """Other parts may print the word."""
    found = '*" doctor "*|*"bench report"*) echo "PROBLEM: no compiler" ;;'
    finding = PYTHON.replace("*Fingerprint*", f"{found}\n    *Fingerprint*")
    out = tmp_path / "out"
    assert script(tmp_path, finding, str(out), "doctor", "report").returncode == 1
    assert summary(out) == {"doctor": "failed (1)", "report": "passed"}


def test_a_part_that_runs_again_has_one_line_and_the_others_keep_theirs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert script(tmp_path, PYTHON, str(out), "ops", "doctor").returncode == 3
    assert script(tmp_path, PYTHON.replace("exit 3", "exit 0"), str(out), "ops").returncode == 0
    assert summary(out) == {"doctor": "passed", "ops": "passed"}


@pytest.mark.nightly
def test_the_folder_may_be_left_out(tmp_path: Path) -> None:
    """It is that of the machine and the day."""
    out = ROOT / "bench" / "results" / "nvidia-h200"
    assert not out.exists() or not list(out.glob("*-smoke"))
    try:
        done = script(tmp_path, PYTHON, "--smoke", "doctor")
        assert done.returncode == 0, done.stderr
        (folder,) = out.glob("*_gpu-smoke")
        assert summary(folder) == {"doctor": "passed"}
    finally:
        for folder in out.glob("*_gpu-smoke"):
            shutil.rmtree(folder)
        if out.exists() and not list(out.iterdir()):
            out.rmdir()


def seconds_of(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


def limits(folder: Path, *arguments: str) -> list[int]:
    """Seconds that each part may take, where none takes any."""
    file = folder / "limits"
    file.unlink(missing_ok=True)
    script(folder, PYTHON, *arguments, timeout=noting(file))
    return seconds_of(file)


@pytest.mark.nightly
def test_every_part_can_be_a_call_of_its_own(
    full: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    """540 s is the limit of a part; a call with named parts ends within it, and one without takes what they take."""
    out = str(tmp_path / "out")
    given = dict(zip(PARTS, seconds_of(full[1].with_name("limits")), strict=True))
    assert max(given.values()) <= 540
    assert given["step-sd2"] == 400, "dozens of graphs are compiled"
    alone = limits(tmp_path, out, "step-sd2", "op-loss")
    assert 0 < alone[0] <= 510
    assert alone[1] == given["op-loss"]
    few = limits(tmp_path, "--seconds", "300", out, "doctor", "ops", "gpu")
    assert few[0] == given["doctor"]
    assert 300 >= few[1] >= few[2] > 0, "what is left of the time"


def gone(folder: Path) -> bool:
    """Return whether no stand-in for Python in this folder is left, waiting for their ends."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if not any(str(folder / "python3") in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
            return True
        time.sleep(0.05)
    return False


def test_a_part_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    """It may say its last words, and what it has recorded is in the summary."""
    out, ready = tmp_path / "out", tmp_path / "ready"
    waiting = f'sleep 600 & trap "echo last words; exit 1" INT; touch {ready}; wait'
    hanging = PYTHON.replace("*) printf", f"*deterministic*) {waiting} ;;\n    *) printf")
    # As the clock of timeout would.
    expire = f"(until [ -e {ready} ] || ! kill -0 $$; do sleep 0.05; done; kill -ALRM $$) &"
    limited = f'{expire} exec {shutil.which("timeout")} --signal=INT --kill-after=240 600 "$@"'
    soon = f'shift 3; case "$*" in *--deterministic*) {limited} ;; esac; exec "$@"'
    done = script(tmp_path, hanging, str(out), "step-dit-deterministic", "report", timeout=soon)
    assert done.returncode == 124
    assert summary(out) == {"step-dit-deterministic": "stopped after 100 s", "report": "passed"}
    assert (out / "README.md").exists()
    assert (out / "step-dit-deterministic.log").read_text() == "last words\n"
    assert gone(tmp_path)


@pytest.mark.nightly
def test_a_part_for_which_no_time_is_left_is_left_out(tmp_path: Path) -> None:
    out, slow = tmp_path / "out", PYTHON.replace("*find_spec*|", '*" doctor "*) sleep 1 ;;\n    *find_spec*|')
    assert script(tmp_path, slow, "--seconds", "1", str(out), "doctor", "report").returncode == 124
    assert summary(out)["report"] == "left out, no time is left"


@pytest.mark.nightly
def test_an_interrupt_ends_the_script_and_the_part_that_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = begin(tmp_path, ENDLESS, str(out), "report", "step")
    try:
        wait_until((out / "step-dit.log").exists, "the part to start")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode == 130
    finally:
        stop(process)
    assert (out / "summary.txt").read_text() == "interrupted\n"
    assert gone(tmp_path)


@pytest.mark.nightly
def test_the_script_does_not_wait_for_processes_that_a_part_leaves(tmp_path: Path) -> None:
    left = tmp_path / "left"
    leaving = PYTHON.replace("*) printf", f"*) setsid sleep 3600 & echo $! >{left}; printf")
    try:
        assert script(tmp_path, leaving, str(tmp_path / "out"), "report").returncode == 0
        assert psutil.pid_exists(int(left.read_text()))
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert (tmp_path / "out" / "report.log").read_text().startswith("ran ")


def test_a_part_whose_package_is_missing_is_left_out(tmp_path: Path) -> None:
    without = PYTHON.replace("*find_spec*|", "*find_spec*diffusers*) echo diffusers ;;\n    *find_spec*|")
    out, left_out = tmp_path / "out", "left out, missing: diffusers"
    assert script(tmp_path, without, str(out), "peer").returncode == 0
    assert summary(out) == {"peer-dit": "passed", "peer-plain": "passed", "peer-diffusers": left_out}
    done = script(tmp_path, without, str(out), "peer-diffusers")
    assert (done.returncode, done.stderr) == (1, "bench/gpu.sh: nothing ran\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--smok"], "there is no --smok"),
        (["--seconds", "soon"], "--seconds soon: expected seconds"),
        (["steps"], "there is no part steps; expected some of: step step-dit step-dit-zero1"),
        (["op", "OUT"], "OUT, the folder .*/out, comes before the parts"),
    ],
)
def test_a_mistake_is_one_clear_error(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = script(tmp_path, PYTHON, *(word.replace("OUT", str(tmp_path / "out")) for word in arguments))
    assert done.returncode == 2
    first, usage = done.stderr.splitlines()
    assert re.match(f"bench/gpu.sh: {message}", first), first
    assert usage.startswith("Usage: ")
    assert not (tmp_path / "out").exists()


def test_help_names_every_part(tmp_path: Path) -> None:
    done = script(tmp_path, PYTHON, "--help")
    assert done.returncode == 0
    assert set(PARTS) <= set(re.findall(r"[\w-]+", done.stdout))
    assert "set -uo" not in done.stdout


def test_it_refuses_a_machine_without_a_gpu(tmp_path: Path) -> None:
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    given["PATH"] = f"{Path(sys.executable).parent}:{given['PATH']}"
    command = ["bash", "bench/gpu.sh", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "bench/gpu.sh: torch sees no CUDA device; run this on a machine with a GPU, or try it with --smoke\n"
    )
    assert not (tmp_path / "out").exists()
