"""Code outside the folders of the optimizers asks the record of an optimizer, never its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdiff.config.optimizers.registry import _BUILT_IN

ROOT = Path(__file__).parents[2]
OWN = [ROOT / "fastdiff/config/optimizers", ROOT / "fastdiff/training/optimizer"]
SOURCES = [
    path
    for folder in ("fastdiff", "bench")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(path.is_relative_to(own) for own in OWN)
]
NAMES = {family.name for family in _BUILT_IN}


def branches(tree: ast.AST) -> Iterator[str]:
    """Code that depends on the name of an optimizer: comparisons, patterns, keys of tables and look-ups by it."""
    for node in ast.walk(tree):
        asked: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Dict):
            asked = [*node.keys]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = [*node.args] if node.func.attr in ("startswith", "endswith", "get") else []
        literals = {one.value for part in asked if part for one in ast.walk(part) if isinstance(one, ast.Constant)}
        if literals & NAMES:
            yield ast.unparse(node)


def test_nobody_branches_on_the_name_of_an_optimizer() -> None:
    found = {(str(path.relative_to(ROOT)), code) for path in SOURCES for code in branches(ast.parse(path.read_text()))}
    assert not found, "ask its OptimizerFamily (fastdiff.config.optimizers.registry.family_of)"


@pytest.mark.parametrize(
    "code",
    [
        "config.optim.name == 'adamw'",
        "'adamw8bit' != name",
        "name in ('adamw', 'adamw8bit')",
        "(precision, name) == ('fp32', 'adamw')",
        "{'adamw': 8, 'other': 2}[name]",
        "tables['adamw8bit-bnb']",
        "name.startswith('adamw')",
        "match name:\n    case 'adamw': pass",
    ],
)
def test_every_way_to_branch_is_found(code: str) -> None:
    assert list(branches(ast.parse(code)))
