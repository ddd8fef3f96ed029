"""Kernel files look alike: one list of ops, and one vocabulary for pointers, blocks and parts of an op."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from fastdiff_bench import cases
from fastdiff_kernels import attention, names

PACKAGE = Path(attention.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def jitted() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file, tree in FILES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and "jit" in map(ast.unparse, node.decorator_list):
                yield file, node


def pointers(function: ast.FunctionDef) -> set[str]:
    """Names at the start of every address that is loaded from or stored to."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    addresses = [call.args[0] for call in calls if ast.unparse(call.func) in ("tl.load", "tl.store")]
    return {_first(address) for address in addresses}


def _first(address: ast.expr) -> str:
    while isinstance(address, ast.BinOp):
        address = address.left
    return ast.unparse(address)


def test_names_are_free_of_torch() -> None:
    code = "import sys, fastdiff_kernels.names; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, timeout=240).returncode == 0


def test_every_op_has_a_file_and_its_cases() -> None:
    for op in names.KERNELS:
        import_module(f"fastdiff_kernels.{op}")
    assert cases.KERNELS == names.KERNELS
    assert {case.op for case in cases.cases(cases.KERNELS)} == set(names.KERNELS)
    assert {case.op for case in cases.cases()} == {*names.OPS, "attention"}


def test_pointers_are_named_so() -> None:
    found = {(file, function.name): pointers(function) for file, function in jitted()}
    assert sum(map(len, found.values())) > 50
    wrong = {place: other for place, used in found.items() if (other := {n for n in used if not n.endswith("_ptr")})}
    assert not wrong


def test_kernels_carry_the_name_of_their_op_and_no_other() -> None:
    kernels = [function.name for _, function in jitted() if function.name.endswith("_kernel")]
    assert len(kernels) == len(set(kernels))
    starts = (
        "philox", "corrupt", "weighted_mse", "group_norm", "adaln", "dropout", "adamw", "adamw8bit", "bias_gradient",
        "short_attention",
    )  # fmt: skip
    assert {start for name in kernels for start in starts if name.lstrip("_").startswith(start)} == set(starts)
    assert all(name.lstrip("_").startswith(starts) for name in kernels)


def test_sizes_of_blocks_are_named_so() -> None:
    """Every constant that a block of numbers is as long as."""
    for file, function in jitted():
        constants = {a.arg for a in function.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"}
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        ranges = [call for call in calls if ast.unparse(call.func) in ("tl.arange", "tl.zeros")]
        sizes = {n.id for call in ranges for n in ast.walk(call) if isinstance(n, ast.Name)} & constants
        assert all(name.startswith("BLOCK_") for name in sizes), (file, function.name, sizes)


@pytest.mark.parametrize("file", sorted(FILES))
def test_reference_kernels_custom_op_and_public_functions_come_in_this_order(file: str) -> None:
    places = [place for node in FILES[file].body if (place := _place(node)) is not None]
    assert places == sorted(places)


def _place(node: ast.stmt) -> int | None:
    """0 for a reference of the op, 1 for a kernel, 2 for a custom op and its autograd, 3 for the op itself."""
    if isinstance(node, ast.FunctionDef):
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if "custom_op" in decorators or "register_fake" in decorators or node.name in ("_setup_context", "_backward"):
            return 2
        if node.name.endswith("_kernel"):
            return 1
        if node.name.endswith("_reference"):
            return 0
        arguments = [*node.args.args, *node.args.kwonlyargs]
        public = arguments and arguments[-1].arg == "backend" and not node.name.startswith("_")
        return 3 if public else None
    return 2 if isinstance(node, ast.Expr) and "register_autograd" in ast.unparse(node) else None
