"""The Triton kernels that Inductor wrote for a graph, compiled for a GPU that is not present, and counted.

Inductor's own heuristics propose the sizes of blocks; on a GPU it measures several and keeps the fastest, here the one
of the least time by the resource that binds.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from fastdiff_bench import BenchError
from fastdiff_bench.emission.blocks import Node
from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.instructions.count import count
from fastdiff_bench.instructions.gpus import GPUS

_SOURCE = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"^\s+(\w+)\.run\((.*), stream=\w+\)$", re.MULTILINE)


def counted(code: str, nodes: Sequence[Node], arch: int) -> list[Launched]:
    """Compile and count the launches of the written code, in its order.

    Args:
        code: that Inductor wrote.
        nodes: Triton kernels that it scheduled.
        arch: compute capability: 90 is sm_90.

    Raises:
        BenchError: the code launches a kernel that Inductor has not scheduled.
    """
    kernels = {name: _autotuner(name, source) for name, source in _SOURCE.findall(code)}
    runs = [(name, arguments) for name, arguments in _RUN.findall(code) if name in kernels]
    return [
        _fastest(kernels[name], name, list(_numbers(arguments)), node.bytes, arch)
        for (name, arguments), node in zip(runs, _scheduled(runs, nodes), strict=True)
    ]


def _scheduled(runs: Sequence[tuple[str, str]], nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the node of each launch; one that is written into the kernel of another has no launch of its own."""
    if len(runs) == len(nodes):
        yield from nodes
        return
    left = iter(nodes)
    for name, arguments in runs:
        given = set(re.findall(r"\w+", arguments))
        found = next((node for node in left if node.writes & given), None)
        if found is None:
            raise BenchError(f"Inductor's code launches {name}, which is none of the {len(nodes)} kernels it scheduled")
        yield found


def _autotuner(name: str, source: str) -> Any:
    """Return Inductor's launcher of a kernel, which compiles it with each proposed size of its blocks."""
    from torch._inductor import config
    from torch._inductor.codecache import _load_triton_kernel_from_source

    # A kernel that is launched from C++ keeps no code.
    with config.patch(use_static_cuda_launcher=False):
        found: Any = _load_triton_kernel_from_source(name, source)
        found._precompile_worker()
    return found


def _numbers(arguments: str) -> Iterator[int | None]:
    """Yield the arguments of a launch that are numbers; None for those that are tensors."""
    call: Any = ast.parse(f"f({arguments})", mode="eval").body
    for argument in call.args:
        try:
            yield int(ast.literal_eval(argument))
        except (ValueError, TypeError):
            yield None


def _fastest(autotuner: Any, name: str, arguments: list[int | None], moved: int, arch: int) -> Launched:
    kinds = [(n, kind) for n, kind in autotuner.triton_meta["signature"].items() if kind != "constexpr"]
    named = {n: value for (n, _), value in zip(kinds, arguments, strict=False)}
    constant = autotuner.triton_meta["constants"]
    given = [value for n, value in named.items() if n not in constant]
    sizes = {n: value for n, value in (constant | named).items() if value is not None and n.endswith("numel")}
    found = [
        count(name, one.kernel, arch, _grid(autotuner, one.config, sizes), given, moved=moved,
              elements=prod(sizes.values()))
        for one in autotuner.compile_results
    ]  # fmt: skip
    # Trips that are unknown would make a kernel look fast.
    return min(found, key=lambda one: (not one.counted, one.bound(GPUS[arch])[1], one.instructions * one.programs))


def _grid(autotuner: Any, config: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    expression: Any = GridExpr.from_meta(autotuner.inductor_meta, config)
    x, y, z = expression.eval_slow(sizes | config.kwargs)
    return x, y, z
