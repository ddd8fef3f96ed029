"""The validation loss: the same pairs of sample and noise in every run, however it is computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.data.loading.fit import check_data_set
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.diffusion.snr_bins import by_log_snr
from fastdiff.errors import ConfigError, DataError
from fastdiff.evaluation.validation_files import Validated, drop_after, read, steps_of
from fastdiff.evaluation.validation_set import batches_of, even_shares, spread
from fastdiff.models.build import load_model
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, normal
from fastdiff.training.callbacks.validation import validated
from fastdiff.training.loop import train
from tests.support.inputs import captioned
from tests.support.inputs.text_runs import encode, text_run
from tests.support.nights import by_day
from tests.support.processes import run_ranks
from tests.support.runs import FRUIT, held_out, launch, named, newest, numbered, tiny

SAMPLES = 96
SEED = 20_260_101


def config_of(data: Path, folder: Path, steps: int = 4, **changes: Any) -> RunConfig:
    """With what must not change the validation: drops, other noise and perturbed inputs."""
    checked = ValidationConfig(data=str(held_out(data)), every=2, samples=SAMPLES)
    config = tiny(data, folder, steps, validation=checked, **changes)
    noise = {"input_perturbation": 0.1, "noise_offset": 0.1, "multires_noise_iterations": 2}
    return replace(config, objective=replace(config.objective, condition_dropout=0.5, **noise))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


def assert_close(first: Path, second: Path, rel: float = 1e-6) -> None:
    """Equal curves, in the total and in every bin, and equal losses of every sample."""
    assert [line["step"] for line in lines(first)] == [line["step"] for line in lines(second)] != []
    for a, b in zip(lines(first), lines(second), strict=True):
        assert a["val_count_snr"] == b["val_count_snr"]
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=rel)
        for name in ("val_loss_snr", "val_loss_snr_se"):
            assert a[name] == [value if value is None else pytest.approx(value, rel=10 * rel) for value in b[name]]
    for step in steps_of(first):
        a_file, b_file = read(first, step), read(second, step)
        assert np.array_equal(a_file.index, b_file.index)
        assert np.array_equal(a_file.log_snr, b_file.log_snr)
        np.testing.assert_allclose(a_file.loss, b_file.loss, rtol=30 * rel)


def _train_and_fail(world: World, config: RunConfig, start: Launch, broken: RunConfig) -> str:
    """Train the one; then the other, whose validation data one rank cannot read."""
    train(config, start, world)
    with pytest.raises(DataError) as caught:
        train(broken, start, world)
    return str(caught.value)


def test_ranks_and_batches_do_not_matter(world: World, digits: Path, tmp_path: Path) -> None:
    """Two ranks at ZeRO-3, and four micro-batches; and an error of one rank is one of both."""
    train(config_of(digits, tmp_path / "one"), launch(1), world)
    train(config_of(digits, tmp_path / "micro", batch__micro=4), launch(1), world)
    copy = _damaged(held_out(digits), tmp_path / "damaged")
    broken = config_of(digits, tmp_path / "broken")
    broken = replace(broken, validation=replace(broken.validation, data=str(copy)))
    found = run_ranks(_train_and_fail, config_of(digits, tmp_path / "two"), launch(3), broken, ranks=2)
    assert "crc32" in found[0]
    assert found[0] == found[1]
    assert_close(tmp_path / "one", tmp_path / "micro")
    assert_close(tmp_path / "one", tmp_path / "two")
    curve = [line["val_loss"] for line in lines(tmp_path / "one")]
    assert curve[1] < 0.99 * curve[0], "the model learns"


def _damaged(data: Path, folder: Path) -> Path:
    """A copy with one wrong byte, in the latents of the first sample of the second batch of 16, which is rank 1's."""
    folder.mkdir()
    for path in data.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    with LatentReader(data) as reader:
        number = int(spread(len(reader), SAMPLES)[16])
        wanted = reader.read([number])["latent"].tobytes()
    for path in sorted(folder.glob("*.tar")):
        content = bytearray(path.read_bytes())
        place = content.find(wanted)
        if place >= 0:
            content[place + 5] ^= 1
            path.write_bytes(content)
            return folder
    raise AssertionError("no shard has the sample")


@pytest.fixture(scope="module")
def trained(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a validation at its end, and its weights in ``weights.safetensors``."""
    folder = tmp_path_factory.mktemp("trained")
    train(config_of(digits, folder / "run", steps=3, output__checkpoint_every=1), launch(0), world)
    save_file(newest(folder / "run").weights(), folder / "weights.safetensors")
    return folder


def test_the_first_validation_may_be_earlier(world: World, digits: Path, tmp_path: Path) -> None:
    """As of a script that validates after the epochs 1, 3, 5."""
    config = config_of(digits, tmp_path / "run", steps=6)
    train(replace(config, validation=replace(config.validation, first=1)), launch(0), world)
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 3, 5, 6]
    with pytest.raises(ConfigError, match=r"--validation\.first 1 needs --validation\.every"):
        ValidationConfig(first=1, every=0)


def test_the_seed_of_the_run_does_not_matter(world: World, digits: Path, trained: Path, tmp_path: Path) -> None:
    """The same weights give the same losses, whatever the run draws for its training."""
    for seed, batch in ((1, 16), (2, 8)):
        config = config_of(digits, tmp_path / str(seed), seed=seed, optim__lr=1e-12, batch__samples=batch)
        config = replace(config, samples=2 * batch)
        start = replace(config.pretrained, path=str(trained / "weights.safetensors"), weights=True)
        train(replace(config, pretrained=start), launch(0), world)
    assert_close(tmp_path / "1", tmp_path / "2")
    assert lines(tmp_path / "1")[0]["val_loss"] < 0.8, "a trained model"


@pytest.mark.parametrize("prediction", by_day(["v"], "epsilon"))
def test_the_file_has_the_losses_of_the_definition(world: World, digits: Path, tmp_path: Path, prediction: str) -> None:
    """Against NumPy in float64, with the network as the only part in common."""
    run = tmp_path / "run"
    config = config_of(digits, run, steps=2, objective__prediction=prediction)
    train(config, launch(0), world)
    found, step = read(run, 2), np.arange(SAMPLES)
    with LatentReader(held_out(digits)) as reader:
        assert found.index.tolist() == [i * len(reader) // SAMPLES for i in range(SAMPLES)]
        stored = reader.read(found.index)
        shift, scale = reader.info.normalisation.shift[0], reader.info.normalisation.scale[0]
        assert found.about["data"] == reader.info.digest
    clean = (stored["latent"].astype(np.float64) - shift) * scale
    noise = normal(SEED, Stream.NOISE, torch.from_numpy(step), (1, 8, 8)).double().numpy()
    time = np.floor(1000 * even_shares(SAMPLES).double().numpy()).astype(int)
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[time].reshape(-1, 1, 1, 1)
    alpha, sigma = np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)
    noisy = alpha * clean + sigma * noise
    model = load_model(config.model, newest(run).weights(0.9))
    with torch.no_grad():
        inputs = torch.from_numpy(noisy).float(), torch.from_numpy(time), torch.from_numpy(stored["label"])
        predicted = model(*inputs).double().numpy()
    target = noise if prediction == "epsilon" else alpha * noise - sigma * clean
    estimate = (noisy - sigma * predicted) / alpha if prediction == "epsilon" else alpha * noisy - sigma * predicted
    np.testing.assert_allclose(found.loss, ((predicted - target) ** 2).mean((1, 2, 3)), rtol=1e-4)
    np.testing.assert_allclose(found.x0_mse, ((estimate - clean) ** 2).mean((1, 2, 3)), rtol=1e-3, atol=1e-8)
    np.testing.assert_allclose(found.log_snr, np.log(alpha_bar / (1 - alpha_bar)).ravel(), rtol=1e-5, atol=1e-6)
    _check_line(lines(run)[-1], found, prediction)
    shown = EventAccumulator(str(run / "tensorboard")).Reload()
    assert shown.Scalars("val_loss")[-1].value == pytest.approx(found.loss.mean())
    assert "val_loss/log_snr below -8.75" in shown.Tags()["scalars"]


def _check_line(line: dict[str, Any], found: Validated, prediction: str) -> None:
    total, bins = by_log_snr(found.log_snr, found.loss)
    assert (line["step"], line["samples"], line["val_count"]) == (2, 32, SAMPLES)
    assert (line["val_loss"], line["val_loss_se"]) == (total.mean, total.error)
    assert line["val_count_snr"] == [one.count for one in bins]
    assert line["val_loss_snr"] == [one.mean if one.count else None for one in bins]
    assert line["val_loss_snr_se"] == [one.error if one.count > 1 else None for one in bins]
    assert line["data"] == found.about["data"][:12]
    assert line["unit"] == found.about["unit"] == f"squared error of {prediction}"
    assert found.about["weights"] == "EMA of rate 0.9"


def test_a_resume_drops_later_validations_and_repeats_missing_ones(
    world: World, digits: Path, trained: Path, tmp_path: Path
) -> None:
    """Killed between the checkpoint of step 2 and its validation, with a torn line at the end."""
    run, whole = tmp_path / "run", trained / "run"
    train(config_of(digits, run, steps=3, output__checkpoint_every=1), launch(0), world)
    (run / "checkpoints" / "step-00000003").rename(tmp_path / "lost")
    (run / "validation" / "step-00000002.npz").unlink()
    assert steps_of(run) == [3]
    (run / "validation.jsonl").write_text((run / "validation.jsonl").read_text().splitlines()[1] + '\n{"step": 2, "sa')
    train(config_of(digits, run, steps=3, output__checkpoint_every=1), launch(0), world)
    assert (run / "validation.jsonl").read_bytes() == (whole / "validation.jsonl").read_bytes()
    assert steps_of(run) == [2, 3]
    for step in steps_of(run):
        name = f"step-{step:08d}.npz"
        assert (run / "validation" / name).read_bytes() == (whole / "validation" / name).read_bytes()
    train(config_of(digits, run, steps=3, output__checkpoint_every=1), launch(0), world)
    assert (run / "validation.jsonl").read_bytes() == (whole / "validation.jsonl").read_bytes(), "nothing twice"


def test_another_data_set_is_reported_and_validated_anew(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a resume: what was validated last is a line of other data, of fewer samples, or of the same."""
    run, small, large = tmp_path / "run", tmp_path / "small", held_out(digits)
    encode_synthetic(small, shape=(1, 8, 8), samples=40, classes=10)
    with LatentReader(small) as first, LatentReader(large) as second:
        digests = [first.info.digest[:12], second.info.digest[:12]]

    def go_on(data: Path, samples: int) -> str:
        capsys.readouterr()
        checked = ValidationConfig(data=str(data), every=2, samples=samples)
        train(tiny(digits, run, 2, validation=checked), launch(0), world)
        return capsys.readouterr().err

    expected = [(digests[0], 40), (digests[1], 40), (digests[1], 64)]
    assert "not comparable" not in go_on(small, 40)
    assert f"up to step 2: data {digests[0]} -> {digests[1]}" in go_on(large, 40)
    assert "up to step 2: val_count 40 -> 64" in go_on(large, 64)
    assert "not comparable" not in go_on(large, 64)
    assert [(line["data"], line["val_count"]) for line in lines(run)] == expected
    assert len(read(run, 2).index) == 64


def test_other_files_are_left_alone_and_half_written_ones_removed(tmp_path: Path) -> None:
    folder = tmp_path / "validation"
    folder.mkdir()
    for name in ("step-00000002.npz", "step-100000000.npz", "step-00000009.npz", "step-best.npz", "step-3.npz"):
        (folder / name).touch()
    (folder / "step-00000004.npz.12-0123abcd.tmp").touch()
    (folder / "step-notes.tmp").touch()
    assert steps_of(tmp_path) == [2, 9, 100_000_000]
    drop_after(tmp_path, 2)
    assert {path.name for path in folder.iterdir()} == {
        "step-00000002.npz",
        "step-best.npz",
        "step-3.npz",
        "step-notes.tmp",
    }


def test_runs_with_other_noise_are_validated_alike() -> None:
    noise = {"noise_offset": 0.1, "multires_noise_iterations": 6, "multires_noise_discount": 0.8}
    trained = DdpmConfig(**noise, input_perturbation=0.1, dream=True, condition_dropout=0.2)
    assert validated(trained) == validated(DdpmConfig())


def test_a_text_model_without_averages_is_validated(world: World, tmp_path: Path) -> None:
    """Posteriors, context, pooled embedding and sizes of SDXL."""
    pipeline = build(tmp_path / "sdxl", kind="sdxl")
    data, held = encode(tmp_path / "data", pipeline), encode(tmp_path / "held-out", pipeline, 24)
    checked = ValidationConfig(data=str(held), every=1, samples=20)
    config = text_run(data, tmp_path / "sdxl", tmp_path / "run", steps=1, kind="sdxl", validation=checked)
    train(replace(config, ema=replace(config.ema, rates=())), launch(0), world)
    [line] = lines(tmp_path / "run")
    assert line["val_count"] == 20
    assert 0 < line["val_loss"] < 10
    assert read(tmp_path / "run", 1).about["weights"] == "weights as trained"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (4, 8, 8)}, "the model takes"),
        ({"classes": 11}, "11 classes"),
    ],
)
def test_data_for_another_model_are_refused(
    world: World, digits: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    encode_synthetic(tmp_path / "other", **({"shape": (1, 8, 8), "samples": 16, "classes": 10} | options))
    checked = ValidationConfig(data=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=message):
        train(tiny(digits, tmp_path / "run", validation=checked), launch(0), world)


def test_data_of_another_scale_are_refused(world: World, digits: Path, tmp_path: Path) -> None:
    with LatentReader(digits) as reader:
        info, arrays = reader.info, reader.read([0])
    doubled = replace(info, shards=(), samples=0, normalisation=replace(info.normalisation, scale=(2.0,)))
    with ShardWriter(tmp_path / "other", doubled, samples_per_shard=1) as writer:
        writer.add("0", {"latent": arrays["latent"][0]}, label=0)
    checked = ValidationConfig(data=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="scale of the latents than the training data"):
        train(tiny(digits, tmp_path / "run", validation=checked), launch(0), world)


def test_classes_are_matched_by_name(world: World, digits: Path, tmp_path: Path) -> None:
    """In another order, and fewer; without names by number, as they are."""
    data, few = named(digits, tmp_path / "data", FRUIT), FRUIT[3:7]
    found = {}
    for name, names, told in (
        ("same", FRUIT, True), ("reversed", FRUIT[::-1], True), ("numbers", FRUIT[::-1], False),
        ("few", few, True), ("few reversed", few[::-1], True), ("fewer numbers", few, False),
    ):  # fmt: skip
        checked = ValidationConfig(data=str(numbered(digits, tmp_path / name / "data", names, told=told)), every=2)
        train(tiny(data, tmp_path / name / "run", 2, validation=checked), launch(0), world)
        found[name] = read(tmp_path / name / "run", 2).loss.tolist()
    assert found["same"] == found["reversed"] != found["numbers"]
    assert found["few"] == found["few reversed"] != found["fewer numbers"]
    assert len(found["few"]) < len(found["same"])


def test_a_class_that_the_training_lacks_is_refused(world: World, digits: Path, tmp_path: Path) -> None:
    """Also before the ranks start."""
    checked = ValidationConfig(data=str(numbered(digits, tmp_path / "other", ("appel", *FRUIT))))
    config = tiny(named(digits, tmp_path / "data", FRUIT), tmp_path / "run", validation=checked)
    told = r"other: its class appel is none of the 10 classes of the training \(the nearest is apple\)"
    for refusing in (lambda: train(config, launch(0), world), lambda: check_data_set(config, None)):
        with pytest.raises(ConfigError, match=told):
            refusing()


def test_the_training_data_are_refused(world: World, digits: Path, tmp_path: Path) -> None:
    """Also a copy elsewhere."""
    (tmp_path / "copy").mkdir()
    for path in digits.iterdir():
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"--validation\.data .*copy is the training data: .* separate folder"):
        train(
            tiny(digits, tmp_path / "run", validation=ValidationConfig(data=str(tmp_path / "copy"))), launch(0), world
        )


def test_samples_are_spread_over_sorted_data() -> None:
    assert spread(10, 20).tolist() == list(range(10))
    assert spread(100, 4).tolist() == [0, 25, 50, 75]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 1000, 1024, 4096])
def test_levels_are_even_and_far_from_those_of_the_samples_beside(count: int) -> None:
    shares = even_shares(count).double().numpy()
    np.testing.assert_allclose(np.sort(shares), (np.arange(count) + 0.5) / count, rtol=1e-6)
    for start in range(0, count - 15, 16):
        gaps = np.diff(np.sort(shares[start : start + 16]), prepend=0, append=1)
        assert gaps.max() < 0.13, "each batch of 16 covers all levels"


def test_a_batch_is_of_one_bucket(tmp_path: Path) -> None:
    captioned.encode(tmp_path / "data", 70)
    with LatentReader(tmp_path / "data") as reader:
        index = spread(len(reader), 50)
        batches = batches_of(reader.info, index)
        assert np.concatenate(batches).tolist() == list(range(50))
        assert max(len(rows) for rows in batches) <= 16
        assert len({reader.bucket_of(index[rows]) for rows in batches}) == 3, "bucket_of refuses mixed ones"


@pytest.mark.parametrize(("side", "size"), [(8, 16), (64, 16), (96, 7), (128, 4), (512, 1)])
def test_a_batch_of_large_latents_is_small(tmp_path: Path, side: int, size: int) -> None:
    with LatentReader(_synthetic(tmp_path / "data", side)) as reader:
        assert [len(rows) for rows in batches_of(reader.info, spread(18, 18))] == _parts(18, size)


def _parts(count: int, size: int) -> list[int]:
    return [min(size, count - start) for start in range(0, count, size)]


def _synthetic(folder: Path, side: int) -> Path:
    encode_synthetic(folder, shape=(1, side, side), samples=18, classes=10)
    return folder
