"""Teachers: features of vision models of transformers, of images resized as in REPA."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.models.encoders.teacher import Teacher
from tests.support.inputs.teachers import DEVIATION, MEAN, TEACHERS, WIDTH, tiny_teacher

SIDE, CPU = 4, torch.device("cpu")


@pytest.fixture(scope="module", params=TEACHERS)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, tiny_teacher(tmp_path_factory.mktemp("teacher") / request.param, request.param)


def states_of(folder: Path, images: Tensor, *, antialias: bool = False) -> Any:
    """The last hidden states of a model, of images that are resized to ``SIDE`` patches per side."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folder)
    patch = TEACHERS[folder.name][1]
    size = (SIDE * patch, SIDE * patch)
    mean, deviation = (torch.tensor(value)[:, None, None] for value in (MEAN, DEVIATION))
    resized = F.interpolate((images - mean) / deviation, size=size, mode="bicubic", antialias=antialias)
    options = (
        {} if folder.name in ("resnet", "dinov3") or "dinov2" in folder.name else {"interpolate_pos_encoding": True}
    )
    with torch.no_grad():
        return getattr(model, "vision_model", model).eval()(pixel_values=resized, **options).last_hidden_state


def test_features_are_those_of_the_model(named: tuple[str, Path]) -> None:
    name, folder = named
    teacher = Teacher(str(folder), SIDE, CPU, torch.float32)
    images = torch.rand(3, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    patches, token = teacher(images)
    leading, states = TEACHERS[name][2], states_of(folder, images)
    expected = states
    if states.dim() == 3:
        expected = states[:, leading:].transpose(1, 2).reshape(3, WIDTH, SIDE, SIDE)  # rows first
    assert patches.shape == (3, WIDTH, SIDE, SIDE) == (3, teacher.width, teacher.side, teacher.side)
    torch.testing.assert_close(patches, expected, rtol=1e-5, atol=1e-5)
    assert teacher.has_token == (token is not None) == (leading > 0)
    if token is not None:
        torch.testing.assert_close(token, states[:, 0], rtol=1e-5, atol=1e-5)


def test_the_resize_has_no_antialiasing(named: tuple[str, Path]) -> None:
    name, folder = named
    images = torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    smooth, plain = (states_of(folder, images, antialias=value) for value in (True, False))
    found, _ = Teacher(str(folder), SIDE, CPU, torch.float32)(images)
    leading = TEACHERS[name][2]
    mine = found if plain.dim() == 4 else found.flatten(2).transpose(1, 2)
    of_smooth, of_plain = (states if states.dim() == 4 else states[:, leading:] for states in (smooth, plain))
    assert (mine - of_plain).norm() < 1e-4 * of_plain.norm()
    assert (mine - of_smooth).norm() > 1e-2 * of_plain.norm()


def test_the_digest_is_that_of_the_weights(tmp_path: Path) -> None:
    folder = tiny_teacher(tmp_path / "dinov2", "dinov2")
    teacher = Teacher(str(folder), SIDE, CPU, torch.float32)
    assert teacher.digest == Teacher(str(folder), 2 * SIDE, CPU, torch.bfloat16).digest == teacher.digest
    other = tiny_teacher(tmp_path / "clip", "clip")
    assert teacher.digest != Teacher(str(other), SIDE, CPU, torch.float32).digest


def test_what_is_no_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--teacher .*nothing cannot be loaded .*facebook/dinov2-base"):
        Teacher(str(tmp_path / "nothing"), SIDE, CPU, torch.float32)
    folder = tiny_teacher(tmp_path / "dinov2", "dinov2")
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("preprocessor*"))
    with pytest.raises(ConfigError, match=r"bare has no preprocessor_config.json"):
        Teacher(str(bare), SIDE, CPU, torch.float32)
    from transformers import T5Config, T5EncoderModel

    T5EncoderModel(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)).save_pretrained(
        tmp_path / "text"
    )
    with pytest.raises(ConfigError, match="takes no images"):
        Teacher(str(tmp_path / "text"), SIDE, CPU, torch.float32)
