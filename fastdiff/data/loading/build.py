"""Choice and construction of the sample order and the loader of a run.

``order.py`` and ``bucket_order.py`` map positions of the run to sample numbers, and ``shards/reader.py`` reads samples
by number. ``build_batches`` combines them in DALI or in a plain prefetching thread.
"""

from __future__ import annotations

import os
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdiff.config.data_sets import apportioned
from fastdiff.config.sections.data import DataConfig
from fastdiff.console import log
from fastdiff.data.dali_trial import dali_problem
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.joined.reader import Shards
from fastdiff.data.loading.bucket_order import BucketOrder
from fastdiff.data.loading.fit import require_flips
from fastdiff.data.loading.mixed_order import MixedBucketOrder, MixedOrder, Part
from fastdiff.data.loading.order import Order, RankPositions, SampleOrder
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fastdiff.data.loading.batches import Batches
    from fastdiff.data.loading.online import OnlineImages


def choose_loader(config: DataConfig, device: torch.device) -> tuple[str, str]:
    """Return the loader, ``dali`` or ``prefetch``, and why not DALI (""); ConfigError: it is asked for, and fails."""
    problem = dali_problem(device.type == "cuda") if config.loader in ("auto", "dali") else None
    if problem is None:
        return ("prefetch" if config.loader == "prefetch" else "dali"), ""
    if config.loader == "dali":
        raise ConfigError(f"--data.loader dali: {problem}, or use --data.loader prefetch, which gives the same batches")
    return "prefetch", problem


def build_order(info: DatasetInfo, *, seed: int, window_shards: int, global_batch: int) -> SampleOrder:
    """Return the sample order of a data set.

    Args:
        info: The data set.
        seed: Seed of the run.
        window_shards: Shards of one bucket that are shuffled together.
        global_batch: Samples per optimizer step; used only with several buckets.

    Raises:
        ConfigError: No bucket fills a batch, or ``window_shards`` is below 1.
    """
    sizes, buckets = [shard.samples for shard in info.shards], [shard.bucket for shard in info.shards]
    if isinstance(info, JoinedInfo):
        return _mixed(info, seed=seed, window_shards=window_shards, global_batch=global_batch)
    if len(set(buckets)) == 1:
        return Order(seed, sizes, window_shards)
    order = BucketOrder(seed, sizes, buckets, window_shards, global_batch, info.buckets)
    if order.left_out and os.environ.get("RANK", "0") == "0":
        lost = (f"{bucket} ({'{}x{}'.format(*info.buckets[bucket])}): {n}" for bucket, n in order.left_out.items())
        log.warning(
            f"{sum(order.left_out.values())} of {info.samples} samples are never trained on, as their buckets cannot "
            f"fill a batch of --batch.samples {global_batch} (bucket (latents): samples; {', '.join(lost)}); use a "
            "smaller batch, or encode with fewer buckets"
        )
    return order


def _mixed(info: JoinedInfo, *, seed: int, window_shards: int, global_batch: int) -> SampleOrder:
    """Return the order of several data sets; the samples of each in an epoch are shared out to its buckets by size."""
    sizes = [shard.samples for shard in info.shards]
    parts: dict[int, list[Part]] = {}
    for number, own in enumerate(info.sets):
        shards = [n for n, of_set in enumerate(info.set_of_shard) if of_set == number]
        buckets = sorted({info.shards[n].bucket for n in shards})
        of_bucket = [[n for n in shards if info.shards[n].bucket == bucket] for bucket in buckets]
        held = [Fraction(sum(sizes[n] for n in each)) for each in of_bucket]
        for bucket, each, count in zip(buckets, of_bucket, apportioned(own.per_epoch, held), strict=True):
            if count:
                parts.setdefault(bucket, []).append(Part(number, np.asarray(each, np.int64), count))
            elif os.environ.get("RANK", "0") == "0":
                log.warning(
                    f"{sum(sizes[n] for n in each)} samples of {own.name} with latents of "
                    f"{'x'.join(map(str, info.buckets[bucket]))} are never trained on, as none of the "
                    f"{own.per_epoch} that an epoch has of the data set fall to them; give it a larger weight"
                )
    if len(parts) == 1:
        (only,) = parts.values()
        return MixedOrder(seed, sizes, only, window_shards)
    return MixedBucketOrder(seed, sizes, parts, window_shards, global_batch)


def build_batches(
    source: Shards | OnlineImages,
    order: SampleOrder,
    *,
    config: DataConfig,
    seed: int,
    device: torch.device,
    start_samples: int,
    rank: int,
    ranks: int,
    micro: int,
    global_batch: int,
) -> Batches:
    """Open the endless stream of one rank's micro-batches; a context manager that must be closed.

    Both loaders give the same batches; ``name`` of the result tells them apart.

    Args:
        source: Reader or images, owned and closed by the caller; a reader should keep two windows of ``order`` open.
        order: Sample order of ``source.info`` (``build_order``).
        config: Data options; ``loader``, ``prefetch`` and ``random_flip`` are used.
        seed: Seed of the run, for the choice of flips and captions.
        device: Device of the batches.
        start_samples: Samples already trained on, a multiple of ``global_batch``.
        rank: This rank.
        ranks: Number of ranks.
        micro: Samples per micro-batch.
        global_batch: Samples per optimizer step over all ranks.

    Raises:
        ConfigError: DALI is requested and does not work here, the batch is not divisible, or flips are requested from
            latents stored without them.
    """
    own = RankPositions(start_samples=start_samples, rank=rank, ranks=ranks, micro=micro, global_batch=global_batch)
    options: dict[str, Any] = {
        "seed": seed, "random_flip": config.random_flip, "device": device, "prefetch": config.prefetch,
    }  # fmt: skip
    if not isinstance(source, Shards):
        from fastdiff.data.loading.online import OnlineBatches

        return OnlineBatches(source, order, own, **options)
    require_flips(config, source.info)
    if choose_loader(config, device)[0] == "prefetch":
        from fastdiff.data.loading.batches import PrefetchBatches

        return PrefetchBatches(source, order, own, **options)
    from fastdiff.data.loading.dali import DaliBatches

    return DaliBatches(source, order, own, **options)
