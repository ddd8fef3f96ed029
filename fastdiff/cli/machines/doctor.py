"""Diagnosis of a machine: versions, devices, chosen kernels, and problems with their remedies."""

import importlib.metadata
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from fastdiff.config.optimizers.registry import optimizers
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.data.dali_trial import dali_installed, dali_problem
from fastdiff.errors import ConfigError
from fastdiff.models import kernel_choice
from fastdiff.models.compile_cache import cache as compile_cache
from fastdiff.models.fused import Matrix
from fastdiff.models.toolchain import c_compiler, compiler_problem, cpp_compiler, python_header
from fastdiff.parallel.devices import Capability, architecture_problem, precision_problem, select_device, usable_gpus
from fastdiff.parallel.fragments import Flat, Fragment
from fastdiff.parallel.world import World
from fastdiff.tables import table
from fastdiff.terminal import columns
from fastdiff.training.optimizer.build import build_optimizer, check_state, create_state
from fastdiff_kernels import attention, launch
from fastdiff_kernels.dispatch import Choice

_PACKAGES = (
    "torch", "triton", "deepspeed", "diffusers", "transformers", "bitsandbytes", "webdataset", "xformers",
    "nvidia-dali-cuda130", "nvidia-dali-cuda120",
)  # fmt: skip
_MISSING = "not installed"


def examine(name: str | None = None) -> Iterator[str]:
    """Yield the findings, one line each: facts; the table of a preset; what is OK of device, compilers and libraries.

    In place of an "OK" line stand its problems, lines that begin with "PROBLEM" and name the remedy. ConfigError: no
    such preset.
    """
    hint = ["kernels and attention: `fastdiff doctor --preset NAME` lists what each layer would use"]
    explained = hint if name is None else list(explain(name))  # fails before the first line is printed
    config = None if name is None else preset(name)
    yield from _facts()
    yield from explained
    for title, found in (("device", _device(config)), ("compilers", _compilers()), ("libraries", _libraries())):
        lines = list(found)
        problems = [line for line in lines if line.startswith("PROBLEM")]
        yield from problems or [f"OK {title}: {'; '.join(lines)}"]


def _facts() -> Iterator[str]:
    yield f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB of memory"
    for name in _PACKAGES:
        if name.split("-cuda")[0] != "nvidia-dali" or _version(name) != _MISSING:
            yield f"{name} {_version(name)}"
    yield f"CUDA of torch: {torch.version.cuda or 'none'}; TF32 off unless a run has --performance.allow-tf32"
    on_cuda = _selected().type == "cuda"
    loader = dali_problem(on_cuda)
    yield f"data loader: {'DALI' if loader is None else f'plain prefetcher ({loader})'}"
    if on_cuda:
        yield f"attention of xformers: {attention.xformers_problem() or 'its operators load'}"
    tools = {"C": c_compiler(), "C++": cpp_compiler(), "ninja": shutil.which("ninja"), "Python.h": _header()}
    yield "; ".join(f"{name}: {path or _MISSING}" for name, path in tools.items())
    yield "ninja is needed only by DeepSpeed's own optimizers, nvcc by nothing"
    yield f"compiled code of earlier runs: {compile_cache.in_words()}"


def _header() -> str | None:
    return str(python_header()) if python_header().is_file() else None


def explain(name: str) -> Iterator[str]:
    """Yield a table of the implementation of each op that a preset would use here; ConfigError: no such preset."""
    config = preset(name)
    device = _selected()
    blocks = "compiled" if kernel_choice.compiles(config.performance, device) else "eager"
    yield f"preset {name} on {device.type}, {config.performance.precision}, blocks {blocks}:"
    yield from _table(kernel_choice.choices(config, device))


def _table(rows: Iterable[kernel_choice.Row]) -> Iterator[str]:
    cells = [("layer", "op", "forward", "backward", "why")]
    cells += [(name, choice.op, choice.forward, choice.backward, choice.why) for name, choice in _merged(rows)]
    yield from table(cells, range(len(cells[0])), columns(sys.stdout)).splitlines()


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
        return _MISSING


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _selected() -> torch.device:
    """Return the device of a run here, or the CPU where the GPU cannot be used."""
    try:
        return select_device()
    except ConfigError:
        return torch.device("cpu")


def _device(config: RunConfig | None) -> Iterator[str]:
    """Yield each GPU and what torch, or a run, cannot do on it; or why there is none."""
    try:
        gpus = usable_gpus()
    except ConfigError as error:
        yield f"PROBLEM: {error}"
        return
    if not gpus:
        yield "CPU (there is no NVIDIA GPU); gloo between ranks, torch.compile off by default"
        if config is not None and config.performance.device == "cuda":
            yield "the preset is made for GPUs, and --performance.device cpu runs it here"
    for index in range(gpus):
        found = torch.cuda.get_device_properties(index)
        name = f"device {index}, {found.name}"
        yield from _of_device(name, (found.major, found.minor), torch.cuda.get_arch_list(), config)
        yield f"{name}, sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB"
    yield from _shared_memory()


def _of_device(name: str, capability: Capability, built: Sequence[str], config: RunConfig | None) -> Iterator[str]:
    """Yield the problems of a GPU; a lack of bf16 is one, the default of most presets."""
    precision = "bf16" if config is None else config.performance.precision
    if problem := architecture_problem(capability, built):
        yield f"PROBLEM: {name}: {problem}"
    if problem := precision_problem(precision, capability):
        yield f"PROBLEM: {name}: {problem}; use --performance.precision fp16"


def _compilers() -> Iterator[str]:
    """Yield what is missing where Triton or torch.compile is used; on a CUDA device, launch a kernel."""
    device = _selected()
    if device.type != "cuda":
        missing = compiler_problem(triton=False, cpu_code=True)
        yield "needed by nothing on a CPU" + (f", except --performance.compile ({missing})" if missing else "")
        return
    if failure := launch.trial(device):
        yield f"PROBLEM: a trivial Triton kernel fails: {compiler_problem(triton=True, cpu_code=False) or failure}"
    else:
        yield "a Triton kernel was built and ran"


def _libraries() -> Iterator[str]:
    on_cuda = _selected().type == "cuda"
    problem = dali_problem(on_cuda)
    if problem and dali_installed():
        yield f"PROBLEM: {problem}; until then the plain prefetcher loads"
    yield "loader DALI" if problem is None else "loader prefetch (DALI is not installed)"
    yield _attention(on_cuda)
    yield from _optimizers()


def _attention(on_cuda: bool) -> str:
    """Run attention once, forward and backward, and name its kernel."""
    dtype = torch.float16 if on_cuda else torch.float32
    try:
        chosen = attention.choice(64, 128, 128, torch.empty(0, device="cuda" if on_cuda else "cpu", dtype=dtype))
        query = torch.zeros(1, 1, 128, 64, device="cuda" if on_cuda else "cpu", dtype=dtype, requires_grad=True)
        attention.attention(query, query, query).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"PROBLEM: attention does not run ({error}); use --performance.attention sdpa"
    return f"attention {chosen.forward}"


def _optimizers() -> Iterator[str]:
    """Take one real step of each optimizer; only that shows the dtype of its state."""
    for name, family in optimizers().items():
        weight = torch.nn.Parameter(torch.zeros(64, 64, device=_selected()))
        weight.grad = torch.ones_like(weight)
        try:
            optimizer = build_optimizer([weight], family.config(name=name), skip_non_finite=False)
            flat = Flat(weight, optimizer.state, (Fragment("weight", 0, 4096, 0),), owned=True)
            create_state(
                optimizer,
                family,
                [flat],
                {"weight": (64, 64)},
                {"weight": Matrix((64,), 1, 64)},
                World(rank=0, size=1, device=weight.device),
            )
            optimizer.step()
            check_state(family, [flat])
        except Exception as error:
            yield f"PROBLEM: optimizer {name} does not run ({error}); {family.remedy}"
        else:
            yield f"optimizer {name}: runs, its state is {family.bits}-bit"


def _shared_memory() -> Iterator[str]:
    free = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    if free < 0.5:
        yield f"PROBLEM: /dev/shm has {free:.1f} GiB free, ranks talk through it; give the container --shm-size 8g"
