"""The data of ``bench recipes``: a teacher that learns its labels, and its features beside the usual digits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.conditions import FEATURES
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.evaluation.digits import scans
from fastdiff.models.encoders.teacher import Teacher
from fastdiff_bench import BenchError
from fastdiff_bench.trainers import aligned_digits, pixel_crops, teachers

SIDE = 4


def test_the_digits_get_features_of_a_teacher_that_learned_them(tmp_path: Path) -> None:
    aligned_digits.prepare(tmp_path, side=SIDE, teacher_steps=40, parts=("train", "held-out"))
    assert teachers.training_of(tmp_path / "teacher")["accuracy"] > 0.5, "of digits that it has not seen"
    encode_digits(tmp_path / "plain", split="train")
    with LatentReader(tmp_path / "train") as aligned, LatentReader(tmp_path / "plain") as plain:
        positions = np.arange(0, len(plain), 100)
        found, usual = aligned.read(positions), plain.read(positions)
        assert len(aligned) == len(plain)
        assert all(np.array_equal(found[name], value) for name, value in usual.items())
    teacher = Teacher(str(tmp_path / "teacher"), SIDE, torch.device("cpu"), torch.float32)
    images = (scans("train")[0][positions] + 1) / 2
    ours = teacher(images.expand(-1, 3, -1, -1))[0].flatten(2)
    scale = torch.tensor(DatasetInfo.read(tmp_path / "train").normalisations[FEATURES].scale).view(-1, 1, 1)
    stored = (torch.from_numpy(found[FEATURES]) * scale).flatten(2)
    # Cosines between the features of an image survive the map and the rounding, and differ between images.
    cosines, kept = (torch.einsum("bkn,bkm->bnm", each, each) for each in map(_normalised, (ours, stored)))
    assert (kept - cosines).abs().mean() < 0.05
    assert (kept.flip(0) - cosines).abs().mean() > 0.1


def _normalised(features: Tensor) -> Tensor:
    return torch.nn.functional.normalize(features, dim=1)


def test_the_held_out_crops_have_no_features(tmp_path: Path) -> None:
    pixel_crops.prepare(tmp_path, stride=96, side=16, teacher_steps=2, parts=("train", "held-out"))
    train, held_out = (DatasetInfo.read(tmp_path / part) for part in ("train", "held-out"))
    assert train.columns[FEATURES].shape == (teachers.WIDTH, 16, 16)
    assert FEATURES not in held_out.columns
    assert teachers.training_of(tmp_path / "teacher")["classes"] == 16, "two photos, eight heights of each"


def test_data_without_a_teacher_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="use a new --folder"):
        teachers.training_of(tmp_path / "teacher")
