"""One training step: no reads from the device, no recompilation, and complete counts."""

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastdiff
from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.parallel.consensus import Consensus
from fastdiff.parallel.world import World
from fastdiff.training.guard import StepGuard
from fastdiff.training.loop import train
from tests.support.dispatch_modes import Operators
from tests.support.runs import launch, newest, records, tiny

OURS = str(Path(fastdiff.__file__).parent)
CONSENSUS = str(Path(fastdiff.__file__).parent / "parallel" / "consensus.py")
READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the reads of tensors in the main thread by their caller; the loader's thread may read host memory."""
    found: Counter[str] = Counter()
    originals = {name: getattr(Tensor, name) for name in READS}

    def watched(name: str):  # type: ignore[no-untyped-def]
        def read(self: Tensor, *args: object, **options: object) -> object:
            caller = sys._getframe(1).f_code.co_filename
            if threading.current_thread() is threading.main_thread():
                found["consensus" if caller == CONSENSUS else "fastdiff" if caller.startswith(OURS) else "other"] += 1
            return originals[name](self, *args, **options)

        return read

    for name in READS:
        setattr(Tensor, name, watched(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def reads_of_a_run(
    world: World, digits: Path, folder: Path, steps: int, stage: int, log_every: int, **options: Any
) -> int:
    """Return the reads by our own files in a whole run, except those of the consensus, which a GPU has sent by then."""
    config = tiny(digits, folder, steps=steps, output__log_every=log_every, **options)
    with counted_reads() as found:
        train(config, launch(stage), world)
    assert found["consensus"] == steps, "once per step"
    return found["fastdiff"]


SHORT, LONG = 11, 19
"""Steps of runs that record statistics equally often: after 1, 2, 5, 10 and the last one."""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_reads_nothing_from_the_device(world: World, digits: Path, tmp_path: Path, stage: int) -> None:
    """Eight more steps read nothing more, as long as no callback is due."""
    short = reads_of_a_run(world, digits, tmp_path / "short", SHORT, stage, log_every=100)
    long = reads_of_a_run(world, digits, tmp_path / "long", LONG, stage, log_every=100)
    assert long == short
    logging = reads_of_a_run(world, digits, tmp_path / "log", LONG, stage, log_every=1)
    assert logging > long, "a callback that is due does read"


def test_a_step_never_waits_for_the_whole_device(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's throughput timer would: `synchronize` at the start and end of every step."""
    from deepspeed.accelerator import get_accelerator

    waits: Counter[str] = Counter()
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *a: waits.update(["synchronize"]))
    train(tiny(digits, tmp_path / "run"), launch(3), world)
    few = waits.total()
    train(tiny(digits, tmp_path / "long", steps=12), launch(3), world)
    assert waits.total() - few == few


def test_plain_zero0_reads_one_flag_per_step(world: World, digits: Path, tmp_path: Path) -> None:
    """There DeepSpeed has no check for non-finite gradients, and ours reads what ZeRO's wrappers read elsewhere."""
    short = reads_of_a_run(world, digits, tmp_path / "short", SHORT, 0, 100, performance__engine="deepspeed")
    long = reads_of_a_run(world, digits, tmp_path / "long", LONG, 0, 100, performance__engine="deepspeed")
    assert long - short == LONG - SHORT


@pytest.mark.parametrize("patch", [2, 4])
def test_one_rank_without_a_file_has_the_numbers_of_zero1(
    world: World, digits: Path, tmp_path: Path, patch: int
) -> None:
    """To the bit if the sizes of all parameters are multiples of 16, otherwise up to rounding.

    PyTorch's AdamW rounds the last elements of a tensor differently, and ZeRO-1 has all parameters in one. Norm and
    factor of the clipping are equal to the bit, as the first two steps show.
    """
    starts = {"zero1": launch(1), "none": Launch()}
    shape = DiTConfig(depth=2, hidden=32, heads=2, patch=patch, channels=1, size=8, classes=10)
    for name, start in starts.items():
        train(tiny(digits, tmp_path / name, steps=12, optim__clip=0.5, model=shape), start, world)
    found = {name: [(r["loss"], r["grad_norm"]) for r in records(tmp_path / name)] for name in starts}
    assert found["none"][:2] == found["zero1"][:2]
    sizes = [math.prod(shape) for shape in newest(tmp_path / "none").manifest["parameters"].values()]
    assert all(size % 16 == 0 for size in sizes) == (patch == 4)
    if patch == 4:
        assert found["none"] == found["zero1"]
    for ours, theirs in zip(found["none"], found["zero1"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    norms = [norm for _, norm in found["none"]]
    assert norms[0] > 0.5 > min(norms), "the first step is clipped, some are not"


def test_a_run_that_began_under_zero1_keeps_it(world: World, digits: Path, tmp_path: Path) -> None:
    """As one rank did without a file, in earlier versions."""
    train(tiny(digits, tmp_path, steps=2), launch(1), world)
    train(tiny(digits, tmp_path, steps=4), Launch(), world)
    assert newest(tmp_path).manifest["zero_stage"] == 1
    train(tiny(digits, tmp_path / "new", steps=2), Launch(), world)
    assert newest(tmp_path / "new").manifest["zero_stage"] == 0


def test_the_update_on_one_rank_takes_as_many_operators_for_any_number_of_parameters(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm, clipping, optimizer and averages work on all tensors at once."""
    counts: list[int] = []

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with Operators() as operators:
                found = own(*arguments)
            counts.append(operators.total)
            return found

        return call

    monkeypatch.setattr(StepGuard, "take_step", counted(StepGuard.take_step))
    start = Launch()
    for depth in (1, 3):
        shape = DiTConfig(depth=depth, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10)
        train(tiny(digits, tmp_path / f"{depth}", steps=3, model=shape), start, world)
    assert len(counts) == 2 * 3
    assert counts[:3] == counts[3:]
    assert min(counts) > 0


def test_blocks_compile_whole_under_zero3(world: World, digits: Path, tmp_path: Path) -> None:
    """Zero graph breaks, one graph for all blocks, and the losses of the run that is not compiled."""
    eager = tiny(digits, tmp_path / "eager", steps=4)
    compiled = tiny(digits, tmp_path / "compiled", steps=4, performance__compile=True)
    train(eager, launch(3), world)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # a pool of compilers would import torch in each of them
        train(compiled, launch(3), world)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for a, b in zip(records(tmp_path / "eager"), records(tmp_path / "compiled"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_a_record_has_the_usual_fields(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", optim__schedule="linear"), launch(1), world)
    found = records(tmp_path / "run")
    assert [r["samples"] for r in found] == [16, 32, 48, 64, 80, 96]
    assert {"step", "loss", "lr", "grad_norm", "samples_per_s", "step_ms", "data_wait_ms", "peak_gib", "mfu"} <= set(
        found[0]
    )
    assert [r["lr"] for r in found] == pytest.approx([1e-2 * (6 - n) / 6 for n in range(6)]), "of this step"
    assert all(r["grad_norm"] > 0 and r["step_ms"] > r["data_wait_ms"] >= 0 for r in found)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("skips", [None, torch.ones(())], ids=["the host knows", "the device knows"])
def test_saves_that_failed_or_are_due_are_told(world: World, skips: Tensor | None) -> None:
    nothing: Any = SimpleNamespace(enter=lambda phase: None, discards=lambda step: False)
    engine: Any = SimpleNamespace(
        check_grads=lambda: skips, optimizer_step=lambda: None, finish_step=lambda *, skipped: False
    )
    guard = StepGuard(Consensus(world), nothing, nothing, accumulation=1)
    guard.failed_save = True
    guard.observe(torch.ones(2))
    guard.save_due = True
    guard.take_step(engine)
    assert (guard.flags.save_due, guard.flags.failed_save) == (True, True)
