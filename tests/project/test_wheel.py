"""What the wheels contain and say of themselves, and what else belongs to a release."""

import re
import subprocess
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml
from trove_classifiers import classifiers

import fastdiff
import fastdiff_kernels
import install
from tests.support.installed import wheels
from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """The wheel, and that of the kernels alone, open."""
    folder = tmp_path_factory.mktemp("wheels")
    projects = {"fastdiff": ROOT, "kernels": ROOT / "kernels"}
    return {name: zipfile.ZipFile(wheels.build(folder / name, project)) for name, project in projects.items()}


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def tracked(folder: str, pattern: str) -> set[str]:
    """Files of a folder of the repository, relative to it; without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/{pattern}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return {name.removeprefix(f"{folder}/") for name in done.stdout.splitlines() if (ROOT / name).exists()}


def contents(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_the_wheels_contain_the_packages_and_nothing_else(built: dict[str, zipfile.ZipFile]) -> None:
    """Whatever lies in the packages, so also templates, schema, the table of GPUs, and the marks of types."""
    of_kernels = {f"fastdiff_kernels/{name}" for name in tracked("kernels/fastdiff_kernels", "*")}
    assert contents(built["kernels"]) == of_kernels
    names = contents(built["fastdiff"])
    assert names == {
        *of_kernels,
        *(f"fastdiff/{name}" for name in tracked("fastdiff", "*")),
        *(f"fastdiff/deepspeed_configs/{name}" for name in tracked("deepspeed_configs", "*.json")),
        *(f"fastdiff_bench/{name}" for name in tracked("bench/fastdiff_bench", "*")),
        *(f"fastdiff_bench/results/{name}" for name in tracked("bench/results", "*.jsonl")),
    }
    assert {
        "fastdiff/planning/gpus.toml", "fastdiff/py.typed", "fastdiff/config/presets/digits.py",
        "fastdiff_bench/page/report.html.j2",
    } <= names  # fmt: skip
    for wheel in built.values():
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


@pytest.mark.parametrize("name", ["fastdiff", "kernels"])
def test_metadata(built: dict[str, zipfile.ZipFile], name: str) -> None:
    found = metadata(built[name])
    assert found["Author"] == "The fastdiff developers"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Summary"]
    assert found["Keywords"]
    assert found["Version"] == fastdiff.__version__ == fastdiff_kernels.__version__
    assert set(found.get_all("Classifier", [])) <= classifiers
    assert found.get_all("Project-URL") is None, "no address is ours"
    pythons = {text.rpartition(" ")[2] for text in found.get_all("Classifier", []) if re.search(r" 3\.\d+$", text)}
    assert pythons == {f"3.{minor}" for minor in range(install.PYTHONS[0][1], install.PYTHONS[1][1] + 1)}


def test_kernels_need_torch_and_triton_alone(built: dict[str, zipfile.ZipFile]) -> None:
    needed = metadata(built["kernels"]).get_all("Requires-Dist", [])
    assert {re.split(r"[<>=;]", text)[0] for text in needed} == {"torch", "triton"}
    assert {*needed} <= {*metadata(built["fastdiff"]).get_all("Requires-Dist", [])}


def test_extras() -> None:
    """``all`` is independent of CUDA, ``cuda12`` and ``cuda13`` are not, and their torch is that of the constraints."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_others = {"cuda12", "cuda13", "dali", "all", "dev", "docs"}
    parts = {text for name, texts in extras.items() if name not in of_others for text in texts}
    assert sorted(extras["all"]) == sorted(parts)
    assert "torch<2.11" in extras["cuda12"]
    assert "torch>=2.11" in extras["cuda13"]


def test_the_copy_of_the_licence_is_one() -> None:
    assert (ROOT / "kernels" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fastdiff.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_image_is_built_from_files_that_exist() -> None:
    """For both sets of versions, as install.py has them, by the extras that exist; nothing else goes to the builder."""
    text = (ROOT / "Dockerfile").read_text()
    for cuda in ("12", "13"):
        constraints = install.SETS[cuda].constraints
        assert re.search(
            rf"FROM nvidia/cuda:{cuda}\.\S+-runtime-\S+ AS cuda{cuda}\nENV CONSTRAINTS={constraints}\n", text
        )
    assert "[cuda${CUDA},all]" in text
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert all(list(ROOT.glob(name)) for name in kept)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.split("/")[0] for path in wheel["only-include"]} | {"pyproject.toml", "LICENSE", "README.md"} <= {
        *kept
    }
    (apt,) = re.findall(r"no-install-recommends \\\n\s+(.*?) \\", text)
    readme = re.search(r"`apt install (.*?)`", (ROOT / "README.md").read_text())
    assert readme is not None
    assert {*readme[1].split()} - {"make"} <= {*apt.split(), "python3"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml")), ids=lambda p: p.stem)
def test_forms_of_issues(path: Path) -> None:
    """What GitHub requires of a form; that of a bug asks for what tells most."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["type"] in ("input", "textarea", "dropdown", "checkboxes") for field in fields)
    assert all(field["attributes"]["label"] for field in fields)
    if path.stem == "bug_report":
        labels = " ".join(field["attributes"]["label"] for field in fields)
        assert "fastdiff doctor" in labels
        assert "run.json" in labels
