"""Synthetic photographs with captions on disk, and a loader that reads them as diffusers' scripts do."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastdiff.config.networks.pretrained import CAPTION_TOKENS

CAPTIONS = "captions.json"
METADATA = "metadata.jsonl"
"""The captions as the library ``datasets`` reads them, one line per image."""
_WORDS = ("a", "bridge", "over", "the", "quiet", "river", "in", "autumn", "light", "seen", "from", "an", "old", "boat")
_SMOOTH = 12
"""Pixels between two independent colours: photographs are smooth, which makes JPEG and its decoder faster."""


def write(folder: Path, count: int, side: int, *, captions: str | None = CAPTIONS, seed: int = 0) -> Path:
    """Write JPEG files 1.25 x 1.5 times as large as the training images, and captions; return the folder.

    Args:
        folder: new.
        count: images.
        side: of the square training images, in pixels.
        captions: their file, ``CAPTIONS`` or ``METADATA``; None: the images alone.
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
    texts = [" ".join(generator.choice(_WORDS, 8)) for _ in names]
    if captions == METADATA:
        rows = [json.dumps({"file_name": name, "text": text}) for name, text in zip(names, texts, strict=True)]
        (folder / captions).write_text("\n".join(rows) + "\n")
    elif captions is not None:
        (folder / captions).write_text(json.dumps(texts))
    return folder


class _Images(Dataset[tuple[Tensor, str]]):
    """Images, decoded, resized, randomly cropped and normalized as torchvision's transforms do with Pillow."""

    def __init__(self, folder: Path, side: int) -> None:
        self._files = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]
        self._captions: list[str] = json.loads((folder / CAPTIONS).read_text())
        self._side = side

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, str]:
        image = Image.open(io.BytesIO(self._files[number])).convert("RGB")
        scale = self._side / min(image.size)
        width, height = (max(self._side, round(pixels * scale)) for pixels in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
        left, top = (int(torch.randint(n - self._side + 1, ())) for n in (width, height))
        image = image.crop((left, top, left + self._side, top + self._side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255.0).sub_(0.5).div_(0.5), self._captions[number]


def loader(folder: Path, side: int, batch: int, tokenizer: Any) -> DataLoader[Any]:
    """Return batches of ``pixel_values [B, 3, side, side]`` fp32 and ``input_ids [B, 77]`` int64, without workers."""

    def collate(samples: list[tuple[Tensor, str]]) -> dict[str, Tensor]:
        pixels, captions = zip(*samples, strict=True)
        tokens = tokenizer(
            list(captions), max_length=CAPTION_TOKENS, padding="max_length", truncation=True, return_tensors="pt"
        )
        return {"pixel_values": torch.stack(pixels), "input_ids": tokens.input_ids}

    images = _Images(folder, side)
    return DataLoader(images, batch, shuffle=True, collate_fn=collate, num_workers=0, drop_last=True)
