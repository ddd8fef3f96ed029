"""What both loaders share: a thread that keeps micro-batches ready on the training device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import ClassVar, Self

import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.data.order import Int64, Order, RankPositions
from fastdiff.data.reader import Arrays, LatentReader

Tensors = dict[str, Tensor]

_JOIN_SECONDS = 10.0


class Batches(ABC):
    """Endless iterator of ``Batch``; close it, or use it as a context manager, to end its thread.

    ``latents`` are fp32 ``(stored - shift) * scale``, ``position`` is ``[B]`` int64, ``label`` ``[B]`` int64
    or None. An error of the thread (DataError, StorageError) is raised by ``next``, at the micro-batch that
    it belongs to.

    Args:
        reader: Where samples come from.
        order: Which sample stands at which position.
        own: The positions of this rank.
        device: Where the batches shall be.
        prefetch: Micro-batches that are ready, or being made, before they are asked for.
    """

    name: ClassVar[str]

    def __init__(
        self,
        reader: LatentReader,
        order: Order,
        own: RankPositions,
        *,
        device: torch.device,
        prefetch: int,
    ) -> None:
        self.reader, self.order, self.own = reader, order, own
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
        """Micro-batch number ``index`` on the device: stored ``latent``, ``position``, and ``label`` if any.

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
            for tensor in (item.latents, item.position, item.label):
                if tensor is not None:
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
            warnings.warn(
                f"the thread {self._thread.name} did not end within {_JOIN_SECONDS:g} s and is left to the end of the "
                f"process; check the storage of {self.reader.folder}",
                RuntimeWarning,
                stacklevel=2,
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

    def read(self, positions: Int64, out: Arrays | None = None) -> Arrays:
        """Stored arrays of the samples at these positions, checked."""
        return self.reader.read(self.order.samples(positions), out)

    def _run(self) -> None:
        try:
            with self._side_stream() as stream:
                shift, scale = map(self._per_channel, dataclasses.astuple(self.reader.info.normalisation))
                for index in itertools.count():
                    self._slots.acquire()
                    if self._stop.is_set():
                        break
                    batch = _normalised(self.load(index), shift, scale)
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

    def _per_channel(self, values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).view(-1, 1, 1)


def _normalised(stored: Tensors, shift: Tensor, scale: Tensor) -> Batch:
    latents = (stored["latent"].float() - shift) * scale
    return Batch(latents=latents, position=stored["position"], label=stored.get("label"))
