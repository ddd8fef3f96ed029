"""No module follows from one condition that there is another: networks declare each by its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdiff.conditions import CAPTIONED, OF_IMAGE

ROOT = Path(__file__).parents[2]
NAMES = {*CAPTIONED, *OF_IMAGE}
NETWORKS = ("fastdiff/models/unet/", "fastdiff/config/networks/")
"""A network declares what it takes, and asks for all of it."""


def named(node: ast.AST) -> set[str]:
    """Conditions that code names: as a string, or by a variable, an attribute or an argument (``pooled_dim``)."""
    found = set()
    for part in ast.walk(node):
        match part:
            case ast.Constant(value=str(text)):
                found |= {text} & NAMES
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.keyword(arg=str(text)):
                # A context is also much else in Python.
                found |= {n for n in NAMES - {"context"} if text == n or text.startswith(f"{n}_")}
    return found


def asked(node: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """What code asks, and what depends on the answer."""
    match node:
        case ast.If():
            return [node.test], [*node.body, *node.orelse]
        case ast.IfExp():
            return [node.test], [node.body, node.orelse]
        case ast.BoolOp():
            return [*node.values[:-1]], [node.values[-1]]
        case ast.DictComp():
            return [test for loop in node.generators for test in loop.ifs], [node.key, node.value]
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            return [test for loop in node.generators for test in loop.ifs], [node.elt]
    return [], []


def inferred(tree: ast.AST) -> Iterator[str]:
    """Code that names a condition where another one is asked for."""
    for node in ast.walk(tree):
        tests, answers = asked(node)
        known = {name for test in tests for name in named(test)}
        if known and {name for answer in answers for name in named(answer)} - known:
            yield ast.unparse(node)


def test_no_module_infers_one_condition_from_another() -> None:
    sources = [path for part in ("fastdiff", "bench") for path in sorted((ROOT / part).rglob("*.py"))]
    others = [path for path in sources if not str(path.relative_to(ROOT)).startswith(NETWORKS)]
    assert len(others) > 300
    found = [(str(path.relative_to(ROOT)), code) for path in others for code in inferred(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        'if "pooled" in columns:\n    columns["time_ids"] = Column(dtype="float32", shape=(6,))',
        'if "pooled" in tensors:\n    tensors["time_ids"] = torch.tensor(sizes)',
        'absent |= set() if "pooled" in model.text_widths else {"time_ids"}',
        'if model.pooled_dim:\n    columns["time_ids"] = column',
        'sizes = {"time_ids": values} if config.pooled_dim else {}',
        'condition |= {"context_mask": ones} if "context" in condition else {}',
        'takes_sizes = "pooled" in columns and "time_ids"',
        '{name: time_ids(image) for name in columns if name == "pooled"}',
    ],
)
def test_an_inference_is_found(code: str) -> None:
    assert list(inferred(ast.parse(code)))
