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
from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.instructions.count import count
from fastdiff_bench.instructions.gpus import GPUS

_SOURCE = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"^\s+(\w+)\.run\((.*), stream=\w+\)$", re.MULTILINE)


def counted(code: str, moved: Sequence[int], arch: int) -> list[Launched]:
    """Compile and count the launches of the written code, in its order.

    Args:
        code: that Inductor wrote.
        moved: bytes of the operands of each launch.
        arch: compute capability: 90 is sm_90.

    Raises:
        BenchError: the code launches another number of kernels than Inductor scheduled.
    """
    kernels = {name: _autotuner(name, source) for name, source in _SOURCE.findall(code)}
    runs = [(name, arguments) for name, arguments in _RUN.findall(code) if name in kernels]
    if len(runs) != len(moved):
        raise BenchError(f"Inductor scheduled {len(moved)} Triton kernels, and its code launches {len(runs)}")
    return [_fastest(kernels[name], name, list(_numbers(arguments)), size, arch)
            for (name, arguments), size in zip(runs, moved, strict=True)]  # fmt: skip


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
    sizes = {n: value for n, value in named.items() if value is not None and n.endswith("numel")}
    found = [
        count(name, one.kernel, arch, _grid(autotuner, one.config, sizes), given, moved=moved,
              elements=prod(sizes.values()))
        for one in autotuner.compile_results
    ]  # fmt: skip
    return min(found, key=lambda one: (one.bound(GPUS[arch])[1], one.instructions * one.programs))


def _grid(autotuner: Any, config: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    expression: Any = GridExpr.from_meta(autotuner.inductor_meta, config)
    x, y, z = expression.eval_slow(sizes | config.kwargs)
    return x, y, z
