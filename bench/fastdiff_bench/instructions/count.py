"""Counts of one launch of a kernel that Triton compiled, without a GPU."""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

from torch import Tensor

from fastdiff_bench.correctness import assembly
from fastdiff_bench.instructions import arguments, sass
from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.instructions.walk import walk

_disassembled = cache(sass.disassemble)


def count(kernel: str, compiled: Any, arch: int, grid: Sequence[int], given: Sequence[Any]) -> Launched:
    """Count what a launch issues.

    Args:
        kernel: its name.
        compiled: by ``triton.compile``.
        arch: compute capability for which it is compiled: 90 is sm_90.
        grid: programs along each axis.
        given: arguments of its parameters in order, without constexprs.
    """
    warps, cubin = compiled.metadata.num_warps, compiled.asm["cubin"]
    constants = arguments.constants(compiled.asm["ptx"], arch, given, grid, warps)
    issued = walk(_disassembled(cubin), warps, arguments.middle_program(grid), constants)
    tensors = list(_distinct(given))
    return Launched(
        kernel=kernel,
        programs=prod(grid),
        warps=warps,
        registers=assembly.resources(cubin)["REG"],
        shared=compiled.metadata.shared,
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        elements=max((tensor.numel() for tensor in tensors), default=0),
        instructions=issued.instructions,
        special=issued.special,
        masked=issued.masked,
        counted=not issued.unknown,
    )


def _distinct(given: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, each once."""
    yield from {id(one): one for one in given if isinstance(one, Tensor)}.values()
