"""The likelihood of a run: against float64 NumPy, against closed forms, and through the command."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.cli.main import main
from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError
from fastdiff.evaluation.likelihood import Likelihood, NllOptions, evaluate_nll, measure, read_clean
from fastdiff.models.build import load_model
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, normal
from fastdiff.sampling.run import Run, config_of
from fastdiff.training.loop import train
from tests.support.inputs.objectives import objective_of
from tests.support.references.variational_reference import Array, Reference, at, cosine_betas
from tests.support.runs import FRUIT, launch, named, newest, numbered, tiny

T = 40
SPREAD = 0.4
SHAPE = (2, 3, 3)
BETAS = cosine_betas(T)


def config(**options: Any) -> ObjectiveConfig:
    return DdpmConfig(timesteps=T, schedule="cosine", **options)


class Gaussian:
    """The best prediction for data from N(0, SPREAD^2), a linear function of x_t; half of it with ``off``."""

    def __init__(self, objective: ObjectiveConfig, off: float = 1.0) -> None:
        self.objective, self.off = objective, off
        self.reference = Reference(BETAS, objective.predicted, objective.variance)

    def __call__(self, noisy: Tensor, time: Tensor) -> Tensor:
        assert noisy.dtype == torch.float32
        x, t = noisy.double().numpy(), time.numpy()
        alpha, sigma = (at(np.sqrt(part), t) for part in (self.reference.abar, 1 - self.reference.abar))
        gain = 1 / (alpha**2 * SPREAD**2 + sigma**2)
        clean, noise = alpha * SPREAD**2 * gain * x, sigma * gain * x
        output = self.off * self.reference.target(clean, noise, t)
        if self.objective.learns_variance:
            output = np.concatenate([output, 0.3 * np.ones_like(output)], axis=1)
        return torch.from_numpy(output).float()


def data(samples: int, parts: int = 3) -> list[Batch]:
    clean = SPREAD * torch.randn(samples, *SHAPE, generator=torch.Generator().manual_seed(2))
    position = torch.arange(samples)
    return [Batch(c, p, {}) for c, p in zip(clean.chunk(parts), position.chunk(parts), strict=True)]


def expected(
    objective: ObjectiveConfig, model: Callable[[Tensor, Tensor], Tensor], clean: Tensor, *, clip: bool, seed: int
) -> list[Array]:
    """vb, xstart_mse and mse ``[T, N]`` by the equations, under the same noise."""
    reference = Reference(BETAS, objective.predicted, objective.variance)
    x0 = clean.double().numpy()
    found = []
    for t in range(T):
        time = torch.full((len(clean),), t)
        noise = normal(seed, Stream.LIKELIHOOD, torch.arange(len(clean)) * T + t, clean.shape[1:]).double().numpy()
        noisy = reference.noisy(x0, noise, time.numpy())
        prediction = model(torch.from_numpy(noisy).float(), time).double().numpy()
        output, given = np.split(prediction, 2, axis=1) if objective.learns_variance else (prediction, prediction)
        estimate = reference.clean_estimate(output, noisy, time.numpy())
        estimate = estimate.clip(-1, 1) if clip else estimate
        implied = (noisy - np.sqrt(reference.abar[t]) * estimate) / np.sqrt(1 - reference.abar[t])
        bits = reference.bits(output, given, x0, noise, time.numpy(), clip)
        squares = [((a - b) ** 2).mean(axis=(1, 2, 3)) for a, b in ((estimate, x0), (implied, noise))]
        found.append([bits, *squares])
    return list(np.moveaxis(np.array(found), 1, 0))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("prediction", "variance"),
    [
        ("epsilon", "fixed_large"), ("epsilon", "learned_range"), ("x0", "fixed_small"), ("v", "learned_range"),
        ("previous_x", "fixed_small"),
    ],
)  # fmt: skip
def test_all_numbers_agree_with_the_equations(prediction: Any, variance: Any, clip: bool) -> None:
    objective = config(prediction=prediction, variance=variance)
    model, batches = Gaussian(objective, off=0.9), data(7)
    found = measure(model, objective, batches, NllOptions(clip=clip, seed=5, batch=8))
    clean = torch.cat([batch.latents for batch in batches])
    vb, xstart_mse, mse = expected(objective, model, clean, clip=clip, seed=5)
    np.testing.assert_allclose(found.vb, vb.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.xstart_mse, xstart_mse.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.mse, mse.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.terms, vb.sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.prior, model.reference.prior_bits(clean.double().numpy()), rtol=1e-5)


def test_the_best_model_of_gaussian_data_has_the_bound_of_the_closed_form() -> None:
    """Its errors are the posterior variances, so that E vb_t is known for t > 0; the means of 600 samples meet it."""
    objective = config(variance="fixed_small")
    found = measure(Gaussian(objective), objective, data(600, parts=4), NllOptions(batch=6000))
    reference = Reference(BETAS, "epsilon", "fixed_small")
    left = SPREAD**2 * (1 - reference.abar) / (reference.abar * SPREAD**2 + 1 - reference.abar)  # variance of x0 | x_t
    noise = left * reference.abar / (1 - reference.abar)
    factor = (np.sqrt(reference.before) * BETAS / (1 - reference.abar)) ** 2 / reference.clipped
    vb = 0.5 * factor * left / np.log(2)
    standard_error = np.sqrt(2 / (600 * np.prod(SHAPE)))  # of the mean of a squared Gaussian, relative
    for curve, closed in ((found.xstart_mse, left), (found.mse, noise), (found.vb[1:], vb[1:])):
        assert np.abs(curve / closed - 1).max() < 4.5 * standard_error
    summary = found.summary()
    assert summary["vb_bpd_se"] == pytest.approx(found.terms.std(ddof=1) / np.sqrt(600))
    assert abs(summary["vb_bpd"] - found.vb[0] - vb[1:].sum()) < 4 * summary["vb_bpd_se"]
    assert summary["total_bpd"] == pytest.approx(summary["vb_bpd"] + summary["prior_bpd"])
    worse = measure(Gaussian(objective, off=0.8), objective, data(600, parts=4), NllOptions(batch=6000))
    assert worse.summary()["total_bpd"] > summary["total_bpd"]


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_the_batch_does_not_change_the_numbers(batch: int) -> None:
    objective = config()
    found = measure(Gaussian(objective), objective, data(6, parts=2), NllOptions(batch=batch))
    other = measure(Gaussian(objective), objective, data(6, parts=6), NllOptions(batch=512))
    for name in Likelihood.__slots__:
        np.testing.assert_allclose(getattr(found, name), getattr(other, name), rtol=1e-6)


def test_a_posterior_is_sampled_once_per_sample(tmp_path: Path) -> None:
    """x0 is the same at all timesteps, and what the model is not conditioned on is left out."""
    columns = {"latent": Column(dtype="float32", shape=(2, 3, 3)), "time_ids": Column(dtype="float32", shape=(6,))}
    template = DatasetInfo(
        columns=columns,
        normalisation=Normalisation(shift=(0.5, 0.0), scale=(2.0, 2.0)),
        provenance=Provenance(source="test", transform="none"),
        kind="posterior",
        classes=5,
    )
    stored = np.random.default_rng(0).random((20, 2, 3, 3), np.float32)
    with ShardWriter(tmp_path, template, samples_per_shard=8) as writer:
        for n, latent in enumerate(stored):
            writer.add(f"{n:09d}", {"latent": latent, "time_ids": np.zeros(6, np.float32)}, label=n % 5)
    index = np.arange(20)
    with LatentReader(tmp_path) as reader:
        batches = list(read_clean(reader, index, ("label",), torch.device("cpu"), seed=7))
    clean = torch.cat([batch.latents for batch in batches])
    drawn = normal(7, Stream.POSTERIOR, torch.arange(20), (1, 3, 3))
    torch.testing.assert_close(clean, torch.from_numpy(2 * (stored[:, :1] - 0.5) + 2 * stored[:, 1:] * drawn.numpy()))
    assert torch.equal(torch.cat([batch.position for batch in batches]), torch.arange(20))
    assert all(batch.condition.keys() == {"label"} for batch in batches)
    assert torch.equal(torch.cat([batch.condition["label"] for batch in batches]), torch.arange(20) % 5)


@pytest.fixture(scope="module")
def run(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nll") / "run"
    objective = {
        "prediction": "v", "variance": "learned_range", "loss": "rescaled_mse", "schedule": "cosine", "timesteps": T,
        "condition_dropout": 0.5,
    }  # fmt: skip
    changes = {f"objective__{name}": value for name, value in objective.items()}
    train(tiny(digits, folder, steps=3, model__learn_sigma=True, **changes), launch(0), world)
    return folder


def test_the_command_measures_a_run(run: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first average, every sample with its class, against the equations with the model called directly."""
    picture = run / "nll.png"
    code = main(["evaluate", str(run), "--nll", "--samples", "6", "--clip-denoised", "--png", str(picture)])
    assert code == 0
    result = json.loads((run / "nll.json").read_text())
    assert {key: result[key] for key in ("samples", "clip_denoised", "step", "seed")} == {
        "samples": 6, "clip_denoised": True, "step": 3, "seed": 0,
    }  # fmt: skip
    output = capsys.readouterr().out
    assert re.fullmatch(r"step 3, EMA .*0\.9", result["weights"])
    printed = re.search(r"nll\.json: ([0-9.]+) ± [0-9.]+ bits per dimension .*, 6 samples; step 3, EMA .*0\.9", output)
    assert printed, output
    assert float(printed[1]) == pytest.approx(result["total_bpd"], abs=1e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")

    arrays = np.load(run / "nll.npz")
    assert {name: arrays[name].shape for name in arrays} == {
        "vb": (T,), "xstart_mse": (T,), "mse": (T,), "total": (6,),
    }  # fmt: skip
    vb, xstart_mse, mse, total = _by_hand(run, digits)
    np.testing.assert_allclose(arrays["vb"], vb.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(arrays["xstart_mse"], xstart_mse.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(arrays["mse"], mse.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(arrays["total"], total, rtol=1e-5)
    assert result["total_bpd"] == pytest.approx(total.mean(), rel=1e-5)
    assert result["total_bpd_se"] == pytest.approx(total.std(ddof=1) / np.sqrt(6), rel=1e-4)


def test_models_of_pixels_are_clamped_and_those_of_latents_are_not(run: Path, tmp_path: Path) -> None:
    """As where they draw; the digits are pixels, and the same numbers said to be of an autoencoder are not."""
    wish = ["evaluate", str(run), "--nll", "--samples", "4"]
    found = {}
    for name, more in {"told": ["--clip-denoised"], "usual": [], "not": ["--no-clip-denoised"]}.items():
        assert main([*wish, *more]) == 0
        found[name] = json.loads((run / "nll.json").read_text())
    assert {name: result["clip_denoised"] for name, result in found.items()} == {
        "told": True, "usual": True, "not": False,
    }  # fmt: skip
    assert found["usual"] == found["told"]
    assert found["usual"]["total_bpd"] != found["not"]["total_bpd"], "the weights are random: some estimate is outside"
    trained = Run(run)
    folder = shutil.copytree(trained.config.data.path, tmp_path / "latents")
    info = DatasetInfo.read(folder)
    replace(info, provenance=replace(info.provenance, autoencoder="some/autoencoder")).write(folder)
    trained.config = replace(trained.config, data=replace(trained.config.data, path=str(folder)))
    assert evaluate_nll(trained, NllOptions(samples=4))[0]["clip_denoised"] is False


def test_other_noise_and_other_data(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = evaluate_nll(Run(run), NllOptions(samples=4))[0]
    again = evaluate_nll(Run(run), NllOptions(samples=4, batch=4))[0]
    other = evaluate_nll(Run(run), NllOptions(samples=4, seed=1))[0]
    assert first["total_bpd"] == pytest.approx(again["total_bpd"], rel=1e-6)
    assert 0 < abs(first["total_bpd"] - other["total_bpd"]) < 0.5 * first["total_bpd"]
    assert first["prior_bpd"] == other["prior_bpd"]
    assert main(["encode", "synthetic", str(tmp_path), "--shape", "1,8,8", "--samples", "8", "--classes", "10"]) == 0
    assert main(["evaluate", str(run), "--nll", "--data", str(tmp_path)]) == 0
    result = json.loads((run / "nll.json").read_text())
    assert result["samples"] == 8, "all there are"
    assert result["total_bpd"] > first["total_bpd"], "noise is no digit"
    info = DatasetInfo.read(tmp_path)
    replace(info, normalisation=Normalisation(shift=(0.0,), scale=(2.0,))).write(tmp_path)
    assert main(["evaluate", str(run), "--nll", "--data", str(tmp_path)]) == 2
    assert "encoded differently" in capsys.readouterr().err


def test_classes_of_other_data_are_matched_by_name(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"objective__schedule": "cosine", "objective__timesteps": 4, "objective__prediction": "v"}
    train(tiny(named(digits, tmp_path / "data", FRUIT), tmp_path / "run", steps=2, **changes), launch(0), world)
    run, found = Run(tmp_path / "run"), []
    for names, told in ((FRUIT, True), (FRUIT[::-1], True), (FRUIT[::-1], False)):
        data = numbered(digits, tmp_path / f"{names[0]}, {told}", names, told=told)
        found.append(evaluate_nll(run, NllOptions(data=str(data)))[1].terms.tolist())
    assert found[0] == found[1] != found[2]
    other = numbered(digits, tmp_path / "other", ("appel", *FRUIT))
    assert main(["evaluate", str(tmp_path / "run"), "--nll", "--data", str(other)]) == 2
    assert "its class appel is none of the 10 classes of the training" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nll", "--samples", "1"], "at least 2"),
        (["--nll", "--ema", "0.123"], "no EMA of rate 0.123"),
        (["--samples", "5"], "--samples needs --nll"),
        (["--clip-denoised"], "--clip-denoised needs --nll"),
        (["--no-clip-denoised"], "--clip-denoised needs --nll"),
    ],
)
def test_wrong_options_are_refused(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"process": "flow"}, "only ddpm"),
        ({"process": "edm"}, "only ddpm"),
        ({"zero_terminal_snr": True}, r"pure noise \(zero_terminal_snr\): .* infinite"),
        ({"schedule": "jsd"}, r"pure noise \(jsd\): .* infinite; measure a run with --objective.prediction v or x0"),
    ],
)
def test_runs_without_a_bound_are_refused(run: Path, objective: dict[str, Any], message: str) -> None:
    trained = Run(run)
    trained.config = replace(trained.config, objective=objective_of(**objective))
    with pytest.raises(ConfigError, match=message):
        evaluate_nll(trained, NllOptions(samples=2))


def test_a_picture_needs_matplotlib(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["evaluate", str(run), "--nll", "--png", str(run / "no.png")]) == 2
    assert "pip install 'matplotlib>=" in capsys.readouterr().err


def _by_hand(run: Path, digits: Path) -> tuple[Array, Array, Array, Array]:
    """The first average and the samples of the run, read and put together here."""
    saved, reader = newest(run), LatentReader(digits)
    network = load_model(config_of(saved).model, saved.weights(0.9))
    stored = reader.read(np.arange(6) * len(reader) // 6)
    normalisation = reader.info.normalisation
    shift, scale = (np.reshape(part, (-1, 1, 1)) for part in (normalisation.shift, normalisation.scale))
    clean = torch.from_numpy((stored["latent"].astype(np.float64) - shift) * scale)
    label = torch.from_numpy(stored["label"])

    @torch.no_grad()
    def model(noisy: Tensor, time: Tensor) -> Tensor:
        return network(noisy, time, label=label)

    objective = config(prediction="v", variance="learned_range")
    vb, xstart_mse, mse = expected(objective, model, clean, clip=True, seed=0)
    prior = Reference(BETAS, "v", "learned_range").prior_bits(clean.numpy())
    return vb, xstart_mse, mse, vb.sum(axis=0) + prior
