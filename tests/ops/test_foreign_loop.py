"""The training loops of kernels/README.md: they run as they stand, and by the kernels as by the references."""

import ast
import re
from pathlib import Path
from typing import Any

import torch

from fastdiff_kernels import dispatch
from fastdiff_kernels.names import KERNELS, OPS

README = Path(__file__).parents[2] / "kernels" / "README.md"
LOOP, FLAT = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def trained(loop: str, flat: str, steps: int, *sizes: int) -> dict[str, Any]:
    """Run both blocks, the first with this number of steps and this batch, width and T, and return their names."""
    names: dict[str, Any] = {}
    given = ", ".join(map(str, sizes))
    exec(
        loop.replace("range(100)", f"range({steps})").replace("WIDTH, T = 0, 8, 64, 1000", f"WIDTH, T = 0, {given}"),
        names,
    )
    assert (names["step"] + 1, names["BATCH"], names["WIDTH"], names["T"]) == (steps, *sizes)
    exec(flat, names)
    return names


def compiled(code: str) -> str:
    """Return the block in which each function that it imports of the package is one graph."""

    def with_graphs(line: re.Match[str]) -> str:
        functions = [name for name in line[1].split(", ") if name not in ("AdamW8bit", "Modulation", "step_numbers")]
        graphs = [f"{name} = torch.compile({name}, fullgraph=True, backend='aot_eager')" for name in functions]
        return "\n".join([line[0], *graphs])

    return re.sub(r"^from fastdiff_kernels\.\S+ import (.*)$", with_graphs, code, flags=re.MULTILINE)


def test_every_op_is_shown() -> None:
    imported = {
        node.module.split(".")[1]
        for node in ast.walk(ast.parse(LOOP + FLAT))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fastdiff_kernels.")
    }
    attention = {"packed_attention"}  # chooses short_attention where it is fastest, and calls bias_gradient's join
    others = {"short_attention", "bias_gradient", "geglu", "fp8"}  # GEGLU is of UNets, FP8 of whole blocks
    options = {"swiglu", "rotary"}  # in place of GELU, and an argument of attention
    assert imported == ({*KERNELS} - others - options) | attention


def test_the_loop_trains() -> None:
    names = trained(LOOP, FLAT, 100, 8, 64, 1000)
    first, last = (sum(names["losses"][part]) for part in (slice(0, 10), slice(-10, None)))
    assert last < 0.9 * first
    assert not torch.equal(names["average"], names["flat"])


def test_the_kernels_train_as_the_references_each_in_one_graph() -> None:
    """With fp32 sums in another order; 8-bit codes turn that into a step between neighbouring values at most."""
    expected = trained(LOOP, FLAT, 2, 2, 16, 50)
    torch._dynamo.reset()
    with dispatch.forced(**dict.fromkeys(OPS, "triton")):
        found = trained(compiled(LOOP), compiled(FLAT), 2, 2, 16, 50)
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["flat"], expected["flat"], rtol=0, atol=2e-3)
