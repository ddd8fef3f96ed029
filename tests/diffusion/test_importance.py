"""Importance sampling by the second moment of the loss: unbiased, equal for any number of ranks, resumable."""

import math
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.processes import build_process
from fastdiff.diffusion.timesteps import HISTORY, Timesteps, build_timesteps
from fastdiff.parallel.world import World
from tests.support.processes import run_ranks

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
T = 12
Step = list[tuple[int, float]]
"""Timestep and loss of each sample of an optimizer step, in the order of their positions."""


def sampler(timesteps: int = T, batch_samples: int = 16, seed: int = 3, **config: object) -> Timesteps:
    objective = DdpmConfig(schedule="cosine", timesteps=timesteps)
    values = TimestepConfig(density="importance", **config)  # type: ignore[arg-type]
    process = build_process(objective, "cpu")
    return build_timesteps(values, objective, process, seed=seed, batch_samples=batch_samples, device="cpu")


def feed(drawn: Timesteps, step: Step, first: int, order: list[int], micro: int) -> None:
    """``observe`` the samples in this order, ``micro`` at a time."""
    row, loss = torch.tensor([t for t, _ in step]), torch.tensor([value for _, value in step], dtype=torch.float32)
    for chosen in torch.tensor(order).split(micro):
        drawn.observe(row[chosen], loss[chosen], first + chosen)


def deque_histories(steps: list[Step], timesteps: int = T) -> list[tuple[int, list[float]]]:
    """The plain meaning: how many losses each timestep had, and the last ten of them."""
    kept = [(0, deque[float](maxlen=10)) for _ in range(timesteps)]
    for t, loss in (sample for step in steps for sample in step):
        if math.isfinite(loss):
            kept[t][1].append(loss)
            kept[t] = (kept[t][0] + 1, kept[t][1])
    return [(count, list(last)) for count, last in kept]


def unrolled(state: dict[str, Tensor]) -> list[tuple[int, list[float]]]:
    """The losses of the rings, the oldest first."""
    found = []
    for count, ring in zip(state["count"].tolist(), state["history"].tolist(), strict=True):
        oldest = count % HISTORY if count >= HISTORY else 0
        found.append((count, (ring[oldest:] + ring[:oldest])[:count]))
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


SAMPLE = st.tuples(
    # Few timesteps, so that many come more than ten times in one step.
    st.one_of(st.integers(0, 2), st.integers(0, T - 1)),
    st.floats(0, 1e6, width=32) | st.sampled_from([math.nan, math.inf]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(SAMPLE, min_size=24, max_size=24), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_histories_are_deques_in_the_order_of_the_positions(steps: list[Step], random) -> None:  # type: ignore[no-untyped-def]
    """However the samples of a step come in: as of one rank, or as micro-batches of several."""
    whole, parted = sampler(), sampler()
    for number, step in enumerate(steps):
        order = list(range(24))
        feed(whole, step, 24 * number, order, micro=24)
        random.shuffle(order)
        feed(parted, step, 24 * number, order, micro=random.choice([1, 2, 6]))
        whole.end_step(ALONE)
        parted.end_step(ALONE)
    assert unrolled(whole.state()) == deque_histories(steps)
    assert same(whole.state(), parted.state())
    position = torch.arange(500)
    assert torch.equal(whole.draw(position)[0], parted.draw(position)[0])


def warm(seed: int = 0, **config: object) -> tuple[Timesteps, Tensor]:
    """A sampler that has seen twelve losses of each timestep, and its probabilities, computed independently."""
    drawn = sampler(**config)
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(T).repeat(12)
    loss = torch.rand(len(row), generator=generator) * 2.0 ** -row.float()
    drawn.observe(row, loss, torch.arange(len(row)))
    drawn.end_step(ALONE)
    root = loss.view(12, T)[-10:].double().square().mean(dim=0).sqrt()
    return drawn, (1 - 0.001) * root / root.sum() + 0.001 / T


@pytest.mark.parametrize("stratified", [False, True])
def test_frequencies_and_weights_are_those_of_the_paper(stratified: bool) -> None:
    drawn, expected = warm(stratified=stratified, batch_samples=500)
    native, weights = drawn.draw(torch.arange(100_000))
    assert weights is not None
    torch.testing.assert_close(weights.double(), 1 / (T * expected[native]), rtol=1e-6, atol=0)
    counts = torch.bincount(native, minlength=T).double()
    chi_square = ((counts - 100_000 * expected) ** 2 / (100_000 * expected)).sum()
    assert chi_square < T - 1 + 5 * math.sqrt(2 * (T - 1))
    if stratified:  # each step has each timestep as often as it should, up to one at either end
        by_step = torch.nn.functional.one_hot(native.view(-1, 500), T).sum(dim=1)
        assert ((by_step - 500 * expected).abs() < 2).all()


def test_levels_are_even_until_every_history_is_full() -> None:
    drawn = sampler()
    row = torch.arange(T).repeat(9)
    drawn.observe(torch.cat([row, torch.zeros(50, dtype=torch.int64)]), torch.ones(len(row) + 50), torch.arange(158))
    drawn.end_step(ALONE)
    native, weights = drawn.draw(torch.arange(12_000))
    assert weights is not None
    assert (weights == 1).all()
    counts = torch.bincount(native, minlength=T).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < T - 1 + 5 * math.sqrt(2 * (T - 1))
    drawn.observe(torch.arange(T), torch.arange(T).float(), torch.arange(158, 158 + T))
    drawn.end_step(ALONE)
    _, weights = drawn.draw(torch.arange(12_000))
    assert weights is not None
    assert not (weights == 1).any()


def test_losses_of_zero_leave_the_levels_even() -> None:
    drawn = sampler()
    drawn.observe(torch.arange(T).repeat(10), torch.zeros(10 * T), torch.arange(10 * T))
    drawn.end_step(ALONE)
    _, weights = drawn.draw(torch.arange(1000))
    assert weights is not None
    assert (weights == 1).all()


@pytest.mark.parametrize("stratified", [False, True])
def test_the_weighted_mean_is_that_of_even_levels(stratified: bool) -> None:
    """1.2e5 draws of a loss that spans three decades, times chance; the sampler learns from it all the while."""
    steps, samples, timesteps = 400, 300, 50
    level = 10 ** (-3 * torch.arange(timesteps, dtype=torch.float64) / timesteps)
    drawn = sampler(timesteps, samples, stratified=stratified)
    generator = torch.Generator().manual_seed(1)
    weighted, unweighted = [], []
    for step in range(steps):
        position = torch.arange(step * samples, (step + 1) * samples)
        native, weights = drawn.draw(position)
        assert weights is not None
        loss = level[native] * torch.randn(samples, 16, generator=generator).square().mean(dim=1)
        drawn.observe(native, loss.float(), position)
        drawn.end_step(ALONE)
        weighted.append(loss * weights)
        unweighted.append(loss)
    found, plain = torch.cat(weighted), torch.cat(unweighted)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - level.mean()) < 3 * error
    assert plain.mean() > 1.5 * level.mean(), "without the weights it would be another mean"
    even = level.square().mean() * (1 + 2 / 16) - level.mean() ** 2  # variance of even draws
    assert found[len(found) // 10 :].var() < 0.3 * even, "what it is for"


def test_the_objective_weights_the_loss_and_learns_from_it_unweighted() -> None:
    config = DdpmConfig(schedule="cosine", timesteps=T, prediction="v", min_snr_gamma=5.0)
    objective = Objective(config, seed=3, null={}, device="cpu", timesteps=TimestepConfig(density="importance"))
    plain = Objective(config, seed=3, null={}, device="cpu")
    learned, _ = warm()
    objective.timesteps.restore(learned.state())
    batch = Batch(torch.randn(64, 2, 4, 4, generator=torch.Generator().manual_seed(2)), torch.arange(200, 264), {})
    corruption = objective.add_noise(batch)
    assert corruption.importance is not None
    assert torch.equal(corruption.time, learned.draw(batch.position)[0])
    guess = torch.zeros_like(batch.latents)
    found = objective.loss(guess, batch, corruption)
    expected = plain.loss(guess, batch, plain.add_noise(batch, native=corruption.time))
    assert torch.equal(found, expected * corruption.importance)
    objective.timesteps.end_step(ALONE)
    learned.observe(corruption.time, expected, batch.position)
    learned.end_step(ALONE)
    assert same(objective.timesteps.state(), learned.state())


def test_the_state_is_restored_and_another_density_starts_anew() -> None:
    learned, _ = warm()
    other = sampler()
    other.restore({name: values.clone() for name, values in learned.state().items()})
    position = torch.arange(1000)
    for a, b in zip(learned.draw(position), other.draw(position), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    for state in ({}, sampler(timesteps=T + 1).state()):
        other.restore(state)
        assert same(other.state(), sampler().state())
        assert torch.equal(other.draw(position)[0], sampler().draw(position)[0])


def test_two_ranks_have_the_state_of_one() -> None:
    """And go on with its state."""
    alone = sampler()
    learn(alone, ALONE, steps=range(20))
    assert alone.state()["count"].min() >= HISTORY
    for state in run_ranks(_learned, ranks=2):
        assert same(state, alone.state())


def _learned(world: World) -> dict[str, Tensor]:
    first, second = sampler(), sampler()
    learn(first, World(rank=0, size=1, device=world.device), steps=range(8))
    second.restore(first.state())
    learn(second, world, steps=range(8, 20))
    return second.state()


def learn(drawn: Timesteps, world: World, steps: range) -> None:
    """Steps of 48 losses, of which each rank has its micro-batches of 8."""
    for step in steps:
        for position in torch.arange(48 * step, 48 * (step + 1)).view(-1, world.size, 8)[:, world.rank]:
            native, _ = drawn.draw(position)
            drawn.observe(native, torch.sin(position.float()) ** 2 * (1 + native), position)
        drawn.end_step(world)
