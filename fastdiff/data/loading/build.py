"""Latents from shards on disk to batches on the training device.

``shards``, ``index``, ``components``, ``tar`` and ``writer`` are the format, ``reader`` reads samples by number,
``order`` and ``bucket_order`` say which number comes when, and ``build_batches`` puts the two together behind DALI or a
plain prefetching thread.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from fastdiff.config.data import DataConfig
from fastdiff.console import log
from fastdiff.data.loading.bucket_order import BucketOrder
from fastdiff.data.loading.order import Order, RankPositions, SampleOrder
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fastdiff.data.loading.batches import Batches
    from fastdiff.data.loading.online import OnlineImages


def dali_installed() -> bool:
    """Whether NVIDIA DALI can be imported, found out without importing it."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        return False  # nothing named nvidia at all


def loader_name(config: DataConfig) -> str:
    """``dali`` or ``prefetch``: the loader that ``config`` comes to on this machine.

    Raises:
        ConfigError: DALI is asked for and not installed.
    """
    if config.loader == "auto":
        return "dali" if dali_installed() else "prefetch"
    if config.loader == "dali" and not dali_installed():
        raise ConfigError(
            "--data.loader dali: NVIDIA DALI is not installed; pip install 'nvidia-dali-cuda130>=2.4,<3', "
            "or use --data.loader prefetch, which gives the same batches"
        )
    return config.loader


def build_order(info: DatasetInfo, *, seed: int, window_shards: int, global_batch: int) -> SampleOrder:
    """The order of a data set.

    Args:
        info: The data set.
        seed: Seed of the run.
        window_shards: Shards, of one bucket, that are mixed with each other.
        global_batch: Samples per optimizer step; it matters only if there are several buckets.

    Raises:
        ConfigError: No bucket fills a batch, or ``window_shards`` is below 1.
    """
    sizes, buckets = [shard.samples for shard in info.shards], [shard.bucket for shard in info.shards]
    if len(set(buckets)) == 1:
        return Order(seed, sizes, window_shards)
    order = BucketOrder(seed, sizes, buckets, window_shards, global_batch, info.buckets)
    if order.left_out and os.environ.get("RANK", "0") == "0":
        lost = (f"{bucket} ({'{}x{}'.format(*info.buckets[bucket])}): {n}" for bucket, n in order.left_out.items())
        log.warning(
            f"never trained on, as their buckets fill no batch of --batch.samples {global_batch}: "
            f"{sum(order.left_out.values())} of {info.samples} samples (bucket (latents): samples; {', '.join(lost)}); "
            "use a smaller batch, or encode with fewer buckets"
        )
    return order


def build_batches(
    source: LatentReader | OnlineImages,
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

    Both loaders give the same batches; which one it is stands in ``name`` of the result.

    Args:
        source: Stays open and belongs to the caller; a reader should keep two windows of ``order`` open.
        order: Made from ``source.info`` (``build_order``).
        config: Its ``loader``, ``prefetch`` and ``random_flip`` count here.
        seed: Seed of the run, for the choice of flips and captions.
        device: Where the batches shall be.
        start_samples: Samples of the run that are behind us, a multiple of ``global_batch``.
        rank: This rank.
        ranks: Number of ranks.
        micro: Samples per micro-batch.
        global_batch: Samples per optimizer step over all ranks.

    Raises:
        ConfigError: DALI is asked for and not installed, the batch does not divide, or there are no flipped latents
            and these are no pixels.
    """
    own = RankPositions(start_samples=start_samples, rank=rank, ranks=ranks, micro=micro, global_batch=global_batch)
    options: dict[str, Any] = {
        "seed": seed, "random_flip": config.random_flip, "device": device, "prefetch": config.prefetch,
    }  # fmt: skip
    if not isinstance(source, LatentReader):
        from fastdiff.data.loading.online import OnlineBatches

        return OnlineBatches(source, order, own, **options)
    if config.random_flip and not (source.info.flipped or source.info.in_pixels):
        raise ConfigError(
            f"--data.random_flip: {source.folder} holds no flipped latents; encode with --flip, or leave it out"
        )
    if loader_name(config) == "prefetch":
        from fastdiff.data.loading.batches import PrefetchBatches

        return PrefetchBatches(source, order, own, **options)
    from fastdiff.data.loading.dali import DaliBatches

    return DaliBatches(source, order, own, **options)
