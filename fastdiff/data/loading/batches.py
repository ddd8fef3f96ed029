"""Prefetching of micro-batches in a thread: the base of all loaders, and the plain loader of shards."""

import contextlib
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fastdiff.batch import Batch, as_numbers, from_stored
from fastdiff.conditions import MASK_OF, REFERENCE
from fastdiff.console import log
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.joined.reader import DATA_SET, JoinedReader, Shards
from fastdiff.data.loading.order import Int64, RankPositions, SampleOrder
from fastdiff.data.shards.format import LATENT, LATENT_LIMITS, LOSS_MASK, DatasetInfo, Normalisation
from fastdiff.data.shards.int8_latents import dequantised
from fastdiff.data.shards.reader import Arrays
from fastdiff.rng import Stream
from fastdiff_kernels import philox

Tensors = dict[str, Tensor]

_JOIN_SECONDS = 10.0


class Source(Protocol):
    """A source of samples: shards or images."""

    @property
    def info(self) -> DatasetInfo:
        """Description of the samples."""

    @property
    def folder(self) -> Path | str:
        """Path or address of the samples, for messages."""


class Batches(ABC):
    """An endless iterator of ``Batch``; close it, or use it as a context manager, to end its thread.

    ``latents`` ``[B, C, H, W]`` are fp32 ``(stored - shift) * scale``, or uint8 pixels, which the kernels convert.
    ``position`` is ``[B]`` int64. ``mask`` ``[B, H, W]`` fp16 and ``label`` ``[B]`` int64 are there if stored;
    ``condition`` has the label and all other columns.
    Flip and caption of a sample are functions of the seed and the position. ``next`` raises an error of the thread
    (DataError, StorageError) at its micro-batch.

    Args:
        source: Source of the samples.
        order: Order of the samples.
        own: Positions of this rank.
        seed: Seed of the run.
        random_flip: Take the flipped latent, or mirror the pixels, of half of the samples.
        device: Device of the batches.
        prefetch: Number of micro-batches loaded ahead.
    """

    name: ClassVar[str]

    def __init__(
        self,
        source: Source,
        order: SampleOrder,
        own: RankPositions,
        *,
        seed: int,
        random_flip: bool,
        device: torch.device,
        prefetch: int,
    ) -> None:
        self.source, self.order, self.own = source, order, own
        self.seed, self.random_flip = seed, random_flip
        self.device, self.on_cuda = device, device.type == "cuda"
        # The thread takes a slot before it loads a batch and the consumer returns it: no polling, bounded memory.
        self._slots = threading.Semaphore(prefetch)
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fastdiff-{self.name}", daemon=True)

    @abstractmethod
    def load(self, index: int) -> Tensors:
        """Return micro-batch ``index`` on the device: ``position`` and the arrays as stored.

        Called by the thread only, with 0, 1, 2, ... The caller owns the tensors.
        """

    def release(self) -> None:  # noqa: B027  (optional)
        """Free the resources of ``load``; called by the thread when it ends."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise RuntimeError("these batches were closed")
        if self._failure is not None:
            raise self._failure
        if self._thread.ident is None:
            self._thread.start()
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        self._slots.release()
        if self.on_cuda:
            # Allocated on another stream: the allocator must not reuse their memory before this stream is done.
            for tensor in item.tensors().values():
                tensor.record_stream(torch.cuda.current_stream(self.device))
        return item

    def close(self) -> None:
        """End the thread and drop its batches."""
        self._stop.set()
        self._slots.release()
        if self._thread.ident is None:
            return
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            # A read that hangs in the storage cannot be interrupted; the process must be able to end anyway.
            log.warning(
                f"the thread {self._thread.name} did not end within {_JOIN_SECONDS:g} s and runs until the process "
                f"ends; check the storage of {self.source.folder}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def positions(self, index: int) -> Int64:
        """Return the positions ``[B]`` int64 of micro-batch ``index``."""
        return self.own[index]

    def uniform(self, stream: Stream, position: Tensor) -> npt.NDArray[np.float32]:
        """Return uniform random numbers ``[B]`` fp32 in [0, 1) for these positions, on the CPU."""
        # Always plain torch, whatever backend the run forces on its device; the numbers are equal.
        return philox.uniform(self.seed, int(stream), position, 1, backend="reference")[:, 0].numpy()

    def _run(self) -> None:
        try:
            with _single_threaded(), self._side_stream() as stream:
                normalise = Normaliser(self.source.info, self.device)
                for index in itertools.count():
                    self._slots.acquire()
                    if self._stop.is_set():
                        break
                    batch = normalise(self.load(index))
                    if stream is not None:
                        # Only this thread waits, ahead of the consumer, who gets a complete batch.
                        stream.synchronize()
                    self._ready.put(batch)
        except BaseException as error:
            self._ready.put(error)
        finally:
            self.release()

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[torch.cuda.Stream | None]:
        if not self.on_cuda:
            yield None
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream


class ShardBatches(Batches):
    """Batches from shards; a subclass moves them to the device."""

    def __init__(self, reader: Shards, order: SampleOrder, own: RankPositions, **options: Any) -> None:
        super().__init__(reader, order, own, **options)
        self.reader = reader

    def read(self, positions: Int64, ids: Int64, out: Arrays | None = None) -> Arrays:
        """Read and verify the samples ``ids`` at these positions, with the chosen variants; mirror masks and pixels."""
        position = torch.from_numpy(positions)
        flips = self.uniform(Stream.FLIP, position) < 0.5 if self.random_flip else np.zeros(len(positions), np.bool_)
        if isinstance(self.reader, JoinedReader):
            flips &= self.reader.can_mirror(ids)
        stored = self.reader.info.flipped
        choice: Arrays = {LATENT: flips.astype(np.int64)} if stored else {}
        if self.reader.info.captions > 1:
            choice["caption"] = self.uniform(Stream.CAPTION, position)
        arrays = self.reader.read(ids, out, choice=choice, positions=positions)
        for name in (*([] if stored else [LATENT]), *([LOSS_MASK] if LOSS_MASK in arrays else [])):
            values = arrays[name]
            for row in np.flatnonzero(flips):
                values[row] = values[row, ..., ::-1].copy()  # [C, H, W] or [H, W], mirrored along W
        return arrays


def _single_threaded() -> threadpool_limits:
    """Limit this thread to one core: a second team of OpenMP threads would compete with the training step."""
    torch.get_num_threads()  # torch sets its own limit at the first operation of a thread
    return threadpool_limits(1, user_api="openmp")


class Normaliser:
    """Turns the stored arrays of a data set into batches.

    Args:
        info: The data set.
        device: Of the arrays.
    """

    def __init__(self, info: DatasetInfo, device: torch.device) -> None:
        self.device = device
        self._of_latents = _scales(info.normalisation, info.statistics_shape, device)
        self._of_references = _scales(info.x0_normalisation, (-1, *info.statistics_shape[1:]), device)
        self._of_others = {
            name: _scales(found, info.normalised_shape(name), device) for name, found in info.normalisations.items()
        }

    def __call__(self, stored: Tensors) -> Batch:
        """Return ``position`` and the stored arrays, consumed, as a batch; all are normalised except pixels."""
        latents, limits = stored.pop(LATENT), stored.pop(LATENT_LIMITS, None)
        if latents.dtype != torch.uint8:
            latents = as_numbers(latents).float() if limits is None else dequantised(latents, limits)
            shift, scale = self._of_latents
            latents.sub_(shift).mul_(scale)  # in place: allocating results would take longer than computing them
        if REFERENCE in stored:
            shift, scale = self._of_references
            stored[REFERENCE] = (from_stored({REFERENCE: stored[REFERENCE]})[REFERENCE].float() - shift) * scale
        for name, (shift, scale) in self._of_others.items():
            stored[name] = (as_numbers(stored[name]).float() - shift) * scale
        position, mask, of_set = stored.pop("position"), stored.pop(LOSS_MASK, None), stored.pop(DATA_SET, None)
        return Batch(latents=latents, position=position, condition=from_stored(stored), mask=mask, data_set=of_set)


def _scales(found: Normalisation, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return shift and scale, fp32; of latents ``[C, 1, 1]`` or, per element, ``[C, H, W]`` each."""
    both = torch.tensor((found.shift, found.scale), dtype=torch.float32, device=device)
    shift, scale = both.view(2, *shape)
    return shift, scale


def empty_batch(info: DatasetInfo, bucket: int, count: int, device: torch.device) -> Batch:
    """Return ``count`` samples with shapes and dtypes of a bucket: zeros, and masks of whole captions and pictures."""
    columns = info.batch_columns(bucket)
    stored = {name: torch.zeros(count, *c.shape, dtype=getattr(torch, c.numpy.name)) for name, c in columns.items()}
    for name in {*MASK_OF.values(), LOSS_MASK} & stored.keys():
        stored[name].fill_(1)
    if info.classes is not None:
        stored["label"] = torch.zeros(count, dtype=torch.int64)
    if isinstance(info, JoinedInfo):
        stored[DATA_SET] = torch.zeros(count, dtype=torch.int64)
    stored["position"] = torch.arange(count)
    here = {name: value.to(device) for name, value in stored.items()}
    return Normaliser(info, device)(here)


class PrefetchBatches(ShardBatches):
    """Micro-batches read ahead by a thread; with CUDA into pinned memory, copied asynchronously."""

    name: ClassVar[str] = "prefetch"

    def load(self, index: int) -> Tensors:
        """Read one micro-batch and start its copy to the device."""
        positions = self.positions(index)
        ids = self.order.samples(positions)
        arrays = {"position": positions, **self.reader.empty(len(ids), self.reader.bucket_of(ids))}
        # torch's pinned-memory allocator reuses a block only after the copies from it have ended.
        host = {
            name: torch.empty_like(torch.from_numpy(array), pin_memory=self.on_cuda) for name, array in arrays.items()
        }
        host["position"].copy_(torch.from_numpy(positions))
        self.read(positions, ids, {name: tensor.numpy() for name, tensor in host.items() if name != "position"})
        return {name: tensor.to(self.device, non_blocking=self.on_cuda) for name, tensor in host.items()}
