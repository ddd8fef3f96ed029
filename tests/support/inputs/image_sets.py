"""Small sets of images for tests, as npz files and folders."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def pictures(count: int, seed: int = 0, size: tuple[int, int] = (4, 3), channels: int = 3) -> Pixels:
    """Random images ``[N, H, W, C]``, brighter with a larger seed."""
    random = np.random.default_rng(seed)
    return random.integers(10 * seed, 200 + 10 * seed, size=(count, *size, channels), dtype=np.uint8)


def npz(path: Path, *arrays: npt.NDArray[Any], **named: npt.NDArray[Any]) -> Path:
    np.savez(path, *arrays, **named)
    return path


def folder_of(path: Path, images: Pixels) -> Path:
    for number, image in enumerate(images):
        file = path / f"class {number % 2}" / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return path
