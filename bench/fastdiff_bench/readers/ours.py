"""The readers of fastdiff; all check the crc32 of every array.

Each pass reopens the shards: on opening, fastdiff asks the kernel to read a shard ahead, and the benchmark may have
emptied the page cache before the pass.
"""

import itertools
from collections.abc import Generator

import numpy as np
import torch

from fastdiff.config.sections.data import DataConfig
from fastdiff.data.loading.build import build_batches, build_order
from fastdiff.data.loading.order import SampleOrder
from fastdiff.data.shards.reader import LatentReader
from fastdiff_bench.readers.reading import Batch
from fastdiff_bench.readers.samples import Samples


def reader(samples: Samples, device: torch.device, passes: int) -> Generator[Batch, None, None]:
    """Read with ``LatentReader`` alone, in one thread, into the same host memory."""
    with _open(samples) as shards:
        order, out = _order(samples, shards), shards.empty(samples.batch)
        for start in range(0, passes * samples.count, samples.batch):
            if start % samples.count == 0:
                shards.close()
            yield shards.read(order.samples(np.arange(start, start + samples.batch)), out)


def prefetch(samples: Samples, device: torch.device, passes: int) -> Generator[Batch, None, None]:
    """Read as a run without DALI does: latents as fp32 on the device, prefetched by a thread."""
    return _loader("prefetch", samples, device, passes)


def dali(samples: Samples, device: torch.device, passes: int) -> Generator[Batch, None, None]:
    """Read as a run with DALI does: the same batches."""
    return _loader("dali", samples, device, passes)


def _loader(name: str, samples: Samples, device: torch.device, passes: int) -> Generator[Batch, None, None]:
    with _open(samples) as shards:
        batches = build_batches(
            shards,
            _order(samples, shards),
            config=DataConfig(loader="dali" if name == "dali" else "prefetch"),
            seed=0,
            device=device,
            start_samples=0,
            rank=0,
            ranks=1,
            micro=samples.batch,
            global_batch=samples.batch,
        )
        with batches:
            for _ in range(passes):
                shards.close()
                for batch in itertools.islice(batches, samples.count // samples.batch):
                    yield {"latent": batch.latents, **batch.condition}


def _open(samples: Samples) -> LatentReader:
    # Two windows, as in a run.
    return LatentReader(samples.shards, open_shards=2 * samples.mixed // samples.per_shard)


def _order(samples: Samples, shards: LatentReader) -> SampleOrder:
    window = samples.mixed // samples.per_shard
    return build_order(shards.info, seed=0, window_shards=window, global_batch=samples.batch)
