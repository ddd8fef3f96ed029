"""Diagnosis of a machine: versions, devices, chosen kernels, and problems with their remedies."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from fastdiff.config.presets import preset
from fastdiff.config.run import OptimConfig
from fastdiff.data.loading.build import dali_installed
from fastdiff.models import kernel_choice
from fastdiff.parallel.fragments import Flat, Fragment
from fastdiff.training.optim import build_optimizer, check_is_8bit
from fastdiff_kernels import launch
from fastdiff_kernels.dispatch import Choice

_PACKAGES = (
    "torch", "triton", "deepspeed", "diffusers", "transformers", "bitsandbytes", "webdataset", "xformers",
    "nvidia-dali-cuda130",
)  # fmt: skip


def examine() -> Iterator[str]:
    """Yield the findings, one line each; a line that starts with "PROBLEM" names the remedy."""
    yield f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB of memory"
    for name in _PACKAGES:
        yield f"{name} {_version(name)}"
    yield from _devices()
    yield from _kernels()
    yield f"data loader: {'DALI' if dali_installed() else 'plain prefetcher (DALI is not installed)'}"
    yield from _eight_bit_adam()
    yield from _compiler()
    yield from _shared_memory()


def explain(name: str) -> Iterator[str]:
    """Yield a table of the implementation of each op that a preset would use on this machine.

    Raises:
        ConfigError: there is no such preset.
    """
    config = preset(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = "compiled" if kernel_choice.compiles(config, device) else "eager"
    yield f"preset {name} on {device.type}, {config.performance.precision}, blocks {blocks}:"
    yield from _table(kernel_choice.choices(config, device))


def _table(rows: Iterable[kernel_choice.Row]) -> Iterator[str]:
    cells = [("layer", "op", "forward", "backward", "why")]
    cells += [(name, choice.op, choice.forward, choice.backward, choice.why) for name, choice in _merged(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _merged(rows: Iterable[kernel_choice.Row]) -> Iterator[kernel_choice.Row]:
    """Merge rows that differ in one number of the layer name only: ``blocks.0-27.attn``."""
    split = [(tuple(name.split(".")), choice) for name, choice in rows]
    for place in range(max((len(parts) for parts, _ in split), default=0)):
        numbers: dict[tuple[tuple[str, ...], Choice], list[str]] = defaultdict(list)
        for parts, choice in split:
            number = next((part for part in parts[place : place + 1] if part.isdecimal()), None)
            open_parts = parts if number is None else (*parts[:place], "*", *parts[place + 1 :])
            numbers[open_parts, choice] += [] if number is None else [number]
        split = [
            (tuple(_ranges(found) if part == "*" else part for part in parts), choice)
            for (parts, choice), found in numbers.items()
        ]
    yield from ((".".join(parts), choice) for parts, choice in split)


def _ranges(numbers: Iterable[str]) -> str:
    """Format numbers as ranges: ``0-3,7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted({int(number) for number in numbers}):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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


def _kernels() -> Iterator[str]:
    if launch.triton is None and torch.cuda.is_available():
        yield "PROBLEM: Triton is not installed, so plain torch computes fastdiff's ops; pip install triton"


def _eight_bit_adam() -> Iterator[str]:
    """Take one real step of each optimizer; only that shows the dtype of its state."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, remedy in (("adamw8bit", "adamw"), ("adamw8bit-bnb", "adamw8bit, or reinstall bitsandbytes")):
        weight = torch.nn.Parameter(torch.zeros(4096, device=device))
        weight.grad = torch.ones_like(weight)
        try:
            optimizer = build_optimizer([weight], OptimConfig(name=name), skip_non_finite=False)  # type: ignore[arg-type]
            optimizer.step()
            check_is_8bit(name, [Flat(weight, optimizer.state, (Fragment("weight", 0, 4096, 0),), owned=True)])
        except Exception as error:
            yield f"PROBLEM: 8-bit Adam, {name}, does not run ({error}); use --optim.name {remedy}"
        else:
            yield f"8-bit Adam, {name}: runs, its state is 8-bit"


def _compiler() -> Iterator[str]:
    if shutil.which("g++") is None:
        yield "PROBLEM: g++ is missing, Triton and torch.compile build with it; install g++"


def _shared_memory() -> Iterator[str]:
    free = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    if free < 0.5:
        yield f"PROBLEM: /dev/shm has {free:.1f} GiB free, ranks talk through it; give the container --shm-size 8g"
