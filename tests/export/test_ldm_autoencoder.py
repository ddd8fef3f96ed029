"""Published autoencoders in the layout of latent diffusion become AutoencoderKL; random weights, published names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.cli.main import main
from fastdiff.models.pretrained.pipeline import Pretrained
from tests.support.references.ldm_autoencoder import LdmAutoencoder

WIDTHS, BLOCKS, CHANNELS = (32, 32, 64), 2, 8


@pytest.fixture(scope="module")
def published() -> LdmAutoencoder:
    """As VA-VAE, with an attention after each block of the coarsest level."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        found = LdmAutoencoder(WIDTHS, BLOCKS, CHANNELS, attends={2})
        for name, weight in found.named_parameters():
            if "norm" in name:
                weight.data.add_(0.3 * torch.randn_like(weight))
    return found.eval()


@torch.no_grad()
def same_as(published: LdmAutoencoder, folder: Path) -> None:
    exact = LdmAutoencoder(WIDTHS, BLOCKS, CHANNELS, attends={2}).double()
    exact.load_state_dict(published.state_dict())
    found = Pretrained(str(folder)).autoencoder()
    generator = torch.Generator().manual_seed(0)
    images, latents = (
        torch.rand(2, 3, 16, 16, generator=generator) * 2 - 1,
        torch.randn(2, 8, 4, 4, generator=generator),
    )
    mean = found.encode(images)[:, :CHANNELS]
    torch.testing.assert_close(mean.double(), exact.mean(images.double()), rtol=1e-5, atol=1e-5)
    pixels = found.with_statistics([0.0] * CHANNELS, [1.0] * CHANNELS).decode(latents)
    torch.testing.assert_close(pixels.double(), exact.decode(latents.double()).clamp(-1, 1), rtol=1e-5, atol=1e-5)


def test_va_vae_with_attention_and_statistics(
    published: LdmAutoencoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"foundation_model.weight": torch.zeros(3), "loss.logvar": torch.zeros(1), "loss.weight": torch.zeros(1)}
    torch.save({"state_dict": published.state_dict() | others}, tmp_path / "vavae.pt")
    mean, std = torch.randn(1, CHANNELS, 1, 1), torch.rand(1, CHANNELS, 1, 1) + 0.5
    torch.save({"mean": mean, "std": std}, tmp_path / "latents_stats.pt")
    files = [str(tmp_path / name) for name in ("vavae.pt", "out", "latents_stats.pt")]
    assert main(["convert", files[0], files[1], "--statistics", files[2]]) == 0
    assert "is an AutoencoderKL of 8 channels and 4 pixels per latent\n" in (told := capsys.readouterr()).out
    assert "left out: foundation_model (1), loss (2)" in told.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["down_block_types"] == ["DownEncoderBlock2D", "DownEncoderBlock2D", "AttnDownEncoderBlock2D"]
    assert config["up_block_types"] == ["AttnUpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"]
    space = Pretrained(str(tmp_path / "out")).latent_space
    torch.testing.assert_close(torch.tensor(space.shift), mean.flatten())
    torch.testing.assert_close(torch.tensor(space.scale), 1 / std.flatten())
    same_as(published, tmp_path / "out")


def test_repa_e_is_measured_while_encoding(
    published: LdmAutoencoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(dict(published.state_dict()), tmp_path / "e2e.safetensors")
    assert main(["convert", str(tmp_path / "e2e.safetensors"), str(tmp_path / "out")]) == 0
    assert "4 pixels per latent; its latents are measured by `fastdiff encode`" in capsys.readouterr().out
    assert not Pretrained(str(tmp_path / "out")).latent_space.has_statistics
    same_as(published, tmp_path / "out")


def test_repa_e_with_the_factor_of_a_recipe_is_not_measured(
    published: LdmAutoencoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(dict(published.state_dict()), tmp_path / "e2e.safetensors")
    files = [str(tmp_path / name) for name in ("e2e.safetensors", "out")]
    assert main(["convert", *files, "--scale", "0.3099"]) == 0
    assert "4 pixels per latent\n" in capsys.readouterr().out
    space = Pretrained(files[1]).latent_space
    assert space.has_statistics
    assert (tuple(space.shift), tuple(space.scale)) == ((0.0,) * CHANNELS, (0.3099,) * CHANNELS)
    same_as(published, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder.extra.weight": torch.zeros(1)}, "more weights than AutoencoderKL: encoder.extra.weight (1)"),
        ({"decoder.conv_out.bias": None}, "not all of its weights: decoder.conv_out.bias (1)"),
        ({"encoder.conv_in.weight": None}, "has no encoder.conv_in.weight; expected an autoencoder in the layout"),
        ({"encoder.norm_out.bias": torch.zeros(5)}, "encoder.norm_out.bias has the shape [5], expected [64]"),
    ],
)
def test_other_files_are_refused(
    published: LdmAutoencoder, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    changed: dict[str, Any] = dict(published.state_dict()) | change
    save_file({name: value for name, value in changed.items() if value is not None}, tmp_path / "file.safetensors")
    assert main(["convert", str(tmp_path / "file.safetensors"), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_without_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save([1], tmp_path / "list.pt")
    assert main(["convert", str(tmp_path / "list.pt"), str(tmp_path / "out")]) == 2
    assert "list.pt cannot be used: expected a dict, it holds list" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none.pt"), str(tmp_path / "out")]) == 74
