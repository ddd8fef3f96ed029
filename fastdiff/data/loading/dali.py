"""The NVIDIA DALI loader: our reader is its external source, DALI transfers and prefetches.

DALI's own WebDataset reader is not used: it silently accepts a stale index, has no checksums and dies of SIGBUS when a
mapped shard shrinks (design 8.11).
"""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import Pipeline, fn, types
from torch.utils.dlpack import from_dlpack

from fastdiff.data.joined.reader import Shards
from fastdiff.data.loading.batches import ShardBatches, Tensors
from fastdiff.data.loading.order import RankPositions, SampleOrder

_TYPES = {
    "float16": types.FLOAT16,
    "float32": types.FLOAT,
    "uint8": types.UINT8,
    "uint16": types.UINT16,
    "int8": types.INT8,
    "int64": types.INT64,
}


class DaliBatches(ShardBatches):
    """Micro-batches from a DALI pipeline, on the CPU or, with CUDA, on the device.

    DALI calls its source in the thread that runs the pipeline: the thread of ``Batches``.
    """

    name: ClassVar[str] = "dali"

    def __init__(
        self, reader: Shards, order: SampleOrder, own: RankPositions, *, prefetch: int, **options: Any
    ) -> None:
        # A pipeline of depth d holds d - 1 micro-batches when run returns; the thread's slots hold the rest.
        self._depth = min(2, prefetch)
        slots = prefetch - self._depth + 1
        super().__init__(reader, order, own, prefetch=slots, **options)
        self._columns = ["position", *reader.empty(0)]
        self._source_failure: tuple[int, BaseException] | None = None
        self._pipeline: Any = None

    def load(self, index: int) -> Tensors:
        """Run the pipeline once and copy its outputs, because DALI reuses its buffers."""
        if self._pipeline is None:
            self._pipeline = self._build()
        outputs = self._pipeline.run()
        if self._source_failure is not None and index >= self._source_failure[0]:
            raise self._source_failure[1]
        tensors = {
            name: from_dlpack(output.as_tensor()).clone() for name, output in zip(self._columns, outputs, strict=True)
        }
        if self.on_cuda:
            torch.cuda.current_stream(self.device).synchronize()  # copies must end before DALI reuses the buffers
        return tensors

    def release(self) -> None:
        """Free the pipeline in the thread that ran it."""
        self._pipeline = None

    def _build(self) -> Any:
        pipeline = Pipeline(
            batch_size=self.own.micro,
            num_threads=1,
            device_id=(self.device.index or 0) if self.on_cuda else None,
            prefetch_queue_depth=self._depth,
            exec_async=True,
            exec_pipelined=True,
        )
        shapes = self._arrays_without_data()
        with pipeline:
            outputs = fn.external_source(
                source=self._source,
                num_outputs=len(self._columns),
                batch=True,
                dtype=[_TYPES[str(shapes[name].dtype)] for name in self._columns],
                ndim=[shapes[name].ndim - 1 for name in self._columns],
            )
            pipeline.set_outputs(*[output.gpu() if self.on_cuda else output for output in outputs])
        pipeline.build()
        return pipeline

    def _source(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays of micro-batch ``index``.

        An exception here would break the pipeline while it still holds good micro-batches. It is therefore kept for
        ``load``, which raises it at this micro-batch; the zeros returned instead are never used.
        """
        positions = self.positions(index)
        if self._source_failure is None:
            try:
                arrays = {"position": positions, **self.read(positions, self.order.samples(positions))}
                return tuple(arrays[name] for name in self._columns)
            except Exception as error:
                self._source_failure = (index, error)
        empty = self._arrays_without_data()
        return tuple(np.zeros((len(positions), *empty[n].shape[1:]), empty[n].dtype) for n in self._columns)

    def _arrays_without_data(self) -> dict[str, npt.NDArray[Any]]:
        return {"position": np.empty(0, np.int64), **self.reader.empty(0)}
