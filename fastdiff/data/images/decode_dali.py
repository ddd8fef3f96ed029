"""Batched decoding, resize and crop of plain images by NVIDIA DALI, on CPU cores or on the GPU.

Without a GPU the decoded pixels equal Pillow's bit for bit. The resize differs: DALI computes in floating point, while
Pillow rounds its weights and, between its two passes, the pixels. Differences in levels of 255 on images with a 1/f
spectrum: the range of the means over seven ratios from 1/8 to 2.6, and the largest difference (bounds are tested):

==========  ==========  =======
filter      mean        largest
==========  ==========  =======
lanczos     0.09-0.26   12
bicubic     0.09-0.23   6
bilinear    0.08-0.19   7
nearest     0-0.08      96
==========  ==========  =======

Nearest neighbours differ only at one ratio, where two pixels are equally near.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import Pipeline, fn, types

from fastdiff.data.images.geometry import Placement, Size, area

Pixels = npt.NDArray[np.uint8]

_FILTERS = {
    "nearest": types.INTERP_NN,
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
    "lanczos": types.INTERP_LANCZOS3,
}

BATCH_IMAGES = 64
BATCH_PIXELS = 2**27  # 3 bytes each


@dataclass(frozen=True)
class Job:
    """One image for DALI: the file's bytes, its height and width in pixels, its resize and crop."""

    image: bytes
    size: Size
    placement: Placement

    @property
    def cost(self) -> int:
        """Pixels before and after the resize, both in memory at the same time."""
        return area(self.size) + area(self.placement.resized)


class DaliPixels:
    """A DALI pipeline, rebuilt after each failure; ``dali-cuda`` has the GPU's JPEG decoder: slightly other pixels."""

    def __init__(self, interpolation: str, threads: int, *, on_cuda: bool = False) -> None:
        """Take a name in ``_FILTERS``, the number of CPU threads, and whether to use the current GPU."""
        self._interpolation = _FILTERS[interpolation]
        self._threads = threads
        self._on_cuda = on_cuda
        self.name = "dali-cuda" if self._on_cuda else "dali"
        self._pipeline: Any = None

    def decode(self, jobs: Sequence[Job]) -> list[Pixels | None]:
        """Return ``[H, W, 3]`` RGB per job, C-contiguous, independent of other jobs; None: DALI cannot decode it."""
        return [pixels for batch in _batches(jobs) for pixels in self._attempt(batch)]

    def _attempt(self, batch: Sequence[Job]) -> list[Pixels | None]:
        """Run a batch; DALI fails as a whole, so a failed batch is halved until the bad images are alone."""
        try:
            return list(self._run(batch))
        except RuntimeError:
            self._pipeline = None  # DALI cannot run a failed pipeline again
        if len(batch) == 1:
            return [None]
        middle = len(batch) // 2
        return self._attempt(batch[:middle]) + self._attempt(batch[middle:])

    def _run(self, batch: Sequence[Job]) -> list[Pixels]:
        if self._pipeline is None:
            self._pipeline = self._build()
        feed = self._pipeline.feed_input
        feed("image", [np.frombuffer(job.image, np.uint8) for job in batch])
        feed("resized", [np.array(job.placement.resized, np.float32) for job in batch])
        feed("crop", [np.array(job.placement.crop, np.int32) for job in batch])
        feed("size", [np.array(job.placement.size, np.int32) for job in batch])
        (output,) = self._pipeline.run()
        images = output.as_cpu() if self._on_cuda else output
        return [np.array(images.at(number)) for number in range(len(batch))]  # copied: DALI reuses its memory

    def _build(self) -> Any:
        pipeline = Pipeline(
            batch_size=BATCH_IMAGES,
            num_threads=self._threads,
            device_id=torch.cuda.current_device() if self._on_cuda else None,
            prefetch_queue_depth=1,
            exec_async=False,
            exec_pipelined=False,
        )
        with pipeline:
            pixels = fn.decoders.image(
                fn.external_source(name="image", dtype=types.UINT8, ndim=1),
                device="mixed" if self._on_cuda else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,  # rotated images are decoded by Pillow
                jpeg_fancy_upsampling=True,  # as libjpeg does
                # The fixed-function decoder takes a share of each batch, so pixels would depend on the batch.
                hw_decoder_load=0.0,
            )
            pixels = fn.resize(
                pixels,
                size=fn.external_source(name="resized", dtype=types.FLOAT, ndim=1),
                interp_type=self._interpolation,
                antialias=True,
            )
            offset, size = (fn.external_source(name=name, dtype=types.INT32, ndim=1) for name in ("crop", "size"))
            pipeline.set_outputs(fn.slice(pixels, start=offset, shape=size, axes=(0, 1)))
        pipeline.build()
        return pipeline


def can_resize(interpolation: str) -> bool:
    """Return whether DALI supports the filter."""
    return interpolation in _FILTERS


def _batches(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """Split ``jobs`` into batches of at most ``BATCH_IMAGES`` and ``BATCH_PIXELS``; a larger image is a batch."""
    start, cost = 0, 0
    for number, job in enumerate(jobs):
        if number > start and (number - start == BATCH_IMAGES or cost + job.cost > BATCH_PIXELS):
            yield jobs[start:number]
            start, cost = number, 0
        cost += job.cost
    if start < len(jobs):
        yield jobs[start:]
