"""The crops of ``trainers.crops`` as data sets in pixel space, and a distance of drawn crops from held-out ones.

Those of the training have patch features of a teacher.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.shards.format import INFO_FILE
from fastdiff.evaluation.image_metrics import frechet_distance
from fastdiff.sampling.run import Run
from fastdiff_bench.trainers import teachers
from fastdiff_bench.trainers.crops import CLASSES, PIXELS, crops_of, write_images

_DRAWN = 256
_BANDS = 8
"""Heights of a photo that the teacher tells apart."""
_POOLED = 8
"""Side of the squares whose mean colours are compared: 48 numbers of a crop."""
_SAMPLER = SamplerConfig(scheduler="euler", steps=25, cfg=1.0)


def prepare(root: Path, *, stride: int, side: int, teacher_steps: int, parts: tuple[str, str]) -> None:
    """Write the crops and encode both halves as pixels, as far as ``root`` does not have them.

    The left one gets features of a teacher that was trained to tell the photo of a crop and its height there.

    Args:
        root: folder; each data set is a folder in it, and so is the teacher.
        stride: pixels between neighbouring crops.
        side: features per side of a crop.
        teacher_steps: optimizer steps of the teacher.
        parts: names of the folders, of the left and the right halves.
    """
    if not (root / "images").is_dir():
        write_images(root, stride)
    train, held_out = parts
    if not (root / held_out / INFO_FILE).is_file():
        encode_images(_options(root, held_out), lambda _: None)
    if not (root / train / INFO_FILE).is_file():
        known, others = (_placed(root / "images" / part) for part in parts)
        teachers.train(known, others, side=side, steps=teacher_steps, out=root / "teacher")
        options = replace(
            _options(root, train), teacher=str(root / "teacher"), teacher_side=side, teacher_width=teachers.WIDTH
        )
        encode_images(options, lambda _: None)


def _options(root: Path, part: str) -> EncodeOptions:
    return EncodeOptions(
        source=str(root / "images" / part),
        out=root / part,
        autoencoder="identity",
        resolution=PIXELS,
        decode="pillow",
        samples_per_shard=512,
    )


def _placed(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the crops in a folder, and of each ``_BANDS`` times the number of its photo plus that of its height."""
    found = crops_of(folder)  # those of a photo together, and in it row by row
    return found, torch.arange(len(found)) * len(CLASSES) * _BANDS // len(found)


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
