"""Programs step in sessions, each in its own processes; one that fails is left out and reported."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from fastdiff_bench.measure import interleaved as measuring
from fastdiff_bench.measure.interleaved import Effort, Program, Result, ran_out, ratios, run_interleaved
from fastdiff_bench.measure.session import Steps
from fastdiff_bench.records.fingerprint import ROOT
from tests.support.benches import programs
from tests.support.benches.forked_programs import forked_programs


@pytest.fixture
def forked() -> Iterator[None]:
    """Programs that need not import everything anew."""
    with forked_programs():
        yield


@pytest.fixture
def short_parting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that hangs does not end by itself, however long it is given."""
    monkeypatch.setattr(measuring, "_PARTING_SECONDS", 0.1)


def interleaved(
    *programs: Program, limit_seconds: float = 120.0, warm_up: int = 2, device: str = "cpu"
) -> list[Result]:
    effort = Effort(rounds=3, steps=2, warm_up=warm_up, limit_seconds=limit_seconds)
    return list(run_interleaved(programs, effort, device=device).values())


@pytest.mark.usefixtures("forked")
def test_programs_step_in_turns_and_the_failed_one_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps"
    a, broken, b = interleaved(
        Program("a", programs.writing, (file, "a"), environment={"GIVEN": "a's"}),
        Program("broken", programs.failing, (4,)),
        Program("b", programs.writing, (file, "b")),
    )
    assert file.read_text() == "aabb" + 3 * "aabb", "the warm-up of each, then the rounds"
    assert (a.facts["given"], b.facts["given"]) == ("a's", None)
    for result, word in ((a, "a"), (b, "b")):
        assert result.failure is None
        assert result.facts["word"] == word
        assert [len(session.seconds) for session in result.sessions] == [2, 2, 2]
        assert all(second >= 0.01 for second in result.seconds)
        assert result.timing.repetitions == 6
        inside = [s for session in result.sessions for s in session.phases["sleep"]]
        assert all(0.01 <= part <= whole for part, whole in zip(inside, result.seconds, strict=True))
        assert result.phase("sleep").median <= result.timing.median
        assert result.memory is not None
        assert result.memory.peak == result.memory.resident > 0
    assert broken.failure == "ValueError: step 4"
    assert not broken.out_of_memory
    assert len(broken.sessions) == 0, "it took the warm-up, and failed in its first session"
    assert "ValueError: step 4" in capfd.readouterr().err, "with what it printed"


@pytest.mark.usefixtures("forked")
def test_each_way_to_end_is_told_apart() -> None:
    memory, system, crashed, ended = interleaved(
        Program("memory", programs.out_of_memory),
        Program("system", programs.killed, (signal.SIGKILL,)),
        Program("crashed", programs.killed, (signal.SIGABRT,)),
        Program("ended", programs.ending),
        warm_up=0,
    )
    assert (memory.failure, memory.out_of_memory) == ("OutOfMemoryError: CUDA out of memory", True)
    assert (system.failure, system.out_of_memory) == (
        "the process was killed, probably by the system's out-of-memory killer", True,
    )  # fmt: skip
    assert (crashed.failure, crashed.out_of_memory) == ("the process ended without a message, with exit code -6", False)
    assert (ended.failure, ended.out_of_memory) == (
        "RuntimeError: the program ended before it had taken all steps", False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_has_many_names(error: BaseException, expected: bool) -> None:
    """And is the cause of other errors, or what they came on top of."""
    assert ran_out(error) is expected
    assert ran_out(raised(lambda: wrap(error))) is expected
    assert ran_out(raised(lambda: raise_on_top(error))) is expected


def test_torch_compile_wraps_what_ran_out_of_memory() -> None:
    """As it really does."""

    def backend(graph: object, inputs: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    error = raised(lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1)))
    assert not isinstance(error, torch.OutOfMemoryError)
    assert ran_out(error)


def raised(action: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    return caught.value


def wrap(error: BaseException) -> None:
    raise KeyError("wrapped") from error


def raise_on_top(error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        raise KeyError("while it was handled")  # noqa: B904


@pytest.mark.usefixtures("forked", "short_parting")
def test_a_program_that_hangs_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (result,) = interleaved(Program("hanging", programs.hanging, (file,)), limit_seconds=1)
    assert result.failure == "no answer within 1 s"
    # On a machine with much to do it may not have come so far.
    pid = file.read_text() if file.exists() else ""
    assert not pid or not psutil.pid_exists(int(pid))


@pytest.mark.usefixtures("forked", "short_parting")
def test_all_ranks_end_when_one_fails() -> None:
    """The first one, which waits, is not waited for."""
    (result,) = interleaved(Program("two", programs.second_rank_fails, ranks=2), limit_seconds=3600)
    assert result.failure == "ValueError: I am the second"
    assert result.facts == {"rank": "0", "ranks": "2"}


@pytest.mark.usefixtures("forked")
def test_peak_memory_is_what_the_process_knows() -> None:
    (result,) = interleaved(Program("allocating", programs.allocating))
    assert result.memory is not None
    assert result.memory.allocated is result.memory.reserved is None
    assert result.memory.resident == pytest.approx(result.facts["high_water"], rel=0.1)
    assert result.memory.resident >= float(result.facts["before"] or 0) + 0.9 * programs.BALLAST


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_allocator() -> None:
    (result,) = interleaved(Program("allocating", programs.allocating), device="cuda")
    assert result.memory is not None
    assert result.memory.peak == result.memory.allocated == result.facts["allocated"]
    assert result.memory.reserved == result.facts["reserved"]
    assert programs.BALLAST <= result.memory.peak < 1.1 * programs.BALLAST


@pytest.mark.gpu
def test_times_on_a_gpu_are_those_of_the_gpu() -> None:
    """The host has given it the work long before it is done."""
    cycles = 100_000_000
    (result,) = interleaved(Program("waiting", programs.waiting_on_the_gpu, (cycles,)), device="cuda")
    assert result.failure is None
    assert result.phase("long").p20 > 0.02, "at 5 GHz at most"
    assert result.phase("short").p80 < 0.1 * result.phase("long").median
    assert result.timing.median == pytest.approx(result.phase("long").median, rel=0.1)
    assert float(result.facts["host"] or 0) < 0.1 * result.phase("long").median


@pytest.mark.usefixtures("forked")
def test_the_first_steps_of_a_session_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    effort = Effort(rounds=2, steps=2, warm_up=1, settling=3)
    (result,) = run_interleaved([Program("a", programs.writing, (file, "a"))], effort, device="cpu").values()
    assert file.read_text() == (1 + 2 * (3 + 2)) * "a"
    assert [(len(session.seconds), len(session.phases["sleep"])) for session in result.sessions] == [(2, 2), (2, 2)]
    steps = Steps([9.0, 1.0, 2.0], {"data": [8.0, 0.0, 0.5]}, 3.0, 4)
    assert steps.without_first(1) == Steps([1.0, 2.0], {"data": [0.0, 0.5]}, 2.0, 4)


@pytest.mark.nightly
def test_nothing_is_left_behind() -> None:
    """Not in the system's folder, and no semaphore that the system keeps and the tracker warns of in the end.

    The program is spawned, as by a benchmark.
    """
    script = (
        "from fastdiff_bench.measure.interleaved import Effort, Program, run_interleaved\n"
        "from tests.support.benches import programs\n"
        "if __name__ == '__main__':\n"
        "    program = Program('a', programs.leaving, environment={'GIVEN': 'given'})\n"
        "    found = run_interleaved([program], Effort(2, 1, 1), device='cpu')['a']\n"
        "    print(found.facts['folder'], found.facts['given'], found.failure)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    folder, given, failure = done.stdout.split()
    assert (given, failure) == ("given", "None")
    assert not Path(folder).parent.exists()
    assert done.stderr == ""


def test_ratios_are_taken_round_by_round() -> None:
    fast = Result(sessions=[Steps([1.0, 1.0]), Steps([2.0, 2.0])])
    slow = Result(sessions=[Steps([2.0, 2.0]), Steps([6.0, 6.0])])
    assert (ratios(fast, slow).median, ratios(slow, fast).median) == pytest.approx((2.5, (1 / 2 + 1 / 3) / 2))
    assert ratios(fast, slow).repetitions == 2
