"""Machine code of a kernel (SASS) as nvdisasm prints it: instructions with their operands."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

BYTES = 16
"""Of one instruction, from sm_70 on."""
_REGISTER = re.compile(r"U?R(\d+|Z)")
_PREDICATE = re.compile(r"U?P(\d+|T)")
_OPERAND = re.compile(r"([-~!]?)\|?(U?[RP](?:\d+|Z|T)(?=\W|$)|.*)")
_FLOW = frozenset(("BRA", "EXIT", "RET", "BRX", "JMX", "JMP", "KILL", "BREAK"))
_GLOBAL = frozenset(("LDG", "STG", "LDGSTS", "RED", "REDG", "ATOMG"))


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand."""

    text: str
    """Register, constant, number or address, without its sign and suffixes."""
    sign: str = ""
    """``-``, ``~`` (of bits) or ``!`` (of a predicate)."""

    @property
    def is_register(self) -> bool:
        """Whether it is a register of 32 bits."""
        return _REGISTER.fullmatch(self.text) is not None

    @property
    def is_predicate(self) -> bool:
        """Whether it is a register of one bit."""
        return _PREDICATE.fullmatch(self.text) is not None

    @classmethod
    def parse(cls, text: str) -> "Operand":
        """Return the operand of a text like ``-R4.reuse``."""
        match = _OPERAND.match(text.strip())
        assert match is not None, text
        return cls(match[2], match[1])


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    opcode: str
    """With its modifiers: ``IMAD.WIDE.U32``."""
    operands: tuple[Operand, ...] = ()
    guard: Operand | None = None
    """Predicate without which it does nothing; None: it always acts."""

    @cached_property
    def name(self) -> str:
        """Opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        """Modifiers of the opcode."""
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def flows(self) -> bool:
        """Whether another instruction than the next may follow."""
        return self.name in _FLOW

    @cached_property
    def target(self) -> int | None:
        """Index of the instruction to which a branch goes; None: it is no branch, or a computed one."""
        return int(self.operands[-1].text, 16) // BYTES if self.name == "BRA" else None

    @cached_property
    def conditions(self) -> tuple[Operand, ...]:
        """Predicates that must all hold for it to act."""
        own = [operand for operand in self.operands if self.name == "BRA" and operand.is_predicate]
        return (*([self.guard] if self.guard else []), *own)

    @cached_property
    def lane_bytes(self) -> int:
        """Bytes that it moves between a lane and global memory; 0: none."""
        if self.name not in _GLOBAL:
            return 0
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return next((widths[one] for one in self.modifiers if one in widths), 4)

    @cached_property
    def wide(self) -> int:
        """Registers of its first destination."""
        pair = (
            "WIDE" in self.modifiers or "64" in self.modifiers or (self.name == "CS2R" and "32" not in self.modifiers)
        )
        return 4 if "128" in self.modifiers else 2 if pair else 1

    @cached_property
    def destinations(self) -> tuple[Operand, ...]:
        """Operands that it writes."""
        return tuple(self._leading())

    def _leading(self) -> Iterator[Operand]:
        """Yield a register and the carries behind it, or predicates and the register behind them."""
        if self.name == "R2P":
            yield from self.packed
            return
        first, *rest = self.operands or (Operand(""),)
        if first.is_register:
            yield first
            for operand in rest[:2] if self.name not in ("SEL", "USEL") else ():
                if not operand.is_predicate or operand.sign:
                    return
                yield operand
        elif first.is_predicate and not self.flows:
            yield first
            second = rest[0] if len(rest) > 1 else Operand("")
            if not second.sign and (second.is_predicate or (second.is_register and self.name not in _COMPARING)):
                yield second

    @cached_property
    def packed(self) -> tuple[Operand, ...]:
        """Predicates that ``P2R`` packs into a register, or ``R2P`` unpacks from one: those of the mask, its last."""
        mask = int(self.operands[-1].text, 16) if self.name in ("P2R", "R2P") else 0
        return tuple(Operand(f"P{bit}") for bit in range(7) if mask >> bit & 1)

    @cached_property
    def sources(self) -> tuple[Operand, ...]:
        """Operands that it reads."""
        return self.operands if self.name == "R2P" else self.operands[len(self.destinations) :]

    @cached_property
    def written(self) -> frozenset[str]:
        """Registers that it writes."""
        found = {operand.text for operand in self.destinations if operand.is_predicate}
        for operand in self.destinations:
            if operand.is_register:
                found |= {following(operand.text, by) for by in range(self.wide)}
        return frozenset(found)

    @cached_property
    def read(self) -> frozenset[str]:
        """Registers that it may read."""
        found = {operand.text for operand in (*self.conditions, *(self.packed if self.name == "P2R" else ()))}
        for operand in self.sources:
            for name in re.findall(r"\bU?[RP]\d+", operand.text):
                found |= {name} if "P" in name else {name, following(name)}
        return frozenset(found)


_COMPARING = frozenset(("ISETP", "UISETP", "FSETP", "HSETP2", "DSETP", "PLOP3", "UPLOP3"))


def following(register: str, by: int = 1) -> str:
    """Return the register ``by`` places after another; RZ is followed by itself."""
    letters = register.rstrip("0123456789")
    return f"{letters}{int(register[len(letters) :]) + by}" if letters != register else register


def disassemble(cubin: bytes) -> tuple[Instruction, ...]:
    """Return the instructions of the kernel in a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-json", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return parse(text)


def parse(text: str) -> tuple[Instruction, ...]:
    """Return the instructions of the first function in the JSON that nvdisasm prints."""
    _, functions = json.loads(text)
    found = []
    for line in functions[0]["sass-instructions"]:
        # nvdisasm prints the set of all predicates, an operand of P2R and R2P, in this place, too.
        guard = line.get("predicate", "").removeprefix("@").removeprefix("PR")
        operands = line.get("operands", "")
        found.append(
            Instruction(
                line["opcode"],
                tuple(map(Operand.parse, operands.split(","))) if operands else (),
                Operand.parse(guard) if guard else None,
            )
        )
    return tuple(_jumping(one, found) for one in found)


def _jumping(one: Instruction, code: Sequence[Instruction]) -> Instruction:
    """Return a call of what never returns, a way to leave a loop, as the branch that it is."""
    if not one.opcode.startswith("CALL.REL") or not one.operands[-1].text.startswith("0x"):
        return one
    called = code[int(one.operands[-1].text, 16) // BYTES :]
    ends = next((other.name for other in called if other.name in ("RET", "EXIT")), "RET")
    return replace(one, opcode="BRA") if ends == "EXIT" else one
