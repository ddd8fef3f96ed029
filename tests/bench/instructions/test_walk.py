"""The walk of a program through its machine code: loops, branches, masks and integer arithmetic."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fastdiff_bench.instructions import arguments, sass
from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.instructions.gpus import GPUS
from fastdiff_bench.instructions.lanes import Lanes
from fastdiff_bench.instructions.walk import Issued, walk

H200 = GPUS[90]


def code(text: str) -> tuple[sass.Instruction, ...]:
    """Instructions of lines like ``@P0 BRA 0x10``."""
    rows = []
    for line in text.strip().splitlines():
        *guard, opcode, operands = line.split() if " " in line.strip() else (line.strip(), "")
        rows.append({"opcode": opcode, "operands": operands} | ({"predicate": guard[0]} if guard else {}))
    return sass.parse(json.dumps([{}, [{"sass-instructions": rows}]]))


def walked(text: str, warps: int = 1, **constants: int) -> Issued:
    """The walk of program 5, with words of the constant bank as ``c210=7``."""
    words = {int(name[1:], 16): value for name, value in constants.items()}
    return walk(code(text), warps, arguments.middle_program((10,)), words)


LOOP = """
    MOV R0,RZ
    IADD3 R0,R0,0x1,RZ
    MUFU.EX2 R5,R6
    ISETP.LT.AND P0,PT,R0,c[0x0][0x210],PT
    @P0 BRA 0x10
    EXIT
"""


@pytest.mark.parametrize("trips", [1, 7, 100])
def test_a_loop_counts_by_its_trips(trips: int) -> None:
    found = walked(LOOP, warps=4, c210=trips)
    assert found.instructions == 4 * (2 + 4 * trips)
    assert found.special == 4 * trips
    assert found.unknown == ()


def test_a_loop_that_depends_on_data_is_counted_once_and_told() -> None:
    found = walked(LOOP.replace("c[0x0][0x210]", "R9"), warps=2)
    assert found.instructions == 2 * (2 + 4)
    assert found.unknown == (4,)


def test_each_warp_takes_its_own_branch() -> None:
    """Of four warps one has a thread below 8; the others leave."""
    found = walked("""
        S2R R0,SR_TID.X
        ISETP.GE.U32.AND P0,PT,R0,0x8,PT
        @P0 BRA 0x50
        NOP
        NOP
        EXIT
    """, warps=4)  # fmt: skip
    assert found.instructions == 4 * 3 + 2 + 4


def test_warps_meet_again_behind_a_loop_of_different_trips() -> None:
    """Thread t adds 32 until it reaches 128: one to four times."""
    found = walked("""
        S2R R0,SR_TID.X
        IADD3 R0,R0,0x20,RZ
        ISETP.LT.U32.AND P0,PT,R0,0x80,PT
        @P0 BRA 0x10
        NOP
        EXIT
    """, warps=4)  # fmt: skip
    assert found.instructions == 4 + 3 * (4 + 3 + 2 + 1) + 4 * 2


def test_both_sides_of_a_branch_on_data_are_walked() -> None:
    found = walked("""
        LDG.E R1,[R2.64]
        ISETP.EQ.AND P0,PT,R1,RZ,PT
        @P0 BRA 0x60
        NOP
        NOP
        BRA 0x70
        NOP
        EXIT
    """)  # fmt: skip
    assert found.instructions == 3 + 3 + 1 + 1
    assert found.unknown == ()


def test_masked_lanes_are_weighted_by_their_bytes() -> None:
    """16 bytes of 8 of 32 lanes and 4 bytes of all; one number of a program does not count."""
    found = walked("""
        S2R R0,SR_TID.X
        ISETP.LT.U32.AND P0,PT,R0,0x8,PT
        ISETP.EQ.U32.AND P1,PT,R0,RZ,PT
        @P0 LDG.E.128 R4,[R2.64]
        STG.E [R2.64],R4
        @P1 STG.E [R2.64],R4
        EXIT
    """)  # fmt: skip
    assert found.masked == pytest.approx(1 - (16 * 8 + 4 * 32) / (20 * 32))


DIVISION = """
    IABS R2,c[0x0][0x214]
    I2F.RP R0,R2
    MUFU.RCP R0,R0
    IADD3 R4,R0,0xffffffe,RZ
    F2I.FTZ.U32.TRUNC.NTZ R5,R4
    MOV R4,RZ
    IMAD.MOV R6,RZ,RZ,-R5
    IMAD R6,R6,R2,RZ
    IMAD.HI.U32 R5,R5,R6,R4
    IABS R7,c[0x0][0x210]
    IMAD.HI.U32 R5,R5,R7,RZ
    IADD3 R8,-R5,RZ,RZ
    IMAD R8,R2,R8,R7
    ISETP.GT.U32.AND P1,PT,R2,R8,PT
    @!P1 IADD3 R8,R8,-R2,RZ
    @!P1 IADD3 R5,R5,0x1,RZ
    ISETP.GE.U32.AND P0,PT,R8,R2,PT
    @P0 IADD3 R5,R5,0x1,RZ
"""
"""As ptxas divides: by a reciprocal in fp32, mended twice."""


@pytest.mark.parametrize(("number", "by"), [(0, 3), (100, 7), (2**31 - 1, 3), (65_536, 4608), (999_999, 1_000_000)])
def test_division_by_a_reciprocal(number: int, by: int) -> None:
    lanes = Lanes(32, {}, {0x210: number, 0x214: by})
    for one in code(DIVISION):
        lanes.execute(one, np.ones(32, dtype=np.bool_))
    found = lanes.registers["R5"]
    assert found is not None
    assert set(found) == {number // by}


def executed(text: str, register: str) -> int:
    lanes = Lanes(32, {}, {})
    for one in code(text):
        lanes.execute(one, np.ones(32, dtype=np.bool_))
    found = lanes.registers[register]
    assert found is not None
    return int(found[0])


@pytest.mark.parametrize(
    ("lines", "register", "value"),
    [
        ("MOV R0,0xffffffff\nIADD3 R2,P0,R0,0x1,RZ\nIADD3.X R3,RZ,0x7,RZ,P0,!PT", "R3", 8),
        ("MOV R0,0x5\nIADD3 R2,P0,R0,-R0,RZ\nIADD3.X R3,RZ,RZ,RZ,P0,!PT", "R3", 1),
        ("MOV R0,-0x2\nIMAD.WIDE R2,R0,0x3,RZ", "R3", 2**32 - 1),
        ("MOV R0,-0x2\nIMAD.WIDE.U32 R2,R0,0x3,RZ", "R3", 2),
        ("MOV R0,0x80000001\nMOV R1,0x1\nLEA R2,P0,R0,0x4,0x1\nLEA.HI.X R3,R0,0x10,R1,0x1,P0", "R3", 0x13),
        ("MOV R0,-0x8\nSHF.R.S32.HI R1,RZ,0x1,R0", "R1", 2**32 - 4),
        ("MOV R0,0xc0000000\nMOV R1,0x1\nSHF.L.U64.HI R2,R0,0x2,R1", "R2", 7),
        ("MOV R0,0xf0\nLOP3.LUT R1,R0,0x3c,RZ,0xc0,!PT", "R1", 0x30),
        ("MOV R0,0xf0\nLOP3.LUT R1,R0,0x3c,RZ,0x3c,!PT", "R1", 0xCC),
        ("MOV R0,0x5\nISETP.GT.AND P0,PT,R0,0x4,PT\nSEL R1,R0,0x9,!P0", "R1", 9),
        ("MOV R0,-0x1\nIMNMX R1,R0,0x3,PT", "R1", 2**32 - 1),
        ("MOV R0,-0x1\nIMNMX.U32 R1,R0,0x3,PT", "R1", 3),
        ("MOV R0,0x11223344\nMOV R1,0x55667788\nPRMT R2,R0,0x5410,R1", "R2", 0x77883344),
        ("HFMA2.MMA R0,-RZ,RZ,0,5.9604644775390625e-08", "R0", 1),
        ("ISETP.EQ.AND P2,PT,RZ,RZ,PT\nPR P2R R0,RZ,0x4", "R0", 4),
    ],
)
def test_integer_instructions(lines: str, register: str, value: int) -> None:
    assert executed(lines, register) == value


def test_comparison_of_64_bits_continues_that_of_the_low_halves() -> None:
    text = (
        "MOV R0,{}\nMOV R1,{}\nISETP.LT.U32.AND P0,PT,R0,0x5,PT\nISETP.LT.AND.EX P0,PT,R1,0x2,PT,P0\nSEL R9,0x1,RZ,P0"
    )
    cases: Sequence[tuple[int, int, int]] = [(4, 2, 1), (5, 2, 0), (9, 1, 1), (0, 3, 0)]
    assert [executed(text.format(hex(low), hex(high)), "R9") for low, high, _ in cases] == [one for *_, one in cases]


def test_parameters_have_the_addresses_of_the_constant_bank() -> None:
    ptx = """
    .visible .entry k(
        .param .u64 .ptr .global .align 1 k_param_0,
        .param .u32 k_param_1,
        .param .f32 k_param_2,
        .param .u64 k_param_3,
        .param .u64 .ptr .global .align 1 k_param_4
    )
    """
    found = arguments.constants(ptx, 90, [torch.empty(4), -3, 1.0, 2**33 + 5], (6, 2), 4)
    assert found == {
        0x218: 2**32 - 3, 0x21C: 0x3F800000, 0x220: 5, 0x224: 2,
        0x0: 128, 0x4: 1, 0x8: 1, 0xC: 6, 0x10: 2, 0x14: 1,
    }  # fmt: skip


def launched(**changes: int) -> Launched:
    given: dict[str, Any] = {
        "registers": 32,
        "shared": 0,
        "warps": 4,
        "programs": 1056,
        "bytes": 10**9,
        "elements": 10**8,
    }
    return Launched(kernel="k", **(given | changes), instructions=1000.0, special=10.0, masked=0.0)


@pytest.mark.parametrize(
    ("changes", "resident"),
    [
        ({"registers": 161}, 3),  # 168 registers: three warps for each scheduler
        ({"registers": 128}, 4),
        ({"registers": 64}, 8),
        ({}, 16),
        ({"shared": 100 * 1024}, 2),
        ({"warps": 1, "registers": 16}, 32),
        ({"warps": 16, "registers": 40}, 3),
        ({"warps": 32, "registers": 255}, 1),
    ],
)
def test_programs_that_a_processor_holds(changes: dict[str, int], resident: int) -> None:
    assert launched(**changes).resident(H200) == resident


def test_waves_and_the_time_of_the_resource_that_binds() -> None:
    one = launched(registers=161, programs=512)
    assert one.waves(H200) == pytest.approx(512 / 396)
    assert one.warps_per_processor(H200) == 12
    seconds = one.seconds(H200)
    assert seconds["bytes"] == pytest.approx(1e9 / 4.256e12, rel=1e-3)
    assert seconds["issue"] == pytest.approx(512 * 1000 / (132 * 4 * 1.755e9))
    assert seconds["special"] == pytest.approx(512 * 10 * 32 / (132 * 16 * 1.755e9))
    assert one.bound(H200) == ("bytes", seconds["bytes"])
    assert launched(bytes=10**6).bound(H200)[0] == "issue"
