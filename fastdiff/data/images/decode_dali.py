"""Decoding, resize and crop of plain images in batches by NVIDIA DALI, on the CPU's cores or on the GPU.

Without a GPU the decoded pixels are Pillow's, bit for bit; the resize is not, since DALI computes in floating point
where Pillow rounds its weights and, between the two passes, its pixels. Differences in levels of 255 on images with a
1/f spectrum, the range of the means of seven ratios between 1/8 and 2.6, and the largest of all (there is a test of
their bounds):

==========  ==========  =======
filter      mean        largest
==========  ==========  =======
lanczos     0.09-0.26   12
bicubic     0.09-0.23   6
bilinear    0.08-0.19   7
nearest     0-0.08      96
==========  ==========  =======

Nearest neighbours differ at one of the ratios only, where two pixels are equally near.
"""

from __future__ import annotations

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
    """One image for DALI.

    Attributes:
        image: The file's bytes.
        size: Height and width in pixels.
        placement: Resize and crop.
    """

    image: bytes
    size: Size
    placement: Placement

    @property
    def cost(self) -> int:
        """Pixels before and after the resize, which are in memory at the same time."""
        return area(self.size) + area(self.placement.resized)


class DaliPixels:
    """A DALI pipeline that is built again whenever an image has broken it.

    Attributes:
        name: ``dali`` or, with the GPU's JPEG decoder, whose pixels differ slightly, ``dali-cuda``.
    """

    def __init__(self, interpolation: str, threads: int) -> None:
        """Args are a name in ``_FILTERS`` and the number of CPU threads."""
        self._interpolation = _FILTERS[interpolation]
        self._threads = threads
        self._on_cuda = torch.cuda.is_available()
        self.name = "dali-cuda" if self._on_cuda else "dali"
        self._pipeline: Any = None

    def decode(self, jobs: Sequence[Job]) -> list[Pixels | None]:
        """Decode, resize and crop; what comes out for a job does not depend on the others.

        Returns:
            For every job ``[H, W, 3]`` RGB, C-contiguous, or None if DALI cannot decode it.
        """
        return [pixels for batch in _batches(jobs) for pixels in self._attempt(batch)]

    def _attempt(self, batch: Sequence[Job]) -> list[Pixels | None]:
        """DALI fails for a batch as a whole: it is halved until the bad images stand alone."""
        try:
            return list(self._run(batch))
        except RuntimeError:
            self._pipeline = None  # DALI does not run a pipeline again that has failed
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
        return [np.array(images.at(number)) for number in range(len(batch))]  # copies: DALI uses its memory again

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
                adjust_orientation=False,  # rotated images do not come here
                jpeg_fancy_upsampling=True,  # as libjpeg does
                # The fixed-function decoder would take a share of each batch: pixels would depend on batch mates.
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
    """Whether DALI has the filter."""
    return interpolation in _FILTERS


def _batches(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """Runs of ``jobs`` of at most ``BATCH_IMAGES`` and, but for a single large image, ``BATCH_PIXELS``."""
    start, cost = 0, 0
    for number, job in enumerate(jobs):
        if number > start and (number - start == BATCH_IMAGES or cost + job.cost > BATCH_PIXELS):
            yield jobs[start:number]
            start, cost = number, 0
        cost += job.cost
    if start < len(jobs):
        yield jobs[start:]
