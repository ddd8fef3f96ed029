"""Autoencoders of diffusers by their records: latents and pixels are those of their own classes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.models.encoders.family import LatentSpace
from fastdiff.models.pretrained.pipeline import Pretrained
from tests.support.inputs.autoencoders import KINDS, Kind, tiny_autoencoder

SIDE = 64
"""Side of the images in pixels, which the tiny RAE needs: its encoder takes 56, its decoder gives 4 x 16."""


def _module(folder: Path) -> Any:
    import diffusers

    kind = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    return kind.from_pretrained(folder).eval()


def _kl_x0(vae: Any, images: Tensor) -> Tensor:
    found: Tensor = (vae.encode(images).latent_dist.mean - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
    return found


def _kl_pixels(vae: Any, x0: Tensor) -> Tensor:
    found: Tensor = vae.decode(x0 / vae.config.scaling_factor + (vae.config.shift_factor or 0)).sample
    return found


def _flux2_deviation(vae: Any) -> Tensor:
    return torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)


def _flux2_x0(vae: Any, images: Tensor) -> Tensor:
    from diffusers import Flux2Pipeline

    patches = Flux2Pipeline._patchify_latents(vae.encode(images).latent_dist.mode())
    return (patches - vae.bn.running_mean.view(1, -1, 1, 1)) / _flux2_deviation(vae)


def _flux2_pixels(vae: Any, x0: Tensor) -> Tensor:
    from diffusers import Flux2Pipeline

    patches = x0 * _flux2_deviation(vae) + vae.bn.running_mean.view(1, -1, 1, 1)
    found: Tensor = vae.decode(Flux2Pipeline._unpatchify_latents(patches)).sample
    return found


def _qwen_statistics(vae: Any) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    return mean, std


def _qwen_x0(vae: Any, images: Tensor) -> Tensor:
    mean, std = _qwen_statistics(vae)
    found: Tensor = (vae.encode(images[:, :, None]).latent_dist.mode()[:, :, 0] - mean) / std
    return found


def _qwen_pixels(vae: Any, x0: Tensor) -> Tensor:
    mean, std = _qwen_statistics(vae)
    found: Tensor = vae.decode((x0 * std + mean)[:, :, None]).sample[:, :, 0]
    return found


THEIRS: dict[Kind, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "kl4": (_kl_x0, _kl_pixels),
    "kl16": (_kl_x0, _kl_pixels),
    "kl32": (_kl_x0, _kl_pixels),
    "dc": (
        lambda vae, images: vae.encode(images).latent * vae.config.scaling_factor,
        lambda vae, x0: vae.decode(x0 / vae.config.scaling_factor).sample,
    ),
    "flux2": (_flux2_x0, _flux2_pixels),
    "qwen": (_qwen_x0, _qwen_pixels),
    "rae": (
        lambda rae, images: rae.encode((images + 1) / 2).latent,
        lambda rae, x0: rae.decode(x0).sample * 2 - 1,
    ),
}
"""x0 of images in [-1, 1], and images of x0, as the pipelines of diffusers compute them."""


def _broadcast(space: LatentSpace, values: tuple[float, ...]) -> Tensor:
    side = space.side if len(values) > space.channels and space.side else 1
    return torch.tensor(values).view(space.channels, side, side)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_x0_and_pixels_are_those_of_diffusers(kind: Kind, tmp_path: Path) -> None:
    folder = tiny_autoencoder(tmp_path / kind, kind)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, SIDE, SIDE, generator=generator) * 2 - 1
    encode, decode = THEIRS[kind]
    module, found = _module(folder), Pretrained(str(folder)).autoencoder()
    space = found.space
    expected = encode(module, images)
    latents = found.encode(images)
    mean = latents[:, : space.channels]
    x0 = (mean - _broadcast(space, space.shift)) * _broadcast(space, space.scale)
    torch.testing.assert_close(x0, expected, rtol=1e-5, atol=1e-5)
    assert (latents.shape[1] == 2 * space.channels) == space.posterior
    drawn = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(found.decode(drawn), decode(module, drawn).clamp(-1, 1), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_teacher_reads_images_resized_without_antialiasing(tmp_path: Path) -> None:
    """Its encoder has another size than its images; antialiased features are far away."""
    folder = tiny_autoencoder(tmp_path / "rae", "rae")
    found, module = Pretrained(str(folder)).autoencoder(), _module(folder)
    images = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)) * 2 - 1
    antialiased = torch.nn.functional.interpolate((images + 1) / 2, (56, 56), mode="bicubic", antialias=True)
    wrong = module.encode(antialiased).latent * (module._latents_std + 1e-5) + module._latents_mean
    right = found.encode(images)
    assert (right - wrong).norm() / right.norm() > 0.03
    in_other_range = module.encode(images).latent * (module._latents_std + 1e-5) + module._latents_mean
    assert (right - in_other_range).norm() / right.norm() > 0.03, "images in [-1, 1] are another picture"


def test_statistics_of_a_channel_for_those_of_an_element_cannot_be_expressed(tmp_path: Path) -> None:
    found = Pretrained(str(tiny_autoencoder(tmp_path / "rae", "rae"))).autoencoder()
    assert (found.space.measured_per, len(found.space.shift)) == ("element", 64 * 4 * 4)
    with pytest.raises(ConfigError, match="16 values of shift and 16 of scale, expected one per channel or one per e"):
        found.with_statistics([0.0] * 16, [1.0] * 16)


@torch.no_grad()
def test_an_autoencoder_without_statistics_decodes_only_with_measured_ones(tmp_path: Path) -> None:
    folder = tiny_autoencoder(tmp_path / "rae", "rae", statistics=False)
    found = Pretrained(str(folder)).autoencoder()
    assert not found.space.has_statistics
    latents = torch.randn(1, 64, 4, 4)
    with pytest.raises(ConfigError, match="has no statistics of its latents, and none were measured"):
        found.decode(latents)
    features = found.with_statistics([0.5] * 64, [2.0] * 64).decode(latents)
    expected = _module(folder).decode((latents / 2 + 0.5) / (1 + 1e-5)).sample * 2 - 1
    torch.testing.assert_close(features, expected.clamp(-1, 1), rtol=1e-5, atol=1e-5)


def test_other_teachers_are_refused(tmp_path: Path) -> None:
    folder = tiny_autoencoder(tmp_path / "rae", "rae")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"encoder_type": "mae"}))
    with pytest.raises(ConfigError, match="encodes with mae, reshape_to_2d True; expected dinov2"):
        _ = Pretrained(str(folder)).latent_space
