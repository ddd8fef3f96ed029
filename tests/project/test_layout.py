"""The architecture, checked over the syntax trees (design: who may import whom, and which names are not free)."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import fastdiff

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "fastdiff").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
BENCH = sorted((ROOT / "bench").rglob("*.py"))

# The packages, from the bottom up, and what each may import: itself and what stands here. "" is the core: the modules
# below all packages.
PACKAGES: dict[str, set[str]] = {
    "": set(),
    "plugins": {""},
    "ledger": {""},
    "config": {"", "plugins"},
    "parallel": {""},
    "diffusion": {"", "config", "parallel"},
    "checkpoint": {"", "config", "parallel"},
    "models": {"", "plugins", "config", "diffusion"},
    "planning": {"", "config", "models"},
    "data": {"", "plugins", "config", "parallel", "models"},
    "sampling": {"", "config", "parallel", "diffusion", "checkpoint", "models", "data"},
    "evaluation": {"", "plugins", "config", "parallel", "diffusion", "models", "data", "sampling"},
    "training": {
        "", "plugins", "ledger", "config", "parallel", "diffusion", "checkpoint", "models", "planning", "data",
        "sampling", "evaluation",
    },
    "cluster": {"", "ledger", "config", "parallel", "checkpoint", "models", "data"},
    "export": {"", "config", "parallel", "diffusion", "checkpoint", "models", "data", "sampling", "training"},
    "dashboard": {"", "ledger", "config", "diffusion", "evaluation"},
    "api": {
        "", "plugins", "ledger", "config", "checkpoint", "data", "evaluation", "sampling", "cluster", "export",
        "dashboard",
    },
    "cli": {
        "", "plugins", "ledger", "config", "parallel", "checkpoint", "models", "planning", "data", "sampling",
        "evaluation", "training", "cluster", "export", "dashboard",
    },
    "__main__": {"cli"},
    "train": {"", "ledger", "config", "parallel", "training", "cluster"},
    "fastdiff": {"", "api"},
}  # fmt: skip
CORE = {
    "batch", "conditions", "console", "durations", "errors", "exit_message", "files", "json_lines", "live_line",
    "optional_packages", "outputs", "buffered_writes", "plurals", "private_folders", "process_limits", "progress",
    "progress_bar", "rng", "run_files", "sanitize", "standard_streams", "starting", "tables", "tags", "terminal",
    "verbosity", "version",
}  # fmt: skip
FREE_OF_TORCH = (
    "ledger",
    "conditions",
    "config",
    "dashboard",
    "errors",
    "exit_message",
    "files",
    "sanitize",
    "progress",
    "console",
    "standard_streams",
    "live_line",
    "progress_bar",
    "starting",
    "tables",
    "terminal",
    "json_lines",
    "run_files",
    "outputs",
    "buffered_writes",
    "plugins.user_code",
    "version",
    "api.config",
)


def module_name(path: Path) -> str:
    top = path.relative_to(ROOT).parts[0]
    base = ROOT / top if top in ("kernels", "bench") else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@dataclass(frozen=True)
class Module:
    """What the tests ask about a file, so that each is parsed once."""

    imports: tuple[str, ...]
    """Absolute names of everything that it imports, at any depth."""
    at_run_time: tuple[str, ...]
    """Those without the ones that are imported only for types."""
    functions: tuple[tuple[str, int], ...]
    """Name and lines of each."""


@cache
def contents(path: Path) -> Module:
    tree = syntax(path)
    inside = [
        (node.name, (node.end_lineno or node.lineno) - node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    return Module(tuple(_imports(tree, type_checking=True)), tuple(_imports(tree, type_checking=False)), tuple(inside))


def imports(path: Path) -> tuple[str, ...]:
    """Absolute names of everything that a file imports, at any depth."""
    return contents(path).imports


def _imports(tree: ast.Module, *, type_checking: bool) -> Iterator[str]:
    for node in _walk(tree, type_checking):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module != "fastdiff":  # from there come modules, or else the names of the facade
                yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            # Of a name that is put together, what stands before the first part that varies.
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            yield ast.literal_eval(name).rstrip(".")


def _name(function: ast.expr) -> str:
    """The last name of what is called."""
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _guards_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _walk(tree: ast.Module, type_checking: bool) -> Iterator[ast.AST]:
    """The nodes of a file in any order; not ``type_checking``: without what is imported only for types."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, ast.If) and _guards_types(node) and not type_checking:
            left += [node.test, *node.orelse]
        else:
            left += ast.iter_child_nodes(node)


def importers(of: str, paths: Sequence[Path] = SOURCES) -> set[str]:
    """Modules that import ``of`` or something below it."""
    return {
        module_name(path) for path in paths if any(name == of or name.startswith(f"{of}.") for name in imports(path))
    }


def test_only_the_engine_imports_deepspeed() -> None:
    assert importers("deepspeed") == {
        "fastdiff.training.engines.deepspeed", "fastdiff.training.zero.linear_layers", "fastdiff.training.zero.norm",
        "fastdiff.training.zero.ordered_shards", "fastdiff.training.zero.refusals", "fastdiff.training.zero.shortcuts",
        "fastdiff.training.zero.slices", "fastdiff.training.zero.stage3",
    }  # fmt: skip


def test_only_the_kernel_package_imports_triton() -> None:
    assert all(name.startswith("fastdiff_kernels") for name in importers("triton"))
    assert importers("triton")


def test_nobody_imports_the_entry_point_bench_or_tests() -> None:
    assert importers("fastdiff.train") == importers("tests") == set()
    assert importers("fastdiff_bench") == {"fastdiff.cli.bench"}, "for the completion of its flags"
    assert importers("fastdiff.config.command_line.train_flags") == {
        "fastdiff.train",
        "fastdiff.cluster.launchers.job",
        "fastdiff.cluster.supervisor.main",
        "fastdiff.cli.compat.run",
        "fastdiff.cli.completion",
        "fastdiff.cli.demo_t2i",
        "fastdiff.cli.machines.plan",
        "fastdiff.cli.published_weights",
    }


def test_nothing_below_imports_the_facade() -> None:
    """The version and the folder of the package have a module of their own, ``fastdiff.version``."""
    names = {"fastdiff", *(f"fastdiff.{name}" for name in fastdiff.__all__)}
    for path in SOURCES:
        assert not names.intersection(imports(path)) - {"fastdiff.train"}, path


def test_bench_uses_the_loop_and_not_the_commands() -> None:
    """Except where it runs what ``fastdiff compat`` prints."""
    translated = {"fastdiff_bench.trainers.scripts.translated"}
    loops = {f"fastdiff_bench.trainers.{name}" for name in ("ours", "saving", "tiny_run", "online_teacher")}
    assert importers("fastdiff.training.loop", BENCH) - translated == loops
    assert importers("fastdiff.train", BENCH) == set()
    assert (
        importers("fastdiff.config.command_line.train_flags", BENCH) | importers("fastdiff.cli.main", BENCH)
        == translated
    )


def test_kernels_depend_on_torch_and_triton_only() -> None:
    """And attention on xformers, where it is installed; no import of the package reaches it."""
    allowed = set(sys.stdlib_module_names) | {"torch", "triton", "fastdiff_kernels"}
    for path in SOURCES:
        if "kernels" in path.relative_to(ROOT).parts:
            optional = {"xformers"} if path.stem == "attention" else set()
            assert {name.split(".")[0] for name in imports(path)} <= allowed | optional, path
    attention = syntax(ROOT / "kernels" / "fastdiff_kernels" / "attention.py")
    at_import = [ast.unparse(node) for node in attention.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("xformers" in line for line in at_import)


def package_of(module: str) -> str:
    """The package of a module of fastdiff; "" for the core, "fastdiff" for the package with its lazy names."""
    first = module.partition(".")[2].partition(".")[0] or "fastdiff"
    return "" if first in CORE else first


def test_every_module_lies_in_a_package() -> None:
    assert {package_of(module_name(path)) for path in SOURCES if "kernels" not in path.parts} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downward_only(package: str) -> None:
    """Whatever a package imports stands in its row, and every row is needed."""
    found = {}
    for path in SOURCES:
        if "kernels" in path.parts or package_of(module_name(path)) != package:
            continue
        for name in imports(path):
            if name.startswith("fastdiff.") and package_of(name) != package:
                found.setdefault(package_of(name), f"{module_name(path)} imports {name}")
    assert {other: line for other, line in found.items() if other not in PACKAGES[package]} == {}
    assert set(found) == PACKAGES[package]


def test_rows_name_only_packages_below() -> None:
    order = list(PACKAGES)
    for package, below in PACKAGES.items():
        assert all(order.index(other) < order.index(package) for other in below), package


def test_packages_build_nothing() -> None:
    """An ``__init__.py`` is a docstring; the package of the presets is their list, that of the cluster a setting."""
    for path in (ROOT / "fastdiff").rglob("__init__.py"):
        body = syntax(path).body
        assert isinstance(body[0], ast.Expr), path
        if path.parent.name not in ("fastdiff", "presets", "cluster"):
            assert len(body) == 1, path


def test_import_direction_has_no_cycle() -> None:
    graph = {module_name(path): set(contents(path).at_run_time) for path in SOURCES}
    graph = {module: {n for n in names if n in graph and n != module} for module, names in graph.items()}
    # A package's __init__ may collect its own modules, which import one another but not the package.
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in graph[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_free_of_torch() -> None:
    """So that --help and a typing error answer at once: no module of these packages brings it in."""
    names = [name for package in FREE_OF_TORCH for name in modules_of(package)]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules: sys.exit(name)"
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def modules_of(package: str) -> list[str]:
    folder = ROOT / "fastdiff" / package
    return [module_name(path) for path in folder.rglob("*.py")] if folder.is_dir() else [f"fastdiff.{package}"]


def test_no_module_shadows_another_one() -> None:
    """`deepspeed fastdiff/train.py` puts fastdiff/ first on sys.path: a `types.py` there would break `import torch`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [name for names in project["optional-dependencies"].values() for name in names]
    installed = {
        "".join(c if c.isalnum() else "_" for c in n.split(">")[0]) for n in project["dependencies"] + optional
    }
    taken = set(sys.stdlib_module_names) | installed | {"kernels", "evaluate", "datasets", "utils"}
    names = {path.stem if path.is_file() else path.name for path in (ROOT / "fastdiff").iterdir()}
    assert not names & taken


def test_kernels_is_not_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()


def test_a_pip_package_named_kernels_wins_over_our_folder(tmp_path: Path) -> None:
    """The regular package wins over our folder of the same name, which is at most a namespace portion."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def get_kernel():\n    return 'the pip package'\n")
    code = f"import sys; sys.path.append({str(package.parent)!r}); from kernels import get_kernel; print(get_kernel())"
    for command in ([sys.executable, "-c", code], [sys.executable, "-c", "import fastdiff_kernels; " + code]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == "the pip package", done.stderr


def test_the_loop_reads_as_prose() -> None:
    """At most 20 statements; no rank checks, no reads from the device, no modulo, no dtypes and devices, no try."""
    tree = syntax(ROOT / "fastdiff" / "training" / "loop.py")
    loop = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "take_steps")
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    assert any(isinstance(node, ast.While) for node in inside), "this is the loop"
    assert sum(isinstance(node, ast.stmt) for node in inside) <= 20
    assert not any(isinstance(node, ast.Try | ast.Mod) for node in inside)
    names = {node.attr for node in inside if isinstance(node, ast.Attribute)}
    names |= {node.id for node in inside if isinstance(node, ast.Name)}
    others = {"rank", "is_first", "item", "tolist", "cuda", "cpu", "to", "device", "dtype", "precision", "torch"}
    assert not names & others


def test_functions_stay_small() -> None:
    for path in [*SOURCES, *BENCH]:
        for name, lines in contents(path).functions:
            assert lines < 60, f"{path}: {name}"


def test_no_junk_drawers() -> None:
    assert not {path.stem for path in [*SOURCES, *BENCH]} & {"utils", "common", "helpers", "misc"}
