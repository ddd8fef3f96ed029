"""The order of several data sets: exact shares of every epoch, for any ranks and any start, and frozen words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.data.loading.mixed_order import MixedBucketOrder, MixedOrder, Part
from fastdiff.data.loading.order import BATCHES, Order, RankPositions, shuffle

SIZES = [5, 8, 7, 40, 30]
"""Shards 0 and 1 are of data set 0, shard 2 of data set 1, the others of data set 2."""
SETS = ([0, 1], [2], [3, 4])


def parts(*counts: int) -> list[Part]:
    return [Part(n, np.array(shards), count) for n, (shards, count) in enumerate(zip(SETS, counts, strict=True))]


def order(*counts: int, seed: int = 3, window: int = 2) -> MixedOrder:
    return MixedOrder(seed, SIZES, parts(*counts), window)


def test_every_sample_comes_as_often_as_its_repeats() -> None:
    mixed = order(10 * 13, 3 * 7, 70)
    for epoch in range(3):
        found = mixed.samples(np.arange(len(mixed)) + epoch * len(mixed))
        np.testing.assert_array_equal(np.bincount(found), [10] * 13 + [3] * 7 + [1] * 70)


def test_passes_that_are_not_whole_go_on_in_the_next_epoch() -> None:
    """Of 13, 7 and 70 samples an epoch has 20, 20 and 20; after any number of epochs counts differ by 1 at most."""
    mixed = order(20, 20, 20)
    seen = np.zeros(90, np.int64)
    for epoch in range(14):
        found = mixed.samples(np.arange(60) + epoch * 60)
        seen += np.bincount(found, minlength=90)
        of_set = np.repeat([0, 1, 2], [13, 7, 70])[found]
        np.testing.assert_array_equal(np.bincount(of_set), [20, 20, 20])
        for own in np.split(seen, [13, 20]):
            assert own.max() - own.min() <= 1
    assert seen[20:].tolist() == [4] * 70  # 14 x 20 samples are 4 passes


@given(
    counts=st.tuples(*[st.integers(1, 400)] * 3),
    micro=st.integers(1, 3),
    resumed=st.integers(0, 40),
)
@settings(max_examples=10, deadline=None)
def test_shares_are_exact_for_1_2_and_3_ranks_and_after_a_resume(counts, micro, resumed) -> None:
    """Any number of ranks, killed after some steps and started anew, sees the same samples; an epoch has its shares."""
    batch, length = 6 * micro, sum(counts)
    steps = -(-length // batch)
    resumed = min(resumed, steps)
    seen = []
    for ranks in (1, 2, 3):
        ids = []
        for first, last in ((0, resumed), (resumed, steps)):
            mixed = order(*counts)  # a new process
            every = [
                RankPositions(start_samples=first * batch, rank=rank, ranks=ranks, micro=micro, global_batch=batch)
                for rank in range(ranks)
            ]
            for index in range((last - first) * (batch // (micro * ranks))):
                ids.append(np.concatenate([mixed.samples(own[index]) for own in every]))
        seen.append(np.concatenate([np.zeros(0, np.int64), *ids]))
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])
    of_set = np.repeat([0, 1, 2], [13, 7, 70])[seen[0][:length]]
    np.testing.assert_array_equal(np.bincount(of_set, minlength=3), counts)


def test_any_part_of_an_epoch_has_its_shares_almost() -> None:
    """A block holds its part of each data set up to one sample, so no stretch is of one data set alone."""
    mixed = order(30_000, 3_000, 7)
    of_set = np.repeat([0, 1, 2], [13, 7, 70])[mixed.samples(np.arange(len(mixed)))]
    starts = np.arange(0, len(mixed) - 4096, 512)
    shares = np.array([np.bincount(of_set[n : n + 4096], minlength=3) for n in starts])
    expected = 4096 * np.array([30_000, 3_000, 7]) / len(mixed)
    # The stretch cuts two blocks, of each of which at most as many samples of the second set as it holds, 93, are off.
    assert np.abs(shares - expected)[:, 1].max() < 93
    assert shares[:, 2].max() <= 3


def test_one_data_set_keeps_its_order() -> None:
    alone = Order(3, SIZES, 2)
    mixed = MixedOrder(3, SIZES, [Part(0, np.arange(5), 4 * 90)], 2)
    n = np.arange(1000)
    np.testing.assert_array_equal(mixed.samples(n), alone.samples(n))


def test_the_order_is_frozen() -> None:
    """Positions 0 to 19 and, far behind, of epoch 1000."""
    mixed = order(26, 7, 7)
    assert mixed.samples(np.arange(20)).tolist() == [8, 5, 12, 3, 10, 6, 7, 9, 2, 1, 11, 18, 4, 27, 17, 0, 0, 88, 12, 7]
    assert mixed.samples(40_000 + np.arange(5)).tolist() == [2, 4, 5, 3, 6]


def test_streams_differ_by_data_set_and_bucket() -> None:
    """Two data sets of equal sizes are not shuffled alike, nor the data sets as the batches."""
    mixed = MixedOrder(3, [50, 50], [Part(0, np.array([0]), 50), Part(1, np.array([1]), 50)], 1)
    found = mixed.samples(np.arange(100))
    assert found[found < 50].tolist() != (found[found >= 50] - 50).tolist()
    assert shuffle(3, 20, 4, 0, 0).tolist() != shuffle(3, 20, BATCHES, 0, 0).tolist()


BUCKETS = [0, 1, 0, 1, 0]
"""Of the shards: data set 0 has 5 and 8 samples in buckets 0 and 1, data set 1 7 in 0, data set 2 30 in 0, 40 in 1."""
BY_BUCKET = {
    0: [Part(0, np.array([0]), 50), Part(1, np.array([2]), 21), Part(2, np.array([4]), 30)],
    1: [Part(0, np.array([1]), 80), Part(2, np.array([3]), 40)],
}


@pytest.mark.parametrize("batch", [1, 4, 7, 150])
def test_batches_have_one_size_and_shares_are_exact(batch: int) -> None:
    """Of buckets of 101 and 120 samples per epoch; after as many epochs as a batch has samples every sample is even."""
    mixed = MixedBucketOrder(3, SIZES, BY_BUCKET, 2, batch)
    assert (mixed.buckets, len(mixed)) == ((0, 1), 221)
    ids = mixed.samples(np.arange(batch * 221))
    bucket = np.repeat(BUCKETS, SIZES)[ids].reshape(-1, batch)
    assert (bucket == bucket[:, :1]).all()
    np.testing.assert_array_equal(np.bincount(ids), batch * np.repeat([10, 3, 1], [13, 7, 70]))
    for epoch in range(1, batch):  # of each bucket less than a batch waits for the next epoch
        first = ids[: int(mixed._batches_before(epoch).sum()) * batch]
        for number, whole in ((0, 101), (1, 120)):
            held = (np.repeat(BUCKETS, SIZES)[first] == number).sum()
            assert 0 <= epoch * whole - held < batch
    np.testing.assert_array_equal(ids[-50:], [mixed.samples([n])[0] for n in range(len(ids))[-50:]])


def test_the_batches_of_the_buckets_are_shuffled() -> None:
    mixed = MixedBucketOrder(3, SIZES, BY_BUCKET, 2, 4)
    bucket = np.repeat(BUCKETS, SIZES)[mixed.samples(np.arange(0, 4 * 400, 4))]
    assert 20 < np.count_nonzero(np.diff(bucket[:55])) < 40  # of 27 each at random about 27 change
    assert bucket[:55].tolist() != bucket[55:110].tolist()
