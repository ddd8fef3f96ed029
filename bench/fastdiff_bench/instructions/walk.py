"""The walk of one program through its machine code: how often each instruction is issued.

Branches are decided by integers: the number of the thread and of the program, and the launch's arguments. Where a
branch depends on data, both sides are walked, as a warp does with threads on both; a loop that depends on data is
walked once. Subroutines, which hold the slow paths of divisions and roots, are not walked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdiff_bench.instructions.lanes import Lanes
from fastdiff_bench.instructions.sass import Instruction

WARP = 32
_MOST = 200_000
"""Blocks that are walked, at most."""
_SPECIAL = "MUFU"
"""Exponential, reciprocal, root and the like, by the unit for special functions."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What the warps of one program issue."""

    instructions: float
    """Warp instructions."""
    special: float
    """Of them those of the unit for special functions."""
    masked: float
    """Share of the bytes of lanes that accesses to global memory leave out."""
    unknown: tuple[int, ...]
    """Indices of the branches whose loops depend on data, so that they are counted once."""


def walk(
    code: Sequence[Instruction], warps: int, special: Mapping[str, int], constants: Mapping[int, int]
) -> Issued:  # fmt: skip
    """Walk a program and count.

    Args:
        code: of the kernel.
        warps: of a program.
        special: values of special registers, as ``SR_CTAID.X``.
        constants: words of the constant bank 0 by address.
    """
    return _Walk(code, Lanes(WARP * warps, special, constants)).count()


class _Walk:
    def __init__(self, code: Sequence[Instruction], lanes: Lanes) -> None:
        self._code, self._lanes = code, lanes
        self._end = len(code)
        self._blocks = _blocks(code)
        self._after = _postdominators(code, self._blocks)
        wanted = _slice(code)
        self._wanted = {
            start: [i for i in range(start, stop) if code[i].written & wanted or code[i].lane_bytes]
            for start, stop in self._blocks.items()
        }
        self._times: Counter[int] = Counter()
        self._lane_bytes = [0.0, 0.0]
        self._unknown: set[int] = set()
        self._open: list[int] = []
        self._walked = 0

    def count(self) -> Issued:
        self._run(0, self._end, np.ones(self._lanes.threads, dtype=np.bool_))
        total = special = 0.0
        for start, times in self._times.items():
            block = self._code[start : self._blocks[start]]
            total += times * len(block)
            special += times * sum(one.name == _SPECIAL for one in block)
        on, possible = self._lane_bytes
        return Issued(total, special, 1 - on / possible if possible else 0.0, tuple(sorted(self._unknown)))

    def _run(self, start: int, stop: int, active: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Walk from one instruction to another; return the threads that arrive."""
        at = start
        while at not in (stop, self._end) and active.any():
            self._walked += 1
            if self._walked > _MOST:
                self._unknown.add(at)
                break
            self._block(at, active)
            last = self._blocks[at] - 1
            at, active = self._follow(last, active)
        return active

    def _block(self, start: int, active: NDArray[np.bool_]) -> None:
        self._times[start] += int(active.reshape(-1, WARP).any(axis=1).sum())
        for index in self._wanted[start]:
            one = self._code[index]
            if one.lane_bytes:
                self._access(one, active)
            self._lanes.execute(one, active)

    def _access(self, one: Instruction, active: NDArray[np.bool_]) -> None:
        bit = None if one.guard is None else self._lanes.bit(one.guard)
        acts = active if bit is None else active & bit
        by_warp = acts.reshape(-1, WARP).sum(axis=1)
        if by_warp.max() > 1:  # else it moves single numbers, of a row or a program
            self._lane_bytes[0] += one.lane_bytes * int(by_warp.sum())
            self._lane_bytes[1] += one.lane_bytes * WARP * int(active.reshape(-1, WARP).any(axis=1).sum())

    def _follow(self, last: int, active: NDArray[np.bool_]) -> tuple[int, NDArray[np.bool_]]:
        """Return the next instruction after the last of a block, and the threads that arrive there."""
        one = self._code[last]
        if not one.flows or "DIV" in one.modifiers:  # BRA.DIV: no warp has diverged here
            return last + 1, active
        goes: NDArray[np.bool_] | None = np.ones_like(active)
        for condition in one.conditions:
            bit = self._lanes.bit(condition)
            goes = None if goes is None or bit is None else goes & bit
        if one.target is None:  # the end of the program
            leaving = np.zeros_like(active) if goes is None else goes
            return last + 1, active & ~leaving
        if goes is None:
            return self._both(last, one.target, active)
        takes, stays = active & goes, active & ~goes
        if not stays.any():
            return one.target, active
        if not takes.any():
            return last + 1, active
        stop = self._after[last]
        arrived = self._run(one.target, stop, takes) | self._run(last + 1, stop, stays)
        return stop, arrived

    def _both(self, last: int, target: int, active: NDArray[np.bool_]) -> tuple[int, NDArray[np.bool_]]:
        """Walk both sides of a branch that depends on data."""
        if target <= last:
            self._unknown.add(last)
            return last + 1, active
        if last in self._open:  # met again within one of its sides: a loop that this branch leaves
            self._unknown.add(last)
            return target, active
        stop, before = self._after[last], dict(self._lanes.registers)
        self._open.append(last)
        self._run(target, stop, active)
        one, self._lanes.registers = self._lanes.registers, before
        self._run(last + 1, stop, active)
        self._open.pop()
        for name, value in one.items():
            if value is not self._lanes.registers.get(name):
                self._lanes.registers[name] = _equal(value, self._lanes.registers.get(name))
        return stop, active


def _equal(first: Any, second: Any) -> Any:
    return first if first is not None and second is not None and np.array_equal(first, second) else None


def _blocks(code: Sequence[Instruction]) -> dict[int, int]:
    """Return first and one past the last instruction of each block without branches."""
    starts = {0} | {one.target for one in code if one.target is not None}
    starts |= {index + 1 for index, one in enumerate(code) if one.flows}
    ordered = sorted(start for start in starts if start < len(code))
    return dict(zip(ordered, [*ordered[1:], len(code)], strict=True))


def _successors(code: Sequence[Instruction], last: int) -> Iterator[int]:
    one = code[last]
    if one.target is not None:
        yield one.target
    elif one.flows:
        yield len(code)
    if not one.flows or one.conditions:
        yield min(last + 1, len(code))


def _postdominators(code: Sequence[Instruction], blocks: Mapping[int, int]) -> dict[int, int]:
    """By the last instruction of each block, the first of the next block that every path passes."""
    end = len(code)
    follow = {start: tuple(_successors(code, stop - 1)) for start, stop in blocks.items()}
    sets: dict[int, frozenset[int]] = dict.fromkeys(blocks, frozenset({*blocks, end}))
    sets[end] = frozenset({end})
    changed = True
    while changed:
        changed = False
        for start in sorted(blocks, reverse=True):
            new = frozenset.intersection(*(sets[after] for after in follow[start])) | {start}
            if new != sets[start]:
                sets[start], changed = new, True
    # The nearest one has the most postdominators of its own.
    return {stop - 1: max(sets[start] - {start}, key=lambda one: len(sets[one]), default=end)
            for start, stop in blocks.items()}  # fmt: skip


def _slice(code: Sequence[Instruction]) -> frozenset[str]:
    """Return the registers on which branches and the masks of accesses to global memory depend."""
    found = {operand.text for one in code if one.flows or one.lane_bytes for operand in one.conditions}
    size = -1
    while size != len(found):
        size = len(found)
        for one in code:
            if one.written & found:
                found |= one.read
    return frozenset(found) - {"PT", "UPT", "RZ", "URZ"}
