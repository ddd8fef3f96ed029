"""Loss spikes and non-finite steps: detected, named, and handled as ``--divergence.policy`` says."""

import dataclasses
import gzip
import json
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.checkpoint.async_saves import AsyncSaves
from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.divergence import DivergenceConfig
from fastdiff.data.encoding.builtin import digits as real_digits
from fastdiff.data.encoding.builtin import pixels_template, write
from fastdiff.data.loading.order import Order
from fastdiff.data.shards.format import Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError, DivergedError, Preempted
from fastdiff.ledger.reader import read_ledger
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.training import build as training_build
from fastdiff.training.build import Run
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.callbacks.divergence import Rewind
from fastdiff.training.callbacks.saving import save_checkpoint
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.loop import train
from fastdiff.training.metrics import Meters
from fastdiff.training.profiling.recording import trace_path
from fastdiff.training.spikes import Spikes
from fastdiff.training.state import TrainState
from tests.support.forked import forked_ranks, values
from tests.support.injected.tiny_disk import fill, tiny_disk
from tests.support.nights import by_day
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, losses, newest, records, tiny

BATCH = 16
SHARDS = [256] * 3
POLICIES = ("log", "skip", "rewind")
FIRST, SECOND, STEPS = 6, 8, 10
"""Steps of two spikes, and length of a run that has them. Its window of 8 losses decides from the fifth step on."""


def marred(folder: Path, factors: Mapping[int, float]) -> Path:
    """The digits, those at some positions of the run multiplied: by a number that makes a spike, by NaN or infinity."""
    order = Order(0, SHARDS, 16)
    by_sample = {int(order.samples([position])[0]): factor for position, factor in factors.items()}
    samples = [
        dataclasses.replace(sample, latent=np.full_like(sample.latent, 1.0) * by_sample[number])
        if number in by_sample
        else sample
        for number, sample in enumerate(islice(real_digits(), sum(SHARDS)))
    ]
    template = pixels_template((1, 8, 8), 10, Provenance(source="marred digits", transform="none"))
    with mock.patch.object(np, "isfinite", return_value=np.True_):  # a writer that does not look
        write(iter(samples), folder, template, total=len(samples), samples_per_shard=256)
    return folder


def key_at(data: Path, position: int) -> str:
    """Return the key of the sample at a position."""
    with LatentReader(data) as reader:
        assert list(reader.shard_sizes) == SHARDS
        return reader.keys(Order(0, reader.shard_sizes, 16).samples([position]))[0]


def in_step(step: int, sample: int = 3) -> int:
    """Return the position of a sample in an optimizer step, counted from 1."""
    return (step - 1) * BATCH + sample


def spiky(data: Path, folder: Path, steps: int = STEPS, **changes: Any) -> RunConfig:
    """A run that decides from the fifth step on, and saves at the fourth one."""
    return tiny(data, folder, steps, **{"divergence__window": 8, "output__checkpoint_every": 4} | changes)


def lines(folder: Path, name: str = "spikes.jsonl") -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def weights(folder: Path, step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights, moments and averages in a checkpoint."""
    found = load_file(folder / "checkpoints" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors")
    return {name: value for name, value in found.items() if name.startswith(("master/", "ema/", "exp_avg"))}


def assert_equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    assert len(a) > 10
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(torch.isfinite(value).all() for value in a.values())


@pytest.fixture(scope="module")
def two_spikes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two spikes."""
    return marred(tmp_path_factory.mktemp("spikes") / "data", {in_step(FIRST): 100.0, in_step(SECOND, 9): 50.0})


@pytest.fixture(scope="module")
def policies(nightly: bool) -> tuple[str, ...]:
    """Those of which the runs are compared."""
    return POLICIES if nightly else POLICIES[1:]


@pytest.fixture(scope="module")
def alone(
    world: World, two_spikes: Path, policies: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A run of one rank, by the flat engine, for every policy that is not disturbed."""
    folders = {policy: tmp_path_factory.mktemp("alone") / policy for policy in policies}
    for policy, folder in folders.items():
        train(spiky(two_spikes, folder, divergence__policy=policy), launch(0), world)
    return folders


@pytest.fixture(scope="module")
def together(two_spikes: Path, policies: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of two ranks under ZeRO-3 for every policy that is not disturbed."""
    folders = {policy: tmp_path_factory.mktemp("together") / policy for policy in policies}
    values(forked_ranks(_train, [spiky(two_spikes, at, divergence__policy=policy) for policy, at in folders.items()]))
    return folders


def _train(world: World, configs: list[RunConfig]) -> None:
    for config in configs:
        train(config, launch(3), world)


# --- what is a spike ---------------------------------------------------------------------------------------------


def spikes_of(world: World, **options: Any) -> Spikes:
    return Spikes(DivergenceConfig(**options), batch_samples=2, world=world)


@pytest.mark.fault(21)
def test_a_spike_is_six_sigma_above_the_mean(world: World) -> None:
    drawn = np.random.default_rng(0).normal(1.0, 0.1, 128)
    spikes = spikes_of(world)
    for loss in drawn:
        assert spikes.see(2 * loss, 2, applied=True) is None
    threshold = drawn.mean() + 6 * drawn.std(ddof=1)
    found = spikes.see(2 * (threshold + 1e-6), 2, applied=True)
    assert found is not None
    assert found.threshold == pytest.approx(threshold, rel=1e-12)
    assert found.loss == pytest.approx(threshold + 1e-6)
    again = spikes.see(2e9, 2, applied=True)
    assert again is not None
    assert again.threshold == found.threshold, "a spike is not taken into the window"
    assert (found.in_a_row, again.in_a_row) == (1, 2)
    assert spikes.see(2 * (threshold - 1e-6), 2, applied=True) is None
    later = spikes.see(2e9, 2, applied=True)
    assert later is not None
    accepted = np.append(drawn[1:], threshold - 1e-6)  # of 128, the oldest one has left
    assert later.threshold == pytest.approx(accepted.mean() + 6 * accepted.std(ddof=1), rel=1e-12)
    assert later.in_a_row == 1


def test_a_restored_window_that_was_full_decides_alike(world: World) -> None:
    drawn = np.random.default_rng(0).normal(1.0, 0.1, 150)  # more than the window of 128 holds
    whole, restored = spikes_of(world), spikes_of(world)
    for loss in drawn:
        whole.see(2 * loss, 2, applied=True)
    restored.restore(whole.state())
    for spikes in (whole, restored):
        spikes.see(2.0, 2, applied=True)
    found = [spikes.see(2e9, 2, applied=True) for spikes in (whole, restored)]
    assert found[0] is not None
    assert found[0] == found[1]


def test_nothing_is_a_spike_before_half_of_the_window(world: World) -> None:
    spikes = spikes_of(world, window=8)
    for loss in (1.0, 9.0, 1.1):
        assert spikes.see(2 * loss, 2, applied=True) is None
    assert spikes.see(2.0, 1, applied=True) is None, "a loss that is not finite is the other guard's matter"
    assert spikes.see(2e9, 2, applied=False) is None, "so is a gradient"
    assert spikes.see(2e9, 2, applied=True) is None, "three losses do not decide"
    spikes.forget()
    for loss in (1.0, 1.2, 1.1, 0.9):
        assert spikes.see(2 * loss, 2, applied=True) is None
    assert spikes.see(10.0, 2, applied=True) is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sigmas": 0.0}, "--divergence.sigmas 0.0: a finite number above 0"),
        ({"sigmas": float("nan")}, "--divergence.sigmas nan"),
        ({"window": 3}, "--divergence.window 3: at least 4"),
        ({"limit": 0}, "--divergence.limit 0: at least 1"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DivergenceConfig(**given)


def test_a_rewind_needs_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewind reloads a checkpoint, and --output.checkpoint_every 0"):
        spiky(tmp_path, tmp_path, divergence__policy="rewind", output__checkpoint_every=0)


def test_only_the_limit_may_differ_at_a_resume(tmp_path: Path) -> None:
    config = spiky(tmp_path, tmp_path)

    def differs(**changes: Any) -> list[str]:
        return list(config_changes(as_json(config), as_json(spiky(tmp_path, tmp_path, **changes)), ()))

    assert differs(divergence__limit=9) == []
    assert differs(divergence__sigmas=9.0, divergence__policy="skip") == ["divergence.policy", "divergence.sigmas"]


# --- log ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault(21)
@pytest.mark.parametrize("policy", by_day(POLICIES[1:], POLICIES[0]))
def test_two_ranks_decide_as_one_does(
    two_spikes: Path, alone: dict[str, Path], together: dict[str, Path], policy: str
) -> None:
    one, two = alone[policy], together[policy]
    a, b = (lines(folder) for folder in (one, two))
    assert len(a) == len(b) == (4 if policy == "rewind" else 2)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key, value in x.items():
            assert y[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key
    assert losses(one) == pytest.approx(losses(two), rel=1e-4)
    spikes = [line for line in a if "loss" in line]
    assert [line["step"] for line in spikes] == [FIRST, SECOND]
    for line, position in zip(spikes, (in_step(FIRST), in_step(SECOND, 9)), strict=True):
        assert line["policy"] == policy
        assert line["keys"][0] == key_at(two_spikes, position)
        assert len(line["keys"]) == len(set(line["keys"])) == 16
        assert line["loss"] > line["threshold"]
        assert line["loss"] == losses(one)[line["step"] - 1], "the abandoned step is in the log too"


@pytest.mark.fault(21)
def test_logging_changes_nothing_and_is_bounded(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss jumps at step 6 and stays: two warnings, then the new level is the normal one."""
    data = marred(tmp_path / "data", {in_step(step): 100.0 for step in range(6, 13)})
    train(spiky(data, tmp_path / "log", 13, divergence__limit=2), launch(1), world)
    said = capsys.readouterr().err
    assert [line["step"] for line in lines(tmp_path / "log")] == [6, 7]
    assert said.count("is a spike: loss") == 2
    assert key_at(data, in_step(6)) in said
    assert said.count("2 spikes in a row: the statistics of the loss start anew") == 1
    train(spiky(data, tmp_path / "deaf", 13, divergence__sigmas=1e30), launch(1), world)
    assert lines(tmp_path / "deaf") == []
    assert hexes(losses(tmp_path / "log")) == hexes(losses(tmp_path / "deaf"))


def test_the_keys_of_a_large_batch_are_bounded(world: World, tmp_path: Path) -> None:
    """Of 64 samples those with the largest losses, the largest first."""
    factors = {step_position: 30.0 + 10 * step_position for step_position in range(5 * 64, 5 * 64 + 20)}
    data = marred(tmp_path / "data", factors)
    config = spiky(data, tmp_path / "run")
    config = dataclasses.replace(config, samples=7 * 64, batch=dataclasses.replace(config.batch, samples=64, micro=16))
    train(config, launch(0), world)
    (line,) = lines(tmp_path / "run")
    assert line["step"] == 6
    assert len(line["keys"]) == 16
    assert set(line["keys"]) <= {key_at(data, position) for position in factors}


# --- skip --------------------------------------------------------------------------------------------------------


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("stage", "precision", "micro"),
    [
        (0, "fp32", 16),
        pytest.param(1, "fp32", 4, marks=pytest.mark.nightly),
        pytest.param(2, "bf16", 8, marks=pytest.mark.nightly),
        (3, "bf16", 4),
    ],
)
def test_a_skipped_spike_moves_nothing(
    world: World, two_spikes: Path, tmp_path: Path, stage: int, precision: str, micro: int
) -> None:
    """Also if it is in the first of four micro-batches, whose gradient is there already."""
    config = spiky(
        two_spikes,
        tmp_path / "run",
        divergence__policy="skip",
        performance__precision=precision,
        batch__micro=micro,
        optim__schedule="linear",
        output__checkpoint_every=1,
        output__keep=99,
    )
    train(config, launch(stage), world)
    found = records(tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run")] == [FIRST, SECOND]
    assert lines(tmp_path / "run", "skipped.jsonl") == [], "nothing was not finite"
    assert [r["skipped"] for r in found] == [0] * 5 + [1] * 2 + [2] * 3
    for step in range(2, STEPS + 1):
        before, after = weights(tmp_path / "run", step - 1), weights(tmp_path / "run", step)
        if step in (FIRST, SECOND):
            assert_equal(before, after)
            assert found[step]["lr"] == found[step - 1]["lr"], "the learning rate waits"
        else:
            name = next(name for name in after if name.startswith("master/"))
            assert not torch.equal(before[name], after[name])


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("stage", "scale"), [(1, {"initial_scale_power": 7}), (3, {"initial_scale_power": 0, "min_loss_scale": 1})]
)
def test_a_skipped_spike_leaves_the_loss_scale(
    world: World, two_spikes: Path, tmp_path: Path, cpu_with_fp16: None, stage: int, scale: dict[str, int]
) -> None:
    """Also at its minimum, where an overflow would end the run."""
    config = spiky(
        two_spikes,
        tmp_path / "run",
        steps=FIRST + 1,
        divergence__policy="skip",
        performance__precision="fp16",
        output__checkpoint_every=1,
        output__keep=99,
    )
    start = launch(stage)
    start.deepspeed["fp16"] = {"hysteresis": 1, **scale}
    train(config, start, world)
    assert [line["step"] for line in lines(tmp_path / "run")] == [FIRST]
    steps = (FIRST - 1, FIRST, FIRST + 1)
    folders = [tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "MANIFEST.json" for step in steps]
    before, spiked, after = (json.loads(path.read_text())["loss_scale"] for path in folders)
    assert before == spiked
    assert before["cur_scale"] == after["cur_scale"] == 2.0 ** scale["initial_scale_power"]
    assert after["cur_iter"] == spiked["cur_iter"] + 1
    assert_equal(weights(tmp_path / "run", FIRST - 1), weights(tmp_path / "run", FIRST))


@pytest.mark.fault(21)
def test_too_many_skips_in_a_row_end_the_run(world: World, tmp_path: Path) -> None:
    data = marred(tmp_path / "data", {in_step(step): 100.0 for step in (5, 7, 8, 9)})
    config = spiky(data, tmp_path / "run", divergence__policy="skip", divergence__limit=2)
    for _ in range(2):  # the same command again stops at the same step
        with pytest.raises(DivergedError, match=r"(?s)step 9 is a spike.*2 steps in a row were skipped") as caught:
            train(config, launch(0), world)
        assert [line["step"] for line in lines(tmp_path / "run")] == [5, 7, 8, 9]
    assert caught.value.exit_code == 70
    assert key_at(data, in_step(9)) in str(caught.value)
    train(spiky(data, tmp_path / "run", divergence__policy="skip", divergence__limit=3), launch(0), world)
    assert records(tmp_path / "run")[-1]["skipped"] == 4


# --- rewind ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_rewind_ends_the_profile_up_to_the_spike_and_begins_another(
    world: World, two_spikes: Path, alone: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No trace overwrites another, the one whose last step is the spike is told once, and the losses are the same."""
    run = tmp_path / "run"
    train(spiky(two_spikes, run, divergence__policy="rewind", performance__profile="4:8"), launch(0), world)
    assert sorted(path.name for path in (run / "profile").iterdir()) == [
        "rank-0-from-5.json.gz",
        "rank-0-from-7.json.gz",
    ]
    for first, last in ((5, FIRST), (7, SECOND)):
        with gzip.open(trace_path(run / "profile", 0, first), "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {name for name in names if name.startswith("step ")} == {f"step {n}" for n in range(first, last + 1)}
    said = capsys.readouterr().err
    assert said.count("profile: ") == 2
    assert "no profile" not in said
    assert hexes(losses(run)) == hexes(losses(alone["rewind"]))


@pytest.mark.fault(21)
def test_a_rewind_goes_on_as_if_the_window_had_not_been_there(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Back from the spike in step 6 to step 4: the losses after it are those of a run whose steps 5 and 6 were
    skipped because they were not finite. The first lines of a run are not told again."""
    spike = marred(tmp_path / "spike", {in_step(6): 100.0})
    nans = marred(tmp_path / "nans", {in_step(5): np.nan, in_step(6): np.nan})
    options: dict[str, Any] = {"divergence__policy": "rewind", "optim__schedule": "linear", "ema__power_stds": (0.1,)}
    train(spiky(spike, tmp_path / "rewound", **options), launch(0), world)
    said = capsys.readouterr().err
    assert [said.count(words) for words in ("rewind 1 of", "M parameters", "planned: ")] == [1, 1, 1]
    train(spiky(nans, tmp_path / "skipped", **options), launch(0), world)
    rewound, skipped = (records(tmp_path / name) for name in ("rewound", "skipped"))
    assert [r["step"] for r in rewound] == [*range(1, STEPS + 1)]
    assert hexes([r["loss"] for r in rewound[6:]]) == hexes([r["loss"] for r in skipped[6:]])
    assert [r["lr"] for r in rewound[6:]] == [r["lr"] for r in skipped[6:]]
    assert rewound[5]["loss"] > 10 * rewound[4]["loss"]
    assert [r["skipped"] for r in rewound] == [0] * 6 + [2] * 4
    assert_equal(weights(tmp_path / "rewound", STEPS), weights(tmp_path / "skipped", STEPS))
    progress = newest(tmp_path / "rewound").manifest["progress"]
    assert progress == {"samples": STEPS * BATCH, "steps": STEPS, "skipped": 2, "skipped_in_a_row": 0, "rewinds": 1}
    spiked, gone_back = lines(tmp_path / "rewound")
    assert spiked["keys"][0] == key_at(spike, in_step(6))
    assert gone_back == {
        "step": 6,
        "rewound_to": 4,
        "rewinds": 1,
        "positions": [4 * BATCH, 6 * BATCH - 1],
        "first_key": key_at(spike, 4 * BATCH),
        "last_key": key_at(spike, 6 * BATCH - 1),
    }


@pytest.mark.fault(21)
@pytest.mark.parametrize("policy", by_day(["skip"], "log"))
def test_a_run_that_stops_between_two_spikes_decides_as_one_that_does_not(
    world: World, two_spikes: Path, alone: dict[str, Path], tmp_path: Path, policy: str
) -> None:
    """Cut at step 7, whose checkpoint holds what the loss of step 8 is compared with."""
    for steps in (7, STEPS):
        train(spiky(two_spikes, tmp_path / "cut", steps, divergence__policy=policy), launch(0), world)
    assert [line["step"] for line in lines(tmp_path / "cut")] == [FIRST, SECOND]
    assert lines(tmp_path / "cut") == lines(alone[policy])
    assert hexes(losses(tmp_path / "cut")) == hexes(losses(alone[policy]))
    assert_same_checkpoint(tmp_path / "cut", alone[policy])


@pytest.mark.nightly
@pytest.mark.fault(7)
@pytest.mark.parametrize("steps", [SECOND, STEPS], ids=["at the end", "in the middle"])
def test_a_rewind_on_a_full_disk_goes_on_without_its_checkpoint(
    world: World, two_spikes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The last step is saved, also if the second rewind ends there."""
    go_back = Run.go_back

    def on_a_full_disk(self: Run, rewind: Rewind) -> None:
        self._parts.background.wait_for_all()
        fill(tmp_path / "disk")
        go_back(self, rewind)
        (tmp_path / "disk" / "ballast").unlink()

    options = {"divergence__policy": "rewind", "output__failed_saves": 2}
    train(spiky(two_spikes, tmp_path / "whole", steps, **options), launch(0), world)
    with tiny_disk(tmp_path / "disk", 24) as disk:
        monkeypatch.setattr(Run, "go_back", on_a_full_disk)
        train(spiky(two_spikes, disk / "run", steps, **options), launch(0), world)
        assert intact(disk / "run")[0] == steps
        assert hexes(losses(disk / "run")) == hexes(losses(tmp_path / "whole"))
        assert_same_checkpoint(disk / "run", tmp_path / "whole")


@dataclasses.dataclass
class _FullDisk(Callback):
    """The disk is full from step 4 to step 9; what waits is written with the next record of the log."""

    disk: Path
    background: AsyncSaves

    def on_step(self, state: TrainState) -> None:
        if state.progress.steps == 4:
            self.background.wait_for_all()
            fill(self.disk)
        if state.progress.steps == 9:
            assert [line["step"] for line in lines(state.folder)] == []
            (self.disk / "ballast").unlink()
        if state.progress.steps == 10:
            assert [line["step"] for line in lines(state.folder)] == [FIRST, FIRST, SECOND, SECOND]


@pytest.mark.nightly
@pytest.mark.fault(7)
def test_records_that_wait_for_room_outlast_a_rewind(
    world: World,
    two_spikes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    callbacks = training_build.build_callbacks
    with tiny_disk(tmp_path / "disk", 24) as disk:
        monkeypatch.setattr(
            training_build, "build_callbacks", lambda *parts: [*callbacks(*parts), _FullDisk(disk, parts[2])]
        )
        run = disk / "run"
        train(spiky(two_spikes, run, divergence__policy="rewind", output__failed_saves=1000), launch(0), world)
        assert newest(run).manifest["progress"]["rewinds"] == 2
        assert len(losses(run)) == STEPS
        assert [line["rewound_to"] for line in lines(run) if "rewound_to" in line] == [4, 4]
        events = EventAccumulator(str(run / "tensorboard")).Reload()
        assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert "lost" not in capsys.readouterr().err


@pytest.mark.fault(21)
def test_too_many_rewinds_end_the_run(world: World, two_spikes: Path, tmp_path: Path) -> None:
    config = spiky(two_spikes, tmp_path / "run", divergence__policy="rewind", divergence__limit=1)
    for _ in range(2):  # the same command again stops at the same step
        with pytest.raises(DivergedError, match=r"(?s)step 8 is a spike.*the run was rewound 1 times.*--optim.lr"):
            train(config, launch(0), world)
        assert [line["step"] for line in lines(tmp_path / "run")] == [FIRST, FIRST, SECOND]
    train(spiky(two_spikes, tmp_path / "run", divergence__policy="rewind", divergence__limit=2), launch(0), world)
    assert newest(tmp_path / "run").manifest["progress"]["rewinds"] == 2


@pytest.mark.fault(21)
def test_a_spike_before_the_first_checkpoint_is_explained(world: World, two_spikes: Path, tmp_path: Path) -> None:
    config = spiky(two_spikes, tmp_path / "run", divergence__policy="rewind", output__checkpoint_every=FIRST)
    with pytest.raises(DivergedError, match=r"there is no checkpoint before it .*--output.checkpoint_every"):
        train(config, launch(0), world)
    assert [line["step"] for line in lines(tmp_path / "run")] == [FIRST]
    assert intact(tmp_path / "run") == [], "nothing is saved with the spike in it"


def test_the_ledger_counts_the_steps_that_a_rewind_undid(alone: dict[str, Path]) -> None:
    rewinds = [line for line in lines(alone["rewind"]) if "rewound_to" in line]
    sums = read_ledger(alone["rewind"])
    assert len(rewinds) == 2
    assert sums.steps_lost == sum(line["step"] - line["rewound_to"] for line in rewinds)
    assert sums.steps_kept == STEPS - sums.steps_lost
    assert sums.seconds["step lost"] > 0


def test_a_rewind_skips_damaged_checkpoints(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", output__checkpoint_every=2, output__keep=9), launch(0), world)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2, world)
    found = checkpoints.newest(before=6)
    assert found is not None
    assert found.folder.name == "step-00000004"
    os.truncate(found.folder / "rank-00000.safetensors", 99)
    found = checkpoints.newest(before=6)
    assert found is not None
    assert found.folder.name == "step-00000002"
    assert checkpoints.newest(before=2) is None


class _Ended(Exception):
    """Instead of a kill."""


def _rewind_and_start_again(world: World, rewound: RunConfig, started: RunConfig, deepspeed: dict[str, Any]) -> None:
    """One run that goes back in its engine; the other ends behind each spike, and starts from what it saved there."""
    type(get_accelerator()).is_fp16_supported = lambda self: True
    start = launch()
    start.deepspeed.update(deepspeed)
    _train_in_one_engine(world, rewound, start)

    def save_and_end(*args: Any) -> None:
        save_checkpoint(*args)
        raise _Ended

    with mock.patch.object(training_build, "save_checkpoint", save_and_end):
        for _ in range(2):
            with pytest.raises(_Ended):
                train(started, start, world)
    train(started, start, world)


def _train_in_one_engine(world: World, config: RunConfig, start: Launch) -> None:
    """Train; what is as large as the model stays where it is."""
    places: list[list[int]] = []
    go_back = Run.go_back

    def watched(self: Run, rewind: Rewind) -> None:
        places.append(_places(self.state))
        go_back(self, rewind)
        places.append(_places(self.state))

    with mock.patch.object(Run, "go_back", watched):
        train(config, start, world)
    assert len(places) == 4
    assert len(places[0]) > 2
    assert all(found == places[0] for found in places)


def _places(state: TrainState) -> list[int]:
    """Addresses of weights, optimizer state and averages."""
    flats = state.engine.flats
    averages = [average for each in state.ema.averages.values() for average in each if average is not None]
    moments = [v for flat in flats for v in flat.state.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
    return sorted(tensor.data_ptr() for tensor in [*(flat.master for flat in flats), *averages, *moments])


ON_HOST = {"device": "cpu"}


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("zero", "precision", "optimizer", "ranks"),
    [
        pytest.param({"stage": 0}, "fp32", "adamw", 1, marks=pytest.mark.nightly),
        pytest.param({"stage": 0}, "bf16", "adamw8bit", 2, marks=pytest.mark.nightly),
        pytest.param({"stage": 1}, "bf16", "adamw8bit-bnb", 2, marks=pytest.mark.nightly),
        pytest.param({"stage": 1}, "fp16", "adamw8bit-bnb", 1, marks=pytest.mark.nightly),
        pytest.param({"stage": 2, "offload_optimizer": ON_HOST}, "bf16", "adamw8bit", 2, marks=pytest.mark.nightly),
        pytest.param(
            {"stage": 3, "stage3_param_persistence_threshold": 0}, "fp32", "adamw8bit-bnb", 2, marks=pytest.mark.nightly
        ),
        ({"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST}, "bf16", "adamw", 2),
    ],
    ids=lambda value: str(value["stage"]) + "-offload" * (len(value) > 2) if isinstance(value, dict) else str(value),
)
def test_a_rewind_in_the_engine_equals_a_new_start(
    two_spikes: Path, tmp_path: Path, zero: Any, precision: str, optimizer: str, ranks: int
) -> None:
    """To the bit, and in the memory that it has."""
    runs = [
        spiky(
            two_spikes,
            tmp_path / name,
            divergence__policy="rewind",
            performance__precision=precision,
            batch__micro=BATCH // ranks // 2,
            optim__name=optimizer,
            optim__schedule="linear",
            ema__power_stds=(0.1,),
            timesteps__density="importance",
        )
        for name in ("rewound", "started")
    ]
    deepspeed = {"zero_optimization": zero} | ({"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {})
    values(forked_ranks(_rewind_and_start_again, *runs, deepspeed, ranks=ranks))
    assert newest(tmp_path / "rewound").manifest["progress"]["rewinds"] == 2
    assert newest(tmp_path / "rewound").manifest["loss_scale"] == newest(tmp_path / "started").manifest["loss_scale"]
    assert hexes(losses(tmp_path / "rewound")) == hexes(losses(tmp_path / "started"))
    assert lines(tmp_path / "rewound") == lines(tmp_path / "started")
    assert_same_checkpoint(tmp_path / "rewound", tmp_path / "started")


@pytest.mark.fault(20)
def test_two_skipped_spikes_and_a_nan_do_not_end_a_run(world: World, tmp_path: Path) -> None:
    data = marred(tmp_path / "data", {in_step(6): 100.0, in_step(7): 100.0, in_step(8): np.nan})
    train(spiky(data, tmp_path / "run", 9, divergence__policy="skip"), launch(0), world)
    assert [line["step"] for line in lines(tmp_path / "run")] == [6, 7]
    assert [line["step"] for line in lines(tmp_path / "run", "skipped.jsonl")] == [8]
    assert records(tmp_path / "run")[-1]["skipped"] == 3


@pytest.mark.fault(12)
def test_a_run_that_is_to_stop_at_a_spike_comes_to_it_again(
    world: World, two_spikes: Path, alone: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is the process ended while others go back, nor is the step saved that is to be undone."""
    config = spiky(two_spikes, tmp_path / "run", divergence__policy="rewind")
    stop = StopRequest()
    add = Meters.add

    def asked(self: Meters, losses: torch.Tensor, position: torch.Tensor, *rest: Any) -> None:
        if int(position[0]) // BATCH + 1 == FIRST:
            stop.make("a test")
        add(self, losses, position, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Meters, "add", asked)
        with pytest.raises(Preempted, match="not saved"):
            train(config, launch(0), world, stop)
        stop.answered = True  # or it would end this process, which goes on
    assert intact(tmp_path / "run")[0] == 4
    train(config, launch(0), world)
    assert lines(tmp_path / "run") == lines(alone["rewind"])
    assert hexes(losses(tmp_path / "run")) == hexes(losses(alone["rewind"]))
    assert_same_checkpoint(tmp_path / "run", alone["rewind"])


# --- not finite --------------------------------------------------------------------------------------------------


@pytest.mark.fault(20)
def test_a_sample_of_one_rank_skips_the_step_of_all(tmp_path: Path) -> None:
    """NaN in step 3 and infinity in step 5, in the half of rank 1."""
    data = marred(tmp_path / "data", {in_step(3, 11): np.nan, in_step(5, 12): -np.inf})
    config = tiny(data, tmp_path / "run", optim__schedule="linear", output__checkpoint_every=1, output__keep=9)
    values(forked_ranks(_train, [config]))
    assert lines(tmp_path / "run", "skipped.jsonl") == [
        {"step": step, "samples": 1, "keys": [key_at(data, in_step(step, sample))]}
        for step, sample in ((3, 11), (5, 12))
    ]
    assert lines(tmp_path / "run") == []
    found = records(tmp_path / "run")
    assert [r["skipped"] for r in found] == [0, 0, 1, 1, 2, 2]
    assert np.isfinite([r["loss"] for r in found]).all()
    for step in (3, 5):
        assert found[step]["lr"] == found[step - 1]["lr"]
        for rank in range(2):
            assert_equal(weights(tmp_path / "run", step - 1, rank), weights(tmp_path / "run", step, rank))


@pytest.mark.fault(20)
def test_the_keys_of_a_batch_that_is_not_finite_are_bounded(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = marred(tmp_path / "data", dict.fromkeys(range(64, 64 + 20), np.nan))
    config = tiny(data, tmp_path / "run")
    config = dataclasses.replace(config, samples=2 * 64, batch=dataclasses.replace(config.batch, samples=64, micro=16))
    train(config, launch(0), world)
    (line,) = lines(tmp_path / "run", "skipped.jsonl")
    assert (line["step"], line["samples"]) == (2, 20)
    assert line["keys"] == [key_at(data, position) for position in range(64, 64 + 16)]
    assert f"{line['keys'][3]} and 16 more\n" in capsys.readouterr().err


@pytest.mark.fault(20)
def test_nan_in_every_batch_ends_the_run_of_two_ranks(tmp_path: Path) -> None:
    """Always at rank 0 only; the checkpoint before it stays, with finite weights."""
    data = marred(tmp_path / "data", {in_step(step): np.nan for step in range(5, 9)})
    config = tiny(data, tmp_path / "run", 8, output__checkpoint_every=4)
    ended = forked_ranks(_train, [config])
    for end in ended:
        assert end.trace is not None
        assert "DivergedError: 3 steps in a row had to be skipped, up to step 7" in end.trace
        assert key_at(data, in_step(7)) in end.trace
        assert "The checkpoints before are intact" in end.trace
    assert [line["step"] for line in lines(tmp_path / "run", "skipped.jsonl")] == [5, 6, 7]
    assert intact(tmp_path / "run") == [4]
    assert all(
        torch.isfinite(value).all() for rank in range(2) for value in weights(tmp_path / "run", 4, rank).values()
    )


def test_a_run_that_diverges_before_its_first_checkpoint_promises_none(world: World, tmp_path: Path) -> None:
    config = tiny(marred(tmp_path / "data", dict.fromkeys(range(64), np.nan)), tmp_path / "run")
    with pytest.raises(DivergedError, match=r"none of its 16 losses is finite; lower .* There is no checkpoint yet"):
        train(config, launch(0), world)
