"""``make test`` hides a GPU, ``make test-gpu`` takes the tests that are for one, and no others."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import select_for_gpu
from tests.support.processes import ROOT


def commands(target: str) -> list[str]:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return [line for line in done.stdout.replace("\\\n", "").splitlines() if "pytest" in line]


@pytest.mark.parametrize("target", ["test", "test-nightly", "test-cluster", "test-faults"])
def test_the_tests_of_a_cpu_see_no_gpu(target: str) -> None:
    found = commands(target)
    assert found
    assert all(line.lstrip("-").startswith("CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 ") for line in found)


def test_the_tests_of_a_gpu_compile_the_kernels() -> None:
    found = commands("test-gpu")
    assert found
    assert all(line.startswith("env -u TRITON_INTERPRET python -m pytest --gpu ") for line in found)


def test_what_times_something_has_the_gpu_to_itself() -> None:
    """The first command runs several tests at once in two folders, the second all others one after another."""
    shared, alone = (line.split() for line in commands("test-gpu"))
    folders = shared[shared.index(".reports/gpu.xml") + 1 :]
    assert folders == ["tests/ops", "tests/gpu"]
    assert "--numprocesses" in shared
    assert "--numprocesses" not in alone
    assert [alone[place + 1] for place, word in enumerate(alone) if word == "--ignore"] == folders
    assert not [word for word in alone if word.startswith("tests/") and alone[alone.index(word) - 1] != "--ignore"]


@dataclass(frozen=True)
class Item:
    path: Path
    marked: bool = False

    def get_closest_marker(self, name: str) -> bool:
        return self.marked and name == "gpu"


@pytest.mark.parametrize("wanted", [True, False])
def test_the_kernels_and_what_is_marked_are_chosen(wanted: bool) -> None:
    step = ROOT / "tests/training/forward_backward/test_step.py"
    marked, kernel, other = Item(step, marked=True), Item(ROOT / "tests/ops/adamw/test_adamw.py"), Item(step)
    left: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name: wanted, hook=hook)
    items: list[Any] = [other, marked, kernel]
    select_for_gpu(config, items)
    assert (items, left) == (([marked, kernel], [other]) if wanted else ([other, marked, kernel], []))
