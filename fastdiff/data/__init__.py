"""Latents from shards on disk to batches on the training device.

``shards``, ``index`` and ``writer`` are the format, ``reader`` reads samples by number, ``order`` says which
number comes when, and ``build_batches`` puts the two together behind DALI or a plain prefetching thread.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from fastdiff.config import DataConfig
from fastdiff.data.order import Order, RankPositions
from fastdiff.data.reader import LatentReader
from fastdiff.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fastdiff.data.batches import Batches


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


def build_batches(
    reader: LatentReader,
    order: Order,
    *,
    config: DataConfig,
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
        reader: Stays open and belongs to the caller; it should keep two windows of ``order`` open.
        order: Made from ``reader.shard_sizes``.
        config: Its ``loader`` and ``prefetch`` count here.
        device: Where the batches shall be.
        start_samples: Samples of the run that are behind us, a multiple of ``global_batch``.
        rank: This rank.
        ranks: Number of ranks.
        micro: Samples per micro-batch.
        global_batch: Samples per optimizer step over all ranks.

    Raises:
        ConfigError: DALI is asked for and not installed, or the batch does not divide.
    """
    own = RankPositions(start_samples=start_samples, rank=rank, ranks=ranks, micro=micro, global_batch=global_batch)
    if loader_name(config) == "prefetch":
        from fastdiff.data.prefetch import PrefetchBatches

        return PrefetchBatches(reader, order, own, device=device, prefetch=config.prefetch)
    from fastdiff.data.dali import DaliBatches

    return DaliBatches(reader, order, own, device=device, prefetch=config.prefetch)
