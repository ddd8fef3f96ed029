"""The compilers that Triton and torch.compile call while a program runs."""

import os
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

from fastdiff.errors import ConfigError
from fastdiff.models.kernel_choice import Row
from fastdiff_kernels import launch

_REMEDY = "Debian and Ubuntu: apt-get install gcc g++ python3-dev"


def require_for(rows: Iterable[Row], device: torch.device, *, compiled: bool) -> None:
    """Check the compilers that a run with these implementations needs; see ``require_compilers``."""
    used = {backend for _, choice in rows for backend in (choice.forward, choice.backward)}
    instead = "; or use --performance.no-compile --performance.kernels reference"
    require_compilers(
        device,
        compiled=compiled or "compile" in used,
        kernels=not used.isdisjoint({"triton", "short"}),
        instead=instead,
    )


def require_compilers(device: torch.device, *, compiled: bool, kernels: bool, instead: str = "") -> None:
    """Refuse to start what would fail at its first kernel, minutes later.

    Args:
        device: of the network.
        compiled: torch.compile is used.
        kernels: Triton kernels of fastdiff are used.
        instead: end of the message: what needs no compiler.

    Raises:
        ConfigError: a compiler or a header that they need is missing.
    """
    on_cuda = device.type == "cuda"
    problem = compiler_problem(triton=on_cuda and (compiled or kernels), cpu_code=compiled and not on_cuda)
    # Kernels that were compiled before need no compiler.
    if problem and not (on_cuda and launch.trial(device) is None):
        raise ConfigError(problem + instead)


def compiler_problem(*, triton: bool, cpu_code: bool) -> str | None:
    """Return what is missing, with the remedy; None: nothing.

    Args:
        triton: Triton is used, by a kernel or by torch.compile on a GPU: it builds the launcher of each kernel in C.
        cpu_code: torch.compile is used on a CPU, where it writes C++.
    """
    if triton and c_compiler() is None:
        return f"Triton needs a C compiler, and {_named('CC', 'neither gcc nor clang is')} on PATH; {_REMEDY}"
    if cpu_code and cpp_compiler() is None:
        return f"torch.compile needs g++ on a CPU, and {_named('CXX', 'it is not')} on PATH; {_REMEDY}"
    if (triton or cpu_code) and not python_header().is_file():
        user = "Triton" if triton else "torch.compile"
        return f"{user} needs Python's header, and {python_header()} is missing; {_REMEDY}"
    return None


def _named(variable: str, otherwise: str) -> str:
    given = os.environ.get(variable)
    return f"{variable}={given} is not" if given else otherwise


def c_compiler() -> str | None:
    """Return the compiler that Triton would call."""
    return _found("CC") if os.environ.get("CC") else shutil.which("gcc") or shutil.which("clang")


def cpp_compiler() -> str | None:
    """Return the compiler that torch.compile would call on a CPU."""
    return _found("CXX") if os.environ.get("CXX") else shutil.which("g++")


def _found(variable: str) -> str | None:
    return shutil.which(os.environ[variable])


def python_header() -> Path:
    """Return where Python.h belongs, as Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    # Debian's scheme for packages of the user, which has no headers.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]) / "Python.h"
