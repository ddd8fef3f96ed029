"""Synthetic photographs with captions on disk."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

METADATA = "metadata.jsonl"
"""The captions as the library ``datasets`` reads them, one line per image."""
_WORDS = ("a", "bridge", "over", "the", "quiet", "river", "in", "autumn", "light", "seen", "from", "an", "old", "boat")
_SMOOTH = 12
"""Pixels between two independent colours: photographs are smooth, which makes JPEG and its decoder faster."""


def write(folder: Path, count: int, side: int, *, captioned: bool = True, seed: int = 0) -> Path:
    """Write JPEG files 1.25 x 1.5 times as large as the training images, and captions; return the folder.

    Args:
        folder: new.
        count: images.
        side: of the square training images, in pixels.
        captioned: write ``METADATA`` beside the images.
        seed: of colours and words.
    """
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    size = (side * 3 // 2, side * 5 // 4)
    names = [f"{number:06d}.jpg" for number in range(count)]
    for name in names:
        colours = generator.integers(0, 256, (size[1] // _SMOOTH + 2, size[0] // _SMOOTH + 2, 3), np.uint8)
        image = Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)
        image.save(folder / name, quality=90)
    if captioned:
        rows = [{"file_name": name, "text": " ".join(generator.choice(_WORDS, 8))} for name in names]
        (folder / METADATA).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder
