"""Readers of other libraries, each configured as its documentation recommends for speed.

None of them verifies the data.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from fastdiff_bench.readers.reading import Batch
from fastdiff_bench.readers.samples import Samples


def dali(
    samples: Samples, device: torch.device, passes: int, *, threads: int, mapped: bool
) -> Generator[Batch, None, None]:
    """Read WebDataset shards with DALI's own reader and the index beside them.

    Args:
        samples: to be read.
        device: of the batches, in memory that the pipeline reuses in the next step.
        passes: over the samples.
        threads: decoding threads.
        mapped: read through a memory mapping, DALI's default. Mapped pages stay in the page cache.
    """
    from nvidia.dali import Pipeline, fn
    from torch.utils.dlpack import from_dlpack

    on_cuda = device.type == "cuda"
    pipeline: Any = Pipeline(samples.batch, threads, (device.index or 0) if on_cuda else None, prefetch_queue_depth=2)
    with pipeline:
        read: Any = fn.readers.webdataset(
            paths=samples.tars,
            index_paths=samples.indices,
            ext=[f"{name}.npy" for name in samples.names],
            missing_component_behavior="error",
            random_shuffle=True,
            initial_fill=samples.mixed,
            dont_use_mmap=not mapped,
        )
        components = read if len(samples.names) > 1 else [read]
        arrays = [fn.decoders.numpy(component) for component in components]
        pipeline.set_outputs(*[array.gpu() if on_cuda else array for array in arrays])
    pipeline.build()
    for _ in range(passes * samples.count // samples.batch):
        tensors = (from_dlpack(output.as_tensor()) for output in pipeline.run())
        yield dict(zip(samples.names, tensors, strict=True))


def webdataset(samples: Samples, device: torch.device, passes: int, *, workers: int) -> Generator[Batch, None, None]:
    """Read with the webdataset library: shards in random order, a shuffle buffer, batches built in the workers."""
    from webdataset import WebDataset, WebLoader

    tars = samples.tars
    dataset = (
        WebDataset(tars, shardshuffle=len(tars), seed=0)
        .shuffle(samples.mixed, initial=samples.mixed)
        .decode()
        .to_tuple(*(f"{name}.npy" for name in samples.names))
        .batched(samples.batch)
        .repeat(passes)
    )
    for arrays in WebLoader(dataset, batch_size=None, **_workers(workers)):
        yield dict(zip(samples.names, arrays, strict=True))


def npy_files(samples: Samples, device: torch.device, passes: int, *, workers: int) -> Generator[Batch, None, None]:
    """Read with a plain PyTorch ``DataLoader`` over one npy file per array, fully shuffled."""
    dataset = _NpyFiles(samples)
    sampler = RandomSampler(dataset, num_samples=passes * samples.count)
    yield from DataLoader(dataset, samples.batch, sampler=sampler, **_workers(workers))


def _workers(count: int) -> dict[str, Any]:
    # Fork is the default on Linux; a spawned process would also spawn its workers.
    return {"num_workers": count, "multiprocessing_context": "fork" if count else None}


class _NpyFiles(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        files = {name: self._samples.array(number, name) for name in self._samples.names}
        return {name: torch.from_numpy(np.load(file, allow_pickle=False)) for name, file in files.items()}
