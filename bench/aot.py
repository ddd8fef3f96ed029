"""Compiles every kernel for GPUs that are not there and reads what the assembler says of it.

The launches of each case are recorded, not run, and Triton's own launcher code turns their arguments into types,
constants and alignments, so that what is compiled is what a GPU would launch at that shape. Compilation goes through
Triton's cache, which is keyed by the source and everything that it calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import BenchError, assembly, record
from bench.arguments import Commands
from bench.cases import KERNELS, add_choice, chosen
from bench.cases.case import Case, as_sequence
from bench.table import progress, table
from fastdiff_kernels import launch
from fastdiff_kernels.launch import Launch

ARCHITECTURES = (80, 90, 100)
WIDE_BITS = 128
_STREAMS_BYTES = 2**18
_SIDES: tuple[assembly.Side, ...] = ("loads", "stores")


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
    """Global load instructions of blocks by the bits that each moves per thread."""
    store_bits: dict[int, int]
    """Global store instructions, likewise."""
    must_be_wide: tuple[assembly.Side, ...]
    """Whether its loads, and its stores, go through a large tensor at this shape."""

    @property
    def problems(self) -> list[str]:
        """What is wrong with it; empty: nothing."""
        found = [f"spills {self.spill_bytes} bytes per thread"] if self.spill_bytes else []
        for name, bits in (("loads", self.load_bits), ("stores", self.store_bits)):
            if name in self.must_be_wide and wide_share(bits) < 0.5:
                found.append(f"global {name} narrower than {WIDE_BITS} bits: {bits}")
        return found


def wide_share(bits: dict[int, int]) -> float:
    """Share of the bytes that instructions of 128 bits and more move; 1 of none."""
    total = sum(width * count for width, count in bits.items())
    return sum(width * count for width, count in bits.items() if width >= WIDE_BITS) / total if total else 1.0


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("aot", help="compile every kernel without a GPU: registers, spills, access widths")
    add_choice(parser, KERNELS)
    parser.add_argument("--arch", nargs="+", type=int, default=[*ARCHITECTURES], help="compute capabilities: sm_90")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the same numbers, as JSON lines")
    parser.set_defaults(run=lambda a: main(chosen(a, KERNELS), a.arch, a.json))


def compile_all(cases: Sequence[Case], architectures: Sequence[int]) -> Iterator[Compiled]:
    """Yield every kernel of every case for every architecture; a kernel that two cases share comes once.

    Raises:
        BenchError: Triton is in its interpreter, which cannot compile, or not installed.
    """
    if launch.triton is None:
        raise BenchError("Triton is not installed: there is nothing to compile with; install it")
    if launch.INTERPRETED:
        raise BenchError("TRITON_INTERPRET is set: the interpreter does not compile; unset it")
    seen = set()
    for case in cases:
        for recorded in record_launches(case):
            for arch in architectures:
                source, options = specialise(recorded, arch)
                key = (source.hash(), tuple(sorted((name, str(value)) for name, value in options.items())))
                if key not in seen:
                    seen.add(key)
                    yield _compile(case, recorded, source, options, arch)


def record_launches(case: Case) -> list[Launch]:
    """The launches of the forward and the backward pass of a case."""
    inputs = case.build("cpu")
    with launch.recording() as launches:
        outputs = as_sequence(case.call(inputs, "triton"))
        case.gradients(inputs, outputs, [torch.ones_like(output) for output in outputs])
    return launches


def specialise(recorded: Launch, arch: int) -> tuple[Any, dict[str, Any]]:
    """The kernel with its arguments as Triton's launcher specialises them, and its compile options."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = recorded.kernel
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False} | recorded.options
    bound, specialization, _ = bind(*recorded.args, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, None)
    return ASTSource(kernel, signature, constants, attributes), options.__dict__


def _compile(case: Case, recorded: Launch, source: Any, options: dict[str, Any], arch: int) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel

    compiled = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    usage = assembly.resources(compiled.asm["cubin"])
    loads, stores = (assembly.access_widths(ptx, side) - assembly.single_widths(ttgir, side) for side in _SIDES)
    name = recorded.kernel.__name__
    return Compiled(
        case=str(case),
        kernel=name,
        arch=arch,
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        load_bits=dict(sorted(loads.items())),
        store_bits=dict(sorted(stores.items())),
        must_be_wide=() if name in case.narrow else _streamed(recorded, source, ttgir),
    )


def _streamed(recorded: Launch, source: Any, ttgir: str) -> tuple[assembly.Side, ...]:
    """Whether it loads, and stores, blocks of a tensor that is large at this shape."""
    given = [a for a, kind in zip(recorded.args, source.signature.values(), strict=False) if kind != "constexpr"]
    large = {i for i, a in enumerate(given) if isinstance(a, Tensor) and a.nbytes >= _STREAMS_BYTES}
    # An address whose origin is not found (-1) is taken for one into a large tensor.
    return tuple(side for side in _SIDES if assembly.block_pointers(ttgir, side) & (large | {-1}))


def report(rows: Sequence[Compiled]) -> str:
    """The table that people read."""
    cells: list[Sequence[str]] = [
        ("kernel", "arch", "regs", "spill B", "smem B", "load bits x count", "store bits x count", "case")
    ]
    for row in rows:
        loads, stores = (" ".join(f"{w}x{n}" for w, n in b.items()) or "-" for b in (row.load_bits, row.store_bits))
        numbers = (str(n) for n in (row.arch, row.registers, row.spill_bytes, row.shared_bytes))
        cells.append((row.kernel, *numbers, loads, stores, row.case))
    return table(cells, "<>>>><<<")


def main(cases: Sequence[Case], architectures: Sequence[int], path: Path | None) -> int:
    """Compile, print the table and write it as JSON lines; 1 if a kernel spills or a streaming one is narrow."""
    rows = []
    for row in compile_all(cases, architectures):
        rows.append(row)
        progress(f"{len(rows)} compiled: {row.kernel} sm_{row.arch}")
    progress("")
    print(report(rows))
    if path is not None:
        with record.Log(path) as log:
            for row in rows:
                log.write(asdict(row) | {"problems": row.problems})
    bad = [f"PROBLEM {r.kernel} sm_{r.arch} ({r.case}): {problem}" for r in rows for problem in r.problems]
    print("\n".join(bad) or f"{len(rows)} kernels: no spills, wide accesses throughout")
    return 1 if bad else 0
