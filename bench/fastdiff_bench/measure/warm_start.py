"""A cold start and a warm one: compilation of a network on two nodes, which share nothing but the cache folder.

A node is a temporary folder of its own. Every compiler is called through a script, first on the path, that notes it;
Triton's own ptxas has no driver in between, so its kernels are counted by the cubins that a node has beyond the pack.
"""

import json
import os
import shlex
import shutil
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastdiff_bench.measure.first_step import start

_COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "ld", "ptxas", "nvcc")
_PASS = "fastdiff_bench.trainers.compiled_pass"
_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Compilation:
    """One start of a network."""

    cpu_seconds: float
    """Until the first pass is done and its code is kept, over all processes."""
    compilers: int
    """Processes of compilers that were started, also to ask for a version."""
    triton: int
    """Kernels that Triton compiled."""
    graphs: int
    anew: int
    """Forward and backward parts of graphs that were compiled."""
    kernels: int


def pair(network: str, folder: Path, environment: Mapping[str, str]) -> tuple[Compilation, Compilation]:
    """Start a network with an empty cache, then on another node; BenchError: a start fails or takes too long."""
    folder.mkdir(parents=True)
    calls = folder / "calls"
    variables = {
        **environment,
        "PATH": f"{_noting(folder / 'bin', calls)}{os.pathsep}{environment['PATH']}",
        "FASTDIFF_CACHE": str(folder / "shared"),
    }
    for name in ("CC", "CXX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        variables.pop(name, None)
    cold, warm = (_start(network, folder, folder / node, calls, variables) for node in ("node-a", "node-b"))
    return cold, warm


def _noting(folder: Path, calls: Path) -> Path:
    """Make scripts in place of compilers; return their folder."""
    folder.mkdir()
    for name in _COMPILERS:
        if found := shutil.which(name):
            note_calls(folder / name, found, calls)
    return folder


def note_calls(script: Path, program: str, calls: Path) -> None:
    """Make a script that adds a line with its arguments to ``calls`` and becomes the program."""
    script.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(calls))}\nexec {shlex.quote(program)} "$@"\n')
    script.chmod(0o755)


def _start(network: str, folder: Path, node: Path, calls: Path, variables: Mapping[str, str]) -> Compilation:
    node.mkdir()
    mark, before = node / "mark", sum(map(_cubins, (folder / "shared").rglob("*.zip")))
    calls.write_text("")
    command = (sys.executable, "-m", _PASS, network, str(mark))
    found = start(command, mark.exists, node / "log", {**variables, "TMPDIR": str(node)}, _LIMIT_S)
    told = json.loads(mark.read_bytes())
    return Compilation(
        cpu_seconds=found.cpu_seconds,
        compilers=len(calls.read_text().splitlines()),
        triton=len(list(node.rglob("*.cubin"))) - before,
        **told,
    )


def _cubins(pack: Path) -> int:
    with zipfile.ZipFile(pack) as archive:
        return sum(name.endswith(".cubin") for name in archive.namelist())
