"""Counts of one launch of a kernel that Triton compiled, without a GPU."""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

from fastdiff_bench.correctness import assembly
from fastdiff_bench.instructions import arguments, sass
from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.instructions.walk import walk

_disassembled = cache(sass.disassemble)


def count(
    kernel: str, compiled: Any, arch: int, grid: Sequence[int], given: Sequence[Any], *, moved: int, elements: int
) -> Launched:  # fmt: skip
    """Count what a launch issues.

    Args:
        kernel: its name.
        compiled: by ``triton.compile``.
        arch: compute capability for which it is compiled: 90 is sm_90.
        grid: programs along each axis.
        given: arguments of its parameters in order, without constexprs.
        moved: bytes of its operands, each once.
        elements: of its largest operand.
    """
    warps, cubin = compiled.metadata.num_warps, compiled.asm["cubin"]
    constants = arguments.constants(compiled.asm["ptx"], arch, given, grid, warps)
    issued = walk(_disassembled(cubin), warps, arguments.middle_program(grid), constants)
    return Launched(
        kernel=kernel,
        programs=prod(grid),
        warps=warps,
        registers=assembly.resources(cubin)["REG"],
        shared=compiled.metadata.shared,
        bytes=moved,
        elements=elements,
        instructions=issued.instructions,
        special=issued.special,
        masked=issued.masked,
        counted=not issued.unknown,
    )
