"""The constants of a launch as its machine code reads them: arguments, and the numbers of the program."""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

_PARAMETERS = {8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}
"""Address of the first parameter in the constant bank 0, by major compute capability."""
_SHAPES = {8: 0x0, 9: 0x0, 10: 0x360, 12: 0x360}
"""Address of the three sizes of a block, then the three of the grid."""
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\n]*?(?:\[(\d+)\])?\s*,?\n")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


def constants(ptx: str, arch: int, arguments: Sequence[Any], grid: Sequence[int], warps: int) -> dict[int, int]:
    """Return the words of the constant bank 0 that a launch sets, by address; those of pointers are unknown.

    Args:
        ptx: of the kernel, which declares its parameters.
        arch: compute capability: 90 is sm_90.
        arguments: of the parameters in order, without constexprs.
        grid: programs along each axis.
        warps: of a program.
    """
    first = _PARAMETERS[arch // 10]
    found: dict[int, int] = {}
    for (offset, kind), value in zip(_parameters(ptx), arguments, strict=False):
        if not isinstance(value, Tensor) and value is not None:
            bits = _bits(value, kind)
            found |= {first + offset: bits & 0xFFFFFFFF} | ({first + offset + 4: bits >> 32} if "64" in kind else {})
    sizes = (32 * warps, 1, 1, *grid, *(1,) * (3 - len(grid)))
    return found | {_SHAPES[arch // 10] + 4 * place: size for place, size in enumerate(sizes)}


def middle_program(grid: Sequence[int]) -> Mapping[str, int]:
    """Return the special registers of the program in the middle of a grid, which works on no border."""
    axes = zip("XYZ", (*grid, 1, 1), strict=False)
    return {f"SR_CTAID.{axis}": count // 2 for axis, count in axes} | {"SR_TID.Y": 0, "SR_TID.Z": 0, "SR_CgaCtaId": 0}


def _parameters(ptx: str) -> Iterator[tuple[int, str]]:
    """Yield offset and type of each parameter of the kernel."""
    listed = ptx[ptx.index(".entry") :].partition(")")[0]
    offset = 0
    for kind, length in _PARAMETER.findall(listed):
        width = _SIZES[kind.lstrip("bfsu")]
        size = width * int(length or 1)
        aligned = 64 if length else width
        offset = -(-offset // aligned) * aligned
        yield offset, kind
        offset += size


def _bits(value: Any, kind: str) -> int:
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<d" if "64" in kind else "<f", value), "little")
    return int(value) & (2**64 - 1 if "64" in kind else 2**32 - 1)
