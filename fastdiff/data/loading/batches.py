"""What both loaders share: a thread that keeps micro-batches ready on the training device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.console import log
from fastdiff.data.loading.order import Int64, RankPositions, SampleOrder
from fastdiff.data.shards.format import LATENT, DatasetInfo, Normalisation
from fastdiff.data.shards.reader import Arrays, LatentReader
from fastdiff.rng import Stream
from fastdiff_kernels import philox

Tensors = dict[str, Tensor]

_JOIN_SECONDS = 10.0


class Source(Protocol):
    """What samples come from: shards, or images."""

    info: DatasetInfo

    @property
    def folder(self) -> Path | str:
        """Where they lie, for messages: a path, or an address."""


class Batches(ABC):
    """Endless iterator of ``Batch``; close it, or use it as a context manager, to end its thread.

    ``latents`` are fp32 ``(stored - shift) * scale``, or pixels in uint8, which the kernels convert as they read them;
    ``position`` is ``[B]`` int64; ``condition`` has the other columns as they are stored and the ``label`` ``[B]``
    int64, as far as there are any. Which variant of a sample is taken, flipped or not, and which caption, is a function
    of the seed and the position. An error of the thread (DataError, StorageError) is raised by ``next``, at the
    micro-batch that it belongs to.

    Args:
        source: Where samples come from.
        order: Which sample stands at which position.
        own: The positions of this rank.
        seed: Seed of the run.
        random_flip: Take the flipped latent of half of the samples, or mirror their pixels.
        device: Where the batches shall be.
        prefetch: Micro-batches that are ready, or being made, before they are asked for.
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
        # The thread takes a slot before it makes a batch and the consumer gives it back: no polling, bounded
        # memory.
        self._slots = threading.Semaphore(prefetch)
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fastdiff-{self.name}", daemon=True)

    @abstractmethod
    def load(self, index: int) -> Tensors:
        """Micro-batch number ``index`` on the device: ``position``, and the arrays of the reader as they are stored.

        Called by the thread only, with 0, 1, 2, ... The tensors are the caller's to keep.
        """

    def release(self) -> None:  # noqa: B027  (a loader without such things has nothing to do)
        """Let go of what ``load`` uses; called by the thread when it ends."""

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
            # Made on another stream: their memory may be used again only when this stream is done with it.
            for tensor in (item.latents, item.position, *item.condition.values()):
                tensor.record_stream(torch.cuda.current_stream(self.device))
        return item

    def close(self) -> None:
        """End the thread, and drop what it has ready."""
        self._stop.set()
        self._slots.release()
        if self._thread.ident is None:
            return
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            # A read from storage that hangs cannot be cut short; the process must be able to end all the same.
            log.warning(
                f"the thread {self._thread.name} did not end within {_JOIN_SECONDS:g} s and is left to the end of the "
                f"process; check the storage of {self.source.folder}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def positions(self, index: int) -> Int64:
        """Positions ``[B]`` int64 of micro-batch number ``index``."""
        return self.own[index]

    def uniform(self, stream: Stream, position: Tensor) -> npt.NDArray[np.float32]:
        """Uniform numbers ``[B]`` fp32 in [0, 1) of these positions, on the CPU."""
        # Plain torch whatever the run forces for its device; the numbers are the same.
        return philox.uniform(self.seed, int(stream), position, 1, backend="reference")[:, 0].numpy()

    def _run(self) -> None:
        try:
            with _single_threaded(), self._side_stream() as stream:
                shift, scale = per_channel(self.source.info.normalisation, self.device)
                for index in itertools.count():
                    self._slots.acquire()
                    if self._stop.is_set():
                        break
                    batch = normalised(self.load(index), shift, scale)
                    if stream is not None:
                        # Only this thread waits here, ahead of time; what the consumer gets is complete.
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
    """Batches from shards; how they get to the device is left to the loaders.

    Args:
        reader: Of the shards.
        order: As for ``Batches``, likewise the rest.
        own: As there.
        options: As there.
    """

    def __init__(self, reader: LatentReader, order: SampleOrder, own: RankPositions, **options: Any) -> None:
        super().__init__(reader, order, own, **options)
        self.reader = reader

    def read(self, positions: Int64, ids: Int64, out: Arrays | None = None) -> Arrays:
        """Stored arrays of the samples ``ids`` that stand at these positions, checked, their pixels mirrored."""
        position = torch.from_numpy(positions)
        flips = self.uniform(Stream.FLIP, position) < 0.5 if self.random_flip else np.zeros(len(positions), np.bool_)
        stored = self.reader.info.flipped
        choice: Arrays = {LATENT: flips.astype(np.int64)} if stored else {}
        if self.reader.info.captions > 1:
            choice["caption"] = self.uniform(Stream.CAPTION, position)
        arrays = self.reader.read(ids, out, choice=choice, positions=positions)
        if not stored:
            pixels = arrays[LATENT]
            for row in np.flatnonzero(flips):
                pixels[row] = pixels[row, :, :, ::-1].copy()
        return arrays


def _single_threaded() -> threadpool_limits:
    """Keep this thread's operations to itself: a second team of OpenMP threads would take the cores from the step's."""
    torch.get_num_threads()  # torch sets a limit of its own at the first operation of a thread
    return threadpool_limits(1, user_api="openmp")


def per_channel(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shift and scale of latents, ``[C, 1, 1]`` fp32 each."""
    values = torch.tensor(dataclasses.astuple(normalisation), dtype=torch.float32, device=device)
    shift, scale = values.view(2, -1, 1, 1)
    return shift, scale


def normalised(stored: Tensors, shift: Tensor, scale: Tensor) -> Batch:
    """The batch of ``position`` and the arrays of a reader, which it takes; its latents in fp32, or pixels in uint8."""
    latents = stored.pop(LATENT)
    if latents.dtype != torch.uint8:
        latents = latents.float()
        latents.sub_(shift).mul_(scale)  # in place: two more results would cost more time than computing them
    return Batch(latents=latents, position=stored.pop("position"), condition=stored)


class PrefetchBatches(ShardBatches):
    """Micro-batches that a thread reads ahead; with CUDA into pinned memory, copied without waiting."""

    name: ClassVar[str] = "prefetch"

    def load(self, index: int) -> Tensors:
        """Read one micro-batch and start its copy to the device."""
        positions = self.positions(index)
        ids = self.order.samples(positions)
        arrays = {"position": positions, **self.reader.empty(len(ids), self.reader.bucket_of(ids))}
        # torch's allocator of pinned memory hands a block out again only after the copies from it have ended.
        host = {
            name: torch.empty_like(torch.from_numpy(array), pin_memory=self.on_cuda) for name, array in arrays.items()
        }
        host["position"].copy_(torch.from_numpy(positions))
        self.read(positions, ids, {name: tensor.numpy() for name, tensor in host.items() if name != "position"})
        return {name: tensor.to(self.device, non_blocking=self.on_cuda) for name, tensor in host.items()}
