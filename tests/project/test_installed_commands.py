"""Every command of README, recipes and how-to pages, from the wheel in a new environment, outside of the repository."""

from pathlib import Path

import pytest

from tests.support.installed import standins, wheels
from tests.support.installed.documented import Folder, commands, reason_against
from tests.support.processes import ROOT

DOCUMENTS = [
    document
    for pattern in ("README.md", "docs/recipes/*.md", "docs/how-to/*.md")
    for document in sorted(ROOT.glob(pattern))
    if commands(document)
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> wheels.Environment:
    """The wheel in an environment of its own."""
    folder = tmp_path_factory.mktemp("installed")
    return wheels.Environment(folder / "venv", wheels.build(folder / "wheels"))


@pytest.mark.nightly
def test_the_wheel_needs_no_repository(tmp_path: Path, environment: wheels.Environment) -> None:
    """Configurations by name, records of the project and the template of their page; no package named bench."""
    names = ("bench", "fastdiff", "fastdiff_bench", "fastdiff_kernels")
    find = f"from importlib.util import find_spec; print(*map(find_spec, {names}))"
    found = environment.run(["python", "-c", find], tmp_path, 60).stdout
    assert found.startswith("None ")
    assert found.count(f"origin='{environment.bin.parent}/") == 3
    for command in (
        ["fastdiff", "train", "--preset", "digits", "--deepspeed", "zero3_offload", "--dry-run"],
        ["fastdiff", "bench", "report", "report.html"],
    ):
        done = environment.run(command, tmp_path, 300)
        assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    page = (tmp_path / "report.html").read_text()
    assert "2026-11-28_peers-dit" in page
    assert "fastdiff bench step --preset dit-s-2" in page
    assert "python -m bench" not in page


@pytest.fixture(scope="module")
def hub(environment: wheels.Environment) -> wheels.Environment:
    """With small pipelines in the cache of the hub."""
    standins.fill_hub(environment.home)
    return environment


@pytest.mark.nightly
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_of_a_document_runs(document: Path, tmp_path: Path, hub: wheels.Environment) -> None:
    """As far as a CPU and small stand-ins allow; a command that is not known is a failure."""
    problems = list(Folder(tmp_path / document.stem, hub).problems(document))
    assert not problems, "\n\n".join(problems)


def test_what_is_not_run_has_a_reason() -> None:
    """And is not most of it."""
    found = {command: reason_against(command) for document in DOCUMENTS for command in commands(document)}
    left_out = [command for command, reason in found.items() if reason]
    assert {"make demo", "make test"} <= {*left_out}
    assert len(left_out) < len(found) / 4
