"""A run that starts again on another node compiles nothing: the compiler is a script that counts its calls."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fastdiff_bench.measure.warm_start import note_calls
from tests.support.processes import Finished, run
from tests.support.runs import flags, losses, tiny
from tests.support.scripts import COMMAND


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C++ compiler that notes each call beside itself."""
    for folder in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # a compilation in this process leaves them set
        monkeypatch.delenv(folder, raising=False)
    compiler = tmp_path / "counting-g++"
    note_calls(compiler, str(shutil.which("g++")), tmp_path / "calls")
    return compiler


def start_on(node: Path, data: Path, folder: Path, compiler: Path, **environment: str) -> tuple[Finished, list[str]]:
    """Train on a node with an empty disk of its own; return the run, and how the compiler was called."""
    node.mkdir(exist_ok=True)
    calls = compiler.with_name("calls")
    calls.unlink(missing_ok=True)
    given = flags(tiny(data, folder, steps=2, performance__compile=True))
    shared = {"FASTDIFF_CACHE": str(compiler.parent / "home"), "CXX": str(compiler)}
    variables: dict[str, Any] = {"TMPDIR": str(node), "TORCHINDUCTOR_COMPILE_THREADS": "1", **shared, **environment}
    done = run([COMMAND, "train", *given], **variables)
    assert done.code == 0, done.output
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_a_start_on_another_node_calls_no_compiler(digits: Path, tmp_path: Path, counting: Path) -> None:
    cold, calls = start_on(tmp_path / "node-a", digits, tmp_path / "a", counting)
    assert "none for this network and machine yet; compiling for the first time" in cold.output
    assert "kernels kept in" in cold.output
    assert sum(".so" in call for call in calls) > 5
    assert not any("torchinductor_" in call for call in calls), "headers, which a kill leaves torn, are not torch's own"
    warm, calls = start_on(tmp_path / "node-b", digits, tmp_path / "b", counting)
    assert calls == [], "not even for its version"
    assert f"kernels from {tmp_path / 'home'}" in warm.output
    assert "compiled 1 graphs" in cold.output
    assert "loaded 1 graphs" in warm.output
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    names = {path.suffix for run in ("a", "b") for path in (tmp_path / run).rglob("*")}
    assert not names & {".so", ".zip", ".cpp"}, "a run folder holds no code"


def test_a_folder_of_the_environment_wins(digits: Path, tmp_path: Path, counting: Path) -> None:
    own = tmp_path / "own"
    done, _ = start_on(tmp_path / "node", digits, tmp_path / "a", counting, TORCHINDUCTOR_CACHE_DIR=str(own))
    assert f"in TORCHINDUCTOR_CACHE_DIR={own}, as the environment says" in done.output
    assert list(own.rglob("*.so"))
    assert not (tmp_path / "home").exists()
