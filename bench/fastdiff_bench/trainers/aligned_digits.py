"""The digits with patch features of a teacher that was trained on the split ``train``, and the held-out ones."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fastdiff.conditions import FEATURES
from fastdiff.data.encoding.autoencoder import reproducible
from fastdiff.data.encoding.builtin import digits, digits_source, encode_digits, pixels_template, versions
from fastdiff.data.encoding.teacher_features import TeacherColumns
from fastdiff.data.shards.format import INFO_FILE, LATENT, DatasetInfo, Provenance, condition_columns
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.evaluation.digits import CLASSES, scans
from fastdiff.models.encoders.teacher import Teacher
from fastdiff_bench.trainers import teachers

_SPLITS = ("train", "test")
_BATCH = 64
_SHARD = 256


def prepare(root: Path, *, side: int, teacher_steps: int, parts: tuple[str, str]) -> None:
    """Write both splits, the training one with features of a teacher, as far as ``root`` does not have them.

    Args:
        root: folder; each data set is a folder in it, and so is the teacher.
        side: features per side of a digit.
        teacher_steps: optimizer steps of the teacher.
        parts: names of the folders, of the splits ``train`` and ``test``.
    """
    train, held_out = (root / part for part in parts)
    if not (held_out / INFO_FILE).is_file():
        encode_digits(held_out, split="test")
    if not (train / INFO_FILE).is_file():
        known, others = (_images(split) for split in _SPLITS)
        teachers.train(known, others, side=side, steps=teacher_steps, out=root / "teacher")
        _encode(known[0], root / "teacher", side, train)


def _images(split: str) -> tuple[Tensor, Tensor]:
    """Return digits ``[N, 3, 8, 8]`` fp32 in [0, 1], in equal channels, and their classes."""
    found, labels = scans(split)
    return ((found + 1) / 2).expand(-1, 3, -1, -1), labels


def _encode(images: Tensor, folder: Path, side: int, out: Path) -> None:
    """Write the training split as ``encode_digits`` does, with the features beside the pixels."""
    with reproducible():
        columns = TeacherColumns(
            Teacher(str(folder), side, torch.device("cpu"), torch.float32), teachers.WIDTH, token=False
        )
        pixels = torch.split((images * 255).round().byte().permute(0, 2, 3, 1), _BATCH)
        columns.basis = columns.fit(iter(pixels))
        features = torch.cat([columns(part)[FEATURES] for part in pixels]).to(torch.int8).numpy()
    with ShardWriter(out, _template(columns), samples_per_shard=_SHARD) as writer:
        for sample, found in zip(digits("train"), features, strict=True):
            writer.add(sample.key, {LATENT: sample.latent, FEATURES: found}, sample.label)


def _template(columns: TeacherColumns) -> DatasetInfo:
    provenance = Provenance(
        source=digits_source("train"), transform="pixel / 8 - 1", versions=versions("scikit-learn", "transformers"),
        teacher="ResNet, trained on the labels of the split", teacher_digest=columns.digest,
    )  # fmt: skip
    template = pixels_template((1, 8, 8), CLASSES, provenance)
    return replace(
        template,
        columns=template.columns | condition_columns(columns.shapes, "float16"),
        normalisations={FEATURES: columns.basis.normalisation},
    )
