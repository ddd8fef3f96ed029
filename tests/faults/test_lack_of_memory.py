"""Out of memory in the midst of a step: the run goes on in smaller micro-batches as if nothing had happened."""

from __future__ import annotations

import json
import random
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import NoMemoryError, Preempted
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.train import take_steps, train
from fastdiff.training.build import build
from fastdiff.training.callbacks.compilation import compile_all
from fastdiff.training.memory.halving import _cause
from fastdiff.training.zero.catching_up import _COLLECTIVES, Collectives
from tests.support.forked import forked_ranks, values
from tests.support.injected import lack_of_memory
from tests.support.injected.lack_of_memory import Lack, fail, lacking
from tests.support.runs import (
    assert_same_checkpoint,
    distance,
    hexes,
    launch,
    losses,
    newest,
    records,
    tiny,
)

pytestmark = [pytest.mark.fault(31), pytest.mark.timeout(600)]

STEPS, SAMPLES = 4, 16
MODULES = ("objective", "x_embedder", "blocks.0", "blocks.0.attn", "blocks.1.mlp.fc1", "final_layer")
"""From the start of the network to its end; ZeRO-3 gathers each block as one."""
LIMIT = 1e-6
"""Of the losses of any step, and of weights, averages and moments, each together; relative, in fp32."""


@dataclass(frozen=True)
class Trial:
    """A run, and where its ranks run out of memory."""

    ranks: int
    engine: str
    stage: int
    lacks: tuple[Lack, ...]

    @property
    def plain(self) -> str:
        """Name of the undisturbed run."""
        return f"{self.engine}-{self.stage}-on-{self.ranks}"

    def config(self, data: Path, folder: Path) -> RunConfig:
        batch = BatchConfig(samples=SAMPLES, micro=8 // self.ranks)
        return tiny(
            data, folder, STEPS, batch=batch, ema__power_stds=(0.1,), optim__clip=0.5,
            performance__engine=self.engine, optim__lr=1e-3,
        )  # fmt: skip


KINDS = (("flat", 0), ("deepspeed", 0), ("deepspeed", 3), ("deepspeed", 1), ("deepspeed", 2))
"""Engine and ZeRO stage."""


def drawn(count: int) -> list[Trial]:
    """Draw trials: every kind of run and every part of a step in turn, at random places."""
    chance, found = random.Random(20), []
    for number in range(count):
        ranks, (engine, stage) = 1 + number % 2, KINDS[number // 2 % 5]
        where = ("backward", "forward", "step")[number // 10 % 3]
        if (engine, stage, where) == ("deepspeed", 0, "step"):  # which has no second try
            where = "forward"
        place = chance.randrange(ranks), chance.randrange(STEPS), chance.randrange(2), chance.choice(MODULES)
        if place[-1] == "objective" and where == "backward":  # which has no gradient
            place = (*place[:3], "blocks.1")
        found.append(Trial(ranks, engine, stage, (Lack(where, *place),)))  # type: ignore[arg-type]
    return found


def run_trials(world: World, digits: Path, folder: Path, trials: list[Trial]) -> list[list[Lack]]:
    """Run them and their undisturbed runs; return the lacks that occurred on this rank."""
    occurred = []
    for number, trial in enumerate(trials):
        start = launch(trial.stage)
        if not (world.on_rank0((folder / trial.plain).exists)):
            train(trial.config(digits, folder / trial.plain), start, world)
        with lacking(world, *trial.lacks) as here:
            train(trial.config(digits, folder / f"{trial.ranks}-{number}"), start, world)
        occurred.append(here)
    return occurred


def run_everywhere(world: World, digits: Path, folder: Path, trials: list[Trial]) -> None:
    """Run trials on one and on two ranks; each lack must occur."""
    for ranks in (1, 2):
        own = [trial for trial in trials if trial.ranks == ranks]
        if ranks == 1:
            found = [run_trials(world, digits, folder, own)]
        else:
            found = values(forked_ranks(run_trials, digits, folder, own, timeout_s=240 + 60 * len(own)))
        for number, trial in enumerate(own):
            assert {lack for rank in found for lack in rank[number]} == set(trial.lacks), trial
            assert_as_if_nothing_happened(folder / f"{ranks}-{number}", folder / trial.plain, trial)


def assert_as_if_nothing_happened(folder: Path, plain: Path, trial: Trial) -> None:
    halved = any(lack.where != "step" for lack in trial.lacks)
    assert micro_of(folder) == (8 // trial.ranks // 2 if halved else 8 // trial.ranks), trial
    for found, expected in zip(losses(folder), losses(plain), strict=True):
        assert found == pytest.approx(expected, rel=LIMIT), trial
    logs = [[(r["step"], r["samples"], r["lr"].hex(), r["skipped"]) for r in records(run)] for run in (folder, plain)]
    assert logs[0] == logs[1], trial
    assert newest(folder).manifest["progress"] == newest(plain).manifest["progress"], trial
    for kind in kinds(plain):
        assert distance(newest(folder).full(kind), newest(plain).full(kind)) <= LIMIT, (trial, kind)


def micro_of(folder: Path) -> int:
    """The micro-batch in the record of a run, the same as in its newest checkpoint."""
    record = json.loads((folder / "run.json").read_text())
    micro: int = record["config"]["batch"]["micro"]
    assert record["deepspeed"]["train_micro_batch_size_per_gpu"] == micro
    assert newest(folder).manifest["config"]["batch"]["micro"] == micro
    return micro


def kinds(folder: Path) -> list[str]:
    """Masters, averages and moments."""
    return ["master", *(f"ema/{name}" for name in newest(folder).averages), "exp_avg", "exp_avg_sq"]


FEW = [
    Trial(1, "flat", 0, (Lack("backward", 0, 1, 1, "blocks.0"),)),
    Trial(1, "deepspeed", 3, (Lack("forward", 0, 0, 0, "blocks.1.mlp.fc1"),)),
    Trial(2, "flat", 0, (Lack("backward", 1, 1, 1, "blocks.0.attn"),)),
    Trial(2, "flat", 0, (Lack("forward", 0, 1, 0, "objective"),)),
    Trial(2, "deepspeed", 0, (Lack("forward", 1, 2, 1, "final_layer"),)),
    Trial(2, "deepspeed", 3, (Lack("backward", 0, 2, 0, "blocks.1.mlp.fc1"), Lack("step", 1, 3))),
]


def test_a_lack_of_memory_changes_nothing(world: World, digits: Path, tmp_path: Path) -> None:
    """On one and two ranks, at stages 0 and 3, in each part of a step."""
    run_everywhere(world, digits, tmp_path, FEW)


@pytest.mark.nightly
def test_a_lack_of_memory_at_random_places_changes_nothing(
    world: World, digits: Path, tmp_path: Path, record_property: Any
) -> None:
    trials = drawn(60)
    record_property("trials", len(trials))
    run_everywhere(world, digits, tmp_path, trials)


def lack_then_end(world: World, config: RunConfig, start: Launch, *lacks: Lack) -> list[Lack]:
    """Train with these lacks of memory; return those that occurred on this rank."""
    with lacking(world, *lacks) as occurred:
        train(config, start, world)
    return occurred


@pytest.mark.parametrize(
    ("engine", "stage"), [("flat", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
)
def test_sums_in_fp32_begin_with_the_second_summand(
    world: World, digits: Path, tmp_path: Path, engine: str, stage: int
) -> None:
    """In bf16 a rank alone without accumulation adds up nothing; from the halving on it is as if it always had."""

    def config(name: str, micro: int) -> RunConfig:
        batch = BatchConfig(samples=SAMPLES, micro=micro)
        precision = {"performance__precision": "bf16", "performance__engine": engine}
        return tiny(digits, tmp_path / name, STEPS, batch=batch, **precision)

    lack = Lack("backward", 0, 0, 0, "blocks.1")
    assert lack_then_end(world, config("lacking", SAMPLES), launch(stage), lack) == [lack]
    train(config("halves", SAMPLES // 2), launch(stage), world)
    assert hexes(losses(tmp_path / "lacking")) == hexes(losses(tmp_path / "halves"))
    assert_same_checkpoint(tmp_path / "lacking", tmp_path / "halves")


def test_a_retaken_step_equals_the_first_of_a_resumed_run_in_every_bit(
    world: World, digits: Path, tmp_path: Path
) -> None:
    """Also after two halvings, of 15 to 5 and to 1 samples: nothing is applied, counted or recorded twice."""

    def config(name: str, steps: int, micro: int) -> RunConfig:
        batch = BatchConfig(samples=30, micro=micro)
        config = tiny(digits, tmp_path / name, 15, batch=batch, output__log_every=3, ema__power_stds=(0.1,))
        return replace(config, samples=30 * steps)

    lacks = Lack("forward", 0, 1, 1, "blocks.1"), Lack("backward", 0, 2, 3, "blocks.0")
    assert lack_then_end(world, config("lacking", 4, 15), launch(1), *lacks) == list(lacks)
    for steps, micro in ((1, 15), (2, 5), (4, 1)):
        train(config("parts", steps, micro), launch(1), world)
    assert micro_of(tmp_path / "lacking") == 1
    lacking_log, parts_log = (records(tmp_path / name)[-1] for name in ("lacking", "parts"))
    assert lacking_log["loss"].hex() == parts_log["loss"].hex()
    assert_same_checkpoint(tmp_path / "lacking", tmp_path / "parts")


@pytest.mark.parametrize("stage", [1, 3])
def test_the_loss_scale_of_fp16_stays(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """A step without memory is no overflow."""
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)

    def config(name: str) -> RunConfig:
        batch = BatchConfig(samples=SAMPLES, micro=8)
        return tiny(digits, tmp_path / name, STEPS, batch=batch, performance__precision="fp16", optim__lr=1e-3)

    lack = Lack("backward", 0, 3, 1, "blocks.0")
    assert lack_then_end(world, config("lacking"), launch(stage), lack) == [lack]
    train(config("plain"), launch(stage), world)
    scales, plain = ([r["loss_scale"] for r in records(tmp_path / name)] for name in ("lacking", "plain"))
    assert scales == plain


def demanding(digits: Path, folder: Path) -> RunConfig:
    """A run whose steps have every collective: learned levels, spikes that are skipped, DREAM, ZeRO-3."""
    config = tiny(
        digits, folder, STEPS, batch=BatchConfig(samples=SAMPLES, micro=4), divergence__policy="skip",
        divergence__window=4, optim__lr=1e-3, data__random_flip=False,
    )  # fmt: skip
    objective = replace(config.objective, schedule="cosine", timesteps=4, prediction="epsilon", dream=True)
    return replace(config, objective=objective, timesteps=TimestepConfig(density="importance"))


LACKS = [
    Lack("backward", 1, 0, 0, "blocks.0"),
    Lack("forward", 0, 0, 1, "final_layer"),
    Lack("forward", 0, 2, 0, "objective"),
    Lack("backward", 1, 3, 1, "blocks.0"),
]
"""In the first step, whose order ZeRO-3 compares between the ranks, and later, at both ends of the last pass."""


def run_demanding(
    world: World, digits: Path, folder: Path, lacks: dict[int, list[Lack]]
) -> dict[int, list[list[Lack]]]:
    """Run with each of these lacks at each stage, and without one; return those that occurred on this rank."""
    found = {}
    for stage, planned in lacks.items():
        own, start = folder / str(stage), launch(stage)
        train(demanding(digits, own / "plain"), start, world)
        found[stage] = [lack_then_end(world, demanding(digits, own / f"{n}"), start, x) for n, x in enumerate(planned)]
    return found


def test_every_collective_of_a_step_is_kept(digits: Path, tmp_path: Path, nightly: bool) -> None:
    """At stages 1, 2 and 3, by night with each lack."""
    lacks = dict.fromkeys((1, 2, 3), LACKS) if nightly else {3: LACKS[:2], 2: LACKS[2:3], 1: LACKS[3:]}
    found = values(forked_ranks(run_demanding, digits, tmp_path, lacks))
    for stage, planned in lacks.items():
        plain = losses(tmp_path / str(stage) / "plain")
        for number, lack in enumerate(planned):
            assert found[0][stage][number] + found[1][stage][number] == [lack]
            assert losses(tmp_path / str(stage) / f"{number}") == pytest.approx(plain, rel=1e-5)
            assert micro_of(tmp_path / str(stage) / f"{number}") == 2


def rehearse(
    world: World, digits: Path, folder: Path, stages: tuple[int, ...]
) -> dict[int, tuple[str | None, str | None]]:
    """Rehearse at each stage, and make the same run undisturbed; return what the two passes came to."""
    found = {}
    for stage in stages:
        found[stage] = rehearse_at(world, digits, folder / f"run-{stage}", stage)
        train(tiny(digits, folder / f"plain-{stage}", STEPS), launch(stage), world)
    return found


def rehearse_at(world: World, digits: Path, folder: Path, stage: int) -> tuple[str | None, str | None]:
    """Lack memory on rank 1 in the pass before the first step, halve, pass again, and take the steps of the run."""
    config = tiny(digits, folder, STEPS, batch=BatchConfig(samples=SAMPLES, micro=4))
    with ExitStack() as stack:
        run = build(config, launch(stage), world, stack)
        begun: list[int] = []

        def fail_once(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            begun.append(len(inputs[0]))
            if world.rank == 1 and len(begun) == 1:
                fail()

        run.state.engine.module.get_submodule("blocks.1").register_forward_hook(fail_once)
        found = compile_all(run.state)
        assert begun == ([4, 1] if world.rank else [4])
        run.go_on_smaller(str(found))
        found = found, compile_all(run.state)
        take_steps(run.state, run.batches, run.callbacks)
        run.callbacks.on_end(run.state)
        return found


def test_the_pass_before_the_first_step_finds_a_micro_batch_too(digits: Path, tmp_path: Path) -> None:
    """It compiles the blocks; here they stay as they are. The flat engine has stage 0, DeepSpeed stage 3."""
    found = values(forked_ranks(rehearse, digits, tmp_path, (0, 3)))[0]
    for stage, (cause, again) in found.items():
        assert re.fullmatch(r"out of memory in the first forward and backward pass on rank 1 \(CUDA .*\)", cause)
        assert again is None
        run, plain = tmp_path / f"run-{stage}", tmp_path / f"plain-{stage}"
        assert micro_of(run) == 2
        assert losses(run) == pytest.approx(losses(plain), rel=1e-5)


def test_a_resume_on_as_many_ranks_remembers_what_did_not_fit(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path, STEPS, batch=BatchConfig(samples=32, micro="auto"), samples=2 * 32)
    lack = Lack("backward", 0, 1, 0, "blocks.0")
    assert lack_then_end(world, config, launch(1), lack) == [lack]
    assert micro_of(tmp_path) == 8
    train(replace(config, samples=3 * 32), launch(1), world)
    assert micro_of(tmp_path) == 8, "not 16, the most on a CPU"


def test_an_optimizer_step_that_lacks_memory_twice_ends_the_run(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path, STEPS)
    with pytest.raises(NoMemoryError, match="out of memory in step on cpu"):
        lack_then_end(world, config, launch(1), Lack("step"), Lack("step", 0, 1, 0, "again"))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("engine", "stage", "name"), [("flat", 0, "adamw8bit"), ("deepspeed", 1, "adamw8bit"), ("deepspeed", 0, "adamw")]
)
def test_an_update_that_changes_before_it_allocates_has_no_second_try(
    world: World, digits: Path, tmp_path: Path, engine: str, stage: int, name: str
) -> None:
    """The 8-bit AdamW counts and updates tensor after tensor, and that of DeepSpeed's ZeRO-0 in fp32 clips in place."""
    config = tiny(digits, tmp_path, STEPS, performance__engine=engine, optim__name=name, optim__clip=0.5)
    with pytest.raises(NoMemoryError, match="out of memory in step on cpu") as ended:
        lack_then_end(world, config, launch(stage), Lack("step"))
    assert ended.value.exit_code == 70
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("step", [0, 1])
def test_a_stop_in_a_void_step_saves_the_step_before(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    stop, lack = StopRequest(), Lack("backward", 0, step, 1, "blocks.0")

    def ask_and_fail() -> None:
        stop.make("SIGTERM")
        fail()

    monkeypatch.setattr(lack_of_memory, "fail", ask_and_fail)
    config = tiny(digits, tmp_path, STEPS, batch=BatchConfig(samples=SAMPLES, micro=8))
    told = "saved step 1;" if step else "in the first step, nothing saved"
    with lacking(world, lack) as occurred, pytest.raises(Preempted, match=told):
        train(config, launch(1), world, stop)
    assert occurred == [lack]
    if step:
        assert newest(tmp_path).manifest["progress"]["steps"] == 1
    else:
        assert not (tmp_path / "checkpoints").exists()


def test_a_collective_in_which_memory_runs_out_is_not_repeated() -> None:
    """It may have begun; a broadcast whose result cannot be kept has begun, and is answered like any other."""

    class Result(Tensor):
        def clone(self) -> Any:  # type: ignore[override]
            fail()

    backend: Any = SimpleNamespace(**(dict.fromkeys(_COLLECTIVES, lambda *_: fail()) | {"broadcast": lambda *_: None}))
    collectives = Collectives(backend)
    with pytest.raises(torch.OutOfMemoryError):
        backend.broadcast(Result())
    collectives.replay()
    assert backend.broadcast(torch.zeros(())).is_completed(), "answered"
    with pytest.raises(torch.OutOfMemoryError):
        backend.reduce(torch.zeros(()))
    with pytest.raises(torch.OutOfMemoryError, match="within the collective reduce"):
        collectives.replay()
    collectives.clear()
    collectives.replay()


def test_host_memory_beside_a_gpu_is_no_reason_for_another_micro_batch() -> None:
    state: Any = SimpleNamespace(
        config=tiny(Path(), Path(), batch__micro=4), world=SimpleNamespace(device=torch.device("cuda"), size=1, rank=0)
    )
    assert _cause(MemoryError(), "backward", state) is None
    assert _cause(NoMemoryError("told"), "backward", state) is None
    assert _cause(torch.OutOfMemoryError("CUDA"), "backward", state) == "out of memory in backward on rank 0 (CUDA)"
    state.config = tiny(Path(), Path(), batch__micro=1)
    assert _cause(torch.OutOfMemoryError("CUDA"), "backward", state) is None
