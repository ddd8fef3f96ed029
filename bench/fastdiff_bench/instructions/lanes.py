"""Integer instructions on all threads of a program at once: what decides branches and masks of a kernel.

A value is an array of one number per thread, or None: unknown, as everything is that was read from memory or computed
in floating point. The reciprocal is the exception, since integers are divided by it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdiff_bench.instructions.sass import Instruction, Operand, following

Value: TypeAlias = NDArray[Any] | None
"""Unsigned numbers of 32 or 64 bits in uint64, or bits; None: unknown."""

_LOW = np.uint64(0xFFFFFFFF)
_SIGN = np.uint64(1 << 31)
_WORD = np.uint64(32)


class Lanes:
    """Registers of the threads of one program."""

    def __init__(self, threads: int, special: Mapping[str, int], constants: Mapping[int, int]) -> None:
        """Begin with empty registers.

        Args:
            threads: of the program.
            special: values of special registers but the index of a thread, as ``SR_CTAID.X``.
            constants: words of the constant bank 0, by their addresses.
        """
        self.threads = threads
        self.registers: dict[str, Value] = {}
        self._constants = constants
        index = np.arange(threads, dtype=np.uint64)
        self._special = {name: self._all(value) for name, value in special.items()}
        self._special |= {"SR_TID.X": index, "SR_LANEID": index % np.uint64(32), "SRZ": self._all(0)}

    def _all(self, value: int) -> NDArray[Any]:
        return np.full(self.threads, value & 0xFFFFFFFF_FFFFFFFF, dtype=np.uint64)

    def execute(self, one: Instruction, active: NDArray[np.bool_]) -> None:
        """Execute an instruction on the active threads."""
        acts = active if one.guard is None else _both(active, self.bit(one.guard))
        found: Sequence[Value] | None = None
        function = _FUNCTIONS.get(one.name)
        if function is not None and acts is not None:
            found = function(self, one)
        values = list(found or ()) + [None] * len(one.destinations)
        for operand, value in zip(one.destinations, values, strict=False):
            self._write(one, operand, value, acts)

    def _write(self, one: Instruction, operand: Operand, value: Value, acts: Value) -> None:
        if operand.is_predicate:
            self._assign(operand.text, value, acts)
            return
        for by in range(one.wide):
            part = None if value is None or by > 1 else (value >> (_WORD * np.uint64(by))) & _LOW
            self._assign(following(operand.text, by), part, acts)

    def _assign(self, name: str, value: Value, acts: Value) -> None:
        if value is None or acts is None:
            self.registers[name] = None
        elif acts.all():
            self.registers[name] = value
        else:
            before = self.registers.get(name)
            # What inactive threads hold is unknown, and does not matter until they hold something.
            self.registers[name] = np.where(acts, value, value if before is None else before)

    def bit(self, operand: Operand) -> Value:
        """Return a predicate."""
        if operand.text in ("PT", "UPT"):
            found: Value = np.ones(self.threads, dtype=np.bool_)
        else:
            found = self.registers.get(operand.text)
        return ~found if operand.sign == "!" and found is not None else found

    def word(self, operand: Operand, *, high: bool = False) -> Value:
        """Return 32 bits, negated if the operand is; -x is 2**32 - x, so that its carry is right."""
        text = operand.text
        if operand.is_register:
            name = following(text) if high else text
            found = self._all(0) if text.endswith("Z") else self.registers.get(name)
        elif text.startswith("c["):
            found = self._constant(text, 4 if high else 0)
        elif text.startswith(("0x", "-0x")) or text.isdecimal():
            found = self._all(0 if high else int(text, 0) & 0xFFFFFFFF)
        else:
            return None
        if found is None or operand.sign == "":
            return found
        if operand.sign == "~":
            return found ^ _LOW
        return np.uint64(1 << 32) - found if operand.sign == "-" else None

    def pair(self, operand: Operand) -> Value:
        """Return the 64 bits of a register and the next, or of a constant."""
        low, high = self.word(Operand(operand.text)), self.word(Operand(operand.text), high=True)
        if low is None or high is None:
            return None
        found: NDArray[Any] = low | (high << _WORD)
        if operand.sign == "-":
            return np.uint64(0) - found
        return ~found if operand.sign == "~" else found

    def _constant(self, text: str, further: int) -> Value:
        bank, _, address = text.removeprefix("c[").removesuffix("]").partition("][")
        if bank != "0x0" or not address.startswith("0x"):
            return None
        found = self._constants.get(int(address, 16) + further)
        return None if found is None else self._all(found)

    def special(self, name: str) -> Value:
        """Return a special register."""
        return self._special.get(name)


def _both(first: Value, second: Value) -> Value:
    return None if first is None or second is None else first & second


def _signed(value: NDArray[Any]) -> NDArray[Any]:
    """Return 32 bits as signed numbers."""
    return ((value & _LOW) ^ _SIGN).astype(np.int64) - np.int64(1 << 31)


def _unsigned(value: NDArray[Any]) -> NDArray[Any]:
    return value.astype(np.int64).view(np.uint64) if value.dtype != np.uint64 else value


def _words(lanes: Lanes, operands: Sequence[Operand]) -> list[NDArray[Any]] | None:
    found = [lanes.word(operand) for operand in operands]
    return None if any(value is None for value in found) else found  # type: ignore[return-value]


def _carries(lanes: Lanes, operands: Sequence[Operand]) -> Value:
    """Return the sum of the carries among the operands."""
    total = np.zeros(lanes.threads, dtype=np.uint64)
    for operand in operands:
        bit = lanes.bit(operand) if operand.is_predicate else np.zeros(lanes.threads, dtype=np.bool_)
        if bit is None:
            return None
        total = total + bit
    return total


def _sum(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``IADD3``: three words and, with ``.X``, carries; destinations are the sum and its carries."""
    given = [operand for operand in one.sources if not operand.is_predicate]
    long = "64" in one.modifiers
    values: list[Any] = [lanes.pair(operand) if long else lanes.word(operand) for operand in given]
    carried: Any = _carries(lanes, one.sources) if "X" in one.modifiers else np.zeros(lanes.threads, dtype=np.uint64)
    if carried is None or any(value is None for value in values):
        return None
    total = sum(values, carried)
    return [total] if long else [total & _LOW, (total >> _WORD) > 0, (total >> _WORD) > 1]


def _product(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``IMAD``: a * b + c, of 32 bits, of 64 with ``.WIDE``, or the high half with ``.HI``."""
    operands = [operand for operand in one.sources if not operand.is_predicate]
    words = _words(lanes, operands[:2])
    long = "WIDE" in one.modifiers or "HI" in one.modifiers
    added = lanes.pair(operands[2]) if long else lanes.word(operands[2])
    carried = _carries(lanes, one.sources) if "X" in one.modifiers else np.zeros(lanes.threads, dtype=np.uint64)
    if words is None or added is None or carried is None:
        return None
    a, b = (w & _LOW for w in words)
    product = _unsigned(_signed(a) * _signed(b)) if long and "U32" not in one.modifiers else a * b
    total = product + added + carried
    carry = total < product
    return [total >> _WORD if "HI" in one.modifiers else total if long else total & _LOW, carry]


def _address(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``LEA``: (a << shift) + b, or with ``.HI`` the high half of c:a shifted, plus b."""
    operands = [operand for operand in one.sources if not operand.is_predicate]
    high, extended = "HI" in one.modifiers, "SX32" in one.modifiers
    words = _words(lanes, operands)
    carried = _carries(lanes, one.sources) if "X" in one.modifiers else np.zeros(lanes.threads, dtype=np.uint64)
    if words is None or carried is None:
        return None
    a, b, *middle, shift = words
    a = a & _LOW
    if not high:
        shifted = (a << shift) & _LOW
    elif extended:
        shifted = _unsigned(_signed(a) << shift.astype(np.int64)) >> _WORD
    else:
        shifted = ((a | ((middle[0] & _LOW) << _WORD)) << shift) >> _WORD
    total = (shifted & _LOW) + b + carried
    return [total & _LOW, (total >> _WORD) > 0]


def _shift(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``SHF``: the low or the high half of c:a, shifted."""
    words = _words(lanes, one.sources)
    if words is None:
        return None
    a, by, c = (w & _LOW for w in words)
    long = "U64" in one.modifiers or "S64" in one.modifiers
    by = by & np.uint64(63 if long else 31) if "W" in one.modifiers else np.minimum(by, np.uint64(63 if long else 32))
    both = a | (c << _WORD)
    if "L" in one.modifiers:
        return [((both << by) >> _WORD) & _LOW if "HI" in one.modifiers else (a << by) & _LOW]
    if "S32" in one.modifiers or "S64" in one.modifiers:
        both = both.view(np.int64) >> by.astype(np.int64)
        both = both.view(np.uint64)
    else:
        both = both >> by
    return [both >> _WORD if "HI" in one.modifiers else both & _LOW]


def _logic(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``LOP3``: a function of three bits, by its table; also whether any bit of the result is set."""
    operands = [operand for operand in one.sources if not operand.is_predicate]
    words = _words(lanes, operands)
    if words is None:
        return None
    a, b, c, table = (w & _LOW for w in words[:4])
    found = _of_table(a, b, c, int(table[0]), _LOW)
    by_place = {True: found != 0, False: found}
    return [by_place[operand.is_predicate] for operand in one.destinations]


def _of_table(a: Any, b: Any, c: Any, table: int, ones: Any) -> Any:
    found = a ^ a
    for entry in range(8):
        if table >> entry & 1:
            terms = zip((a, b, c), (4, 2, 1), strict=True)
            chosen = [value if entry & place else value ^ ones for value, place in terms]
            found = found | (chosen[0] & chosen[1] & chosen[2])
    return found


def _predicate_logic(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``PLOP3``: two functions of three predicates, by their tables."""
    bits: list[Any] = [lanes.bit(operand) for operand in one.sources if operand.is_predicate]
    tables = [int(operand.text, 0) for operand in one.sources if not operand.is_predicate]
    if len(bits) != 3:
        return None
    never = np.zeros(lanes.threads, dtype=np.bool_)
    bits = [never if bit is None and _ignored(place, tables) else bit for place, bit in enumerate(bits)]
    if any(bit is None for bit in bits):
        return None
    a, b, c = bits
    return [_of_table(a, b, c, table, np.True_) for table in tables]


def _ignored(place: int, tables: Sequence[int]) -> bool:
    """Whether no table depends on an operand."""
    bit = 4 >> place
    return all(bool(t >> e & 1) == bool(t >> (e ^ bit) & 1) for t in tables for e in range(8))


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less, "GT": np.greater, "LE": np.less_equal, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def _comparison(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``ISETP``: a comparison, joined with a predicate; ``.EX`` continues that of the low halves, its last operand."""
    kind = next((name for name in _COMPARE if name in one.modifiers), None)
    bits = [lanes.bit(operand) for operand in one.sources if operand.is_predicate]
    given = [operand for operand in one.sources if not operand.is_predicate]
    long = {"64", "U64", "S64"} & one.modifiers
    values: list[Any] = [lanes.pair(operand) if long else lanes.word(operand) for operand in given]
    if kind is None or not bits or any(value is None for value in values):
        return None
    if long:
        a, b = values if "U64" in one.modifiers else (value.view(np.int64) for value in values)
    else:
        a, b = (value & _LOW if "U32" in one.modifiers else _signed(value) for value in values)
    found = _COMPARE[kind](a, b)
    if "EX" in one.modifiers:
        low = bits.pop()
        if low is None:
            return None
        strictly = {"NE": a != b, "EQ": np.zeros_like(low), "LT": a < b, "LE": a < b}.get(kind, a > b)
        found = strictly | (low if kind == "NE" else (a == b) & low)
    joined = bits[0]
    if joined is None:
        return None
    join = np.logical_or if "OR" in one.modifiers else np.logical_xor if "XOR" in one.modifiers else np.logical_and
    return [join(found, joined), join(~found, joined)]


def _chosen(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``SEL``: one of two by a predicate; ``IMNMX``: the smaller where the predicate holds, else the larger."""
    *operands, last = one.sources
    bit = lanes.bit(last)
    if bit is None:
        return None
    words = _words(lanes, operands)
    if words is None:
        return None
    if one.name in ("SEL", "USEL"):
        return [np.where(bit, words[0], words[1]) & _LOW]
    a, b = (words[0] + words[1], words[2]) if "ADD" in one.name else (words[0], words[1])
    a, b = a & _LOW, b & _LOW
    less = a < b if "U32" in one.modifiers else _signed(a) < _signed(b)
    return [np.where(less == bit, a, b)]


def _moved(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    source = next(operand for operand in one.sources if not operand.is_predicate)
    return [lanes.pair(source) if one.wide > 1 else lanes.word(source)]


def _special(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    return [lanes.special(one.operands[-1].text)]


def _absolute(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    word = lanes.word(one.sources[0])
    return None if word is None else [_unsigned(np.abs(_signed(word))) & _LOW]


def _permuted(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``PRMT``: each byte of the result is one of the eight of c:a."""
    words = _words(lanes, one.sources)
    if words is None:
        return None
    a, select, c = (w & _LOW for w in words)
    both, found = a | (c << _WORD), np.zeros(lanes.threads, dtype=np.uint64)
    for place in range(4):
        nibble = (select >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        byte = np.where(nibble >= 8, np.where(byte >= 128, np.uint64(255), np.uint64(0)), byte)
        found = found | (byte << np.uint64(8 * place))
    return [found]


def _extended(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``SGXT``: the sign of the lowest bits, extended."""
    words = _words(lanes, one.sources)
    if words is None:
        return None
    a, bits = (w & _LOW for w in words)
    kept = a & ((np.uint64(1) << bits) - np.uint64(1))
    negative = (kept >> (bits - np.uint64(1))) & np.uint64(1) == 1
    signed = "U32" not in one.modifiers
    return [np.where(negative & signed, kept | (_LOW << bits) & _LOW, kept)]


def _float(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``I2F``: the bits of a number in fp32. However it is rounded, a division mends its reciprocal."""
    word = lanes.word(one.sources[-1])
    if word is None or one.wide > 1 or "U64" in one.modifiers or "S64" in one.modifiers:
        return None
    number = word & _LOW if "U32" in one.modifiers else _signed(word)
    return [number.astype(np.float32).view(np.uint32).astype(np.uint64)]


def _reciprocal(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    word = lanes.word(one.sources[-1]) if "RCP" in one.modifiers and "RCP64H" not in one.modifiers else None
    if word is None:
        return None
    with np.errstate(all="ignore"):
        return [(np.float32(1) / word.astype(np.uint32).view(np.float32)).view(np.uint32).astype(np.uint64)]


def _integer(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``F2I``, towards zero."""
    word = lanes.word(one.sources[-1])
    if word is None or "TRUNC" not in one.modifiers:
        return None
    with np.errstate(all="ignore"):
        number = np.nan_to_num(word.astype(np.uint32).view(np.float32).astype(np.float64))
    return [_unsigned(np.clip(number, -(2.0**31), 2.0**32 - 1).astype(np.int64)) & _LOW]


def _halves(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``HFMA2`` of zeros and two numbers: how a constant is loaded beside the integer units."""
    first, second, *numbers = one.sources
    if {first.text, second.text} - {"RZ", "URZ"} or len(numbers) != 2 or any(n.is_register for n in numbers):
        return None
    try:
        high, low = (np.float16(float(n.sign + n.text)).view(np.uint16) for n in numbers)
    except ValueError:
        return None
    return [np.full(lanes.threads, int(high) << 16 | int(low), dtype=np.uint64)]


def _elected(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``ELECT``: one lane of each warp."""
    first = np.arange(lanes.threads) % 32 == 0
    return [first if operand.is_predicate else None for operand in one.destinations]


def _yes(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``SYNCS``: a wait has ended."""
    return [np.ones(lanes.threads, dtype=np.bool_) if o.is_predicate else None for o in one.destinations]


def _no(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``FCHK``: no division takes the slow path, which is that of subnormal numbers."""
    return [np.zeros(lanes.threads, dtype=np.bool_)]


def _counted(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    word = lanes.word(one.sources[0])
    return None if word is None else [np.array([int(w).bit_count() for w in word & _LOW], dtype=np.uint64)]


def _voted(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``VOTE`` into a predicate: whether it holds for any, or for all, threads of the warp."""
    bit = lanes.bit(one.operands[-1])
    if bit is None or any(not operand.is_predicate for operand in one.destinations):
        return None
    by_warp = bit.reshape(-1, 32)
    found = by_warp.all(axis=1) if "ALL" in one.modifiers else by_warp.any(axis=1)
    return [np.repeat(found, 32)]


def _packed(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``P2R``: some predicates as bits of a register, the others of which are those of another."""
    words = _words(lanes, one.sources)
    if words is None or one.modifiers:
        return None
    found = words[0] & ~words[1] & _LOW
    for operand in one.packed:
        bit = lanes.bit(operand)
        if bit is None:
            return None
        found = found | (bit.astype(np.uint64) << np.uint64(int(operand.text[1:])))
    return [found]


def _unpacked(lanes: Lanes, one: Instruction) -> Sequence[Value] | None:
    """``R2P``: some bits of a register as predicates."""
    word = None if one.modifiers else lanes.word(one.sources[0])
    if word is None:
        return None
    return [(word >> np.uint64(int(operand.text[1:]))) & np.uint64(1) == 1 for operand in one.packed]


_NAMES: dict[Callable[[Lanes, Instruction], Sequence[Value] | None], tuple[str, ...]] = {
    _sum: ("IADD3", "UIADD3", "IADD", "VIADD", "UIADD"),
    _product: ("IMAD", "UIMAD"),
    _address: ("LEA", "ULEA"),
    _shift: ("SHF", "USHF"),
    _logic: ("LOP3", "ULOP3"),
    _predicate_logic: ("PLOP3", "UPLOP3"),
    _comparison: ("ISETP", "UISETP"),
    _chosen: ("SEL", "USEL", "IMNMX", "UIMNMX", "VIMNMX", "UVIMNMX", "VIADDMNMX"),
    _moved: ("MOV", "UMOV", "R2UR", "LDC", "ULDC", "LDCU"),
    _special: ("S2R", "S2UR", "CS2R"),
    _absolute: ("IABS", "UIABS"),
    _permuted: ("PRMT", "UPRMT"),
    _extended: ("SGXT", "USGXT"),
    _float: ("I2F", "I2FP", "UI2F", "UI2FP"),
    _reciprocal: ("MUFU",),
    _integer: ("F2I",),
    _halves: ("HFMA2",),
    _elected: ("ELECT",),
    _yes: ("SYNCS",),
    _no: ("FCHK",),
    _counted: ("POPC", "UPOPC"),
    _voted: ("VOTE", "VOTEU"),
    _packed: ("P2R",),
    _unpacked: ("R2P",),
}
_FUNCTIONS = {name: function for function, names in _NAMES.items() for name in names}
