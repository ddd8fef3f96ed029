"""The order of the samples: a permutation per epoch, the same for any number of ranks and any start."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.data.loading.order import Order, RankPositions, positions
from fastdiff.errors import ConfigError, DataError

SIZES = [5, 3, 7, 1, 6, 2]


def take(order, count, **share):
    """The sample ids of the first micro-batches of one rank."""
    own = RankPositions(**share)
    return [order.samples(own[index]) for index in range(count)]


def test_the_order_is_frozen():
    # Written down once: a change of numpy or of this code must not change the order of a run that is resumed.
    order = Order(1234, SIZES, 2)
    assert order.samples(np.arange(30)).tolist() == GOLDEN
    assert Order(1234, SIZES, 100).samples(np.arange(24)).tolist() == GOLDEN_ONE_WINDOW
    assert Order(2**64 + 1234, SIZES, 2).samples(np.arange(30)).tolist() == GOLDEN
    assert Order(1235, SIZES, 2).samples(np.arange(30)).tolist() != GOLDEN


def test_samples_are_mixed_inside_windows_of_shards_only():
    order = Order(0, [10] * 12, 3)
    shards, rows = order.locate(order.samples(np.arange(120)))
    windows = [set(shards[start : start + 30].tolist()) for start in range(0, 120, 30)]
    assert [len(window) for window in windows] == [3, 3, 3, 3]
    assert set().union(*windows) == set(range(12))
    assert windows[0] != {0, 1, 2}
    assert shards[:30].tolist() != sorted(shards[:30].tolist())
    assert rows.min() == 0
    assert rows.max() == 9


def test_every_place_of_a_window_is_equally_likely():
    # 24 samples, 4000 epochs: each sample comes first about 166.7 times, standard deviation 12.6.
    order = Order(7, SIZES, 6)
    first = order.samples(np.arange(4000) * 24)
    counts = np.bincount(first, minlength=24)
    assert abs(counts - 4000 / 24).max() < 5 * 12.6


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_sample_order_is_the_same_for_1_2_3_4_ranks(micro):
    global_batch, steps = 72, 3
    sequences = []
    for ranks in (1, 2, 3, 4):
        order = Order(11, SIZES, 2)
        accumulation = global_batch // (micro * ranks)
        share = {"start_samples": 0, "ranks": ranks, "micro": micro, "global_batch": global_batch}
        shares = [take(order, steps * accumulation, rank=rank, **share) for rank in range(ranks)]
        # Interleave what the ranks read: micro-batch by micro-batch, rank by rank.
        together = np.concatenate([batch for batches in zip(*shares, strict=True) for batch in batches])
        sequences.append(together.tolist())
    assert sequences[0] == Order(11, SIZES, 2).samples(np.arange(steps * global_batch)).tolist()
    assert sequences[1:] == sequences[:1] * 3


def test_positions_follow_the_formula():
    assert positions(2, 1, 3, 4, 5, 40).tolist() == [2 * 40 + (1 * 4 + 3) * 5 + i for i in range(5)]
    assert positions(2, 1, 3, 4, 5, 40).dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    window=st.integers(1, 12),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_any_shards_give_a_permutation_that_is_a_pure_function(sizes, window, seed, epoch):
    order, total = Order(seed, sizes, window), sum(sizes)
    ids = order.samples(epoch * total + np.arange(total))
    assert sorted(ids.tolist()) == list(range(total))
    backwards = [int(Order(seed, sizes, window).samples([epoch * total + n])[0]) for n in reversed(range(total))]
    assert backwards == ids.tolist()[::-1]
    shards, rows = order.locate(ids)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    assert np.array_equal(starts[shards] + rows, ids)
    assert (rows < np.asarray(sizes)[shards]).all()


def test_a_huge_data_set_needs_the_memory_of_a_window():
    order = Order(0, [10_000] * 10_000, 4)
    ids = order.samples(np.array([0, 99_999_999, 100_000_000, 10**15]))
    assert ids.max() < 10**8
    assert max(len(window) for window in order._windows.values()) == 40_000
    assert len(order._windows) <= 3


def test_threads_share_an_order(monkeypatch):
    order, epochs = Order(2, SIZES, 2), range(8)
    expected = {epoch: Order(2, SIZES, 2).samples(epoch * 24 + np.arange(24)).tolist() for epoch in epochs}
    inside, most, found, errors = [], [], [], []
    shuffle = order._shuffle

    def slow_shuffle(*args):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)  # lets the other thread in, if it may
        inside.pop()
        return shuffle(*args)

    def work(epochs):
        try:
            found.extend((epoch, order.samples(epoch * 24 + np.arange(24)).tolist()) for epoch in epochs)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(order, "_shuffle", slow_shuffle)
    threads = [threading.Thread(target=work, args=(order_of,)) for order_of in (epochs, reversed(epochs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(found) == 16
    assert all(ids == expected[epoch] for epoch, ids in found)
    assert max(most) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"start_samples": 3}, "multiple of --batch.samples 12"),
        ({"start_samples": -12}, "multiple of --batch.samples 12"),
        ({"micro": 5}, "is not divisible"),
        ({"micro": 0}, "is not divisible"),
        ({"rank": 2}, "rank 2 of 2"),
    ],
)
def test_batches_that_do_not_divide_are_refused(change, problem):
    with pytest.raises(ConfigError, match=problem):
        RankPositions(**{"start_samples": 0, "rank": 0, "ranks": 2, "micro": 3, "global_batch": 12} | change)


def test_impossible_orders_are_refused():
    with pytest.raises(ConfigError, match=r"shuffle_shards 0"):
        Order(0, SIZES, 0)
    with pytest.raises(DataError, match=r"at least one"):
        Order(0, [], 1)
    with pytest.raises(DataError, match=r"at least one"):
        Order(0, [3, 0], 1)
    with pytest.raises(ValueError, match=r"must not be negative"):
        Order(0, SIZES, 1).samples([-1])


# fmt: off
GOLDEN = [
    4, 1, 2, 0, 23, 22, 3, 6, 5, 15, 7, 12, 18, 10, 17, 13, 8, 16, 20, 21, 14, 19, 11, 9, 7, 1, 6, 0, 5, 2,
]
GOLDEN_ONE_WINDOW = [
    18, 20, 6, 14, 7, 19, 4, 1, 2, 9, 0, 23, 15, 22, 11, 5, 16, 21, 10, 17, 8, 13, 12, 3,
]
# fmt: on
