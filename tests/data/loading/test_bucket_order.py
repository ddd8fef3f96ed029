"""The order of samples of several sizes: every global batch of one bucket, a pure function of the seed."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.data.loading.bucket_order import BucketOrder
from fastdiff.data.loading.build import build_order
from fastdiff.data.loading.order import Order, RankPositions
from fastdiff.data.shards.format import DatasetInfo, ShardInfo
from fastdiff.errors import ConfigError
from tests.support.inputs.captioned import template

SIZES = [5, 8, 7, 9, 6, 4, 8]
BUCKETS = [0, 2, 0, 2, 1, 0, 1]
"""Buckets 0, 1 and 2 have 16, 14 and 17 samples."""
BATCH = 4
EPOCH = (4 + 3 + 4) * BATCH


def info(sizes=SIZES, buckets=BUCKETS) -> DatasetInfo:
    shards = tuple(
        ShardInfo(name=f"{n}.tar", samples=size, bytes=10**6, sha256="", index_sha256="", bucket=bucket)
        for n, (size, bucket) in enumerate(zip(sizes, buckets, strict=True))
    )
    return replace(template(), shards=shards, samples=sum(sizes))


def order(seed=3, *, window=2, batch=BATCH, **shards):
    return build_order(info(**shards), seed=seed, window_shards=window, global_batch=batch)


def bucket_of(ids):
    return np.repeat(BUCKETS, SIZES)[ids]


def epochs(count, **arguments):
    return order(**arguments).samples(np.arange(count * EPOCH)).reshape(count, -1, BATCH)


def test_batches_of_all_buckets_are_shuffled_anew_in_every_epoch():
    sequences = bucket_of(epochs(200)[:, :, 0])
    assert len({tuple(sequence) for sequence in sequences.tolist()}) > 190
    # Each place of an epoch has bucket 0 with probability 4/11: 72.7 of 200 times, standard deviation 6.8.
    assert abs((sequences == 0).sum(axis=0) - 200 * 4 / 11).max() < 5 * 6.8


def test_every_sample_is_left_out_sometimes_and_equally_often():
    counts = np.bincount(epochs(600, window=100).ravel(), minlength=sum(SIZES))
    # Of 14 samples 2 are left out, of 17 one: 600 * 12/14 and 600 * 16/17, standard deviations 8.6 and 5.8.
    for bucket, expected, deviation in ((0, 600, 0), (1, 600 * 12 / 14, 8.6), (2, 600 * 16 / 17, 5.8)):
        found = counts[bucket_of(np.arange(sum(SIZES))) == bucket]
        assert abs(found - expected).max() <= 5 * deviation


def test_the_order_is_frozen():
    # Written down once: a change of numpy or of this code must not change the order of a run that is resumed.
    assert order(1234).samples(np.arange(24)).tolist() == GOLDEN
    assert order(2**64 + 1234).samples(np.arange(24)).tolist() == GOLDEN
    assert order(1235).samples(np.arange(24)).tolist() != GOLDEN


def test_samples_are_mixed_inside_windows_of_the_shards_of_a_bucket_only():
    many = order(sizes=[10] * 24, buckets=[0, 1] * 12, window=3, batch=5)
    ids = many.samples(np.arange(240))
    shards, rows = many.locate(ids)
    assert np.array_equal(shards * 10 + rows, ids)
    for bucket in (0, 1):
        own = shards[shards % 2 == bucket]
        windows = [set(own[start : start + 30].tolist()) for start in range(0, 120, 30)]
        assert [len(window) for window in windows] == [3, 3, 3, 3]
        assert own[:30].tolist() != sorted(own[:30].tolist())
    first, second = (shards[shards % 2 == bucket] // 2 for bucket in (0, 1))
    assert first.tolist() != second.tolist()  # each bucket has random numbers of its own


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=2, max_size=9),
    window=st.integers(1, 12),
    batch=st.integers(1, 6),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_any_shards_give_whole_batches_that_are_a_pure_function(shards, window, batch, seed, epoch):
    sizes, buckets = (list(part) for part in zip(*shards, strict=True))
    totals = np.bincount(buckets, weights=sizes).astype(int)
    arguments = {"seed": seed, "window": window, "batch": batch, "sizes": sizes, "buckets": buckets}
    if len(set(buckets)) > 1 and totals.max() < batch:
        with pytest.raises(ConfigError, match=r"--batch.samples"):
            order(**arguments)
        return
    built = order(**arguments)
    total = len(built)
    assert total == (sum(t // batch * batch for t in totals) if len(set(buckets)) > 1 else sum(sizes))
    ids = built.samples(epoch * total + np.arange(total))
    assert len(set(ids.tolist())) == total
    own = np.repeat(buckets, sizes)[ids[: total // batch * batch]].reshape(-1, batch)
    assert (own == own[:, :1]).all()
    backwards = [int(order(**arguments).samples([epoch * total + n])[0]) for n in reversed(range(total))]
    assert backwards == ids.tolist()[::-1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sample_order_is_the_same_for_any_number_of_ranks(ranks):
    built, micro_batches = order(batch=8), 6 * 8 // (ranks * 2)
    shares = [RankPositions(start_samples=0, rank=rank, ranks=ranks, micro=2, global_batch=8) for rank in range(ranks)]
    read = [built.samples(share[index]) for index in range(micro_batches) for share in shares]
    assert np.concatenate(read).tolist() == order(batch=8).samples(np.arange(48)).tolist()
    assert all(len(set(bucket_of(ids).tolist())) == 1 for ids in read)


def test_one_bucket_is_ordered_like_data_without_buckets():
    one = order(buckets=[1] * len(SIZES))
    assert isinstance(one, Order)
    assert one.samples(np.arange(100)).tolist() == Order(3, SIZES, 2).samples(np.arange(100)).tolist()
    assert isinstance(order(), BucketOrder)


def test_a_bucket_that_fills_no_batch_is_left_out_with_a_warning_of_one_rank(monkeypatch, capsys):
    left = r"14 of 47 samples .*\(bucket \(latents\): samples; 1 \(6x4\): 14\); use a smaller batch"
    found = order(batch=15)
    assert (found.left_out, len(found)) == ({1: 14}, 30)
    assert re.search(left, capsys.readouterr().err)
    ids = found.samples(np.arange(60)).reshape(2, 2, 15)
    assert [sorted(bucket_of(epoch[:, 0]).tolist()) for epoch in ids] == [[0, 2]] * 2
    assert (bucket_of(ids) == bucket_of(ids[:, :, :1])).all()
    monkeypatch.setenv("RANK", "1")
    assert order(batch=15).left_out == {1: 14}
    assert order(batch=BATCH).left_out == {}
    assert capsys.readouterr().err == ""


def test_an_order_without_any_batch_is_refused():
    with pytest.raises(
        ConfigError, match=r"no bucket fills a batch: the largest, 2 \(.* latents\), has 17 samples, fewer"
    ):
        order(batch=18)
    with pytest.raises(ConfigError, match=r"shuffle_shards 0"):
        order(window=0)
    with pytest.raises(ValueError, match=r"must not be negative"):
        order().samples([-1])
    assert order().samples([]).shape == (0,)


def test_a_huge_data_set_needs_the_memory_of_windows():
    huge = order(sizes=[10_000] * 10_000, buckets=[0, 1, 2, 1] * 2500, window=4, batch=256)
    ids = huge.samples(np.array([0, len(huge) - 1, len(huge), 10**15]))
    assert ids.max() < 10**8
    assert len(huge) > 10**8 - 3 * 256


GOLDEN = [29, 44, 31, 33, 17, 18, 4, 1, 11, 12, 28, 8, 2, 0, 14, 15, 7, 10, 6, 27, 13, 16, 19, 3]  # fmt: skip
