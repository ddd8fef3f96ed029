"""Grids of the adaLN kernels: as many programs as fit the processors, with equal work.

A program's share of a processor follows from the columns that a thread holds and the vectors that the kernel holds for
each. ``maxnreg`` keeps the compiler to it, so the number of programs that run at a time is known without compiling.
``fastdiff bench aot`` shows that nothing spills.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from fastdiff_kernels.launch import REGISTERS, processors, registers, triton

MAX_WIDTH = 4096
"""Most channels of a row that a program holds."""
_WARPS = 64
"""Most warps on a processor."""
_LEAST_ROWS = 16
_GATE: dict[bool, tuple[int, int, int, int]] = {False: (16, 128, 4, 5), True: (32, 64, 4, 3)}
"""Rows, columns and warps of a program of ``adaln_gate_bwd_kernel``, and programs on a processor, by ``turned``."""
_TURN: dict[str, int] = {"BLOCK_R": 32, "BLOCK_C": 128}
"""Tile that is turned at a time: a sector of ``columns`` is 32 rows, an access of ``rows`` 16 columns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens of a program, programs of a sample, and the constants and options of the kernel."""

    rows: int
    blocks: int
    constants: dict[str, Any]


def forward_plan(x: Tensor, gated: bool, biased: bool, turned: bool = False) -> Plan:
    """Return the plan of ``adaln_fwd_kernel``; it holds x, shift and scale, then gate and branch, then the bias.

    ``turned``: it writes the transpose of FP8 rows, too, from whole tiles.
    """
    return _row_plan(x, 3 + 2 * gated + biased, gated, turned, base=32, setup=2)


def backward_plan(x: Tensor, residual: bool, gated: bool, biased: bool, turned: bool = False) -> Plan:
    """Return the plan of ``adaln_bwd_kernel``; ``turned`` as for ``forward_plan``.

    It holds x, dy, the scale and two sums, then dh, then branch, gate and a sum, then the bias; its sum takes the
    place of a temporary.
    """
    return _row_plan(x, 5 + residual + 3 * gated + biased, gated, turned, base=63, setup=4)


def gate_plan(x: Tensor, turned: bool = False) -> Plan:
    """Return the plan of ``adaln_gate_bwd_kernel``; its programs hold a block of columns, not whole rows.

    ``turned`` as for ``forward_plan``.
    """
    batch, length, width = _sizes(x)
    rows, columns, warps, programs = _GATE[turned]
    constants = {"BLOCK_R": rows, "BLOCK_C": columns, "num_warps": warps, "maxnreg": registers(programs, warps)}
    samples, slots = batch * triton.cdiv(width, columns), processors(x) * programs
    shares = _shares(samples, length, slots, rows, rows if turned else 1)
    return Plan(*shares, {"D": width} | constants)


def _row_plan(x: Tensor, vectors: int, gated: bool, turned: bool, *, base: int, setup: int) -> Plan:
    batch, length, width = _sizes(x)
    head = max(int(triton.next_power_of_2(width)) // 2, 1)
    warps = max(head // 256, 1)  # a thread reads 8 columns of the head
    lanes = min(32 * warps, head)
    # A thread reads 4 bytes of the tail or more, the least that is copied asynchronously.
    tail = max(int(triton.next_power_of_2(max(width - head, 1))), lanes * max(4 // x.element_size(), 1))
    programs = _programs(base + vectors * ((head + tail) // lanes), warps)
    rows, blocks = _shares(batch, length, processors(x) * programs, setup, _TURN["BLOCK_R"] if turned else 1)
    constants = {"D": width, "BLOCK_HEAD": head, "BLOCK_TAIL": tail, "LANES": lanes, "GATED": gated} | _TURN
    # The rows that follow are on their way to shared memory; in fp32 one, since they take twice the space.
    stages = {"STAGES": 3 if x.element_size() == 2 else 2}
    return Plan(rows, blocks, constants | stages | {"num_warps": warps, "maxnreg": registers(programs, warps)})


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Sizes as numbers: those of a trace may be symbols, which a plan fixes."""
    batch, length, width = (int(size) for size in x.shape)
    return batch, length, width


def _programs(used: int, warps: int) -> int:
    """Programs that a processor holds at a time, of ``warps`` warps with so many registers per thread."""
    return max(min(REGISTERS // (32 * warps * used), _WARPS // warps, 32), 1)


@cache
def _shares(batch: int, length: int, slots: int, setup: int, multiple: int) -> tuple[int, int]:
    """Return the tokens of a program and the programs of a sample that take the least time.

    Args:
        batch: samples, or blocks of columns of all samples.
        length: tokens of a sample.
        slots: programs that run at a time.
        setup: what a program does besides its tokens, in tokens: modulations, partial sums, and the first loads.
        multiple: divisor of the tokens of a program.
    """

    def tokens(blocks: int) -> int:
        return -(-length // (blocks * multiple)) * multiple

    def time(blocks: int) -> tuple[int, int]:
        waves = -(-batch * blocks // max(slots, 1))
        return waves * (tokens(blocks) + setup), blocks

    blocks = min(range(1, max(-(-length // _LEAST_ROWS), 1) + 1), key=time)
    rows = tokens(blocks)
    return rows, -(-length // max(rows, 1))
