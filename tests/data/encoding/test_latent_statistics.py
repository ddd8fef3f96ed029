"""Statistics of latents: measured while encoding, of a file, or the autoencoder's own; and what a posterior stores."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff.data.encoding.statistics import sums_path
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.int8_latents import dequantised, quantised
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.rng import Stream
from fastdiff_kernels import philox
from tests.support.inputs.autoencoders import tiny_autoencoder
from tests.support.inputs.encoding import classed, encode, encode_part, files, picture

IMAGES, SIDE = 10, 64
MEASURED = {"resolution": SIDE, "flip": True, "statistics": "measured"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classed(tmp_path_factory.mktemp("sources") / "images", range(IMAGES), SIDE)


@pytest.fixture(scope="module")
def rae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_autoencoder(tmp_path_factory.mktemp("rae") / "rae", "rae", statistics=False)


@pytest.fixture(scope="module")
def kl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_autoencoder(tmp_path_factory.mktemp("kl") / "kl", "kl4")


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory, source: Path, rae: Path) -> Path:
    """The source as features, measured in one go."""
    out = tmp_path_factory.mktemp("encoded") / "features"
    encode(source, out, rae, resolution=SIDE, flip=True)
    return out


def stored(folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All latents, those of mirrored images too."""
    with LatentReader(folder) as reader:
        both = [reader.read(np.arange(IMAGES), choice={"latent": np.full(IMAGES, flip)}) for flip in (0, 1)]
    return np.concatenate([each["latent"] for each in both]).astype(np.float64)


def test_features_have_a_mean_and_a_deviation_per_element(features: Path) -> None:
    info, values = DatasetInfo.read(features), stored(features)
    assert info.provenance.statistics == "measured per element"
    assert len(info.normalisation.shift) == 64 * 4 * 4
    mean, deviation = values.mean(0), np.sqrt(values.var(0) + 1e-5)
    np.testing.assert_allclose(info.normalisation.shift, mean.flatten(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(info.normalisation.scale, 1 / deviation.flatten(), rtol=1e-6)
    assert not verify(features).problems
    batch = {"latent": torch.from_numpy(values), "position": torch.arange(len(values))}
    x0 = Normaliser(replace(info, normalisations={}), torch.device("cpu"))(batch).latents
    torch.testing.assert_close(x0, torch.from_numpy((values - mean) / deviation).float(), rtol=1e-4, atol=1e-4)
    assert x0.mean(0).abs().max() < 1e-4


def test_statistics_of_a_posterior_are_those_of_its_samples(tmp_path: Path, source: Path, kl: Path) -> None:
    encode(source, tmp_path / "out", kl, **MEASURED)
    info, values = DatasetInfo.read(tmp_path / "out"), stored(tmp_path / "out")
    mean, deviation = np.split(values, 2, axis=1)
    variance = mean.var((0, 2, 3)) + (deviation**2).mean((0, 2, 3))
    assert info.provenance.statistics == "measured per channel"
    np.testing.assert_allclose(info.normalisation.shift, [*mean.mean((0, 2, 3)), 0, 0, 0, 0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(info.normalisation.scale, [*variance**-0.5] * 2, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 2])
def test_ranks_and_a_stop_do_not_change_a_bit(
    tmp_path: Path, source: Path, rae: Path, features: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A late rank encodes its own partitions first; killed and concurrent ranks are in test_encode_resume.py."""
    encode_part(source, tmp_path / "out", rae, 1, resolution=SIDE, flip=True)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    encode(source, tmp_path / "out", rae, resolution=SIDE, flip=True)
    assert files(tmp_path / "out") == files(features)


def test_an_edited_picture_changes_the_statistics_of_all(tmp_path: Path, source: Path, rae: Path) -> None:
    copied = Path(shutil.copytree(source, tmp_path / "images"))
    encode(copied, tmp_path / "out", rae, resolution=SIDE)
    before = DatasetInfo.read(tmp_path / "out").normalisation
    picture(99, (SIDE, SIDE)).save(copied / "class0" / "0.png")
    encode(copied, tmp_path / "out", rae, resolution=SIDE)
    encode(copied, tmp_path / "fresh", rae, resolution=SIDE)
    after = DatasetInfo.read(tmp_path / "out")
    assert after.normalisation != before
    assert after == DatasetInfo.read(tmp_path / "fresh")


def test_a_lost_sum_names_what_to_delete(tmp_path: Path, source: Path, rae: Path, features: Path) -> None:
    encode_part(source, tmp_path / "out", rae, 1, resolution=SIDE, flip=True)
    sums_path(tmp_path / "out", 0).unlink()
    with pytest.raises(
        DataError, match=r"sums\.safetensors cannot be used \(it is missing\); delete the shards train-0"
    ):
        encode(source, tmp_path / "out", rae, resolution=SIDE, flip=True)
    (tmp_path / "out" / "train-000000.tar").unlink()
    encode(source, tmp_path / "out", rae, resolution=SIDE, flip=True)
    assert files(tmp_path / "out") == files(features)


def test_statistics_of_a_file_or_of_another_data_set(tmp_path: Path, source: Path, rae: Path, features: Path) -> None:
    mean, var = torch.randn(64, 4, 4), torch.rand(64, 4, 4)
    torch.save({"mean": mean, "var": var}, tmp_path / "of_recipe.pt")
    encode(source, tmp_path / "file", rae, resolution=SIDE, statistics=str(tmp_path / "of_recipe.pt"))
    info = DatasetInfo.read(tmp_path / "file")
    np.testing.assert_allclose(info.normalisation.shift, mean.flatten(), rtol=1e-6)
    np.testing.assert_allclose(info.normalisation.scale, (var + 1e-5).rsqrt().flatten(), rtol=1e-6)
    assert info.provenance.statistics == f"per element, of {tmp_path / 'of_recipe.pt'}"
    encode(source, tmp_path / "alike", rae, resolution=SIDE, statistics=str(features))
    assert DatasetInfo.read(tmp_path / "alike").normalisation == DatasetInfo.read(features).normalisation
    with pytest.raises(ConfigError, match="other options"):
        encode(source, tmp_path / "alike", rae, resolution=SIDE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"mean": torch.zeros(64), "std": torch.ones(64)}, r"64 means, expected 1024: the recipe .* one per element"),
        ({"mean": torch.zeros(64)}, "holds mean; expected mean with std or var"),
        ({"mean": torch.zeros(2), "std": torch.zeros(2)}, "a deviation that is not above 0"),
        ([1], "it holds list"),
    ],
)
def test_wrong_statistics_are_refused(tmp_path: Path, source: Path, rae: Path, content: Any, said: str) -> None:
    torch.save(content, tmp_path / "wrong.pt")
    with pytest.raises(ConfigError, match=said):
        encode(source, tmp_path / "out", rae, resolution=SIDE, statistics=str(tmp_path / "wrong.pt"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"statistics": "own"}, "has no statistics of its latents; use --statistics measured, or name"),
        ({"resolution": 32}, "--resolution 32: the autoencoder takes images of 64 pixels alone; use --resolution 64"),
        ({"buckets": True}, "--buckets: the autoencoder takes one size"),
        ({"posterior": "once"}, "--posterior once: the autoencoder of .* has no posterior; leave it out"),
        ({"statistics": "nowhere"}, "--statistics nowhere cannot be read .*; expected own, measured, the folder of a"),
    ],
)
def test_options_that_do_not_fit_the_features(
    tmp_path: Path, source: Path, rae: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        encode(source, tmp_path / "out", rae, **{"resolution": SIDE} | options)


def test_a_posterior_is_sampled_once_or_its_mean_is_stored(tmp_path: Path, source: Path, kl: Path) -> None:
    common: dict[str, Any] = {"resolution": SIDE, "dtype": "float32", "flip": True}
    encode(source, tmp_path / "both", kl, **common)
    encode(source, tmp_path / "mean", kl, posterior="mean", **common)
    encode(source, tmp_path / "once", kl, posterior="once", **common)
    infos = {name: DatasetInfo.read(tmp_path / name) for name in ("both", "mean", "once")}
    assert [infos[name].kind for name in infos] == ["posterior", "mean", "mean"]
    assert infos["once"].normalisation == infos["both"].normalisation.of_mean
    mean, deviation = np.split(stored(tmp_path / "both"), 2, axis=1)
    assert np.array_equal(stored(tmp_path / "mean"), mean)
    noise = (stored(tmp_path / "once") - mean) / deviation
    assert abs(noise.mean()) < 4 / noise.size**0.5
    assert abs(noise.std() - 1) < 4 / noise.size**0.5
    images, mirrored = np.split(noise, 2)
    assert abs(np.corrcoef(images.flatten(), mirrored.flatten())[0, 1]) < 4 / images.size**0.5
    encode(source, tmp_path / "again", kl, posterior="once", **common | {"samples_per_shard": 3})
    np.testing.assert_allclose(stored(tmp_path / "again"), stored(tmp_path / "once"), atol=1e-5)
    encode_part(source, tmp_path / "begun", kl, 1, posterior="once", **common)
    with pytest.raises(ConfigError, match="posterior was once, is None"):
        encode(source, tmp_path / "begun", kl, **common)


def test_the_numbers_of_a_sample_are_of_its_key() -> None:
    from fastdiff.data.encoding.posterior import _position, stored

    posterior = torch.cat([torch.zeros(2, 4, 2, 2), torch.ones(2, 4, 2, 2)], 1)
    found = stored(posterior, "once", ["000000001", "000000000"], mirrored=False)
    expected = philox.normal(0, int(Stream.POSTERIOR), torch.tensor([_position("000000000")]), 16, backend="reference")
    assert torch.equal(found[1].flatten(), expected[0])


def test_the_class_token_of_the_teacher_is_a_column_with_statistics_of_its_own(features: Path, rae: Path) -> None:
    info = DatasetInfo.read(features)
    with LatentReader(features) as reader:
        both = [reader.read(np.arange(IMAGES), choice={"latent": np.full(IMAGES, flip)}) for flip in (0, 1)]
    tokens = np.concatenate([each["teacher_token"] for each in both]).astype(np.float64)
    found = info.normalisations["teacher_token"]
    np.testing.assert_allclose(found.shift, tokens.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.scale, (tokens.var(0) + 1e-5) ** -0.5, rtol=1e-6)
    autoencoder = Pretrained(str(rae)).autoencoder()
    pixels = np.stack([np.asarray(picture(int(number), (SIDE, SIDE))) for number in (0, 2)])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    for variant, flipped in enumerate((images, images.flip(3))):
        module = autoencoder.module
        resized = torch.nn.functional.interpolate((flipped + 1) / 2, (56, 56), mode="bicubic")
        hidden = module.encoder((resized - module.encoder_mean) / module.encoder_std).last_hidden_state  # type: ignore
        np.testing.assert_allclose(both[variant]["teacher_token"][:2], hidden[:, 0].detach(), rtol=2e-3, atol=2e-3)
    stored = {name: torch.from_numpy(values) for name, values in both[0].items()}
    batch = Normaliser(info, torch.device("cpu"))(stored | {"position": torch.arange(IMAGES)})
    expected = (tokens[:IMAGES] - tokens.mean(0)) / np.sqrt(tokens.var(0) + 1e-5)
    torch.testing.assert_close(
        batch.condition["teacher_token"], torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-4
    )


def test_held_out_images_take_the_statistics_of_the_training(
    tmp_path: Path, source: Path, rae: Path, features: Path
) -> None:
    encode(source / "class0", tmp_path / "held_out", rae, resolution=SIDE, statistics=str(features))
    here, there = DatasetInfo.read(tmp_path / "held_out"), DatasetInfo.read(features)
    assert (here.normalisation, here.normalisations) == (there.normalisation, there.normalisations)
    assert not list((tmp_path / "held_out").glob("*.sums.*"))


@pytest.mark.parametrize("kind", ["features", "posterior"])
def test_int8_has_an_error_of_half_a_step(tmp_path: Path, source: Path, rae: Path, kl: Path, kind: str) -> None:
    common: dict[str, Any] = {"resolution": SIDE, "flip": True, "statistics": "measured"}
    pipeline = rae if kind == "features" else kl
    encode(source, tmp_path / "whole", pipeline, dtype="float32", **common)
    encode(source, tmp_path / "int8", pipeline, dtype="int8", **common)
    info, exact = DatasetInfo.read(tmp_path / "int8"), stored(tmp_path / "whole")
    assert (info.latent.dtype, info.columns["latent_limits"].shape) == ("int8", (2, exact.shape[1]))
    assert not verify(tmp_path / "int8").problems
    with LatentReader(tmp_path / "int8") as reader:
        both = [reader.read(np.arange(IMAGES), choice={"latent": np.full(IMAGES, flip)}) for flip in (0, 1)]
    levels, limits = (torch.from_numpy(np.concatenate([e[name] for e in both])) for name in ("latent", "latent_limits"))
    found = dequantised(levels, limits).double().numpy()
    half = (exact.max((2, 3), keepdims=True) - exact.min((2, 3), keepdims=True)) / 255 / 2
    assert (np.abs(found - exact) <= half * (1 + 1e-4) + 1e-6).all()
    assert np.abs(found - exact).max() > 0.4 * half.max(), "and not less: these are 256 levels"
    shift = np.array(info.x0_normalisation.shift)
    mean = found.mean(0).flatten() if kind == "features" else found[:, :4].mean((0, 2, 3))
    np.testing.assert_allclose(shift, mean, rtol=1e-5, atol=1e-6)
    arrays = {"latent": levels, "latent_limits": limits, "position": torch.arange(len(levels))}
    x0 = Normaliser(replace(info, normalisations={}), torch.device("cpu"))(arrays).latents
    exact_info = DatasetInfo.read(tmp_path / "whole")
    whole = {"latent": torch.from_numpy(exact).float(), "position": torch.arange(len(levels))}
    expected = Normaliser(replace(exact_info, normalisations={}), torch.device("cpu"))(whole).latents
    assert (x0 - expected).std() < 0.01 * expected.std()


def test_latents_in_bfloat16_are_rounded_once_and_read_as_numbers(
    tmp_path: Path, source: Path, rae: Path, digits: Path
) -> None:
    """numpy lacks the dtype, so shards hold its bits; statistics are of what they hold."""
    for dtype in ("float32", "bfloat16"):
        encode(source, tmp_path / dtype, rae, resolution=SIDE, dtype=dtype)
    both = {}
    for dtype in ("float32", "bfloat16"):
        with LatentReader(tmp_path / dtype) as reader:
            found = {name: torch.from_numpy(value) for name, value in reader.read(np.arange(IMAGES)).items()}
        info = DatasetInfo.read(tmp_path / dtype)
        assert {info.columns[name].dtype for name in ("latent", "teacher_token")} == {dtype}
        both[dtype] = info, found | {"position": torch.arange(IMAGES)}
    (_, exact), (info, bits) = both["float32"], both["bfloat16"]
    rounded = {name: exact[name].bfloat16().double() for name in ("latent", "teacher_token")}
    np.testing.assert_allclose(info.normalisation.shift, rounded["latent"].mean(0).flatten(), rtol=1e-6, atol=1e-7)
    mean, variance = (rounded["latent"].mean(0), rounded["latent"].var(0, correction=0) + 1e-5)
    token = rounded["teacher_token"]
    batch = Normaliser(info, torch.device("cpu"))(bits)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(batch.latents, ((rounded["latent"] - mean) / variance.sqrt()).float(), **near)
    expected = (token - token.mean(0)) / (token.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(batch.condition["teacher_token"], expected.float(), **near)
    assert not verify(tmp_path / "bfloat16").problems
    found = DatasetInfo.read(digits)
    replace(found, columns={"latent": replace(found.latent, dtype="float8_e4m3fn")}).write(tmp_path)
    with pytest.raises(DataError, match="the latents are float8_e4m3fn, expected float16, bfloat16, float32"):
        DatasetInfo.read(tmp_path)


def test_a_latent_in_bfloat16_that_is_not_finite_is_bad(tmp_path: Path, source: Path, rae: Path) -> None:
    """The bits of NaN are a finite integer."""
    broken = Path(shutil.copytree(rae, tmp_path / "rae"))
    weights = load_file(next(broken.rglob("*.safetensors")))
    name = next(name for name in weights if name.endswith("encoder.layer.0.mlp.fc1.bias"))
    weights[name][0] = torch.inf
    save_file(weights, next(broken.rglob("*.safetensors")))
    with pytest.raises(DataError, match="its latent is not finite"):
        encode(source, tmp_path / "out", broken, resolution=SIDE, dtype="bfloat16")


def test_int8_of_a_constant_channel_and_of_a_value_that_is_not_finite() -> None:
    latents = torch.randn(2, 3, 4, 4)
    latents[0, 1] = -7.25
    latents[1, 2, 0, 0] = torch.nan
    levels, limits = quantised(latents)
    assert torch.equal(dequantised(levels, limits)[0, 1], latents[0, 1])
    assert limits.isfinite().tolist() == [[[True] * 3] * 2, [[True, True, False]] * 2]
