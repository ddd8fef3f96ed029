"""Losses by noise level in the log: quartiles of the depth, and bins of the log SNR."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fastdiff.diffusion.levels import Levels
from fastdiff.diffusion.snr_bins import by_log_snr, mean_of, name_of
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, normal
from fastdiff.training.loop import train
from fastdiff.training.metrics import BY_LEVEL, Meters
from fastdiff.training.trackers.tags import shown
from tests.support.references.timesteps import uniform_timesteps
from tests.support.runs import launch, records, tiny

ALONE: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), sum_=lambda tensor: tensor)
LOG_SNR = [-math.inf, -30.0, -8.75, -8.7500001, -0.001, 0.0, 1.2499, 1.25, 8.7499, 8.75, 40.0, 3.0]
DEPTH = [1.0, 0.99, 0.75, 0.74999, 0.5, 0.49999, 0.25, 0.24999, 0.1, 0.0, 0.0, 0.3]


def levels_of(row: torch.Tensor) -> Levels:
    rows = len(DEPTH)
    return Levels(
        row, row, torch.ones(rows, 4), torch.ones(rows), torch.tensor(LOG_SNR), torch.tensor(DEPTH)
    )  # fmt: skip


def group_of(name: str, row: int) -> bool:
    """Whether a row belongs to a group, from the definition of the groups."""
    number = int(name[-1]) if name.startswith("loss_q") else int(name[-2:])
    if name.startswith("loss_q"):
        return min(3, math.floor(4 * np.float32(DEPTH[row]))) == number
    below, above = -10 + 1.25 * number, -10 + 1.25 * (number + 1)
    value = np.float32(LOG_SNR[row])
    return bool((number == 0 or value >= below) and (number == 15 or value < above))


@pytest.mark.parametrize("weighted", [False, True])
def test_groups_are_those_of_numpy(weighted: bool) -> None:
    """Over several micro-batches with losses that are not finite; uneven draws are weighted in the mean of a group."""
    generator = np.random.default_rng(0)
    meters, seen = Meters(ALONE), []
    for _ in range(5):
        rows = generator.integers(len(DEPTH) - 1, size=16)
        losses = generator.standard_normal(16).astype(np.float32)
        losses[generator.integers(16)] = generator.choice([np.nan, np.inf])
        importance = generator.uniform(0.5, 2, 16).astype(np.float32)
        seen += list(zip(rows, losses, importance if weighted else np.ones(16), strict=True))
        meters.add(
            torch.from_numpy(losses),
            torch.arange(16),
            levels_of(torch.from_numpy(rows)),
            torch.from_numpy(importance) if weighted else None,
        )
    found = meters.read()
    seen = [one for one in seen if np.isfinite(one[1])]
    assert found["loss"] == pytest.approx(np.mean([float(loss) for _, loss, _ in seen]), rel=1e-12)
    for name in BY_LEVEL:
        members = [(float(loss), float(weight)) for row, loss, weight in seen if group_of(name, row)]
        expected = sum(loss for loss, _ in members) / sum(weight for _, weight in members) if members else None
        assert found[name] == (expected if expected is None else pytest.approx(expected, rel=1e-12)), name
    assert found["loss_snr_10"] is None, "no sample was there"
    assert found["loss_q2"] is not None
    again = meters.read()
    assert math.isnan(again["loss"])
    assert {again[name] for name in BY_LEVEL} == {None}


@pytest.mark.parametrize("weighted", [False, True])
def test_the_parts_of_a_loss(weighted: bool) -> None:
    meters = Meters(ALONE, parts=("mse", "vb"))
    rows = torch.tensor([9, 1, 8, 10])
    mse, vb = torch.tensor([1.0, 2.0, 3.0, math.inf]), torch.tensor([0.5, 0.25, 0.125, 1.0])
    importance = torch.tensor([1.0, 3.0, 2.0, 1.0]) if weighted else torch.ones(4)
    given = importance if weighted else None
    meters.add((mse + vb) * importance, torch.arange(4), levels_of(rows), given, (mse, vb))
    older = torch.full((2, 1 + len(BY_LEVEL)), 2.0, dtype=torch.float64)
    found = meters.read()
    for name, part in (("mse", mse), ("vb", vb)):
        finite = (part * importance)[:3]
        assert found[name] == pytest.approx(float(finite.mean())), "as the loss, without samples that are not finite"
        first = [n for n in range(3) if group_of("loss_q0", int(rows[n]))]
        expected = float(finite[first].sum() / importance[first].sum())
        assert found[f"{name}_q0"] == pytest.approx(expected)
    assert found["mse"] + found["vb"] == pytest.approx(found["loss"])
    assert found["mse_q1"] is None
    meters.restore(older)
    again = meters.read()
    assert (again["loss"], again["mse"]) == (1.0, None), "a checkpoint of before has no parts"


def test_nothing_is_read_from_the_device() -> None:
    """Under fake tensors, which have shapes and no values, every such read fails."""
    with FakeTensorMode():
        meters = Meters(ALONE)
        losses, rows = torch.rand(16), torch.zeros(16, dtype=torch.int64)
        meters.add(losses, rows, levels_of(rows), losses)
        assert meters.sums.shape == (2, 1 + len(BY_LEVEL))
        with pytest.raises(DataDependentOutputException):
            meters.read()


def test_the_log_has_the_losses_by_level(world: World, digits: Path, tmp_path: Path) -> None:
    """A fresh network says 0: its loss is the mean square of the noise that each sample was given."""
    config = tiny(digits, tmp_path / "run", steps=1, objective__prediction="epsilon")
    train(config, launch(0), world)
    [found] = records(tmp_path / "run")
    position = torch.arange(16)
    noise = normal(config.seed, Stream.NOISE, position, (1, 8, 8)).double().numpy()
    losses = (noise**2).mean(axis=(1, 2, 3))
    time = uniform_timesteps(config.seed, position, 1000).numpy()
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    bins = np.clip(np.floor((np.log(alpha_bar / (1 - alpha_bar))[time] + 10) / 1.25), 0, 15)
    groups = [(f"loss_q{n}", losses[time // 250 == n]) for n in range(4)]
    groups += [(f"loss_snr_{n:02d}", losses[bins == n]) for n in range(16)]
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    for name, members in groups:
        assert found[name] == (pytest.approx(members.mean(), rel=1e-6) if len(members) else None), name
    tags = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Tags()["scalars"]
    assert {tag for tag in tags if "/" in tag} == {shown(name) for name, members in groups if len(members)}


def test_means_and_errors_of_even_levels() -> None:
    """The change with the level is no error; what is random around it is."""
    generator = np.random.default_rng(0)
    log_snr = np.linspace(12, -12, 4000)[generator.permutation(4000)]
    total, bins = by_log_snr(log_snr, 5 * log_snr + generator.normal(0, 0.5, 4000))
    assert total.error == pytest.approx(0.5 / math.sqrt(4000), rel=0.05)
    assert abs(total.mean) < 4 * total.error
    for number, found in enumerate(bins):
        inside = (np.clip((log_snr + 10) // 1.25, 0, 15)) == number
        assert found.count == inside.sum()
        assert found.mean == pytest.approx(5 * log_snr[inside].mean(), abs=5 * found.error)
        assert found.error == pytest.approx(0.5 / math.sqrt(found.count), rel=0.3)


def test_means_of_few_samples() -> None:
    assert math.isnan(mean_of(np.zeros(0)).mean)
    assert mean_of(np.array([2.0])).mean == 2.0
    assert math.isnan(mean_of(np.array([2.0])).error)
    assert mean_of(np.array([1.0, 3.0])).error == 1.0
    assert [name_of(n) for n in (0, 1, 8, 15)] == ["below -8.75", "-8.75 to -7.50", "0.00 to 1.25", "above 8.75"]
