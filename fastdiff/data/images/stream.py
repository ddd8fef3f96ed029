"""Prefetching of images: one thread reads partitions ahead, another one decodes them."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastdiff.data.images.decode import BadImage, Decoded, Decoder
from fastdiff.data.images.items import BadItem, ImageItem

# Limits of a chunk: large enough to keep all threads busy, with bounded memory.
_IMAGES = 64
_BYTES = 128 << 20
_DEPTH = 2


@dataclass(frozen=True)
class Chunk:
    """Consecutive images of a partition; every partition has at least one chunk, which may be empty."""

    partition: int
    images: list[tuple[ImageItem | BadItem, Decoded | BadImage]]


class Items(Protocol):
    """What gives the images of a partition."""

    def items(self, partition: int) -> Iterator[ImageItem | BadItem]:
        """See ``ImageSource``."""


def decoded_images(
    source: Items,
    decoder: Decoder,
    partitions: Iterable[int],
    stopwatch: Stopwatch,
    start: Callable[[], None],
    complete: Callable[[Chunk], Chunk] = lambda chunk: chunk,
) -> Generator[Chunk, None, None]:
    """Read and decode ``partitions`` in order.

    Args:
        source: Source of the images, used by one thread only.
        decoder: Decoder, used by one thread only.
        partitions: Numbers of the partitions.
        stopwatch: Records the stages ``read`` and ``decode``.
        start: Called first in the decoding thread, for example to select the GPU.
        complete: Called there with each chunk, to decode what belongs to its images.

    Yields:
        The chunks in order; an error of the source is raised at its chunk.
    """
    read = read_ahead(_read(source, partitions, stopwatch), _DEPTH)
    return read_ahead(_decode(read, decoder, complete, stopwatch), _DEPTH, start=start)


def _read(
    source: Items, partitions: Iterable[int], stopwatch: Stopwatch
) -> Generator[tuple[int, list[ImageItem | BadItem]], None, None]:
    for partition in partitions:
        chunks = _chunks(source.items(partition))
        while True:
            with stopwatch.measure("read"):
                chunk = next(chunks, None)
            if chunk is None:
                break
            yield partition, chunk


def _chunks(items: Iterator[ImageItem | BadItem]) -> Iterator[list[ImageItem | BadItem]]:
    chunk: list[ImageItem | BadItem] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += sum(map(len, (item.image, item.mask or b"", *item.references))) if isinstance(item, ImageItem) else 0
        if len(chunk) == _IMAGES or size >= _BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk


def _decode(
    chunks: Generator[tuple[int, list[ImageItem | BadItem]], None, None],
    decoder: Decoder,
    complete: Callable[[Chunk], Chunk],
    stopwatch: Stopwatch,
) -> Generator[Chunk, None, None]:
    try:
        for partition, items in chunks:
            with stopwatch.measure("decode"):
                decoded = iter(decoder.decode([item.image for item in items if isinstance(item, ImageItem)]))
                images = [
                    (item, next(decoded) if isinstance(item, ImageItem) else BadImage(item.reason)) for item in items
                ]
                chunk = complete(Chunk(partition, images))
            yield chunk
    finally:
        chunks.close()


T = TypeVar("T")

_END = object()


def read_ahead(
    items: Generator[T, None, None], depth: int, *, start: Callable[[], None] | None = None
) -> Generator[T, None, None]:
    """Run a generator in its own thread, at most ``depth`` items ahead.

    Args:
        items: The generator; its exceptions are raised here, in order. It is closed together with the result.
        depth: Number of items, at least 1.
        start: Called first in that thread.
    """
    with ThreadPoolExecutor(1, initializer=start) as thread:
        try:
            waiting = deque(thread.submit(next, items, _END) for _ in range(depth))
            while (item := waiting.popleft().result()) is not _END:
                waiting.append(thread.submit(next, items, _END))
                yield item  # type: ignore[misc]
        finally:
            thread.shutdown(cancel_futures=True)
            items.close()


class Stopwatch:
    """The seconds spent per stage; each stage belongs to one thread."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the duration of the context to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - begin
