"""``bench aot``: compile every kernel for GPUs that are not present, and read the assembler's report and machine code.

The launches of each case are recorded instead of run. Triton's own launcher code derives types, constants and
alignments from their arguments, so the result is what a GPU would launch at that shape. Compilation uses Triton's
cache; its key covers the source and everything that it calls.

Instructions, waves and least times are those of a launch with the batch of a training step (``Case.build_large``).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastdiff.plurals import counted as plural
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.cases import KERNELS, add_choice, chosen
from fastdiff_bench.cases.case import Case, as_sequence
from fastdiff_bench.correctness import assembly
from fastdiff_bench.correctness.baseline import Baseline, add_baseline
from fastdiff_bench.instructions.bounds import Launched, counted_once
from fastdiff_bench.instructions.gpus import GPUS
from fastdiff_bench.instructions.launches import Launching, compiled_for, counted, given, recording, specialise
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.records.tables import progress, table
from fastdiff_kernels import launch
from fastdiff_kernels.launch import Launch

BENCH = "aot"
ARCHITECTURES = tuple(GPUS)
WIDE_BITS = 128
_TENSOR_COLUMNS = 512
"""Columns of 32 bits and 128 lanes in the tensor memory of a processor of sm_100."""
_STREAMS_BYTES = 2**18
_SIDES: tuple[assembly.Side, ...] = ("loads", "stores")
_Quantity: TypeAlias = tuple[str, str, float, record.Better, dict[str, record.Fact]]
"""Name, unit, value, direction of an improvement, facts."""


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
    launched: Launched | None = None
    """The launch with the batch of a training step, counted; None: its kernel does not fit the GPU."""

    @property
    def problems(self) -> list[str]:
        """Problems of the kernel; empty: none."""
        found = [f"spills {self.spill_bytes} bytes per thread"] if self.spill_bytes else []
        for name, bits in (("loads", self.load_bits), ("stores", self.store_bits)):
            if name in self.must_be_wide and wide_share(bits) < 0.5:
                found.append(f"global {name} narrower than {WIDE_BITS} bits: {bits}")
        if self.shared_bytes > (most := 1024 * GPUS[self.arch].known_multiprocessors().shared_kib):
            found.append(f"wants {self.shared_bytes} bytes of shared memory, sm_{self.arch} has {most}")
        if self.tensor_columns > _TENSOR_COLUMNS:
            found.append(f"wants {self.tensor_columns} columns of tensor memory, a processor has {_TENSOR_COLUMNS}")
        return found

    def rows(self) -> Iterator[Measurement | Failure]:
        """Yield the lines of the record."""
        case = f"{self.case} sm_{self.arch}"
        loads: dict[str, record.Fact] = {"bits": _widths(self.load_bits)}
        stores: dict[str, record.Fact] = {"bits": _widths(self.store_bits)}
        quantities: list[_Quantity] = [
            ("registers", "1", self.registers, "lower", {}),
            ("spilled", "B", self.spill_bytes, "lower", {}),
            ("shared", "B", self.shared_bytes, "lower", {}),
            ("wide loads", "1", wide_share(self.load_bits), "higher", loads),
            ("wide stores", "1", wide_share(self.store_bits), "higher", stores),
        ]
        for quantity, unit, value, better, facts in [*quantities, *self._counts()]:
            yield Measurement.of(BENCH, case, self.kernel, quantity, unit, value, better, facts=facts)
        for problem in self.problems:
            yield Failure(bench=BENCH, case=case, provider=self.kernel, reason=problem)

    def _counts(self) -> Iterator[_Quantity]:
        """Yield what binds the launch."""
        if self.launched is None:
            return
        one, gpu = self.launched, GPUS[self.arch]
        facts: dict[str, record.Fact] = {"programs": one.programs, "warps": one.warps, "elements": one.elements}
        facts["trips of loops"] = "known" if one.counted else "depend on data"
        by, seconds = one.bound(gpu)
        times = {f"{name}, us": round(1e6 * time, 3) for name, time in one.seconds(gpu).items()}
        yield "waves", "1", round(one.waves(gpu), 3), "neither", facts
        yield "warps per processor", "1", round(one.warps_per_processor(gpu), 2), "higher", facts
        if not one.counted:
            return
        yield "instructions", "1/element", round(one.per_element, 3), "lower", facts
        yield "special functions", "1/element", round(one.special_per_element, 3), "lower", facts
        yield "masked lanes", "1", round(one.masked, 3), "lower", facts
        yield "least time", "us", round(1e6 * seconds, 3), "lower", {"by": by, **times}


def _widths(bits: dict[int, int]) -> str:
    return " ".join(f"{width}x{count}" for width, count in bits.items()) or "-"


def wide_share(bits: dict[int, int]) -> float:
    """Return the share of bytes moved by instructions of at least 128 bits; 1 without any."""
    total = sum(width * count for width, count in bits.items())
    return sum(width * count for width, count in bits.items() if width >= WIDE_BITS) / total if total else 1.0


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("aot")
    add_choice(parser, KERNELS)
    parser.add_argument(
        "--arch", nargs="+", type=int, default=[*ARCHITECTURES], choices=ARCHITECTURES, help="90 is sm_90; default: all"
    )
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
    """Yield every kernel of every case for every architecture, without duplicates of code and trips of its loops.

    Raises:
        BenchError: Triton is missing, or runs its interpreter, which cannot compile.
    """
    _refuse_what_cannot_compile()
    seen = set()
    for case in cases:
        for arch in (arch for arch in architectures if arch >= case.least_arch):
            for small, large in zip(record_launches(case, arch), large_launches(case, arch), strict=True):
                source, options = specialise(small, arch)
                key = (source.hash(), str(sorted(options.items(), key=str)), large.grid, _numbers(large))
                if key not in seen:
                    seen.add(key)
                    yield _compile(case, small, large, source, options, arch)


def _numbers(recorded: Launch) -> tuple[Any, ...]:
    """Return the arguments of a launch that are numbers: they decide how often its loops run."""
    return tuple(argument for argument in recorded.args if isinstance(argument, int | float))


def _refuse_what_cannot_compile() -> None:
    if launch.triton is None:
        raise BenchError("Triton is not installed, and compiles the kernels; install it")
    if launch.INTERPRETED:
        raise BenchError("TRITON_INTERPRET is set: the interpreter does not compile; unset it")


def record_launches(case: Case, arch: int = 90) -> list[Launch]:
    """Return the launches of the forward and the backward pass of a case on a GPU of compute capability ``arch``."""
    inputs = case.build("cpu")
    with recording(arch) as launches:
        outputs = as_sequence(case.call(inputs, "triton"))
        case.gradients(inputs, outputs, [torch.ones_like(output) for output in outputs])
    return launches


def large_launches(case: Case, arch: int = 90) -> list[Launch]:
    """Return the same with the batch of a training step, on tensors without memory."""
    inputs = (case.build_large or case.build)("meta")
    with recording(arch) as launches, Launching():
        outputs = as_sequence(case.call(inputs, "triton"))
        case.gradients(inputs, outputs, [torch.empty_like(output) for output in outputs])
    return launches


def _compile(
    case: Case, recorded: Launch, large: Launch, source: Any, options: dict[str, Any], arch: int
) -> Compiled:  # fmt: skip
    compiled = compiled_for(arch, source, options)
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
        launched=counted(large, arch),
    )


def _streamed(recorded: Launch, source: Any, ttgir: str) -> tuple[assembly.Side, ...]:
    """Return the sides on which the kernel accesses blocks of a tensor that is large at this shape."""
    arguments = enumerate(given(recorded, source))
    large = {i for i, a in arguments if isinstance(a, Tensor) and a.nbytes >= _STREAMS_BYTES}
    # An unknown origin (-1) counts as a large tensor.
    return tuple(side for side in _SIDES if assembly.block_pointers(ttgir, side) & (large | {-1}))


def report(rows: Sequence[Compiled]) -> str:
    """Format the table for the terminal."""
    cells: list[Sequence[str]] = [
        (
            "kernel", "arch", "regs", "spill B", "smem B", "waves", "warps/SM", "instr/elem", "MUFU/elem", "masked",
            "least us", "by", "load bits x count", "store bits x count", "case",
        )
    ]  # fmt: skip
    for row in rows:
        numbers = (str(n) for n in (row.arch, row.registers, row.spill_bytes, row.shared_bytes))
        widths = _widths(row.load_bits), _widths(row.store_bits)
        cells.append((row.kernel, *numbers, *_launch_cells(row), *widths, str(row.case)))
    return table(cells, "<>>>>>>>>>><<<<")


def _launch_cells(row: Compiled) -> Sequence[str]:
    if row.launched is None:
        return ("-",) * 7  # it does not fit the GPU
    one, gpu = row.launched, GPUS[row.arch]
    by, seconds = one.bound(gpu)
    if not one.counted:
        return f"{one.waves(gpu):.2f}", f"{one.warps_per_processor(gpu):.1f}", *("-",) * 5
    return (
        f"{one.waves(gpu):.2f}", f"{one.warps_per_processor(gpu):.1f}", f"{one.per_element:.2f}",
        f"{one.special_per_element:.2f}", f"{one.masked:.2f}", f"{1e6 * seconds:.1f}", by,
    )  # fmt: skip


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
    print("\n".join(bad) or f"{plural(len(compiled), 'kernel')}: no spills, wide accesses throughout")
    if once := counted_once(row.launched for row in compiled if row.launched):
        print(once)
    worse = False
    if baseline is not None:
        text, worse = baseline.compare(log.measurements)
        print(f"\n{text}")
    return 1 if bad or worse else 0
