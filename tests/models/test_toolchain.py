"""The compilers that a run needs: looked for as Triton and torch.compile do, and missed before anything starts."""

import sysconfig
from pathlib import Path

import pytest
import torch

from fastdiff.errors import ConfigError
from fastdiff.models.toolchain import (
    c_compiler,
    compiler_problem,
    cpp_compiler,
    python_header,
    require_compilers,
    require_for,
)
from fastdiff_kernels import launch
from fastdiff_kernels.dispatch import Choice
from tests.support.processes import BIN
from tests.support.runs import flags, tiny
from tests.support.scripts import TRAIN, run_script

CPU = torch.device("cpu")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def add(tools: Path, *names: str) -> None:
    for name in names:
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)


def test_the_c_compiler_of_triton(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert c_compiler() is None
    add(tools, "clang")
    assert c_compiler() == str(tools / "clang")
    add(tools, "gcc")
    assert c_compiler() == str(tools / "gcc")
    monkeypatch.setenv("CC", "mine")
    assert c_compiler() is None
    assert "CC=mine is not on PATH" in str(compiler_problem(triton=True, cpu_code=False))


def test_the_compiler_of_torch_compile_on_a_cpu(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch.compile needs g++ on a CPU, and it is not on PATH" in str(
        compiler_problem(triton=False, cpu_code=True)
    )
    add(tools, "g++", "own-g++")
    assert cpp_compiler() == str(tools / "g++")
    monkeypatch.setenv("CXX", "own-g++")
    assert cpp_compiler() == str(tools / "own-g++")


def test_triton_needs_a_c_compiler_and_the_header_of_python(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = str(compiler_problem(triton=True, cpu_code=False))
    assert found.startswith("Triton needs a C compiler, and neither gcc nor clang is on PATH; ")
    assert found.endswith("apt-get install gcc g++ python3-dev")
    add(tools, "gcc", "g++")
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tools / scheme)})
    for needed in ({"triton": True, "cpu_code": False}, {"triton": False, "cpu_code": True}):
        assert "needs Python's header, and" in str(compiler_problem(**needed))
    python_header().parent.mkdir()
    python_header().touch()
    assert compiler_problem(triton=True, cpu_code=True) is None
    assert compiler_problem(triton=False, cpu_code=False) is None


def test_what_needs_no_compiler_is_not_asked_for_one(tools: Path) -> None:
    require_compilers(CPU, compiled=False, kernels=True)
    require_for([("blocks.0", Choice("adaln", "triton", "triton", "in the interpreter"))], CPU, compiled=False)
    with pytest.raises(ConfigError, match=r"torch.compile needs g\+\+.* --performance.kernels reference$"):
        require_for([("blocks.0", Choice("adaln", "compile", "compile", "forced"))], CPU, compiled=False)


def test_on_a_gpu_a_kernel_is_tried_before_a_run_is_refused(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were built before need no compiler."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(launch, "trial", lambda device: "Failed to find C compiler")
    for used in ({"compiled": False, "kernels": True}, {"compiled": True, "kernels": False}):
        with pytest.raises(ConfigError, match=r"^Triton needs a C compiler"):
            require_compilers(gpu, **used)
    require_compilers(gpu, compiled=False, kernels=False)
    monkeypatch.setattr(launch, "trial", lambda device: None)
    require_compilers(gpu, compiled=True, kernels=True)


@pytest.mark.nightly
def test_a_run_that_would_compile_is_refused_before_anything_is_written(digits: Path, tmp_path: Path) -> None:
    own = flags(tiny(digits, tmp_path / "run", steps=1))
    without = {"PATH": str(BIN), "CXX": ""}
    assert not (BIN / "g++").exists()
    done = run_script(TRAIN, *own, "--performance.compile", "True", **without)
    assert done.code == 2, done.output
    (line,) = done.output.strip().splitlines()
    assert line.startswith("fastdiff: error: torch.compile needs g++ on a CPU, and it is not on PATH; "), line
    assert not (tmp_path / "run" / "run.json").exists()
    done = run_script(TRAIN, *own, **without)
    assert done.code == 0, done.output
