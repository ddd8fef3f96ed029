"""The random streams of a run: the dependence of each number on seed and position alone."""

import pytest
import torch

from fastdiff.data.loading.order import RankPositions, shuffle
from fastdiff.rng import Stream, normal, uniform
from fastdiff.sampling.solvers import _generator
from fastdiff_kernels import philox
from fastdiff_kernels.noising import uniform_time
from tests.support.references.timesteps import uniform_timesteps

SHAPE = (4, 8, 8)


def test_the_numbering_of_the_streams_is_frozen():
    assert {stream.name: stream.value for stream in Stream} == {
        "TIMESTEP": 0,
        "NOISE": 1,
        "POSTERIOR": 2,
        "LABEL_DROP": 3,
        "FLIP": 4,
        "PERTURBATION": 5,
        "OFFSET": 6,
        "CAPTION": 7,
        "CROP": 8,
        "MULTIRES": 9,
        "LIKELIHOOD": 10,
        "DROPOUT": 11,
        "LOW_RES": 12,
        "LOW_RES_LEVEL": 13,
        "TEACHER_TOKEN": 14,
        "ROUTING": 15,
        "PATH_DROP": 16,
    }


def test_the_numbers_of_a_run_are_frozen():
    position = torch.tensor([0, 2**32 + 1])
    got = uniform(1234, Stream.NOISE, position, 2)
    # Recorded once: another value means that old runs cannot be continued.
    assert [[value.hex() for value in row] for row in got.tolist()] == [
        ["0x1.c3146c0000000p-1", "0x1.fdf74c0000000p-2"],
        ["0x1.fd4e8c0000000p-2", "0x1.92c45e0000000p-1"],
    ]


def _positions(step, micro_batch, rank, ranks, micro, accumulation):
    """Those of one micro-batch of a step, as the loader takes them."""
    batch = ranks * micro * accumulation
    own = RankPositions(start_samples=step * batch, rank=rank, ranks=ranks, micro=micro, global_batch=batch)
    return torch.from_numpy(own[micro_batch])


def test_two_ranks_draw_different_noise():
    noise = [normal(0, Stream.NOISE, _positions(3, 0, rank, 2, 8, 2), SHAPE) for rank in (0, 1)]
    together = torch.cat(noise).flatten(1)
    correlation = torch.corrcoef(together) - torch.eye(16)
    # 5 standard errors of a correlation of 256 independent pairs, over 120 pairs.
    assert correlation.abs().max() < 5 * together.shape[1] ** -0.5


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 16, 1), (1, 4, 4), (2, 4, 2), (4, 2, 2)])
def test_the_numbers_of_a_step_do_not_depend_on_how_it_is_split(ranks, micro, accumulation):
    whole = torch.arange(5 * 16, 6 * 16)
    parts = [
        _positions(5, micro_batch, rank, ranks, micro, accumulation)
        for micro_batch in range(accumulation)
        for rank in range(ranks)
    ]
    for draw in (
        lambda position: normal(9, Stream.NOISE, position, SHAPE),
        lambda position: uniform(9, Stream.FLIP, position, 3),
        lambda position: uniform_timesteps(9, position, 1000),
    ):
        assert torch.equal(torch.cat([draw(part) for part in parts]), draw(whole))


def test_streams_seeds_and_positions_share_no_numbers():
    position = torch.arange(50)
    draws = [philox.bits(seed, stream, position, 4) for seed in (0, 1, 2**63) for stream in Stream]
    values = torch.stack(draws).flatten()
    # 8400 draws of 2**32 values collide 0.008 times on average; of those of fp32, which are fewer, about twice.
    assert values.unique().numel() == values.numel()
    for draw in (uniform, lambda *arguments: normal(*arguments[:3], (4,))):
        draws = [draw(seed, stream, position, 4) for seed in (0, 1, 2**63) for stream in Stream]
        assert torch.stack(draws).unique().numel() > values.numel() - 10


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: uniform(seed, Stream.NOISE, torch.arange(4), 16),
        lambda seed: torch.from_numpy(shuffle(seed, 64, 0, 0, 0)),
        lambda seed: torch.rand(64, generator=_generator(seed, 0)),
    ],
    ids=["training", "order", "sampling"],
)
def test_the_top_bit_of_a_seed_counts(draw):
    for seed in (0, 7, 2**63 - 1):
        assert not torch.equal(draw(seed), draw(seed + 2**63))


def test_shapes_are_row_major_and_fp32():
    position = torch.arange(3)
    shaped = normal(0, Stream.NOISE, position, SHAPE)
    assert shaped.shape == (3, *SHAPE)
    assert shaped.dtype == torch.float32
    assert torch.equal(shaped.flatten(1), normal(0, Stream.NOISE, position, (256,)))


@pytest.mark.parametrize("timesteps", [2, 10, 1000])
def test_timesteps_are_uniform_and_in_range(timesteps):
    draws = 40_000
    time = uniform_timesteps(5, torch.arange(draws), timesteps)
    assert time.dtype == torch.int64
    share = uniform(5, Stream.TIMESTEP, torch.arange(draws), 1)[:, 0]
    assert torch.equal(time, (share * timesteps).long())
    counts = torch.bincount(time, minlength=timesteps).double()
    assert counts.numel() == timesteps
    expected = draws / timesteps
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = timesteps - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_the_largest_uniform_gives_the_last_timestep():
    largest = torch.tensor([1 - 2**-24])
    for timesteps in (*range(2, 2000), 2**24 - 1, 2**24):
        assert uniform_time(largest, timesteps) == timesteps - 1
