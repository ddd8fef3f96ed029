"""The site of the documentation: it builds, and its generated parts are those of the code."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fastdiff import errors
from fastdiff.cluster.supervisor.nodes import NodeError
from tests.support.processes import ROOT

QUICK = {"dit-small-images"}
"""Presets whose plans are compared in every run of the tests; all are at night."""


@cache
def script(name: str) -> ModuleType:
    """A module of docs/scripts, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """With every link and anchor, and every name of the reference; ``make docs`` builds it too."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference" / "kernels.html").read_text()
    assert 'id="fastdiff_kernels.noising.corrupt"' in reference
    assert (tmp_path / "site" / "deepspeed_configs" / "index.html").is_file()
    assert not (tmp_path / "site" / "scripts").exists()
    page = (tmp_path / "site" / "architecture.html").read_text()
    assert not re.findall(r'href="[^"]*\.py"', page), "links to code are plain text"


def plans() -> list[tuple[str, str, str]]:
    return [
        (page.name, spec, table)
        for page in script("plans").PAGES
        for spec, table in script("plans").blocks(page.read_text())
    ]


def test_every_recipe_and_the_training_methods_have_a_plan() -> None:
    without = {"index.md", "own-network.md"}
    assert {page for page, *_ in plans()} == {page.name for page in script("plans").PAGES} - without


def expected_of(spec: str, table: str) -> None:
    assert script("plans").table(spec) == table, "python docs/scripts/plans.py"


@pytest.mark.parametrize(("spec", "table"), [pytest.param(s, t, id=s) for _, s, t in plans() if s.split()[1] in QUICK])
def test_the_tables_of_plans_are_those_of_the_command(spec: str, table: str) -> None:
    expected_of(spec, table)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spec", "table"), [pytest.param(s, t, id=s) for _, s, t in plans() if s.split()[1] not in QUICK]
)
def test_the_tables_of_large_plans_are_those_of_the_command(spec: str, table: str) -> None:
    expected_of(spec, table)


def test_the_exit_codes_of_the_page_are_those_of_the_classes() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    told = {int(code) for code in re.findall(r"^\| (\d+) \| [a-z]", page.split("## Faults")[0], re.MULTILINE)}
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    raised = {kind.exit_code for kind in classes if issubclass(kind, errors.FastdiffError)}
    assert told == raised | {0, NodeError.exit_code, 130}


def test_every_page_is_in_the_navigation() -> None:
    navigation = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    found = re.findall(r"[\w./-]+\.md", navigation)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages | set(script("outside_pages").OUTSIDE) == set(found)
    assert len(found) == len(set(found))


def test_a_first_use_types_what_the_readme_shows() -> None:
    """The same commands and flags; only numbers and names differ."""
    page, readme = (ROOT / "docs" / "first-use.md").read_text(), (ROOT / "README.md").read_text()
    typed = re.findall(r"^\$ (.+)$", page, re.MULTILINE)
    assert len(typed) >= 6
    for command in typed:
        assert " ".join(command.split()[:2]) in readme, command
        for flag in re.findall(r"--[\w.-]+", command):
            assert f"{flag} " in readme, command
