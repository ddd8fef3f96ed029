"""Command lines of other trainers become runs of fastdiff, flag by flag."""

import os
import re
from argparse import Action, ArgumentParser
from operator import attrgetter
from pathlib import Path

import pytest

from fastdiff.cli.compat import run as compat
from fastdiff.cli.compat.run import SCRIPTS, in_words, translate
from fastdiff.cli.compat.translation import Translation, program
from fastdiff.cli.main import _parser, main
from fastdiff.config.arguments.types import count
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.dit import DIT_PATCHES, DIT_SIZES, DiTConfig, dit_config
from fastdiff.config.networks.registry import networks
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from fastdiff.models.family import family_of
from tests.support.inputs.images import encode, natural
from tests.support.nights import by_day
from tests.support.processes import run
from tests.support.scripts import COMMAND, run_with_forks

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
    return config_of(training_command(done)), done.notes


def training_command(done: Translation) -> list[str]:
    return next(words for words in done.commands if words[1] == "launch")


def config_of(command: list[str]) -> RunConfig:
    return parse(command[command.index("--") + 1 :])[1]


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
    parser = ArgumentParser(add_help=False)
    SCRIPTS[script].add_flags(parser)
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
    assert (config.output.keep, config.data.subset) == (2, "first")
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
        "--dataset_config_name", "small",
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
    assert (data.dataset_config, data.subset) == (None, "random"), "a folder has no configurations"
    assert (config.pretrained.variant, config.seed, config.output.folder) == ("fp16", 7, os.path.abspath("out"))
    assert (config.output.checkpoint_every, config.output.keep) == (20, 3)
    assert config.output.report_to == ("tensorboard", "wandb")
    for word in (
        "comet_ml",
        "--dataset_config_name belongs",
        "--variant fp16: the UNet",
        "every sample has its own",
        "fp32 masters",
    ):
        assert any(word in note for note in notes), word
    assert any("offload_ema" in note for note in notes)
    assert run_of("t2i", [*flags, "--dataset_name", "a/b"], gpus=2)[0].data.dataset_config == "small"


BARE = {
    "t2i": T2I,
    "t2i-lora": T2I,
    "dit": ["--data-path", "images"],
    "iddpm": ["--data_dir", "images"],
    "iddpm-sr": ["--data_dir", "images", "--small_size", "32"],
}
FULL = {
    "t2i": [
        "--validation_prompts", "cat", "--use_ema", "--dream_training", "--push_to_hub", "--lr_scheduler", "linear",
    ],
    "t2i-lora": ["--validation_prompt", "a cat", "--num_validation_images", "0", "--push_to_hub"],
    "iddpm": ["--learn_sigma", "True", "--use_fp16", "True", "--batch_size", "8"],
    "iddpm-sr": ["--use_kl", "True", "--batch_size", "8"],
}  # fmt: skip
VALUES = {
    "attention_resolutions": "8", "data-path": "others", "dataset_name": "./others", "dropout": "0.5",
    "ema_rate": "0.5", "image_size": "32", "large_size": "64", "learning_rate": "0.5", "microbatch": "8",
    "num_channels": "64", "num_heads": "2", "num_heads_upsample": "4", "resume_checkpoint": "model000003.pt",
    "resume_from_checkpoint": "latest", "small_size": "32", "timestep_respacing": "1000",
}  # fmt: skip


@pytest.mark.parametrize(("script", "more"), [*((name, ()) for name in BARE), *FULL.items()])
def test_no_flag_is_left_out_in_silence(script: str, more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes the commands, or a note has its name; one that another flag makes idle is told with the reason."""
    monkeypatch.setattr(compat, "_check", lambda _: None)  # whether the trainer takes the values is tested elsewhere
    base = translate(script, [*BARE[script], *more], gpus=1)
    parser = ArgumentParser(add_help=False)
    SCRIPTS[script].add_flags(parser)
    for action in parser._actions:
        name = action.option_strings[0]
        if action.required or name in (*BARE[script], *more):
            continue
        done = translate(script, [*BARE[script], *more, *written(action)], gpus=1)
        told = [note for note in (*done.notes, *base.notes) if re.search(rf"{name}(?![\w-])", note)]
        assert done.commands != base.commands or told, name
        assert not any(compat._OTHERS_DECIDE in note for note in done.notes), name


def written(action: Action) -> list[str]:
    """A flag with a value that is not its default."""
    name = action.option_strings[0]
    if action.nargs == 0:
        return [name]
    if action.choices is not None:
        return [name, str(next(choice for choice in action.choices if str(choice) != str(action.default)))]
    if isinstance(action.default, bool):
        return [name, str(not action.default)]
    number = isinstance(action.default, int | float) or action.type in (int, float) or action.type is count
    return [f"{name}={VALUES.get(name[2:], '3' if number else 'other')}"]


def test_a_prompt_of_which_no_image_is_drawn_is_told() -> None:
    notes = run_of("t2i-lora", [*T2I, "--validation_prompt", "a cat", "--num_validation_images", "0"])[1]
    assert "--validation_prompt changes nothing: --num_validation_images below 1 draws nothing of it" in notes
    _, notes = run_of("t2i-lora", [*T2I, "--validation_prompt", "a cat"])
    assert not any("changes nothing" in note for note in notes)


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
    assert (config.validation.first, config.validation.every) == (3, 5 * 3), "after epochs 1, 6, 11, ..."


def test_without_the_images_epochs_stay_epochs(classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of the script is one of epochs; the training counts the images where they are."""
    monkeypatch.chdir(tmp_path)
    flags = ["--pretrained_model_name_or_path", "p", "--train_data_dir", "images/none", "--train_batch_size", "4"]
    done = translate("t2i", flags, gpus=1)
    command = training_command(done)
    assert command[command.index("--epochs") + 1] == "100"
    assert "--samples" not in command
    assert any("--epochs 100: the images of" in note and "the training counts them" in note for note in done.notes)
    classes.rename(tmp_path / "elsewhere")
    (tmp_path / "images").mkdir()
    (tmp_path / "elsewhere").rename(tmp_path / "images" / "none")
    assert config_of(command).steps == 100 * 3
    some = translate("t2i", [*flags[:3], "/nowhere", "--max_train_samples", "5", "--validation_prompts", "a"], gpus=1)
    assert any("--validation.every to the steps of an epoch" in note for note in some.notes)
    words = ["/nowhere" if word == str(tmp_path / "images" / "none") else word for word in command]
    with pytest.raises(ConfigError, match=r"--epochs 100: the images of /nowhere cannot be counted"):
        config_of(words)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--num_validation_images 0 --validation_prompt x", {"validation.prompts": ()}),
        ("--num_validation_images=-1 --validation_prompt x", {"validation.prompts": ()}),
        ("--validation_prompt=", {"validation.prompts": ("",), "validation.images_per_prompt": 4}),
        ("--validation_epochs 0", {"validation.prompts": ()}),
        ("--checkpoints_total_limit 0", {"output.keep": 1}),
        ("--checkpoints_total_limit=-3", {"output.keep": 1}),
        ("--num_train_epochs 0", {"steps": 100}),
        ("--lr_scheduler cosine --lr_warmup_steps=-1", {"optim.warmup_steps": 0}),
        ("--lr_scheduler cosine --lr_warmup_steps 500", {"optim.warmup_steps": 500}),
        ("--max_grad_norm inf", {"optim.clip": 0.0}),
        ("--noise_offset=-0.1", {"objective.noise_offset": 0.1}),
        ("--dataloader_num_workers 0 --local_rank 3", {"data.workers": 1}),
        ("--report_to none", {"output.report_to": ()}),
        ("--report_to trackio", {"output.report_to": ("trackio",)}),
        ("--resume_from_checkpoint=", {"steps": 100}),
        ("--seed 0 --adam_beta1 0 --adam_weight_decay 0", {"seed": 0, "optim.betas": (0.0, 0.999)}),
    ],
)
def test_every_value_that_the_script_takes_is_taken(flags: str, found: dict[str, object]) -> None:
    config, _ = run_of("t2i-lora", [*T2I, *flags.split()])
    for name, value in found.items():
        assert attrgetter(name)(config) == value


def test_the_end_of_a_run_names_the_printed_format() -> None:
    for script, model in (("t2i", "unet"), ("dit", "dit"), ("iddpm", "adm")):
        given = {"t2i": T2I, "dit": ["--data-path", "imagenet"], "iddpm": ["--data_dir", "cifar", "--image_size", "32"]}
        [export] = [words for words in translate(script, given[script], gpus=1).commands if words[1] == "export"]
        assert export[export.index("--format") + 1] == family_of(networks()[model]).script_format
    [export] = [words for words in translate("t2i-lora", T2I, gpus=1).commands if words[1] == "export"]
    assert export[export.index("--format") + 1] == family_of(networks()["unet"]).adapter_formats[-1]


def test_dit(classes: Path) -> None:
    done = translate(
        "dit", ["--data-path", str(classes), "--model", "DiT-B/4", "--epochs", "10", "--global-batch-size", "4"], gpus=2
    )
    encode, train, export, sample = done.commands
    assert encode[:3] == ["fastdiff", "encode", str(classes)]
    assert {"--flip", "adm", "stabilityai/sd-vae-ft-ema"} <= set(encode)
    assert export[-1] == "dit-training", "model, ema, opt and args, as theirs leaves them"
    assert any("--step N exports an earlier one" in note for note in done.notes)
    config = config_of(train)
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
    given = _parser().parse_args(sample[1:])
    assert (str(given.folder), str(given.npz)) == (config.output.folder, f"{config.output.folder}/samples-30.npz")
    assert (given.scheduler, given.respacing, given.cfg, given.cfg_channels) == ("ddpm", "250", 4.0, 3)
    assert (given.classes, given.per_class, given.clip) == ("207,360,387,974,88,979,417,279", 1, False)
    notes = "\n".join(done.notes)
    for word in ("EXIF rotation", "16-bit gray", "incomplete last batch", "their sample.py", "--dtype float32"):
        assert word in notes, word
    assert "is not here" not in notes
    with pytest.raises(ConfigError, match="is not divisible by 3 GPUs"):
        translate("dit", ["--data-path", str(classes)], gpus=3)


def test_dit_without_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a network: what is no folder is not looked for on the hub."""
    monkeypatch.setattr("socket.socket.connect", None)
    config, notes = run_of("dit", ["--data-path", "imagenet/train", "--epochs", "2"])
    assert config.steps == 2 * (1_281_167 // 256)
    assert any("imagenet/train is not here" in note and "1281167 of ImageNet" in note for note in notes)
    few = translate("dit", ["--data-path", "flowers", "--num-classes", "102"], gpus=1).commands[-1]
    assert _parser().parse_args(few[1:]).classes is None, "theirs are of ImageNet"


@pytest.mark.parametrize(("side", "latents"), by_day([(256, 32)], (512, 64)))
def test_every_model_of_dit_becomes_its_preset(side: int, latents: int, classes: Path) -> None:
    flags = ["--data-path", str(classes), "--global-batch-size", "4", "--epochs", "1", "--image-size", str(side)]
    for letter in DIT_SIZES:
        for patch in DIT_PATCHES:
            config, _ = run_of("dit", [*flags, "--model", f"DiT-{letter}/{patch}"])
            assert config.model == dit_config(f"DiT-{letter}/{patch}", size=latents, learn_sigma=True)
            assert config.output.folder == os.path.abspath(f"results/dit-{letter.lower()}-{patch}-{side}")


def test_the_encode_command_is_one_that_fastdiff_has(classes: Path, tmp_path: Path) -> None:
    """Up to the autoencoder, which is not on this machine."""
    done = translate("dit", ["--data-path", str(classes), "--global-batch-size", "4", "--epochs", "1"], gpus=1)
    words = [word.replace("stabilityai/sd-vae-ft-ema", str(tmp_path / "none")) for word in done.commands[0]]
    assert main([*words[1:3], str(tmp_path / "out"), *words[4:]]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pretrained_model_name_or_path", "p"], "neither --dataset_name nor --train_data_dir"),
        ([*T2I, "--no_such_flag"], "unrecognized arguments: --no_such_flag; give"),
        ([*T2I, "--snr_gama", "5"], "unrecognized arguments: --snr_gama (did you mean --snr_gamma?)"),
        ([*T2I, "--use-emma"], "--use-emma (did you mean --use_ema?)"),
        ([*T2I, "--lr_w=3", "--adam", "1"], "ambiguous option: --adam could match"),
        (T2I[2:], "--pretrained_model_name_or_path"),
        ([*T2I, "--report_to", "wandb", "--hub_token", "secret"], "hf auth login"),
        ([*T2I, "--lr_scheduler", "steps"], "invalid choice"),
        ([*T2I, "--image_interpolation_mode", "best"], "invalid choice"),
        ([*T2I, "--train_batch_size", "0"], "--train_batch_size: 0: expected a whole number from 1 to"),
        ([*T2I, "--checkpointing_steps", "0"], "--checkpointing_steps: 0"),
        ([*T2I, "--max_train_steps", "0"], "--max_train_steps: their script takes no step below 1"),
        ([*T2I[:4], "--num_train_epochs", "0"], "--num_train_epochs: their script takes no step below 1"),
        ([*T2I, "--validation_epochs", "0", "--validation_prompts", "a"], "their script divides by it"),
        ([*T2I, "--train_text_encoder"], "--train_text_encoder, of train_text_to_image_lora_sdxl.py: text encoders"),
        ([*T2I, "--learning_rate", "nan"], "an invalid run: --optim.lr nan: above 0"),
    ],
)
def test_untranslatable_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate("t2i", flags, gpus=1)


def test_the_command_prints_lines_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "--gpus", "8", "t2i", "--", *T2I, "--output_dir", "my runs"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{program()} launch local \\\n    --ranks 8 \\\n    -- \\\n    --preset sd15-finetune")
    assert f"--output.folder '{os.path.abspath('my runs')}'" in printed
    assert "# Not the same:" in printed
    assert "--performance.device auto" in printed, "the other script runs on a CPU, too, where the preset refuses to"
    assert "secret" not in in_words(translate("t2i", [*T2I, "--hub_token", "secret"], gpus=1))


def test_flags_are_abbreviated_as_argparse_allows_it() -> None:
    config, _ = run_of("t2i", [*T2I[:4], "--max_train_st", "7", "--snr", "5", "--use_ema", "--train_b=2"])
    assert (config.steps, config.objective.min_snr_gamma, config.batch.micro) == (7, 5.0, 2)
    assert config.ema.rates == (0.9999,)


def test_what_theirs_does_otherwise_is_said() -> None:
    config, notes = run_of("t2i", T2I)
    assert config.output.log_every == 1, "theirs logs every step"
    told = "\n".join(notes)
    for word in (
        "folders checkpoint-N",
        "text encoders stay",
        "the export replaces",
        "starts anew",
        "every step is logged",
        "last step of an epoch",
        "16 bits",
        "EXIF",
        "16-bit gray",
    ):
        assert word in told, word
    _, resumed = run_of("t2i", [*T2I, "--resume_from_checkpoint", "latest"])
    assert "starts anew" not in "\n".join(resumed)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("t2i", ["--pretrained_model_name_or_path", "pipeline", "--train_data_dir", "images", "--output_dir", "out"]),
        ("t2i-lora", ["--pretrained_model_name_or_path", "./pipeline", "--dataset_name", "images"]),
        ("dit", ["--data-path", "images", "--epochs", "1", "--global-batch-size", "2"]),
        ("iddpm", ["--data_dir", "images", "--resume_checkpoint", "logs/model000100.pt"]),
        ("iddpm-sr", ["--data_dir", "images"]),
    ],
)
def test_the_commands_run_in_any_folder(
    script: str, flags: list[str], classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every path is one from the root, so that a translation elsewhere is another one."""
    monkeypatch.chdir(classes.parent)
    (classes.parent / "pipeline").mkdir()
    more = ["--max_train_steps", "5"] if script.startswith("t2i") else []
    commands = translate(script, [*flags, *more], gpus=1).commands
    words = [word for command in commands for word in command]
    named = [word for word in words if "/" in word and word != "stabilityai/sd-vae-ft-ema"]
    assert len(named) >= 4
    assert all(word.startswith(f"{classes.parent}/") for word in named), named
    assert f"{classes}" in words
    assert "images" not in words


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("script", "flag"),
    [("dit", "--data-path"), ("iddpm", "--data_dir"), ("t2i", "--train_data_dir"), ("t2i", "--output_dir")],
)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("http://me:secret@host/x", "http://host/x: an address, expected a path of this machine"),
        ("me:secret@host/x", "***@host/x: an address with credentials, without its scheme"),
        ("host/x?sig=secret", "host/x?sig=***: an address with credentials"),
    ],
)
def test_an_address_in_the_place_of_a_path_is_refused(script: str, flag: str, path: str, message: str) -> None:
    given = [*T2I, flag, path] if script == "t2i" else [flag, path]
    with pytest.raises(ConfigError) as caught:
        translate(script, given, gpus=1)
    assert str(caught.value).startswith(f"{flag} {message}")


def test_a_path_from_the_root_may_look_like_an_address() -> None:
    encode = translate("dit", ["--data-path", "/data/a:b@c"], gpus=1).commands[0]
    assert encode[2] == "/data/a:b@c"


def test_dit_is_told_a_file_and_what_can_be_nowhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--data-path .*/file: expected a folder; give --data-path of a folder with"):
        translate("dit", ["--data-path", str(tmp_path / "file")], gpus=1)
    with pytest.raises(NotADirectoryError):
        translate("dit", ["--data-path", str(tmp_path / "file" / "x")], gpus=1)


def test_one_checkpoint_may_be_enough() -> None:
    config, notes = run_of("t2i", [*T2I, "--checkpoints_total_limit", "1"])
    assert config.output.keep == 1
    assert any("deleted when the new one is complete" in note for note in notes)


@pytest.mark.parametrize("id_", ["stable-diffusion-v1-5/stable-diffusion-v1-5", "gpt2"])
def test_an_id_of_the_hub_stays_one(id_: str) -> None:
    flags = ["--pretrained_model_name_or_path", id_, "--dataset_name", id_, "--max_train_steps", "5"]
    config, _ = run_of("t2i", flags)
    assert (config.pretrained.path, config.data.path) == (id_, id_)
    config, _ = run_of("t2i", [*flags[:2], "--dataset_name", "s3://bucket/{0..9}.tar", *flags[4:]])
    assert config.data.path == "s3://bucket/{0..9}.tar"


def test_the_printed_commands_run(tmp_path: Path) -> None:
    """As a shell reads them, from another folder than that of the translation: encode, train, export."""
    for number in range(4):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"{number}.png").write_bytes(encode(natural(40, 50), "PNG"))
    shape = "--image_size 32 --num_channels 32 --num_res_blocks 1 --num_heads 1 --batch_size 2 --lr_anneal_steps 2"
    words = ["compat", "iddpm", "--", "--data_dir", "images", *shape.split()]
    translated = run_with_forks(COMMAND, *words, cwd=tmp_path)
    assert translated.code == 0, translated.output
    commands = re.split(r"(?<!\\)\n", translated.output.partition("\n\n")[0])
    assert [command.split()[1] for command in commands] == ["encode", "launch", "export", "sample"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for command in commands[:3]:
        read = run(["bash", "-c", f"printf '%s\\0' {command}"]).output.split("\0")[:-1]
        assert read[0] == "fastdiff"
        done = run_with_forks(COMMAND, *read[1:], cwd=elsewhere)
        assert done.code == 0, done.output
    assert (tmp_path / "runs" / "iddpm-images-32-export" / "model000002.pt").is_file()
    assert not list(elsewhere.iterdir())
