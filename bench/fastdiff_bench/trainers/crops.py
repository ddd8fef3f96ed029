"""Crops of scikit-learn's two photos as features of a tiny ``AutoencoderRAE`` that is trained on them.

The left half of each photo is for training, the right half is held out. The autoencoder is trained as a whole, with its
encoder, in seconds; a frozen DINOv2 would be a download. Its latents are what ``fastdiff encode`` stores of it: 64
channels at 4 x 4 positions, and a mean and a deviation for each element.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fastdiff.data.encoding.autoencoder import reproducible
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions, LatentDtype
from fastdiff.data.shards import int8_latents
from fastdiff.data.shards.format import INFO_FILE
from fastdiff.data.shards.int8_latents import LEVELS

CHANNELS, SIDE = 64, 4
"""Of the features. diffusers gives this encoder heads of 64 channels, so it has no fewer."""
CLASSES = ("china", "flower")
PIXELS = 32
_SEED, _BATCH, _RATE = 0, 64, 2e-3
_MEASURED = 512
"""Held-out crops whose reconstruction is measured."""
EXACT = "float32"
"""Storage whose statistics all others take, so that they have the same x0, and that of the held-out features."""
HELD_OUT = "held-out"
"""Folder of the held-out features."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How the features of the training are stored."""

    dtype: LatentDtype
    levels: int = LEVELS
    """Steps of int8 between the limits of a channel."""

    @property
    def is_control(self) -> bool:
        """Whether it is coarse, so that a test of the losses should find it."""
        return self.levels < LEVELS


STORAGES = {
    EXACT: Storage("float32"),
    "bfloat16": Storage("bfloat16"),
    "int8": Storage("int8"),
    "3 bits": Storage("int8", 7),
}
"""By name; the last is a control."""


def prepare(root: Path, *, stride: int, steps: int) -> None:
    """Write the crops, train the autoencoder and encode both halves, as far as ``root`` does not have them.

    Args:
        root: Folder; each data set is a folder in it, by the name of its storage, and ``HELD_OUT``.
        stride: Pixels between neighbouring crops.
        steps: Optimizer steps of the autoencoder.
    """
    if not (root / "autoencoder").is_dir():
        write_images(root, stride)
        _train(crops_of(root / "images" / "train"), steps, root / "autoencoder")
    for name, storage in STORAGES.items():
        statistics = "measured" if name == EXACT else str(root / EXACT)
        _encode(root, "train", name, storage, statistics)
    _encode(root, HELD_OUT, HELD_OUT, STORAGES[EXACT], str(root / EXACT))


def reconstruction(root: Path) -> float:
    """Return the peak signal-to-noise ratio of held-out crops, decoded from their features, in dB."""
    from diffusers import AutoencoderRAE

    crops = crops_of(root / "images" / HELD_OUT)
    crops = crops[:: max(1, len(crops) // _MEASURED)]
    rae: Any = AutoencoderRAE.from_pretrained(root / "autoencoder")
    with reproducible(), torch.no_grad():
        return float(-10 * (rae(crops).sample - crops).square().mean().log10())


def write_images(root: Path, stride: int) -> None:
    """Write the crops as PNG files in a folder per photo."""
    from sklearn.datasets import load_sample_images  # the import takes seconds

    shutil.rmtree(root / "images", ignore_errors=True)
    for name, photo in zip(CLASSES, load_sample_images().images, strict=True):
        half = photo.shape[1] // 2
        for part, pixels in (("train", photo[:, :half]), (HELD_OUT, photo[:, half:])):
            folder = root / "images" / part / name
            folder.mkdir(parents=True)
            for number, crop in enumerate(_cut(pixels, stride)):
                Image.fromarray(crop).save(folder / f"{number:05d}.png")


def _cut(pixels: npt.NDArray[np.uint8], stride: int) -> Iterator[npt.NDArray[np.uint8]]:
    height, width, _ = pixels.shape
    for top in range(0, height - PIXELS + 1, stride):
        for left in range(0, width - PIXELS + 1, stride):
            yield pixels[top : top + PIXELS, left : left + PIXELS]


def crops_of(folder: Path) -> Tensor:
    """Return the crops in a folder, ``[N, 3, 32, 32]`` fp32 in [0, 1]."""
    images = [np.asarray(Image.open(path)) for path in sorted(folder.rglob("*.png"))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255


def _train(crops: Tensor, steps: int, out: Path) -> None:
    """Train an autoencoder, encoder too, to reproduce the crops, and save it."""
    from diffusers import AutoencoderRAE

    with torch.random.fork_rng(devices=[]), reproducible():
        torch.default_generator.manual_seed(_SEED)
        rae: Any = AutoencoderRAE(
            encoder_hidden_size=CHANNELS,
            encoder_patch_size=7,
            encoder_num_hidden_layers=2,
            decoder_hidden_size=64,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=128,
            patch_size=PIXELS // SIDE,
            encoder_input_size=7 * SIDE,
        )
        weights = [*rae.encoder.requires_grad_(True).parameters(), *rae.decoder.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
        rae.train()
        for _ in range(steps):
            batch = crops[torch.randint(len(crops), (_BATCH,))]
            optimizer.zero_grad()
            F.l1_loss(rae(batch).sample, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    rae.eval().save_pretrained(out)


def _encode(root: Path, part: str, name: str, storage: Storage, statistics: str) -> None:
    out = root / name.replace(" ", "-")
    if (out / INFO_FILE).is_file():
        return
    options = EncodeOptions(
        source=str(root / "images" / part),
        out=out,
        pretrained=str(root / "autoencoder"),
        resolution=PIXELS,
        decode="pillow",
        batch=64,
        samples_per_shard=512,
        dtype=storage.dtype,
        statistics=statistics,
    )
    with _levels(storage.levels):
        encode_images(options, lambda _: None)


@contextmanager
def _levels(levels: int) -> Iterator[None]:
    """Take so many steps of int8."""
    before, int8_latents.LEVELS = int8_latents.LEVELS, levels
    try:
        yield
    finally:
        int8_latents.LEVELS = before
