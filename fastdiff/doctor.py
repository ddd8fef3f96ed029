"""What this machine has, what will run on it, what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from fastdiff.data import dali_installed

_PACKAGES = (
    "torch", "triton", "deepspeed", "diffusers", "transformers", "bitsandbytes", "webdataset", "xformers",
    "nvidia-dali-cuda130",
)  # fmt: skip


def examine() -> Iterator[str]:
    """Yield the findings, one line each; a line that starts with "PROBLEM" says what to do."""
    yield f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB of memory"
    for name in _PACKAGES:
        yield f"{name} {_version(name)}"
    yield from _devices()
    yield f"data loader: {'DALI' if dali_installed() else 'plain prefetcher (DALI is not installed)'}"
    yield from _eight_bit_adam()
    yield from _build_tools()
    yield from _stale_locks()
    yield from _shared_memory()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _devices() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "device: CPU (no CUDA device is visible); gloo between ranks, torch.compile off by default"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"device {index}: {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB; NCCL between ranks, torch.compile on by default"
        )
    names = ("cudnn", "flash", "mem_efficient")
    enabled = [name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    yield f"attention: scaled_dot_product_attention with {', '.join(enabled)}"


def _eight_bit_adam() -> Iterator[str]:
    """Take one real step, because only that shows what the state is kept in."""
    try:
        import bitsandbytes

        device = "cuda" if torch.cuda.is_available() else "cpu"
        weight = torch.nn.Parameter(torch.zeros(4096, device=device))
        optimizer = bitsandbytes.optim.AdamW8bit([weight])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        dtype = optimizer.state[weight]["state1"].dtype
    except Exception as error:
        yield f"PROBLEM: 8-bit Adam does not run ({error}); use --optim.name adamw, or reinstall bitsandbytes"
        return
    if dtype is torch.uint8:
        yield "8-bit Adam: runs, its state is 8-bit"
    else:
        yield f"PROBLEM: 8-bit Adam keeps its state in {dtype}; use --optim.name adamw"


def _build_tools() -> Iterator[str]:
    for tool, package in (("g++", "g++"), ("ninja", "ninja")):
        if shutil.which(tool) is None and shutil.which(tool, path=str(Path(sys.executable).parent)) is None:
            yield f"PROBLEM: {tool} is missing, DeepSpeed compiles its operators with it; install {package}"


def _stale_locks() -> Iterator[str]:
    """A process that is killed while it builds an operator leaves a lock, on which every later start waits for ever."""
    default = Path.home() / ".cache" / "torch_extensions"
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)).glob("**/lock"):
        age = time.time() - lock.stat().st_mtime
        yield f"PROBLEM: {lock} is {age / 60:.0f} minutes old; if no build runs, delete it: later starts wait on it"


def _shared_memory() -> Iterator[str]:
    free = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    if free < 0.5:
        yield f"PROBLEM: /dev/shm has {free:.1f} GiB free, ranks talk through it; give the container --shm-size 8g"
