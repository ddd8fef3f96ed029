"""Compiles every kernel for GPUs that are not there and reads what the assembler says of it.

The launches of each case are recorded, not run, so that what is compiled is exactly what a GPU would launch at that
shape: same types, same constants, same alignment.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cases.case import Case
from fastdiff_kernels import launch
from fastdiff_kernels.launch import Launch

ARCHITECTURES = (80, 90, 100)
WIDE_BITS = 128
_STREAMS_BYTES = 2**18
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one case for one architecture."""

    case: str
    kernel: str
    arch: int
    registers: int
    """Per thread."""
    spill_bytes: int
    """Stack and local memory per thread; 0 unless registers were spilled."""
    shared_bytes: int
    """Per program."""
    load_bits: dict[int, int]
    """Global load instructions by the bits that each moves per thread."""
    store_bits: dict[int, int]
    """Global store instructions, likewise."""
    streams: bool
    """Whether it is bandwidth-bound at this shape and so must use wide accesses."""

    @property
    def problems(self) -> list[str]:
        """What is wrong with it; empty: nothing."""
        found = [f"spills {self.spill_bytes} bytes per thread"] if self.spill_bytes else []
        for name, bits in (("loads", self.load_bits), ("stores", self.store_bits)) if self.streams else ():
            if _bytes_matter(bits) and wide_share(bits) < 0.5:
                found.append(f"global {name} narrower than {WIDE_BITS} bits: {bits}")
        return found


def _bytes_matter(bits: dict[int, int]) -> bool:
    """Whether a thread moves more than one number of 8 bytes."""
    return sum(width * count for width, count in bits.items()) > 64


def wide_share(bits: dict[int, int]) -> float:
    """Share of the bytes that instructions of 128 bits and more move."""
    total = sum(width * count for width, count in bits.items())
    return sum(width * count for width, count in bits.items() if width >= WIDE_BITS) / total


def compile_all(cases: Sequence[Case], architectures: Sequence[int]) -> Iterator[Compiled]:
    """Yield every kernel of every case for every architecture; a kernel that two cases share comes once.

    Raises:
        RuntimeError: Triton is in its interpreter, which cannot compile.
    """
    if launch.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: kernels cannot be compiled; unset it")
    seen = set()
    for case in cases:
        for recorded in _launches(case):
            source = _source(recorded)
            options = {k: v for k, v in recorded.options.items() if k in ("num_warps", "num_stages", "num_ctas")}
            key = (source.hash(), tuple(sorted(options.items())))
            if key in seen:
                continue
            seen.add(key)
            for arch in architectures:
                yield _compile(case, recorded, source, options, arch)


def _launches(case: Case) -> list[Launch]:
    inputs = case.build("cpu")
    with launch.recording() as launches:
        outputs = case.call(inputs, "triton")
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        case.gradients(inputs, outputs, [torch.ones_like(output) for output in outputs])
    return launches


def _source(recorded: Launch) -> Any:
    """The kernel with its arguments as Triton's launcher specialises them."""
    from triton.compiler import ASTSource

    parameters = recorded.kernel.params
    given = dict(zip((p.name for p in parameters), recorded.args, strict=False)) | recorded.options
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for index, parameter in enumerate(parameters):
        value = given.get(parameter.name, parameter.default if parameter.has_default else None)
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        address = value.data_ptr() if isinstance(value, Tensor) else value
        if isinstance(address, int) and address % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(recorded.kernel, signature, constants, attributes)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    return "fp32"


def _compile(case: Case, recorded: Launch, source: Any, options: dict[str, int], arch: int) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel

    compiled = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = _resources(compiled.asm["cubin"])
    name = recorded.kernel.__name__
    largest = max(a.numel() * a.element_size() for a in recorded.args if isinstance(a, Tensor))
    return Compiled(
        case=str(case),
        kernel=name,
        arch=arch,
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        load_bits=_widths(compiled.asm["ptx"], "ld"),
        store_bits=_widths(compiled.asm["ptx"], "st"),
        streams=largest >= _STREAMS_BYTES and name not in case.narrow,
    )


def _resources(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def _widths(ptx: str, instruction: str) -> dict[int, int]:
    """How many global accesses there are of each width in bits."""
    counts: dict[int, int] = {}
    for vector, bits in re.findall(rf"\b{instruction}\.global(?:\.\w+?)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx):
        width = int(vector or 1) * int(bits)
        counts[width] = counts.get(width, 0) + 1
    return dict(sorted(counts.items()))


def report(rows: Sequence[Compiled]) -> str:
    """The table that people read."""
    lines = [f"{'kernel':<34}{'arch':>5}{'regs':>6}{'spill B':>9}{'smem B':>8}  loads, stores (bits x count)  case"]
    for row in rows:
        accesses = ", ".join(" ".join(f"{w}x{n}" for w, n in b.items()) for b in (row.load_bits, row.store_bits))
        lines.append(
            f"{row.kernel:<34}{row.arch:>5}{row.registers:>6}{row.spill_bytes:>9}{row.shared_bytes:>8}"
            f"  {accesses:<28}  {row.case}"
        )
    return "\n".join(lines)


def main(cases: Sequence[Case], architectures: Sequence[int], path: Path | None) -> int:
    """Compile, print the table and write it as JSON; 1 if a kernel spills or a streaming one has narrow accesses."""
    rows = []
    for row in compile_all(cases, architectures):
        rows.append(row)
        print(f"\r{len(rows)} compiled", end="", file=sys.stderr, flush=True)
    print(f"\r{report(rows)}")
    if path is not None:
        path.write_text(json.dumps([asdict(row) | {"problems": row.problems} for row in rows], indent=1) + "\n")
    bad = [f"PROBLEM {r.kernel} sm_{r.arch} ({r.case}): {problem}" for r in rows for problem in r.problems]
    print("\n".join(bad) or f"{len(rows)} kernels: no spills, wide accesses throughout")
    return 1 if bad else 0
