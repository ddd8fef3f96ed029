"""What compiled code depends on besides the program: it is used again only where all of it is the same."""

import hashlib
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import fastdiff_kernels
from fastdiff.files import file_digest
from fastdiff.models.toolchain import c_compiler, cpp_compiler
from fastdiff.version import PACKAGE, __version__

_CPU = Path("/proc/cpuinfo")
_OF_CPU = re.compile(r"^(model name|flags|CPU implementer|CPU part|Features)\s*:.*$", re.MULTILINE)
"""Inductor's C++ is compiled for the machine (``-march=native``): another processor may lack an instruction."""


def describe(device: torch.device) -> dict[str, str]:
    """Return device, processor, versions, compilers and code of this machine, in words and digests."""
    return {
        "device": _device(device),
        "cpu": _digest(_cpu().encode()),
        "python": sys.version,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "triton": _version("triton"),
        "C": _compiler(c_compiler()),
        "C++": _compiler(cpp_compiler()),
        "fastdiff": f"{__version__} {_code()}",
    }


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a name for code that was compiled under these facts."""
    return _digest(json.dumps(facts, sort_keys=True).encode())


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, sm_{found.major}{found.minor}"


def _cpu() -> str:
    """Return model and instruction sets of the first processor."""
    try:
        first = _CPU.read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join([platform.machine(), *(line.group() for line in _OF_CPU.finditer(first))])


def _compiler(path: str | None) -> str:
    """Return path and digest: versions could be asked of a compiler only by running it."""
    return "none" if path is None else f"{path} {file_digest(Path(path))}"


def _code() -> str:
    """Return a digest of the networks and kernels: graphs hold our ops by name, not their gradients."""
    folders = (PACKAGE / "models", Path(fastdiff_kernels.__file__).parent)
    return _digest(b"".join(_with_names(path for folder in folders for path in sorted(folder.rglob("*.py")))))


def _with_names(paths: Iterable[Path]) -> Iterable[bytes]:
    for path in paths:
        yield f"{path.name} {file_digest(path)}\n".encode()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
