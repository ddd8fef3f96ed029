"""Kernel files look alike: one list of ops, and one vocabulary for pointers, blocks and parts of an op."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from fastdiff_bench import cases
from fastdiff_kernels import attention, names

PACKAGE = Path(attention.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def jitted() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file, tree in FILES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and "jit" in map(ast.unparse, node.decorator_list):
                yield file, node


def test_names_are_free_of_torch() -> None:
    code = "import sys, fastdiff_kernels.names; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, timeout=240).returncode == 0


def test_every_op_has_a_file_and_its_cases() -> None:
    for op in names.KERNELS:
        import_module(f"fastdiff_kernels.{op}")
    assert cases.KERNELS == names.KERNELS
    assert {case.op for case in cases.cases(cases.KERNELS)} == set(names.KERNELS)
    assert {case.op for case in cases.cases()} == set(cases.OPS)


def test_kernels_carry_the_name_of_their_op_and_no_other() -> None:
    kernels = [function.name for _, function in jitted() if function.name.endswith("_kernel")]
    assert len(kernels) == len(set(kernels))
    starts = (
        "philox", "corrupt", "weighted_mse", "group_norm", "adaln", "dropout", "adamw", "adamw8bit", "bias_gradient",
        "gelu", "geglu", "swiglu", "rotary", "fp8", "short_attention",
    )  # fmt: skip
    assert {start for name in kernels for start in starts if name.lstrip("_").startswith(start)} == set(starts)
    assert all(name.lstrip("_").startswith(starts) for name in kernels)
