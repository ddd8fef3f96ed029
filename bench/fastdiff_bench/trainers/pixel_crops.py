"""The crops of ``trainers.crops`` as data sets in pixel space, and a distance of drawn crops from held-out ones."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.evaluation.image_metrics import frechet_distance
from fastdiff.sampling.run import Run
from fastdiff_bench.trainers.crops import CLASSES, PIXELS, crops_of, write_images

_DRAWN = 256
_POOLED = 8
"""Side of the squares whose mean colours are compared: 48 numbers of a crop."""
_SAMPLER = SamplerConfig(scheduler="euler", steps=25, cfg=1.0)


def prepare(root: Path, *, stride: int, parts: tuple[str, str]) -> None:
    """Write the crops and encode both halves as pixels, as far as ``root`` does not have them.

    Args:
        root: folder; each data set is a folder in it.
        stride: pixels between neighbouring crops.
        parts: names of the folders, of the left and the right halves.
    """
    if not (root / "images").is_dir():
        write_images(root, stride)
    for part in parts:
        if not (root / part / "dataset.json").is_file():
            encode_images(
                EncodeOptions(
                    source=str(root / "images" / part),
                    out=root / part,
                    autoencoder="identity",
                    resolution=PIXELS,
                    decode="pillow",
                    samples_per_shard=512,
                ),
                lambda _: None,
            )


def distance_of_drawn(run: Run, held_out: Path) -> float:
    """Return the Fréchet distance between mean colours of drawn crops and of those in a folder of images.

    The colours, in [0, 1], are means of 8 x 8 squares.
    """
    labels = torch.arange(len(CLASSES)).repeat(_DRAWN // len(CLASSES))
    drawn = (run.draw(labels, _SAMPLER, progress=False).clamp(-1, 1) + 1) / 2
    return frechet_distance(_colours(drawn), _colours(crops_of(held_out)))


def _colours(images: Tensor) -> npt.NDArray[np.float64]:
    """Return ``[N, 3 * 4 * 4]`` mean colours of images ``[N, 3, 32, 32]``."""
    return F.avg_pool2d(images.double(), _POOLED).flatten(1).numpy()
