"""Out of memory anywhere in a run: it goes on by itself with a smaller micro-batch, as if nothing had happened."""

import json
import pickle
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.errors import NoMemoryError, OutOfMemoryRestart
from fastdiff.ledger.reader import read_ledger
from fastdiff.parallel.heartbeat import MICRO_LIMIT
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from fastdiff.training.memory.explanation import explaining_memory
from fastdiff.training.memory.smaller_batch import FILE, halve, limited
from tests.support.injected.lack_of_memory import Lack, environment
from tests.support.processes import deepspeed
from tests.support.runs import distance, flags, held_out, intact, launch, losses, newest, tiny
from tests.support.servers.ports import reserved_port
from tests.support.supervised import Supervised
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.fault(31), pytest.mark.timeout(600)]

STEPS, EVERY = 5, 2
"""Steps of a run, and between checkpoints, validations and grids."""
LIMIT = 1e-6
"""Of the losses of any step, and of weights, averages and moments, each together; relative, in fp32."""
PLACES = ("rehearsal", "forward", "backward", "step", "validation", "sampling")


@dataclass(frozen=True)
class Trial:
    """A run, and where a rank of it runs out of memory."""

    ranks: int
    stage: int
    lack: Lack

    @property
    def plain(self) -> str:
        """Name of the undisturbed run."""
        return f"stage-{self.stage}-on-{self.ranks}"

    @property
    def lost(self) -> int:
        """Steps since the last checkpoint; those behind it, validations and grids, lose nothing."""
        return self.lack.step % EVERY

    def flags(self, digits: Path, folder: Path) -> list[str]:
        batch = BatchConfig(samples=16, micro=8 // self.ranks)
        config = tiny(
            digits, folder, STEPS, batch=batch, optim__lr=1e-3, output__checkpoint_every=EVERY,
            output__sample_every=EVERY, output__sample_steps=2, validation__data=str(held_out(digits)),
            validation__samples=32, validation__every=EVERY,
        )  # fmt: skip
        return [*flags(config), "--deepspeed_config", "zero3" if self.stage else "ddp"]

    def run(self, digits: Path, folder: Path, *more: str, **variables: str) -> Supervised:
        ranks = f"--ranks-per-node={self.ranks}"
        words = [*self.flags(digits, folder), *more]
        return Supervised(folder, words, ranks, "--no-preflight", environment=variables)


def trials() -> list[Trial]:
    """Return every place on one and two ranks, without and with ZeRO-3."""
    found = []
    for number, (where, ranks, stage) in enumerate((w, r, s) for w in PLACES for r in (1, 2) for s in (0, 3)):
        step = 0 if where == "rehearsal" else 2 if where in ("validation", "sampling") else (1, 3)[number % 2]
        micro = number % 2 if where in ("forward", "backward") else 0
        found.append(Trial(ranks, stage, Lack(where, number % ranks, step, micro, f"blocks.{number % 2}")))  # type: ignore[arg-type]
    return found


BY_DAY = ("rehearsal-2-3", "step-1-0")


def cases() -> list[Any]:
    found = []
    for trial in trials():
        name = f"{trial.lack.where}-{trial.ranks}-{trial.stage}"
        found.append(pytest.param(trial, id=name, marks=() if name in BY_DAY else pytest.mark.nightly))
    return found


@pytest.fixture(scope="module")
def plain(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the undisturbed run of a trial."""
    folder = tmp_path_factory.mktemp("plain")

    def run(trial: Trial) -> Path:
        if not (folder / trial.plain).exists():
            supervised = trial.run(digits, folder / trial.plain)
            assert supervised.wait() == 0, supervised.output
        return folder / trial.plain

    return run


@pytest.mark.parametrize("trial", cases())
def test_the_run_goes_on_with_half_the_micro_batch(trial: Trial, plain: Any, digits: Path, tmp_path: Path) -> None:
    run, undisturbed = tmp_path / "run", plain(trial)
    supervised = trial.run(digits, run, **environment(trial.lack, tmp_path / "lack"))
    assert supervised.wait() == 0, supervised.output
    assert (tmp_path / "lack" / "occurred").exists()
    assert "out of memory in" in supervised.output
    assert supervised.output.count("starting the ranks again") == 1
    assert micro_of(run) == 8 // trial.ranks // 2
    assert losses(run) == pytest.approx(losses(undisturbed), rel=LIMIT)
    for kind in ("master", "exp_avg", "exp_avg_sq", *(f"ema/{name}" for name in newest(undisturbed).averages)):
        assert distance(newest(run).full(kind), newest(undisturbed).full(kind)) <= LIMIT, kind
    sums = read_ledger(run)
    assert [start.outcome for start in sums.starts] == ["out of memory", "done"]
    assert (sums.steps_kept, sums.steps_lost) == (STEPS, trial.lost)


def micro_of(run: Path) -> int:
    """The micro-batch in the record of a run, the same as in its newest checkpoint."""
    micro: int = json.loads((run / "run.json").read_text())["config"]["batch"]["micro"]
    assert newest(run).manifest["config"]["batch"]["micro"] == micro
    return micro


def test_a_stop_beside_a_lack_of_memory_is_heeded(digits: Path, tmp_path: Path) -> None:
    """Whether it comes before the ranks have ended, between two starts, or behind them."""
    trial = Trial(2, 0, Lack("forward", rank=1, step=3))
    supervised = trial.run(digits, tmp_path / "run", **environment(trial.lack, tmp_path / "lack"))
    wait_until((tmp_path / "lack" / "occurred").exists, "the lack of memory")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 75, supervised.output
    assert trial.run(digits, tmp_path / "run").wait() == 0
    assert micro_of(tmp_path / "run") == 2


@pytest.mark.parametrize(
    ("stops", "options"), [("others", ()), pytest.param("itself", ("--hang-timeout", "15"), marks=pytest.mark.nightly)]
)
def test_ranks_that_cannot_end_by_themselves_are_ended(
    digits: Path, tmp_path: Path, stops: Any, options: tuple[str, ...]
) -> None:
    """By the supervisor, at once; a hang behind a lack of memory is none, but follows from it."""
    trial = Trial(2, 3, Lack("forward", rank=1, step=3, stops=stops))
    supervised = trial.run(digits, tmp_path / "run", *options, **environment(trial.lack, tmp_path / "lack"))
    assert supervised.wait() == 0, supervised.output
    assert supervised.output.count("starting the ranks again") == 1
    assert "no sign of life" not in supervised.output
    assert [start.outcome for start in read_ledger(tmp_path / "run").starts] == ["out of memory", "done"]


def test_the_ranks_start_again_with_what_the_supervisor_knows(digits: Path, tmp_path: Path) -> None:
    """Not only with what the run folder remembers, which a network file system may show too late."""
    trial = Trial(2, 0, Lack("forward", rank=1, step=1, noted=False))
    supervised = trial.run(digits, tmp_path / "run", **environment(trial.lack, tmp_path / "lack"))
    assert supervised.wait() == 0, supervised.output
    assert not (tmp_path / "run" / FILE).exists()
    assert micro_of(tmp_path / "run") == 2


def test_the_ranks_of_all_nodes_start_again(plain: Any, digits: Path, tmp_path: Path) -> None:
    """Node 1 runs out of memory; the nodes meet again in the store of node 0, whose supervisor is late."""
    trial = Trial(2, 3, Lack("backward", rank=1, step=3))
    job = ("--nodes", "2", "--ranks-per-node", "1", "--master", "127.0.0.1", "--port", str(reserved_port()))
    nodes: list[Supervised] = []
    for node in (0, 1):
        words = trial.flags(digits, tmp_path / "run")
        variables = environment(replace(trial.lack, refused=node == 1), tmp_path / f"lack-{node}")
        nodes.append(Supervised(tmp_path / "run", words, *job, "--no-preflight", node=node, environment=variables))
    assert [node.wait() for node in nodes] == [0, 0], [node.output for node in nodes]
    assert nodes[0].output.count("starting the ranks again") == 1
    assert micro_of(tmp_path / "run") == 2
    assert losses(tmp_path / "run") == pytest.approx(losses(plain(trial)), rel=LIMIT)
    assert [start.outcome for start in read_ledger(tmp_path / "run").starts] == ["out of memory", "done"]


@pytest.mark.nightly
def test_under_another_launcher_the_same_command_goes_on(digits: Path, tmp_path: Path) -> None:
    trial = Trial(2, 3, Lack("forward", rank=1, step=3))
    command, variables = trial.flags(digits, tmp_path / "run"), environment(trial.lack, tmp_path / "lack")
    ended = deepspeed(*command, ranks=2, **variables)
    assert "the same command goes on in micro-batches of 2 samples per rank instead of 4" in ended.output
    assert intact(tmp_path / "run") == [2]
    assert deepspeed(*command, ranks=2, **variables).code == 0
    assert micro_of(tmp_path / "run") == 2


def state_of(folder: Path, micro: int, device: str = "cuda", **changes: Any) -> Any:
    config = tiny(Path(), folder, batch__micro=micro, **changes)
    world = SimpleNamespace(device=torch.device(device), size=1, rank=0)
    engine = SimpleNamespace(ds_config={"zero_optimization": {"stage": 0}})
    return SimpleNamespace(
        config=config, world=world, engine=engine, folder=folder, heartbeat=SimpleNamespace(phase="backward")
    )


def test_at_one_sample_the_run_ends_and_says_what_helps(tmp_path: Path) -> None:
    with pytest.raises(NoMemoryError, match=r"out of memory in a picture on cuda .*: draw none") as ended:
        with explaining_memory(state_of(tmp_path, 1), "a picture", "draw none"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
    assert ended.value.exit_code == 70
    assert not (tmp_path / FILE).exists()


def test_a_smaller_micro_batch_holds_whole_pairs(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contrastive loss refuses another one, at which the supervisor would start it again and again."""
    contrastive = {"objective": FlowConfig(contrastive_weight=0.05), "batch__samples": 12}
    state = state_of(tmp_path, 6, "cpu", **contrastive)
    with pytest.raises(OutOfMemoryRestart, match="of 2 samples per rank instead of 6"), explaining_memory(state):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    (tmp_path / FILE).unlink()
    monkeypatch.setenv(MICRO_LIMIT, "3")
    assert limited(state.config, state.engine.ds_config, world).batch.micro == 2
    assert halve(state_of(tmp_path, 2, "cpu", **contrastive), "a pass") is None


def test_a_lack_of_host_memory_beside_a_gpu_does_not_halve(tmp_path: Path) -> None:
    with pytest.raises(NoMemoryError, match="out of host memory in backward"):
        with explaining_memory(state_of(tmp_path, 4)):
            raise MemoryError
    assert not (tmp_path / FILE).exists()


def test_the_error_of_a_restart_reaches_other_ranks_whole() -> None:
    error = pickle.loads(pickle.dumps(OutOfMemoryRestart("told", micro=4)))
    assert (str(error), error.micro, error.exit_code) == ("told", 4, 75)


def test_the_folder_remembers_until_the_run_needs_less(world: World, digits: Path, tmp_path: Path) -> None:
    def config(**changes: Any) -> RunConfig:
        return tiny(digits, tmp_path, 1, batch=BatchConfig(samples=16, micro=8), **changes)

    with pytest.raises(OutOfMemoryRestart), explaining_memory(state_of(tmp_path, 8, "cpu", batch__samples=16)):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    train(config(), launch(0), world)
    assert micro_of(tmp_path) == 4
    train(config(samples=32, performance__recompute=True), launch(0), world)
    assert micro_of(tmp_path) == 8, "recomputation needs less"
    (tmp_path / FILE).write_text("{")
    with pytest.raises(Exception, match=f"{FILE} cannot be read .* delete it"):
        train(config(samples=48), launch(0), world)


def test_the_file_is_named_where_it_gives_the_limit(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A supervisor gives the limit also where the folder remembers none."""
    blocks = {"performance__recompute": True, "performance__stored_blocks": 1}
    state = state_of(tmp_path, 8, "cpu", batch__samples=16, **blocks)
    config, ds_config = replace(state.config, batch=BatchConfig(samples=16, micro=8)), state.engine.ds_config
    monkeypatch.setenv(MICRO_LIMIT, "4")
    assert limited(config, ds_config, world).batch.micro == 4
    told = capsys.readouterr().err
    assert "in micro-batches of 4 samples per rank, not 8" in told
    assert "delete" not in told
    may = "a smaller --performance.stored_blocks than 1 may keep the 8"
    with pytest.raises(OutOfMemoryRestart, match=may), explaining_memory(state):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert limited(config, ds_config, world).batch.micro == 4
    monkeypatch.delenv(MICRO_LIMIT)
    fewer = replace(config, performance=replace(config.performance, recompute=True, stored_blocks=0))
    assert limited(fewer, ds_config, world).batch.micro == 8, "for another number of stored blocks it is not known"
    assert f"{tmp_path / FILE}; to try 8 again delete that file" in " ".join(capsys.readouterr().err.split())
