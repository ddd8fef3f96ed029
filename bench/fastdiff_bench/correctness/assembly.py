"""Properties of a compiled kernel: its resources, and its accesses to global memory."""

import re
import subprocess
import tempfile
from collections import Counter
from typing import Literal

Side = Literal["loads", "stores"]

_SUFFIX: dict[Side, str] = {"loads": "ld", "stores": "st"}
_OPERATION: dict[Side, str] = {"loads": r"tt\.load|ttg\.async_copy_global_to_local", "stores": r"tt\.store"}


def resources(cubin: bytes) -> dict[str, int]:
    """Return ``REG``, ``STACK`` and ``LOCAL`` per thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def access_widths(ptx: str, side: Side) -> Counter[int]:
    """Count a thread's accesses to global memory by width in bits; asynchronous copies count as loads."""
    counts: Counter[int] = Counter()
    for suffixes in re.findall(rf"\b{_SUFFIX[side]}((?:\.[\w:]+)+)", ptx):
        *modifiers, kind = suffixes[1:].split(".")
        if "global" in modifiers:
            vector = next((int(m[1:]) for m in modifiers if re.fullmatch(r"v\d+", m)), 1)
            counts[vector * int(kind.lstrip("bfsu"))] += 1
    if side == "loads":
        copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(\w+)", ptx)
        counts.update(8 * int(size, 0) for size in copies)
    return counts


def single_widths(ttgir: str, side: Side) -> Counter[int]:
    """Count the accesses that move one number for a whole program; their width does not matter."""
    types: list[str] = re.findall(rf"(?:{_OPERATION[side]}) .* : !tt\.ptr<[a-z]+(\d+)>", ttgir)
    return Counter(max(8, int(bits)) for bits in types)


def block_pointers(ttgir: str, side: Side) -> set[int]:
    """Return the indices of the run-time arguments that block addresses derive from; -1: not found."""
    signature = next(line for line in ttgir.splitlines() if "tt.func public" in line)
    arguments = {name: index for index, name in enumerate(re.findall(r"(%\w+): ", signature))}
    origin: dict[str, str] = dict(re.findall(r"^\s*(%\w+) = [\w.]+ (%[\w#]+)", ttgir, re.MULTILINE))
    for pairs in re.findall(r"iter_args\(([^)]*)\)", ttgir):
        origin |= dict(re.findall(r"(%\w+) = (%[\w#]+)", pairs))
    found = set()
    for name in re.findall(rf"(?:{_OPERATION[side]}) (%\w+).* : tensor<", ttgir):
        for _ in origin:
            name = name if name in arguments else origin.get(name, name)
        found.add(arguments.get(name, -1))
    return found
