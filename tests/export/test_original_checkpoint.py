"""Trainings in the files of improved-diffusion and DiT: written, read back and continued with PyTorch's AdamW."""

import argparse
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.cli.main import main
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.errors import ConfigError
from fastdiff.export.adamw_state import MOMENTS, moments
from fastdiff.export.run import Choice, export
from fastdiff.models.build import build_model
from fastdiff.models.pretrained.pickles import load_published
from fastdiff.models.pretrained.training_state import read_published_training
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.loop import take_steps, train
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.runs import assert_same_checkpoint, launch, newest, records, tiny, train_losses

ADM = AdmConfig(
    channels=1, size=8, width=8, channel_mult=(1, 2), res_blocks=1, attention_resolutions=(4,), heads=2, classes=10,
    norm_num_groups=4,
)  # fmt: skip


def two_steps(world: World, digits: Path, folder: Path, kind: str, **changes: Any) -> RunConfig:
    """A run with a checkpoint of both of its steps."""
    changes |= {"model": ADM} if kind == "adm" else {}
    config = tiny(digits, folder, steps=2, output__checkpoint_every=1, **changes)
    train(config, launch(1), world)
    return config


@pytest.fixture(scope="module")
def made(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Runs of ``two_steps`` with one average, of the rate of the published trainings; not to be changed."""
    folder, ema = tmp_path_factory.mktemp("made"), EmaConfig(rates=(0.9999,))
    return {kind: two_steps(world, digits, folder / kind, kind, ema=ema) for kind in ("adm", "dit")}


def folder_of(config: RunConfig) -> Path:
    return Path(config.output.folder)


def output(folder: Path) -> OutputConfig:
    return OutputConfig(folder=str(folder), sample_every=0)


def opened(path: Path) -> Any:
    """As anybody reads it who does not trust the file."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def network(config: RunConfig) -> nn.Module:
    """With the parameters that the published classes have: the positions of a DiT are one, which is not trained."""
    model = build_model(config.model)
    if config.model.kind == "dit":
        table = model.pos_embed
        del model.pos_embed
        model.register_parameter("pos_embed", nn.Parameter(table, requires_grad=False))
    return model


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor], model: nn.Module) -> None:
    """These weights bit for bit, in the names and the order of the model."""
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert state.keys() - expected.keys() <= {"pos_embed"}
    model.load_state_dict(state, strict=True)


def assert_goes_on(weights: dict[str, Tensor], opt: dict[str, Any], run: Path, config: RunConfig) -> None:
    """PyTorch's AdamW, given the state after step 1 and the gradient of step 2, has the weights after step 2.

    The gradient comes from what step 2 made of the first moment.
    """
    model = network(config)
    model.load_state_dict(weights, strict=True)
    adamw = torch.optim.AdamW(model.parameters(), lr=123.0)
    adamw.load_state_dict(opt)
    before, after = (Checkpoint(run / "checkpoints" / f"step-0000000{step}") for step in (1, 2))
    old, new = before.full("exp_avg"), after.full("exp_avg")
    beta = config.optim.betas[0]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = (new[name] - beta * old[name]) / (1 - beta)
    adamw.step()
    second = after.full("exp_avg_sq")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            moved = (after.weights()[name] - before.weights()[name]).abs().max().item()
            torch.testing.assert_close(parameter.data, after.weights()[name], rtol=0, atol=1e-3 * moved + 1e-8)
            torch.testing.assert_close(adamw.state[parameter]["exp_avg_sq"], second[name], rtol=1e-4, atol=1e-12)
            assert adamw.state[parameter]["step"] == 2


def test_an_adm_run_in_the_files_of_improved_diffusion(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    config = two_steps(world, digits, run, "adm", ema__power_stds=(0.1,))
    assert main(["export", str(run), str(out), "--format", "iddpm", "--step", "1"]) == 0
    assert "the averages of the stds [0.1] are left out" in capsys.readouterr().err
    files = {path.name for path in out.iterdir()} - {"README.md"}
    assert files == {"model000001.pt", "ema_0.9_000001.pt", "ema_0.5_000001.pt", "opt000001.pt"}
    saved, model = Checkpoint(run / "checkpoints" / "step-00000001"), network(config)
    assert_same(opened(out / "model000001.pt"), saved.weights(), model)
    for rate in (0.9, 0.5):
        assert_same(opened(out / f"ema_{rate}_000001.pt"), saved.weights(rate), model)
        assert_same(load_published(out / f"ema_{rate}_000001.pt"), saved.weights(rate), model)
    opt = opened(out / "opt000001.pt")
    assert opt["param_groups"][0]["params"] == list(range(len(saved.weights())))
    for moment in MOMENTS:
        found = {name: opt["state"][number][moment] for number, name in enumerate(saved.weights())}
        assert_same(found, saved.full(moment), model)
    assert_goes_on(saved.weights(), opt, run, config)

    read = read_published_training(out / "model000001.pt")
    assert read.step == 1
    assert_same(read.weights, saved.weights(), model)
    assert list(read.averages) == [0.5, 0.9]
    assert_same(read.averages[0.5], saved.weights(0.5), model)
    assert read.optimizer is not None
    assert read.optimizer.applied == 1
    assert_same(read.optimizer.exp_avg_sq, saved.full("exp_avg_sq"), model)


@pytest.mark.parametrize(("kind", "form"), [("adm", "iddpm"), ("dit", "dit-training")])
def test_a_run_goes_on_with_a_published_training_bit_for_bit(
    world: World, made: dict[str, RunConfig], tmp_path: Path, kind: str, form: Any
) -> None:
    config = made[kind]
    export(folder_of(config), tmp_path / "out", Choice(format=form, step=1))
    file = tmp_path / "out" / {"adm": "model000001.pt", "dit": "0000001.pt"}[kind]
    start = PretrainedConfig(path=str(file), weights=True, training=True)
    train(replace(config, pretrained=start, output=output(tmp_path / "second")), launch(1), world)
    expected, found = newest(folder_of(config)), newest(tmp_path / "second")
    assert found.manifest["progress"] == expected.manifest["progress"]
    for which in ("master", "ema/0.9999", *MOMENTS):
        values = expected.full(which)
        assert all(torch.equal(found.full(which)[name], value) for name, value in values.items())


@pytest.mark.parametrize("schedule", by_day(["linear"], "constant", "cosine"))
def test_a_finished_schedule_leaves_the_configured_rate(
    world: World, digits: Path, tmp_path: Path, schedule: Any
) -> None:
    """A program that goes on with the rate of the file would otherwise train with a rate of zero."""
    config = two_steps(world, digits, tmp_path / "run", "adm", optim__schedule=schedule)
    for step, rate in ((1, 0.5 if schedule != "constant" else 1.0), (2, 1.0)):
        export(tmp_path / "run", tmp_path / f"out{step}", Choice(format="iddpm", step=step))
        (group,) = opened(tmp_path / f"out{step}" / f"opt00000{step}.pt")["param_groups"]
        assert group["lr"] == pytest.approx(rate * config.optim.lr)


def _renamed(folder: Path, before: str, after: str) -> Path:
    """The training as one of another step, while its AdamW counts as before."""
    for path in folder.glob(f"*{before}.pt"):
        path.rename(path.with_name(path.name.replace(before, after)))
    return folder / f"model{after}.pt"


def test_an_adamw_that_has_counted_fewer_steps_keeps_its_count_and_the_schedule_the_steps(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a resume without its file: theirs anneals by the step, and corrects the bias by AdamW's own count."""
    config = tiny(
        digits, tmp_path / "run", steps=6, model=ADM, optim__schedule="linear", output__checkpoint_every=1,
        output__keep=9, ema=EmaConfig(rates=(0.9999,)),
    )  # fmt: skip
    train(config, launch(1), world)
    export(tmp_path / "run", tmp_path / "out", Choice(format="iddpm", step=1))
    start = PretrainedConfig(path=str(_renamed(tmp_path / "out", "000001", "000003")), weights=True, training=True)
    capsys.readouterr()
    second = replace(config, pretrained=start, output=replace(config.output, folder=str(tmp_path / "second")))
    with ExitStack() as stack:
        run = build(second, launch(1), world, stack)
        state, batches, callbacks = run.state, run.batches, run.callbacks
        take_steps(state, batches, callbacks)
        assert [flat.state["step"].item() for flat in state.engine.flats] == [4.0] * len(state.engine.flats)
    assert "its AdamW has taken 1 of 3 steps; the learning rate is that of step 3, the bias" in capsys.readouterr().err
    rates = {record["step"]: record["lr"] for record in records(tmp_path / "run")}
    assert {record["step"]: record["lr"] for record in records(tmp_path / "second")} == {n: rates[n] for n in (4, 5, 6)}
    assert rates[4] == pytest.approx(0.5 * config.optim.lr)
    assert newest(tmp_path / "second").manifest["progress"] == newest(tmp_path / "run").manifest["progress"]


@pytest.mark.parametrize(("stage", "counted"), by_day([(3, 1)], (0, 0)))
def test_an_adamw_that_began_later_keeps_its_count_in_a_resume(
    world: World, digits: Path, tmp_path: Path, stage: int, counted: int
) -> None:
    """Bit for bit: its bias correction is that of a run that was not interrupted; an export has the count."""
    config = tiny(
        digits, tmp_path / "run", steps=5, model=ADM, output__checkpoint_every=1, output__keep=9,
        ema=EmaConfig(rates=(0.9999,)),
    )  # fmt: skip
    train(replace(config, samples=16), launch(stage), world)
    export(tmp_path / "run", tmp_path / "out", Choice(format="iddpm"))
    start = PretrainedConfig(path=str(_renamed(tmp_path / "out", "000001", "000003")), weights=True, training=True)
    if not counted:
        (tmp_path / "out" / "opt000003.pt").unlink()
    for name in ("whole", "resumed"):
        second = replace(config, pretrained=start, output=replace(config.output, folder=str(tmp_path / name)))
        train(second, launch(stage), world)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000005")
    train(second, launch(stage), world)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "resumed")
    export(tmp_path / "resumed", tmp_path / "again", Choice(format="iddpm"))
    assert opened(tmp_path / "again" / "opt000005.pt")["state"][0]["step"] == counted + 2


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_differences_from_the_published_adamw_are_reported(
    world: World, made: dict[str, RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: Any
) -> None:
    """improved-diffusion goes on with what is in the file, but for the learning rate of its --lr_anneal_steps."""
    config = made["adm"]
    export(folder_of(config), tmp_path / "out", Choice(format="iddpm", step=1))
    file = tmp_path / "out" / "model000001.pt"
    start = PretrainedConfig(path=str(file), weights=True, training=True)
    capsys.readouterr()
    train(replace(config, pretrained=start, output=output(tmp_path / "same")), launch(1), world)
    assert "its AdamW" not in capsys.readouterr().err
    optim = replace(config.optim, lr=0.5, betas=(0.8, 0.99), weight_decay=0.1, schedule=schedule)
    train(replace(config, pretrained=start, optim=optim, output=output(tmp_path / "other")), launch(1), world)
    told = next(line for line in capsys.readouterr().err.splitlines() if "its AdamW" in line)
    theirs, ours = ("lr 0.01, ", "--optim.lr 0.5, ") if schedule == "constant" else ("", "")
    assert told.partition(" WARNING ")[2] == (
        f"{file}: its AdamW had {theirs}betas 0.9 0.999, weight_decay 0.0; the run uses {ours}"
        "--optim.betas 0.8 0.99, --optim.weight_decay 0.1"
    )


def test_neither_adapters_nor_averages_of_the_whole_course_go_on_with_a_published_training(tmp_path: Path) -> None:
    start = PretrainedConfig(path="0000001.pt", weights=True, training=True)
    with pytest.raises(ConfigError, match=r"--lora.rank 2 with --pretrained.training: .*; leave out one of them"):
        tiny(tmp_path, tmp_path, pretrained=start, lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match=r"--ema.power_stds 0.05 with --pretrained.training: .*; leave it out"):
        tiny(tmp_path, tmp_path, pretrained=start, ema=EmaConfig(power_stds=(0.05,)))


@pytest.mark.nightly
def test_a_run_that_goes_on_is_cut_between_ranks(digits: Path, tmp_path: Path) -> None:
    """Written by one rank, gone on with by two under ZeRO-3, which round sums otherwise."""
    config = tiny(
        digits, tmp_path / "run", steps=4, output__checkpoint_every=2, model=ADM, ema=EmaConfig(rates=(0.9999,))
    )
    expected = values(forked_ranks(train_losses, config, launch(1)))[0]
    export(tmp_path / "run", tmp_path / "out", Choice(format="iddpm", step=2))
    start = PretrainedConfig(path=str(tmp_path / "out" / "model000002.pt"), weights=True, training=True)
    second = replace(config, pretrained=start, output=replace(config.output, folder=str(tmp_path / "second")))
    found = values(forked_ranks(_losses_after, second, launch(3), ranks=2))[0]
    assert found == pytest.approx(expected[2:], rel=2e-5)
    one, two = newest(tmp_path / "run"), newest(tmp_path / "second")
    for which in ("ema/0.9999", "exp_avg"):
        for name, value in one.full(which).items():
            torch.testing.assert_close(two.full(which)[name], value, rtol=1e-3, atol=1e-6)


def _losses_after(world: World, config: RunConfig, start: Any) -> list[float]:
    train(config, start, world)
    return [record["loss"] for record in records(Path(config.output.folder))]


def test_a_dit_run_in_the_file_of_dit(world: World, digits: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    config = two_steps(world, digits, run, "dit")
    assert main(["export", str(run), str(out), "--format", "dit-training", "--step", "1", "--ema", "0.5"]) == 0
    assert {path.name for path in out.iterdir()} == {"README.md", "0000001.pt"}
    content = opened(out / "0000001.pt")
    assert list(content) == ["model", "ema", "opt", "args"]
    saved, model = Checkpoint(run / "checkpoints" / "step-00000001"), network(config)
    assert_same(content["model"], saved.weights(), model)
    assert_same(content["ema"], saved.weights(0.5), model)
    assert 0 not in content["opt"]["state"], "the table of positions is not trained"
    assert_goes_on(content["model"], content["opt"], run, config)
    assert vars(content["args"]) == {
        "data_path": digits.name, "results_dir": "run", "model": None, "image_size": 64, "num_classes": 10,
        "epochs": None, "global_batch_size": 16, "global_seed": 0, "vae": None, "num_workers": 4, "log_every": 1,
        "ckpt_every": 1,
    }  # fmt: skip
    assert str(tmp_path) not in str(content["args"]), "it may be published"

    assert_same(load_published(out / "0000001.pt"), saved.weights(0.5), model)
    read = read_published_training(out / "0000001.pt")
    assert_same(read.weights, saved.weights(), model)
    assert_same(read.averages[0.9999], saved.weights(0.5), model)
    assert read.optimizer is not None
    assert read.optimizer.exp_avg.keys() == saved.weights().keys()
    assert all(torch.equal(read.optimizer.exp_avg[name], value) for name, value in saved.full("exp_avg").items())
    torch.save({"model": content["model"]}, tmp_path / "0000002.pt")
    assert_same(load_published(tmp_path / "0000002.pt"), saved.weights(), model)
    assert read_published_training(tmp_path / "0000002.pt").optimizer is None


@pytest.mark.parametrize("name", ["adamw8bit", "adamw8bit-bnb"])
def test_moments_of_8_bits_are_those_of_fp32_but_for_their_rounding(
    world: World, digits: Path, tmp_path: Path, name: str
) -> None:
    """After one step, whose gradient is the same for every optimizer."""
    read = {}
    for kind in ("adamw", name):
        config = tiny(digits, tmp_path / kind, steps=1, optim__name=kind)
        train(config, launch(1), world)
        read[kind] = moments(newest(tmp_path / kind), config.optim, config.lora)
    exact, rounded = read["adamw"], read[name]
    assert callable(exact)
    assert callable(rounded)
    for parameter in newest(tmp_path / name).manifest["parameters"]:
        for moment in MOMENTS:
            expected, found = exact(moment, parameter), rounded(moment, parameter)
            assert found.shape == expected.shape
            assert found.dtype == torch.float32
            if name == "adamw8bit":  # its blocks are those of the parameter
                scale = expected.abs().max()
                torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * scale.item() + 1e-12)
    parameters = newest(tmp_path / name).manifest["parameters"]
    for moment in MOMENTS:
        expected, found = (torch.cat([given(moment, p).flatten() for p in parameters]) for given in (exact, rounded))
        assert 0 < (found - expected).norm() < 0.02 * expected.norm()


def test_an_optimizer_that_is_not_there_is_left_out(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimizer of an adapter does not fit the merged weights; here it was trained on such a file."""
    first = two_steps(world, digits, tmp_path / "first", "dit")
    export(tmp_path / "first", tmp_path / "base", Choice(format="dit-training"))
    start = PretrainedConfig(path=str(tmp_path / "base" / "0000002.pt"), weights=True)
    train(replace(first, pretrained=start, lora=LoraConfig(rank=2), output=output(tmp_path / "run")), launch(1), world)
    capsys.readouterr()
    export(tmp_path / "run", tmp_path / "out", Choice(format="dit-training"))
    assert "optimizer is left out: it is the state of an adapter, not of the merged weights" in capsys.readouterr().err
    assert opened(tmp_path / "out" / "0000002.pt").keys() == {"model", "ema", "args"}
    read = read_published_training(tmp_path / "out" / "0000002.pt")
    assert read.optimizer is None
    base = newest(tmp_path / "first").weights(0.9)
    assert torch.equal(read.weights["x_embedder.proj.weight"], base["x_embedder.proj.weight"])
    assert not torch.equal(read.weights["blocks.0.attn.qkv.weight"], base["blocks.0.attn.qkv.weight"])

    saved = newest(tmp_path / "first")
    saved.manifest["optimizer_steps"] = 0
    assert moments(saved, first.optim, first.lora) == "no step was taken"


def test_the_steps_of_files_that_are_numbered_from_0(world: World, digits: Path, tmp_path: Path) -> None:
    """improved-diffusion's file of N is written after N + 1 steps; the run goes on as if it had not been stopped."""
    config = tiny(digits, tmp_path / "run", steps=3, output__checkpoint_every=1, model=ADM)
    config = replace(config, ema=EmaConfig(rates=(0.9999,)))
    train(config, launch(1), world)
    export(tmp_path / "run", tmp_path / "out", Choice(format="iddpm", step=2))
    start = PretrainedConfig(path=str(_renamed(tmp_path / "out", "000002", "000001")), weights=True, training=True)
    train(replace(config, pretrained=start, output=output(tmp_path / "second")), launch(1), world)
    expected, found = newest(tmp_path / "run"), newest(tmp_path / "second")
    assert found.manifest["progress"] == expected.manifest["progress"]
    for which in ("master", "ema/0.9999", *MOMENTS):
        weights = found.full(which)
        assert all(torch.equal(weights[name], value) for name, value in expected.full(which).items())

    short = replace(config, pretrained=start, samples=2 * config.batch.samples, output=output(tmp_path / "third"))
    with pytest.raises(ConfigError, match=r"is of step 2, and the run has 2 steps in all; raise --samples"):
        train(short, launch(1), world)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dit", ["--format", "iddpm"], "the run has a DiT; use diffusers, dit, dit-training or safetensors"),
        ("adm", ["--format", "dit"], "dit is for a DiT, the run has an ADM UNet; use diffusers, iddpm or safetensors"),
        ("adm", ["--format", "dit-training"], "dit-training is for a DiT"),
        ("adm", ["--format", "iddpm", "--ema", "0.5"], "--ema: --format iddpm has every average"),
        ("adm", ["--format", "iddpm", "--raw"], "--raw: --format iddpm holds the raw weights"),
        ("dit", ["--format", "dit-training", "--dtype", "bf16"], "--dtype bf16: the files of --format dit-training"),
    ],
)  # fmt: skip
def test_impossible_formats_of_a_training_are_refused(
    made: dict[str, RunConfig], tmp_path: Path, capsys: Any, kind: str, options: list[str], message: str
) -> None:
    assert main(["export", str(folder_of(made[kind])), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
