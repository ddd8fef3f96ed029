"""What tests of several parts of the benchmarks share."""

from collections.abc import Iterator

import pytest

from fastdiff_bench.commands import step
from tests.support.benches import programs
from tests.support.benches.forked_programs import forked_programs


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the machine from small products, measured in this process."""
    monkeypatch.setattr(step, "in_another_process", lambda _, __, *given: programs.small_limits(*given))


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """The programs of a benchmark are forks; ``test_nothing_is_left_behind`` spawns them as a benchmark does."""
    with forked_programs():
        yield
