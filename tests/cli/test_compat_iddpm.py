"""Command lines of improved-diffusion become runs of fastdiff: those of its README, and every flag."""

import argparse
import os
import re
from pathlib import Path

import pytest
import torch

from fastdiff.cli.compat.run import SCRIPTS, translate
from fastdiff.cli.main import _parser, main
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.data.loading.training_set import open_data
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from tests.cli.test_compat import config_of, flags_of, run_of
from tests.support.inputs.images import encode, natural

DATA = ["--data_dir", "path/to/images"]

TRAINING = {
    "data_dir": "", "schedule_sampler": "uniform", "lr": 1e-4, "weight_decay": 0.0, "lr_anneal_steps": 0,
    "batch_size": 1, "microbatch": -1, "ema_rate": (0.9999,), "log_interval": 10, "save_interval": 10000,
    "resume_checkpoint": "", "use_fp16": False, "fp16_scale_growth": 1e-3,
}  # fmt: skip
NETWORK = {
    "num_channels": 128, "num_res_blocks": 2, "num_heads": 4, "num_heads_upsample": -1,
    "attention_resolutions": (16, 8), "dropout": 0.0, "learn_sigma": False, "class_cond": False,
    "diffusion_steps": 1000, "noise_schedule": "linear", "timestep_respacing": "", "use_kl": False,
    "predict_xstart": False, "rescale_timesteps": True, "rescale_learned_sigmas": True, "use_checkpoint": False,
    "use_scale_shift_norm": True,
}  # fmt: skip
"""The inventory of both scripts' flags with their defaults."""

HYBRID = "--learn_sigma True --diffusion_steps 4000 --noise_schedule cosine"
BEDROOMS = (
    "--image_size 256 --num_channels 128 --num_res_blocks 2 --num_heads 1 --learn_sigma True "
    "--use_scale_shift_norm False --attention_resolutions 16 --diffusion_steps 1000 --noise_schedule linear "
    "--rescale_learned_sigmas False --rescale_timesteps False"
)
RECIPES = {
    "imagenet64": (
        "iddpm-imagenet64", 121.06,
        f"--image_size 64 --num_channels 128 --num_res_blocks 3 {HYBRID} --lr 1e-4 --batch_size 128",
    ),
    "cifar10": (
        "iddpm-cifar10", 52.55,
        f"--image_size 32 --num_channels 128 --num_res_blocks 3 --dropout 0.3 {HYBRID} --lr 1e-4 --batch_size 128",
    ),
    "imagenet64, classes": (
        "iddpm-imagenet64-cond", 273.05,
        f"--image_size 64 --num_channels 192 --num_res_blocks 3 --class_cond True {HYBRID} "
        "--rescale_learned_sigmas False --rescale_timesteps False --lr 3e-4 --batch_size 2048",
    ),
    "upsampler": (
        "iddpm-upsampler", 279.79,
        "--num_channels 192 --num_res_blocks 2 --learn_sigma True --class_cond True --diffusion_steps 4000 "
        "--noise_schedule linear --rescale_learned_sigmas False --rescale_timesteps False --lr 3e-4 --batch_size 256",
    ),
    "bedrooms": ("iddpm-lsun256", 113.68, f"{BEDROOMS} --lr 1e-4 --batch_size 128"),
    "bedrooms, slower": (
        "iddpm-lsun256", 113.68, f"{BEDROOMS} --use_scale_shift_norm False --lr 2e-5 --batch_size 128",
    ),
    "imagenet64, bound": (
        "iddpm-imagenet64", 121.06,
        f"--image_size 64 --num_channels 128 --num_res_blocks 3 {HYBRID} --use_kl True --lr 1e-4 --batch_size 128 "
        "--schedule_sampler loss-second-moment",
    ),
    "cifar10, bound": (
        "iddpm-cifar10", 52.55,
        f"--image_size 32 --num_channels 128 --num_res_blocks 3 --dropout 0.3 {HYBRID} --use_kl True --lr 1e-4 "
        "--batch_size 128 --schedule_sampler loss-second-moment",
    ),
}  # fmt: skip
"""The README's runs: our preset, millions of parameters, their flags."""


def iddpm(flags: str = "", *, gpus: int = 1, script: str = "iddpm") -> tuple[RunConfig, str]:
    """The configuration of the translated training command, and all notes."""
    config, notes = run_of(script, [*DATA, *flags.split()], gpus)
    return config, "\n".join(notes)


def adm(config: RunConfig) -> AdmConfig:
    assert isinstance(config.model, AdmConfig)
    return config.model


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("iddpm", {"image_size": 64, "sigma_small": False}),
        ("iddpm-sr", {"large_size": 256, "small_size": 64}),
    ],
)
def test_every_flag_of_the_scripts_is_known_with_its_default(script: str, more: dict[str, object]) -> None:
    expected = TRAINING | NETWORK | more
    assert flags_of(script) == expected.keys()
    parser = argparse.ArgumentParser()
    SCRIPTS[script].add_flags(parser)
    found = vars(parser.parse_args([]))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_runs_of_the_readme_are_our_presets(name: str) -> None:
    published, millions, flags = RECIPES[name]
    config, _ = iddpm(flags, script="iddpm-sr" if name == "upsampler" else "iddpm")
    expected = preset(published)
    assert config.model == expected.model
    with torch.device("meta"):
        network = build_model(config.model)
    assert f"{sum(weights.numel() for weights in network.parameters()) / 1e6:.2f}" == f"{millions:.2f}"
    bound = "bound" in name
    assert config.objective.loss == ("rescaled_kl" if bound else expected.objective.loss)
    assert config.timesteps.density == ("importance" if bound else "uniform")
    for field in ("schedule", "timesteps", "rescale_timesteps", "predicted", "variance", "condition_dropout"):
        assert getattr(config.objective, field) == getattr(expected.objective, field), field
    assert config.batch.samples == config.batch.micro == expected.batch.samples
    assert config.optim.lr == (2e-5 if "slower" in name else expected.optim.lr)
    assert (config.steps, config.ema) == (expected.steps, expected.ema)
    for field in ("name", "betas", "eps", "weight_decay", "clip", "schedule"):
        assert getattr(config.optim, field) == getattr(expected.optim, field), field


def test_the_defaults_of_the_script_are_those_of_the_run() -> None:
    config, notes = iddpm()
    assert adm(config) == AdmConfig(res_blocks=2)
    objective = config.objective
    assert (objective.predicted, objective.variance, objective.loss, objective.schedule, objective.timesteps) == (
        "epsilon", "fixed_large", "rescaled_mse", "linear", 1000,
    )  # fmt: skip
    assert objective.rescale_timesteps
    assert objective.condition_dropout == 0.0
    optim = config.optim
    assert (optim.name, optim.lr, optim.weight_decay, optim.clip) == ("adamw", 1e-4, 0.0, 0.0)
    assert (optim.schedule, optim.warmup_steps) == ("constant", 0)
    assert (config.batch.samples, config.batch.micro, config.ema.rates, config.ema.warmup) == (1, 1, (0.9999,), False)
    assert (config.data.random_flip, config.performance.precision, config.performance.recompute) == (
        False, "fp32", False,
    )  # fmt: skip
    output = config.output
    assert (output.log_every, output.checkpoint_every, output.keep) == (10, 10_000, 151)
    assert "this one ends after 1500000 steps, those of iddpm-imagenet64" in notes
    for absent in ("microbatches", "importance", "--use_fp16", "1000 classes", "--resume_checkpoint"):
        assert absent not in notes, absent


def test_the_flags_arrive() -> None:
    config, notes = iddpm(
        "--image_size 32 --num_channels 64 --num_res_blocks 1 --num_heads 2 --num_heads_upsample 2 --dropout 0.1 "
        "--attention_resolutions 16 --class_cond yes --use_scale_shift_norm n --sigma_small T --predict_xstart 1 "
        "--diffusion_steps 500 --timestep_respacing 500 --noise_schedule cosine --rescale_timesteps f "
        "--rescale_learned_sigmas No --use_checkpoint true --lr 2e-4 --weight_decay 0.05 --lr_anneal_steps 3000 "
        "--batch_size 24 --microbatch 8 --ema_rate 0.999,0.9999 --log_interval 7 --save_interval 500 --use_fp16 y "
        "--fp16_scale_growth 0.01",
        gpus=2,
    )
    assert adm(config) == AdmConfig(
        size=32, width=64, channel_mult=(1, 2, 2, 2), res_blocks=1, heads=2, attention_resolutions=(16,), dropout=0.1,
        classes=1000, scale_shift_norm=False,
    )  # fmt: skip
    objective = config.objective
    assert (objective.predicted, objective.variance, objective.loss, objective.schedule, objective.timesteps) == (
        "x0", "fixed_small", "mse", "cosine", 500,
    )  # fmt: skip
    assert not objective.rescale_timesteps
    assert (config.batch.samples, config.batch.micro, config.batch.accumulation(2)) == (48, 8, 3)
    assert (config.steps, config.optim.schedule, config.optim.lr) == (3000, "linear", 2e-4)
    assert (config.optim.weight_decay, config.ema.rates) == (0.05, (0.999, 0.9999))
    assert config.optim.eps == pytest.approx(1e-8 / 3), "their gradients are the sums of three"
    assert (config.performance.precision, config.performance.recompute) == ("fp16", True)
    assert (config.output.log_every, config.output.checkpoint_every, config.output.keep) == (7, 500, 7)
    for word in ("of the 3 microbatches are averaged", "--fp16_scale_growth is not used", "1000 classes"):
        assert word in notes, word
    _, notes_of_bound = iddpm("--schedule_sampler loss-second-moment --batch_size 8 --microbatch 4")
    for word in ("means of the weighted losses", "theirs after each microbatch"):
        assert word in notes_of_bound, word
    for absent in ("never ends", "bf16", "importance"):
        assert absent not in notes, absent


@pytest.mark.parametrize(
    ("size", "given", "sides", "passed_over"),
    [
        (64, "16,8", (16, 8), ""),
        (64, "30", (32,), ""),
        (64, "12,9,16", (16,), "12, 9"),
        (256, "100", (128,), ""),
        (256, "16,8", (16, 8), ""),
        (256, "4,4096", (), "4, 4096"),
        (32, "12,30,64", (32, 16), "64"),
    ],
)
def test_attention_is_where_theirs_is(size: int, given: str, sides: tuple[int, ...], passed_over: str) -> None:
    """A resolution is rounded to a whole downsampling, and one that no level has is passed over."""
    config, notes = iddpm(f"--image_size {size} --attention_resolutions {given}")
    assert adm(config).attention_resolutions == sides
    told = re.search(r"no map has a side of (.+); theirs skips it too", notes)
    assert (told[1] if told else "") == passed_over


def test_super_resolution() -> None:
    config, _ = iddpm("--large_size 64 --small_size 16 --learn_sigma True", gpus=4, script="iddpm-sr")
    model = adm(config)
    assert (model.size, model.low_res_size, model.channel_mult) == (64, 16, (1, 2, 3, 4))
    assert (config.batch.samples, config.objective.variance, config.output.sample_every) == (4, "learned_range", 0)
    assert iddpm(script="iddpm-sr")[0].objective.variance == "fixed_large", "their script has no --sigma_small"
    with pytest.raises(ConfigError, match="unrecognized arguments: --image_size"):
        translate("iddpm-sr", [*DATA, "--image_size", "64"], gpus=1)


def test_a_resumed_run_goes_on_with_the_whole_training() -> None:
    config, notes = iddpm("--resume_checkpoint logs/model030000.pt --lr_anneal_steps 40000 --lr 1e-4")
    given = config.pretrained
    assert (given.path, given.weights, given.training) == (os.path.abspath("logs/model030000.pt"), True, True)
    assert (config.steps, config.optim.lr) == (40_000, 1e-4), "both of the whole run"
    assert "Adam's state and the step are read" in notes
    assert "; --weight_decay is applied, whereas theirs" in notes, "their learning rate is set at every step"
    _, notes = iddpm("--resume_checkpoint logs/model030000.pt")
    assert "; --lr and --weight_decay are applied, whereas theirs" in notes


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("imagenet64_uncond_100M_1500K.pt", "its name contains no step"),
        ("models/000100.pt", "its name contains no step"),
        ("my_model.pt", "its name contains no step"),
        ("logs/model000000.pt", "its number is 0"),
    ],
)
def test_without_a_step_in_its_name_a_file_is_read_for_its_weights_alone(file: str, why: str) -> None:
    config, notes = iddpm(f"--resume_checkpoint {file}")
    assert (config.pretrained.weights, config.pretrained.training, config.steps) == (True, False, 1_500_000)
    assert f"{file}: {why}" in notes
    assert "only the weights are read" in notes
    assert ("contains no step" in notes) == ("contains no step" in why)
    assert "whereas theirs" not in notes


@pytest.mark.parametrize(
    "file", ["my_model000100.pt", "model100.pt", "model0000100.pt", "model100.d/x.pt", "model-5.pt"]
)
def test_a_step_that_only_theirs_would_read_is_refused(file: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{file}: theirs reads the step -?\d+ from its name.* rename it modelNNNNNN\.pt"
    ):
        iddpm(f"--resume_checkpoint {file}")


@pytest.mark.parametrize("step", [30_000, 1_499_999, 2_000_000])
def test_a_resumed_run_without_an_end_has_as_many_steps_as_the_published_one_behind_it(step: int) -> None:
    config, notes = iddpm(f"--resume_checkpoint logs/model{step:06d}.pt --batch_size 8", gpus=2)
    assert config.steps == step + 1_500_001, "the file of that number is after one step more"
    assert f"ends after {step + 1_500_001} steps, the {step + 1} of --resume_checkpoint and those of iddpm-im" in notes
    ended, notes = iddpm(f"--resume_checkpoint logs/model{step:06d}.pt --lr_anneal_steps 2000002")
    assert ended.steps == 2_000_002
    assert "never ends" not in notes


def test_the_other_commands_are_ones_that_fastdiff_has() -> None:
    for script, side in (("iddpm", 64), ("iddpm-sr", 256)):
        encode, train, export, sample = translate(script, [*DATA, "--diffusion_steps", "4000"], gpus=1).commands
        shards = config_of(train).data.path
        given = _parser().parse_args(encode[1:])
        assert (given.source, str(given.out), given.resolution) == (os.path.abspath("path/to/images"), shards, side)
        assert (given.crop, given.autoencoder, hasattr(given, "flip")) == ("adm", "identity", False)
        assert given.classes_from == "none", "an unconditional network needs none, whatever the files are called"
        given = _parser().parse_args(export[1:])
        folder, steps = config_of(train).output.folder, config_of(train).steps
        assert (str(given.run_folder), given.format) == (folder, "iddpm")
        given = _parser().parse_args(sample[1:])
        assert (str(given.folder), str(given.npz)) == (folder, f"{folder}/samples-{steps}.npz")
        assert (given.scheduler, given.respacing, given.clip) == ("ddpm", "4000", None)
        wanted = (10_000, None) if script == "iddpm" else (None, Path("base.npz").absolute())
        assert (given.num, given.low_res) == wanted
    with_classes = translate("iddpm", [*DATA, "--class_cond", "True"], gpus=1).commands[0]
    assert _parser().parse_args(with_classes[1:]).classes_from == "prefix"


@pytest.mark.parametrize("conditional", [False, True])
def test_the_encode_command_writes_what_the_training_command_reads(
    conditional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        path = tmp_path / "images" / f"folder{number % 3}" / f"class{number % 2}_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(natural(40, 50), "PNG"))
    flags = ["--data_dir", "images", "--image_size", "32", "--class_cond", str(conditional)]
    assert main(translate("iddpm", flags, gpus=1).commands[0][1:]) == 0
    data = open_data(run_of("iddpm", flags)[0], torch.device("cpu"))
    assert (len(data), data.info.latent.shape) == (4, (3, 32, 32))
    assert data.info.classes == (2 if conditional else None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--no_such_flag 1", "unrecognized arguments: --no_such_flag"),
        ("--learn_sigma maybe", "--learn_sigma: maybe: expected True or False"),
        ("--image_size 128", "--image_size 128: their script has networks for 32, 64 and 256"),
        ("--num_heads_upsample 8", "--num_heads_upsample 8: all levels have the same number of heads, --num_heads 4"),
        ("--timestep_respacing 250", "fastdiff sample RUN --respacing 250"),
        ("--noise_schedule sqrt", "invalid choice"),
        ("--schedule_sampler last", "invalid choice"),
        ("--batch_size 10 --microbatch 4", "--batch_size 10 is not divisible by --microbatch 4"),
        ("--batch_size 0", "--batch_size: 0: expected a whole number from 1 to"),
        ("--ema_rate 0.9999,high", "--ema_rate: high: expected a finite number"),
        ("--attention_resolutions 16,0", "--attention_resolutions: 0"),
        ("--num_channels 100", "a network that cannot be built: --model.width 100"),
        ("--dropout 1", "a network that cannot be built: --model.dropout 1"),
        ("--lr_anneal_steps 100 --resume_checkpoint model000100.pt", "no step is left after --resume_checkpoint"),
        ("--lr_anneal_steps 101 --resume_checkpoint model000100.pt", "whose file 100 was written after 101 steps"),
        ("--lr_anneal_steps -1", "--lr_anneal_steps -1"),
        ("--resume_checkpoint folder", "expected a file of weights"),
        ("--lr nan", "an invalid run: --optim.lr nan: above 0"),
        ("--lr -1", "--optim.lr -1.0: above 0"),
        ("--weight_decay -0.1", "--optim.weight_decay -0.1: 0 or above"),
        ("--ema_rate 1.5", "--ema.rates (1.5,): different values between 0 and 1"),
    ],
)
def test_untranslatable_flags_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        iddpm(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--data_dir is missing"),
        ([*DATA, "--large_size", "128"], "--large_size 128: their script has networks for 64 and 256"),
        ([*DATA, "--small_size", "256"], "--small_size 256: smaller than --large_size 256"),
    ],
)
def test_untranslatable_flags_of_super_resolution_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate("iddpm-sr", flags, gpus=1)


def test_differences_of_images_and_sampling_are_reported() -> None:
    for script, theirs in (("iddpm", "image_sample.py"), ("iddpm-sr", "super_res_sample.py")):
        _, notes = iddpm("--diffusion_steps 500", script=script)
        for word in (
            "a palette or alpha, of 1 bit or in CMYK become RGB before", "scaled to 8 bits, theirs clipped",
            f"their {theirs} with its defaults, over all 500 timesteps", "theirs truncated", "--step N",
            "--respacing ddim50", "evaluate RUN --nll",
        ):  # fmt: skip
            assert word in notes, word
        assert ("--base_samples" in notes) == (script == "iddpm-sr")
