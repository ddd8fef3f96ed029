"""How many programs of a kernel a GPU holds at once, and the least time of a launch by each of its resources."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal, TypeAlias

from fastdiff.planning.gpus import Gpu
from fastdiff.plurals import counted
from fastdiff_bench.instructions.walk import WARP

Resource: TypeAlias = Literal["bytes", "issue", "special"]
"""What can bind: the memory, the slots in which instructions are issued, the unit for special functions."""

_REGISTERS = 1 << 16
"""Of a multiprocessor, a quarter for each of its schedulers."""
_SCHEDULERS = 4
_ALLOCATION = 8
"""Registers of a thread are given out by so many."""
_WARPS, _PROGRAMS = 64, 32
"""Most warps and programs of a multiprocessor."""


@dataclass(frozen=True)
class Launched:
    """One launch of a compiled kernel, counted."""

    kernel: str
    programs: int
    """Of the grid."""
    warps: int
    """Of a program."""
    registers: int
    """Of a thread."""
    shared: int
    """Bytes of shared memory of a program."""
    bytes: int
    """Of its operands, each once."""
    elements: int
    """Of its largest operand."""
    instructions: float
    """Warp instructions of a program."""
    special: float
    """Of them those of the unit for special functions."""
    masked: float
    """Share of the lanes of accesses to global memory that move nothing, by bytes."""
    counted: bool = True
    """Whether the trips of every loop are known."""

    def resident(self, gpu: Gpu) -> int:
        """Return the programs that a multiprocessor holds at once, by registers, shared memory and warps."""
        warp = WARP * _ALLOCATION * ceil(max(self.registers, 1) / _ALLOCATION)
        warps = _SCHEDULERS * (_REGISTERS // _SCHEDULERS // warp)
        shared = (gpu.known_multiprocessors().shared_kib + 1) * 1024 // (self.shared + 1024)
        return max(min(warps // self.warps, _WARPS // self.warps, shared, _PROGRAMS), 1)

    def waves(self, gpu: Gpu) -> float:
        """Return the grid over the programs that the GPU holds at once."""
        return self.programs / (self.resident(gpu) * gpu.known_multiprocessors().count)

    def warps_per_processor(self, gpu: Gpu) -> float:
        """Return the warps of a multiprocessor, fewer than fit if the grid is small."""
        return self.warps * min(self.resident(gpu), self.programs / gpu.known_multiprocessors().count)

    @cached_property
    def per_element(self) -> float:
        """Instructions per element, of single lanes."""
        return WARP * self.programs * self.instructions / max(self.elements, 1)

    @cached_property
    def special_per_element(self) -> float:
        """Special functions per element."""
        return WARP * self.programs * self.special / max(self.elements, 1)

    def seconds(self, gpu: Gpu) -> dict[Resource, float]:
        """Return the least time by bytes, by issue slots and by special functions."""
        held = gpu.known_multiprocessors()
        return {
            "bytes": self.bytes / gpu.copy_rate,
            "issue": self.programs * self.instructions / held.issue,
            "special": WARP * self.programs * self.special / held.special,
        }

    def idle(self, gpu: Gpu) -> float:
        """Return how much longer a launch takes because its last wave, or a small grid, leaves processors idle."""
        waves = self.waves(gpu)
        return ceil(waves) / waves if waves > 1 else max(1.0, gpu.known_multiprocessors().count / self.programs)

    def bound(self, gpu: Gpu) -> tuple[Resource, float]:
        """Return the resource that binds, and its time."""
        return max(self.seconds(gpu).items(), key=lambda pair: pair[1])


def counted_once(launches: Iterable[Launched]) -> str:
    """Name the kernels in which one trip of a loop that depends on data is counted; empty: there is none."""
    found = list(launches)
    names = [one.kernel for one in found if not one.counted]
    if not names:
        return ""
    of_all = f"{len(names)} of {counted(len(found), 'launch', 'es')}"
    return f"loops that depend on data, counted as one trip, in {of_all}: {', '.join(dict.fromkeys(names))}"
