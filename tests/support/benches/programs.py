"""Programs for tests of interleaved runs: programs that step well, and one for each way to fail."""

import multiprocessing
import os
import time
from pathlib import Path
from unittest import mock

import torch

from fastdiff.training.state import TrainState
from fastdiff_bench.measure import roofline
from fastdiff_bench.measure.roofline import Limits
from fastdiff_bench.measure.session import Enough, StepTimer
from fastdiff_bench.measure.timing import Effort
from fastdiff_bench.measure.workload import Workload

BROKEN_BATCH = 24
BALLAST = 2**28
"""Bytes."""
PER_SAMPLE = 2**22
"""Bytes."""
_KEPT: list[object] = []
_measure = roofline.measure


def writing(timer: StepTimer, file: Path, word: str) -> None:
    """Append a word to a file in every step."""
    timer.ready(word=word, given=os.environ.get("GIVEN"))
    while True:
        with timer.phase("sleep"):
            time.sleep(0.01)
        with file.open("a") as lines:
            lines.write(word)
        timer.after_step()


def failing(timer: StepTimer, step: int) -> None:
    """Fail in a step, counted from 1."""
    timer.ready()
    for number in range(1, step + 1):
        if number == step:
            raise ValueError(f"step {step}\nand more")
        timer.after_step()


def ending(timer: StepTimer) -> None:
    """Return after a step; programs should step without end."""
    timer.ready()
    timer.after_step()


def waiting_on_the_gpu(timer: StepTimer, cycles: int) -> None:
    """Give the GPU work in one of two phases, and say how long the host took for it."""
    timer.ready()
    while True:
        begin = time.perf_counter()
        with timer.phase("long"):
            torch.cuda._sleep(cycles)
        timer.facts["host"] = time.perf_counter() - begin
        with timer.phase("short"):
            torch.cuda._sleep(1)
        timer.after_step()


def leaving(timer: StepTimer) -> None:
    """Leave a file and a semaphore behind, and report its folder."""
    timer.ready(folder=str(timer.folder), given=os.environ.get("GIVEN"))
    assert timer.folder is not None
    (timer.folder / "left").write_text("left")
    _KEPT.append(multiprocessing.get_context("spawn").Lock())
    while True:
        timer.after_step()


def out_of_memory(timer: StepTimer) -> None:
    timer.ready()
    raise torch.OutOfMemoryError("CUDA out of memory")


def killed(timer: StepTimer, number: int) -> None:
    timer.ready()
    os.kill(os.getpid(), number)


def hanging(timer: StepTimer, file: Path) -> None:
    file.write_text(str(os.getpid()))
    timer.ready()
    time.sleep(3600)


def second_rank_fails(timer: StepTimer) -> None:
    """Fail on the second rank while the first waits for it."""
    timer.ready(rank=os.environ["RANK"], ranks=os.environ["WORLD_SIZE"])
    if os.environ["RANK"] == "1":
        raise ValueError("I am the second")
    time.sleep(3600)


def allocating(timer: StepTimer) -> None:
    """Hold much memory in one step only, and report the peak that the process measured itself."""
    timer.ready(before=_high_water())
    timer.after_step()
    ballast = torch.ones(BALLAST // 4, device=timer.device)
    del ballast
    while True:
        try:
            timer.after_step()
        except Enough:
            timer.facts["high_water"] = _high_water()
            if timer.device.type == "cuda":
                statistics = torch.cuda.memory_stats()
                timer.facts["allocated"] = statistics["allocated_bytes.all.peak"]
                timer.facts["reserved"] = statistics["reserved_bytes.all.peak"]
            raise


def ours(
    timer: StepTimer,
    workload: Workload,
    data: Path,
    unmarked: int | None = None,
    traced: tuple[Path, int] | None = None,
) -> None:
    """fastdiff's own loop; it has too little memory for one batch size.

    Its times are those of the processor, which other processes on the machine do not stretch.
    """
    timer._mark = time.process_time
    if workload.batch == BROKEN_BATCH:
        raise torch.OutOfMemoryError("CUDA out of memory")
    from fastdiff_bench.trainers import ours

    ours.run(timer, workload, data, unmarked, traced)


def watched(
    timer: StepTimer,
    workload: Workload,
    data: Path,
    unmarked: int | None = None,
    traced: tuple[Path, int] | None = None,
) -> None:
    """fastdiff's own loop, with CUDA graphs that run operation by operation; it counts steps that end in 16 bits."""
    from fastdiff.models import fp8
    from fastdiff.models.delayed_scales import PLAIN
    from fastdiff_bench.trainers import ours
    from tests.support.watched_graphs import watching

    on_step, in_16_bits = ours.AfterStep.on_step, 0

    def counted(self: ours.AfterStep, state: TrainState) -> None:
        nonlocal in_16_bits
        in_16_bits += state.scales.forms == PLAIN
        timer.facts["in_16_bits"] = in_16_bits
        on_step(self, state)

    patches = mock.patch.object(fp8, "LEAST", 64), mock.patch.object(ours.AfterStep, "on_step", counted)
    with watching(), patches[0], patches[1]:
        ours.run(timer, workload, data, unmarked, traced)


def growing(timer: StepTimer, workload: Workload, data: Path, unmarked: int | None, *, failing: bool = False) -> None:
    """Hold so much memory per sample of the batch in every step."""
    from fastdiff_bench.measure.stepping import PHASES

    names = ("graph_breaks", "compilations", "last_compilation", "last_capture", "compiled_anew", "from_cache")
    compiled = dict.fromkeys(names, 0)
    timer.ready(parameters=1, device="cpu", start_s=1.0, **compiled)
    while True:
        held = torch.ones(workload.samples * PER_SAMPLE // 4)
        for name in PHASES[:-1]:
            with timer.phase(name):
                held[:1] += 1
        del held
        timer.after_step()
        if failing and unmarked is not None and timer.sessions > unmarked:
            raise ValueError("marked")


def failing_with_marks(timer: StepTimer, workload: Workload, data: Path, unmarked: int) -> None:
    """Step well as long as nothing is marked."""
    growing(timer, workload, data, unmarked, failing=True)


def wrong(timer: StepTimer, workload: Workload, data: Path, unmarked: int) -> None:
    """Fail, but not for memory."""
    raise ValueError("wrong")


def small_limits(device: str, care: Effort) -> Limits:
    """Limits of the machine from small products, in whatever process: a large one in bf16 takes seconds."""
    copied, side = roofline._COPIED_BYTES, roofline._SIDE
    with mock.patch.dict(copied, {device: 2**20}), mock.patch.dict(side, {device: 64}):
        return _measure(device, care)


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("no high-water mark")
