"""``bench aot``: compile every kernel for GPUs that are not present, and read the assembler's report.

The launches of each case are recorded instead of run. Triton's own launcher code derives types, constants and
alignments from their arguments, so the result is what a GPU would launch at that shape. Compilation uses Triton's
cache; its key covers the source and everything that it calls.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.cases import KERNELS, add_choice, chosen
from fastdiff_bench.cases.case import Case, as_sequence
from fastdiff_bench.correctness import assembly
from fastdiff_bench.correctness.baseline import Baseline, add_baseline
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.records.tables import progress, table
from fastdiff_kernels import launch
from fastdiff_kernels.launch import Launch

BENCH = "aot"
ARCHITECTURES = (80, 90, 100)
WIDE_BITS = 128
_SHARED_KIB = {80: 163, 90: 227, 100: 227}
"""Most shared memory that one program can have, by architecture."""
_TENSOR_COLUMNS = 512
"""Columns of 32 bits and 128 lanes in the tensor memory of a processor of sm_100."""
_STREAMS_BYTES = 2**18
_SIDES: tuple[assembly.Side, ...] = ("loads", "stores")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one case for one architecture."""

    case: Case
    kernel: str
    arch: int
    registers: int
    """Registers per thread."""
    spill_bytes: int
    """Stack and local memory per thread; 0 unless registers were spilled."""
    shared_bytes: int
    """Shared memory per program."""
    load_bits: dict[int, int]
    """Global load instructions of blocks, by bits moved per thread."""
    store_bits: dict[int, int]
    """Global store instructions, by bits moved per thread."""
    must_be_wide: tuple[assembly.Side, ...]
    """Sides (loads, stores) that access a large tensor at this shape."""
    tensor_columns: int = 0
    """Columns of tensor memory; a kernel that wants more than there are compiles to nothing, without an error."""

    @property
    def problems(self) -> list[str]:
        """Problems of the kernel; empty: none."""
        found = [f"spills {self.spill_bytes} bytes per thread"] if self.spill_bytes else []
        for name, bits in (("loads", self.load_bits), ("stores", self.store_bits)):
            if name in self.must_be_wide and wide_share(bits) < 0.5:
                found.append(f"global {name} narrower than {WIDE_BITS} bits: {bits}")
        if self.shared_bytes > (most := 1024 * _SHARED_KIB.get(self.arch, 227)):
            found.append(f"wants {self.shared_bytes} bytes of shared memory, sm_{self.arch} has {most}")
        if self.tensor_columns > _TENSOR_COLUMNS:
            found.append(f"wants {self.tensor_columns} columns of tensor memory, a processor has {_TENSOR_COLUMNS}")
        return found

    def rows(self) -> Iterator[Measurement | Failure]:
        """Yield the lines of the record."""
        case = f"{self.case} sm_{self.arch}"
        loads: dict[str, record.Fact] = {"bits": _counts(self.load_bits)}
        stores: dict[str, record.Fact] = {"bits": _counts(self.store_bits)}
        quantities: list[tuple[str, str, float, record.Better, dict[str, record.Fact]]] = [
            ("registers", "1", self.registers, "lower", {}),
            ("spilled", "B", self.spill_bytes, "lower", {}),
            ("shared", "B", self.shared_bytes, "lower", {}),
            ("wide loads", "1", wide_share(self.load_bits), "higher", loads),
            ("wide stores", "1", wide_share(self.store_bits), "higher", stores),
        ]
        for quantity, unit, value, better, facts in quantities:
            yield Measurement.of(BENCH, case, self.kernel, quantity, unit, value, better, facts=facts)
        for problem in self.problems:
            yield Failure(bench=BENCH, case=case, provider=self.kernel, reason=problem)


def _counts(bits: dict[int, int]) -> str:
    return " ".join(f"{width}x{count}" for width, count in bits.items()) or "-"


def wide_share(bits: dict[int, int]) -> float:
    """Return the share of bytes moved by instructions of at least 128 bits; 1 without any."""
    total = sum(width * count for width, count in bits.items())
    return sum(width * count for width, count in bits.items() if width >= WIDE_BITS) / total if total else 1.0


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("aot")
    add_choice(parser, KERNELS)
    parser.add_argument("--arch", nargs="+", type=int, default=[*ARCHITECTURES], help="compute capabilities: sm_90")
    add_baseline(parser)
    add_output(parser, "one case for one GPU", "aot/<date>_kernels")
    parser.set_defaults(run=_run_command)


def _run_command(arguments: argparse.Namespace) -> int:
    cases, architectures = chosen(arguments, KERNELS), arguments.arch
    if arguments.smoke:
        cases, architectures = cases[:1], architectures[:1]
    _refuse_what_cannot_compile()
    baseline = read_baseline(arguments.baseline, cases, architectures) if arguments.baseline else None
    with open_log(arguments, BENCH, "kernels", BENCH) as log:
        return main(cases, architectures, log, baseline)


def read_baseline(path: Path, cases: Sequence[Case], architectures: Sequence[int]) -> Baseline:
    """Read a record of these ops, dtypes and architectures; BenchError if there is none."""
    kinds = {(case.op, case.dtype_name, f"sm_{arch}") for case in cases for arch in architectures}

    def counted(measurement: Measurement) -> bool:
        op, *_, dtype, architecture = measurement.case.split()
        return (op, dtype, architecture) in kinds

    return Baseline.read(path, BENCH, counted)


def compile_all(cases: Sequence[Case], architectures: Sequence[int]) -> Iterator[Compiled]:
    """Yield every kernel of every case for every architecture, without duplicates.

    Raises:
        BenchError: Triton is missing, or runs its interpreter, which cannot compile.
    """
    _refuse_what_cannot_compile()
    seen = set()
    for case in cases:
        for recorded in record_launches(case):
            for arch in (arch for arch in architectures if arch >= case.least_arch):
                source, options = specialise(recorded, arch)
                key = (source.hash(), tuple(sorted((name, str(value)) for name, value in options.items())))
                if key not in seen:
                    seen.add(key)
                    yield _compile(case, recorded, source, options, arch)


def _refuse_what_cannot_compile() -> None:
    if launch.triton is None:
        raise BenchError("Triton is not installed, and compiles the kernels; install it")
    if launch.INTERPRETED:
        raise BenchError("TRITON_INTERPRET is set: the interpreter does not compile; unset it")


def record_launches(case: Case) -> list[Launch]:
    """Return the launches of the forward and the backward pass of a case."""
    inputs = case.build("cpu")
    with launch.recording() as launches:
        outputs = as_sequence(case.call(inputs, "triton"))
        case.gradients(inputs, outputs, [torch.ones_like(output) for output in outputs])
    return launches


def specialise(recorded: Launch, arch: int) -> tuple[Any, dict[str, Any]]:
    """Return the kernel with its arguments specialized by Triton's launcher, and its compile options."""
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
        case=case,
        kernel=name,
        arch=arch,
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        load_bits=dict(sorted(loads.items())),
        store_bits=dict(sorted(stores.items())),
        must_be_wide=() if name in case.narrow else _streamed(recorded, source, ttgir),
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
    )


def _streamed(recorded: Launch, source: Any, ttgir: str) -> tuple[assembly.Side, ...]:
    """Return the sides on which the kernel accesses blocks of a tensor that is large at this shape."""
    pairs = _one_by_one(zip(recorded.args, source.signature.values(), strict=False))
    given = [a for a, kind in pairs if kind != "constexpr"]
    large = {i for i, a in enumerate(given) if isinstance(a, Tensor) and a.nbytes >= _STREAMS_BYTES}
    # An unknown origin (-1) counts as a large tensor.
    return tuple(side for side in _SIDES if assembly.block_pointers(ttgir, side) & (large | {-1}))


def _one_by_one(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield arguments with their types; the members of a tuple are arguments of the compiled kernel."""
    for argument, kind in pairs:
        if isinstance(kind, tuple):
            yield from zip(argument, kind, strict=True)
        else:
            yield argument, kind


def report(rows: Sequence[Compiled]) -> str:
    """Format the table for the terminal."""
    cells: list[Sequence[str]] = [
        ("kernel", "arch", "regs", "spill B", "smem B", "load bits x count", "store bits x count", "case")
    ]
    for row in rows:
        numbers = (str(n) for n in (row.arch, row.registers, row.spill_bytes, row.shared_bytes))
        cells.append((row.kernel, *numbers, _counts(row.load_bits), _counts(row.store_bits), str(row.case)))
    return table(cells, "<>>>><<<")


def main(cases: Sequence[Case], architectures: Sequence[int], log: Log, baseline: Baseline | None = None) -> int:
    """Compile, record and print; return 1 if a kernel spills, streams with narrow accesses, or got worse."""
    compiled: list[Compiled] = []
    for row in compile_all(cases, architectures):
        compiled.append(row)
        progress(f"{len(compiled)} compiled: {row.kernel} sm_{row.arch}")
        log.write(*row.rows())
    progress("")
    print(report(compiled))
    bad = [f"PROBLEM {r.kernel} sm_{r.arch} ({r.case}): {problem}" for r in compiled for problem in r.problems]
    print("\n".join(bad) or f"{len(compiled)} kernels: no spills, wide accesses throughout")
    worse = False
    if baseline is not None:
        text, worse = baseline.compare(log.measurements)
        print(f"\n{text}")
    return 1 if bad or worse else 0
