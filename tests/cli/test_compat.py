"""Command lines of other trainers become runs of fastdiff, flag by flag."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdiff.cli.compat.run import in_words, translate
from fastdiff.cli.main import main
from fastdiff.config.command_line import parse
from fastdiff.config.networks.dit import DIT_PATCHES, DIT_SIZES, DiTConfig, dit_config
from fastdiff.config.run import EmaConfig, RunConfig
from fastdiff.config.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from tests.support.inputs.images import encode, natural

T2I = ["--pretrained_model_name_or_path", "some/pipeline", "--train_data_dir", "images", "--max_train_steps", "100"]

# The inventory of both scripts' flags.
COMMON = """
pretrained_model_name_or_path revision variant cache_dir dataset_name dataset_config_name train_data_dir image_column
caption_column max_train_samples resolution center_crop random_flip image_interpolation_mode dataloader_num_workers
validation_epochs output_dir seed train_batch_size num_train_epochs max_train_steps gradient_accumulation_steps
gradient_checkpointing learning_rate scale_lr lr_scheduler lr_warmup_steps use_8bit_adam adam_beta1 adam_beta2
adam_weight_decay adam_epsilon max_grad_norm allow_tf32 prediction_type snr_gamma noise_offset mixed_precision
enable_xformers_memory_efficient_attention checkpointing_steps checkpoints_total_limit resume_from_checkpoint
logging_dir report_to push_to_hub hub_token hub_model_id local_rank
"""
ONLY_T2I = """
validation_prompts input_perturbation dream_training dream_detail_preservation use_ema offload_ema foreach_ema
non_ema_revision tracker_project_name
"""
ONLY_LORA = "validation_prompt num_validation_images rank"
DIT = """
data-path results-dir model image-size num-classes epochs global-batch-size global-seed vae num-workers log-every
ckpt-every
"""


def run_of(script: str, flags: list[str], gpus: int = 1) -> tuple[RunConfig, list[str]]:
    """The configuration of the translated training command, which the trainer's own parser reads, and the notes."""
    done = translate(script, flags, gpus=gpus)
    command = next(words for words in done.commands if words[0] == "deepspeed")
    return parse(command[command.index("fastdiff/train.py") + 1 :])[1], done.notes


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Twelve images in two classes."""
    for number in range(12):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(natural(8, 8), "PNG"))
    return tmp_path / "images"


def test_every_flag_of_the_scripts_is_known() -> None:
    for script, names in (("t2i", COMMON + ONLY_T2I), ("t2i-lora", COMMON + ONLY_LORA), ("dit", DIT)):
        parser_names = flags_of(script)
        assert parser_names == set(names.split()), script


def flags_of(script: str) -> set[str]:
    import argparse

    from fastdiff.cli.compat.run import SCRIPTS

    parser = argparse.ArgumentParser(add_help=False)
    SCRIPTS[script][1](parser)
    return {option.removeprefix("--") for action in parser._actions for option in action.option_strings}


def test_the_defaults_of_the_script_are_those_of_the_run() -> None:
    config, notes = run_of("t2i", T2I)
    assert config.batch.samples == config.batch.micro == 16
    assert config.steps == 100
    assert (config.optim.name, config.optim.lr, config.optim.betas, config.optim.weight_decay) == (
        "adamw", 1e-4, (0.9, 0.999), 1e-2,
    )  # fmt: skip
    assert (config.optim.eps, config.optim.clip, config.optim.schedule) == (1e-8, 1.0, "constant")
    assert config.optim.warmup_steps == 0, "a constant schedule has no warm-up, whatever the script's default says"
    assert config.ema.rates == ()
    assert config.objective.condition_dropout == 0.0
    assert (config.objective.prediction, config.objective.min_snr_gamma) == ("auto", None)
    assert (config.performance.precision, config.performance.recompute) == ("fp32", False)
    assert (config.data.online, config.data.resolution, config.data.center_crop) == (True, 512, False)
    assert config.output.keep == 2
    assert any("without --seed" in note for note in notes)


def test_the_flags_arrive() -> None:
    flags = [
        *T2I, "--use_ema", "--offload_ema", "--seed", "7", "--resolution=256", "--center_crop", "--random_flip",
        "--train_batch_size", "4", "--gradient_accumulation_steps", "4", "--gradient_checkpointing", "--scale_lr",
        "--learning_rate", "1e-5", "--lr_scheduler", "cosine", "--lr_warmup_steps", "10", "--use_8bit_adam",
        "--adam_beta2", "0.95", "--max_grad_norm", "2", "--allow_tf32", "--prediction_type", "v_prediction",
        "--snr_gamma", "5.0", "--noise_offset", "0.1", "--input_perturbation", "0.1", "--mixed_precision", "bf16",
        "--checkpointing_steps", "20", "--checkpoints_total_limit", "3", "--report_to", "all", "--variant", "fp16",
        "--max_train_samples", "50", "--image_column", "picture", "--caption_column", "said", "--output_dir", "out",
    ]  # fmt: skip
    config, notes = run_of("t2i", flags, gpus=2)
    assert (config.batch.samples, config.batch.micro, config.batch.accumulation(2)) == (32, 4, 4)
    assert config.optim.lr == pytest.approx(1e-5 * 32)
    assert (config.optim.schedule, config.optim.warmup_steps, config.optim.name) == ("cosine", 10, "adamw8bit")
    assert (config.optim.betas, config.optim.clip) == ((0.9, 0.95), 2.0)
    assert config.ema == EmaConfig(rates=(0.9999,), warmup=True)
    objective = config.objective
    assert (objective.prediction, objective.min_snr_gamma) == ("v", 5.0)
    assert (objective.noise_offset, objective.input_perturbation) == (0.1, 0.1)
    assert (config.performance.precision, config.performance.recompute, config.performance.allow_tf32) == (
        "bf16", True, True,
    )  # fmt: skip
    data = config.data
    assert (data.center_crop, data.random_flip, data.resolution, data.max_samples) == (True, True, 256, 50)
    assert (data.image_column, data.caption_column, data.decode) == ("picture", "said", "pillow")
    assert (config.pretrained.variant, config.seed, config.output.folder) == ("fp16", 7, "out")
    assert (config.output.checkpoint_every, config.output.keep) == (20, 3)
    assert config.output.report_to == ("tensorboard", "wandb")
    for word in ("comet_ml", "--variant fp16: the UNet", "every sample has its own", "fp32 masters"):
        assert any(word in note for note in notes), word
    assert any("offload_ema" in note for note in notes)


def test_dream() -> None:
    config, _ = run_of("t2i", [*T2I, "--dream_training", "--dream_detail_preservation", "10"])
    assert (config.objective.dream, config.objective.dream_detail_preservation) == (True, 10.0)


def test_lora() -> None:
    flags = [*T2I, "--rank", "8", "--mixed_precision", "fp16"]
    config, notes = run_of("t2i-lora", flags)
    assert (config.lora.rank, config.ema.rates) == (8, ())
    assert config.performance.precision == "fp16"
    assert any("fp32 in every precision" in note for note in notes)
    assert any("--max_grad_norm clips" in note for note in notes)
    with pytest.raises(ConfigError, match="use_ema"):
        translate("t2i-lora", [*T2I, "--use_ema"], gpus=1)


def test_epochs_count_the_images(classes: Path) -> None:
    flags = ["--pretrained_model_name_or_path", "p", "--train_data_dir", str(classes), "--train_batch_size", "2"]
    config, _ = run_of("t2i", [*flags, "--num_train_epochs", "3", "--validation_prompts", "a", "b"], gpus=2)
    assert config.steps == 9, "12 images by 2 GPUs by 2, three times"
    assert config.validation.prompts == ("a", "b")
    assert config.validation.every == 5 * 3
    with pytest.raises(ConfigError, match=r"cannot be counted .*give --max_train_steps"):
        translate("t2i", ["--pretrained_model_name_or_path", "p", "--train_data_dir", "/nowhere"], gpus=1)


def test_dit(classes: Path) -> None:
    done = translate(
        "dit", ["--data-path", str(classes), "--model", "DiT-B/4", "--epochs", "10", "--global-batch-size", "4"], gpus=2
    )
    encode, train, export = done.commands
    assert encode[:3] == ["fastdiff", "encode", str(classes)]
    assert {"--flip", "adm", "stabilityai/sd-vae-ft-ema"} <= set(encode)
    assert export[-1] == "dit-training", "model, ema, opt and args, as theirs leaves them"
    assert any("--step N exports an earlier one" in note for note in done.notes)
    config = parse(train[4:])[1]
    assert (config.steps, config.batch.samples) == (10 * 3, 4)
    assert (config.model.kind, config.model.size) == ("dit", 32)
    assert (config.optim.weight_decay, config.optim.clip, config.ema.rates) == (0.0, 0.0, (0.9999,))
    objective = config.objective
    assert isinstance(config.model, DiTConfig)
    assert config.model.learn_sigma
    assert (objective.predicted, objective.variance, objective.loss, objective.weighted, objective.schedule) == (
        "epsilon", "learned_range", "mse", "none", "linear",
    )  # fmt: skip
    assert config.timesteps == TimestepConfig()
    assert (config.optim.name, config.optim.lr, config.optim.schedule) == ("adamw", 1e-4, "constant")
    assert (config.data.random_flip, objective.condition_dropout) == (True, 0.1)
    assert not any("learn_sigma" in note or "sample.py" in note for note in done.notes)
    with pytest.raises(ConfigError, match="is not divisible by 3 GPUs"):
        translate("dit", ["--data-path", str(classes)], gpus=3)


@pytest.mark.parametrize(("side", "latents"), [(256, 32), (512, 64)])
def test_every_model_of_dit_becomes_its_preset(side: int, latents: int, classes: Path) -> None:
    flags = ["--data-path", str(classes), "--global-batch-size", "4", "--epochs", "1", "--image-size", str(side)]
    for letter in DIT_SIZES:
        for patch in DIT_PATCHES:
            config, _ = run_of("dit", [*flags, "--model", f"DiT-{letter}/{patch}"])
            assert config.model == dit_config(f"DiT-{letter}/{patch}", size=latents, learn_sigma=True)
            assert config.output.folder == f"results/dit-{letter.lower()}-{patch}-{side}"


def test_the_encode_command_is_one_that_fastdiff_has(classes: Path, tmp_path: Path) -> None:
    """Up to the autoencoder, which is not on this machine."""
    done = translate("dit", ["--data-path", str(classes), "--global-batch-size", "4", "--epochs", "1"], gpus=1)
    words = [word.replace("stabilityai/sd-vae-ft-ema", str(tmp_path / "none")) for word in done.commands[0]]
    assert main([*words[1:3], str(tmp_path / "out"), *words[4:]]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pretrained_model_name_or_path", "p"], "neither --dataset_name nor --train_data_dir"),
        ([*T2I, "--no_such_flag"], "unrecognized arguments: --no_such_flag"),
        (T2I[2:], "--pretrained_model_name_or_path"),
        ([*T2I, "--report_to", "wandb", "--hub_token", "secret"], "hf auth login"),
        ([*T2I, "--dataset_config_name", "x"], "save_to_disk"),
        ([*T2I, "--lr_scheduler", "steps"], "invalid choice"),
        ([*T2I, "--image_interpolation_mode", "best"], "invalid choice"),
        ([*T2I, "--train_batch_size", "0"], "--train_batch_size: 0: expected a whole number of at least 1"),
        ([*T2I, "--checkpointing_steps", "0"], "--checkpointing_steps: 0"),
        ([*T2I, "--learning_rate", "nan"], "an invalid run: --optim.lr nan: above 0"),
    ],
)
def test_untranslatable_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate("t2i", flags, gpus=1)


def test_the_command_prints_lines_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "--gpus", "8", "t2i", "--", *T2I, "--output_dir", "my runs"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("deepspeed \\\n    --num_gpus 8 fastdiff/train.py")
    assert "--output.folder 'my runs'" in printed
    assert "# Not the same:" in printed
    assert "secret" not in in_words(translate("t2i", [*T2I, "--hub_token", "secret"], gpus=1))
