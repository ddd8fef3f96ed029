"""A small ResNet of transformers as the teacher of an alignment, trained on the labels of the training half alone.

A published teacher would be a download, and has seen no labels; this one has. A gain from it is not only a gain from
the alignment, and says nothing of DINOv2.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.data.encoding.autoencoder import reproducible
from fastdiff.files import publish
from fastdiff_bench import BenchError

WIDTH = 32
"""Components of a stored feature."""
_CHANNELS = (16, 32, 64)
"""Of the stem and of both stages; the last are those of a feature."""
_STRIDE = 8
"""Pixels per side of a feature: the stem halves the picture twice, and the second stage once."""
_MEAN = _DEVIATION = 0.5
_SEED, _BATCH, _RATE = 0, 64, 4e-3
_RESULT = "training.json"
"""File of its folder, written last."""


def train(known: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], *, side: int, steps: int, out: Path) -> None:
    """Train a teacher to classify and save it as ``Teacher`` reads it, unless ``out`` has it.

    Args:
        known: images ``[N, 3, H, W]`` fp32 in [0, 1], and their classes ``[N]`` int64.
        others: images and classes, on which its accuracy is measured.
        side: features per side of an image.
        steps: optimizer steps.
        out: folder.
    """
    from transformers import CLIPImageProcessor

    if (out / _RESULT).is_file():
        return
    classes = int(known[1].max()) + 1
    with torch.random.fork_rng(devices=[]), reproducible():
        torch.default_generator.manual_seed(_SEED)
        network = _network(classes)
        _fit(network, *known, side, steps)
        right = _classified(network, others[0], side) == others[1]
    network.resnet.save_pretrained(out)
    CLIPImageProcessor(image_mean=[_MEAN] * 3, image_std=[_DEVIATION] * 3).save_pretrained(out)
    found = {"classes": classes, "images": len(known[0]), "steps": steps, "accuracy": float(right.float().mean())}
    publish(out / _RESULT, json.dumps(found).encode())


def training_of(folder: Path) -> dict[str, float]:
    """Return the number of classes, images and steps with which a teacher was trained, and its held-out accuracy.

    Raises:
        BenchError: there is none, beside data of an earlier version.
    """
    if not (folder / _RESULT).is_file():
        raise BenchError(f"{folder}: the data beside it have no teacher's features; use a new --folder")
    found: dict[str, float] = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
    return found


def _network(classes: int) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    stem, *stages = _CHANNELS
    config = ResNetConfig(
        embedding_size=stem, hidden_sizes=stages, depths=[1] * len(stages), layer_type="basic", num_labels=classes
    )
    return ResNetForImageClassification(config)


def _fit(network: Any, images: Tensor, labels: Tensor, side: int, steps: int) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    network.train()
    for _ in range(steps):
        chosen = torch.randint(len(images), (_BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(network(_seen(images[chosen], side)).logits, labels[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    network.eval()


@torch.no_grad()
def _classified(network: Any, images: Tensor, side: int) -> Tensor:
    return torch.cat([network(_seen(part, side)).logits.argmax(1) for part in torch.split(images, _BATCH)])


def _seen(images: Tensor, side: int) -> Tensor:
    """Return the images as ``Teacher`` shows them to its model."""
    size = (side * _STRIDE, side * _STRIDE)
    return F.interpolate((images - _MEAN) / _DEVIATION, size=size, mode="bicubic", align_corners=False)
