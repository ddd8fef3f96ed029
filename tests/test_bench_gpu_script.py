"""``bench/gpu.sh``: every part runs within its time, and what failed or is missing is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from bench.fingerprint import ROOT

PARTS = [
    "ops", "gpu", "op-kernels", "op-attention", "op-optimizer", "step-dit-xl-2", "step-sd2-512", "peer-dit",
    "peer-diffusers", "peer-plain", "data", "report",
]  # fmt: skip

PYTHON = """
case "$*" in
    -|"- --smoke") cat >/dev/null; echo nvidia-h200 ;;
    *Fingerprint*) echo "device NVIDIA H200" ;;
    *find_spec*) ;;
    *"-q tests/ops"*) echo "one test failed"; exit 3 ;;
    *"bench data"*) exit 5 ;;
    *) echo "ran $*" ;;
esac"""
"""Stands in for Python: the kernels' tests fail, and so do the readers, in another way."""


def script(folder: Path, python: str, *arguments: str, timeout: str = "") -> subprocess.CompletedProcess[str]:
    """``bench/gpu.sh`` with these commands in place of Python's, and of ``timeout``'s."""
    for name, text in (("python3", python), ("timeout", timeout)):
        if text:
            (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (folder / name).chmod(0o755)
    given = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "bench/gpu.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=60, check=False)


def summary(out: Path) -> dict[str, str]:
    """How each part ended, without the seconds."""
    lines = (line.split(": ", 1) for line in (out / "summary.txt").read_text().splitlines())
    return {name: re.sub(r", \d+ s$", "", result) for name, result in lines}


def test_it_goes_on_after_failures_and_ends_with_the_code_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script(tmp_path, PYTHON, str(out))
    assert done.returncode == 3, done.stderr
    expected = dict.fromkeys(PARTS, "passed") | {"ops": "failed (3)", "data": "failed (5)"}
    assert summary(out) == expected
    assert list(summary(out)) == PARTS
    assert {p.name for p in out.iterdir()} == {"environment.txt", "summary.txt"} | {f"{name}.log" for name in PARTS}
    assert (out / "environment.txt").read_text() == "device NVIDIA H200\n"
    assert (out / "op-attention.log").read_text() == f"ran -m bench op --out {out} attention\n"
    assert (out / "step-dit-xl-2.log").read_text() == (
        f"ran -m bench step --out {out} --preset dit-xl-2 --precision bf16 --find-batch --sweep compile=true,false\n"
    )
    assert (out / "report.log").read_text() == f"ran -m bench report {out}/report.html {out}\n"


def test_parts_run_singly_and_in_groups(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert script(tmp_path, PYTHON, str(out), "gpu").returncode == 0
    assert summary(out) == {"gpu": "passed"}
    assert script(tmp_path, PYTHON, str(out), "op", "peer-dit").returncode == 0
    assert list(summary(out)) == ["op-kernels", "op-attention", "op-optimizer", "peer-dit"]


def limits(folder: Path, *parts: str) -> list[int]:
    """Seconds that each part may take, where none takes any."""
    file = folder / "limits"
    file.write_text("")
    script(folder, PYTHON, str(folder / "out"), *parts, timeout=f'echo "$2" >>{file}; shift 2; exec "$@"')
    return [int(line) for line in file.read_text().split()]


def test_no_part_may_take_ten_minutes_and_all_together_twenty(tmp_path: Path) -> None:
    assert limits(tmp_path, "op-kernels", "data") == [570, 570]
    found = limits(tmp_path)
    assert len(found) == len(PARTS)
    # What a part leaves is for the next ones.
    assert found[0] == 120
    assert 155 <= found[1] <= 160
    assert all(300 < seconds <= 570 for seconds in found[2:])
    text = (ROOT / "bench" / "gpu.sh").read_text()
    shares = dict(re.findall(r'^ *(?:part|bench) "?([\w$-]+)"? (\d+)', text, re.MULTILINE))
    assert sum(map(int, shares.values())) + int(shares["step-$preset"]) == 1200


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    slow = PYTHON.replace('*) echo "ran $*"', "*) sleep 30")
    done = script(tmp_path, slow, str(tmp_path / "out"), "gpu", timeout='shift 2; exec /usr/bin/timeout 0.2 "$@"')
    assert done.returncode == 124
    assert summary(tmp_path / "out") == {"gpu": "stopped after 570 s"}


def test_a_part_whose_package_is_missing_is_left_out(tmp_path: Path) -> None:
    without = PYTHON.replace("*find_spec*) ;;", "*find_spec*diffusers*) exit 1 ;;\n    *find_spec*) ;;")
    out = tmp_path / "out"
    assert script(tmp_path, without, str(out), "peer").returncode == 0
    assert summary(out) == {
        "peer-dit": "passed", "peer-diffusers": "left out, diffusers is not installed", "peer-plain": "passed",
    }  # fmt: skip


def test_the_smallest_run_asks_for_the_smallest_run_of_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script(tmp_path, PYTHON, "--smoke", str(out))
    logs = {p.stem: p.read_text() for p in out.glob("*.log")}
    measuring = {name: log for name, log in logs.items() if name.startswith(("op-", "step-", "peer-"))}
    assert len(measuring) == 8
    assert all(" --smoke " in log for log in measuring.values())
    assert not any("-xl-" in log or "512" in log for log in measuring.values())


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
