"""Command lines of kohya's sd-scripts become runs of fastdiff."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.cli.compat.run import translate
from fastdiff.cli.main import _parser
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.adapter_files.forms import KOHYA, in_native_layout, tensors_of
from fastdiff.models.adapter_files.native_names import named_network
from fastdiff.models.pretrained.tiny_pipeline import UNETS
from tests.cli.test_compat import config_of, training_command
from tests.support.inputs import kronecker
from tests.support.inputs.images import encode, natural
from tests.support.inputs.kronecker import SHAPES
from tests.support.inputs.tiny_transformers import adapter

NETWORK, FULL = "sdxl_train_network", "sdxl_train"
LORA = "--network_module networks.lora --network_train_unet_only"


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six pictures in a folder with ten repeats, and another folder that is none of theirs."""
    monkeypatch.chdir(tmp_path)
    for name in ("10_sks dog", "drafts"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
    for number in range(6):
        (tmp_path / "pictures" / "10_sks dog" / f"{number}.png").write_bytes(encode(natural(8, 8), "PNG"))
    return tmp_path / "pictures"


def run_of(script: str, flags: str, gpus: int = 1) -> tuple[RunConfig, str]:
    done = translate(script, words(flags), gpus=gpus)
    return config_of(training_command(done)), "\n".join(done.notes)


def words(flags: str) -> list[str]:
    base = "--pretrained_model_name_or_path some/pipeline --train_data_dir pictures --output_dir out --resolution 1024"
    return [*base.split(), *shlex.split(flags)]


def test_a_run_may_start_from_a_published_adapter(pictures: Path) -> None:
    """With --dim_from_weights rank, alpha and layers are those of the file."""
    names = named_network(UNETS["sdxl"])
    changes = adapter(names, 6, 3.0, [layer for layer in names.layers if layer.endswith("to_q")])
    save_file(tensors_of(KOHYA, in_native_layout(changes, names), "unet"), "shoe.safetensors")
    config, notes = run_of(NETWORK, f"{LORA} --network_weights shoe.safetensors --network_dim 8 --network_alpha 4")
    assert (config.lora.init, config.lora.rank, config.lora.alpha) == (str(Path("shoe.safetensors").absolute()), 8, 4.0)
    assert "the run starts with the change that the file means" in notes
    config, _ = run_of(NETWORK, f"{LORA} --network_weights shoe.safetensors --dim_from_weights --network_dim 8")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (6, None, ())
    with pytest.raises(ConfigError, match="--dim_from_weights: of which file"):
        run_of(NETWORK, f"{LORA} --dim_from_weights")
    with pytest.raises(ConfigError, match="--network_args up_lr_weight: all layers have one learning rate"):
        run_of(NETWORK, f"{LORA} --network_weights s.safetensors --dim_from_weights --network_args up_lr_weight=sine")


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(("script", "flags"), [(NETWORK, LORA), (FULL, "")])
def test_the_defaults_of_the_script_are_those_of_the_run(script: str, flags: str) -> None:
    config, notes = run_of(script, flags)
    assert (config.steps, config.batch.samples, config.batch.micro) == (1600, 1, 1)
    optim = config.optim
    assert (optim.name, optim.lr, optim.betas, optim.eps, optim.weight_decay) == (
        "adamw", 2e-6, (0.9, 0.999), 1e-8, 0.01,
    )  # fmt: skip
    assert (optim.clip, optim.schedule, optim.warmup_steps) == (1.0, "constant", 0)
    objective = config.objective
    assert (objective.schedule, objective.prediction, objective.min_snr_gamma) == ("scaled_linear", "epsilon", None)
    assert (objective.noise_offset, objective.condition_dropout) == (0.0, 0.0)
    assert (config.performance.precision, config.performance.recompute, config.ema.rates) == ("fp32", False, ())
    assert (config.output.checkpoint_every, config.output.report_to, config.validation.draws_prompts) == (0, (), False)
    assert (config.lora.rank, config.lora.alpha) == ((4, 1.0) if script == NETWORK else (0, None))
    assert "drafts: no repeats in its name" in notes
    assert "without --seed theirs draws one by chance" in notes


@pytest.mark.usefixtures("pictures")
def test_the_flags_arrive() -> None:
    config, notes = run_of(
        NETWORK,
        f"{LORA} --network_dim 32 --network_alpha 16 --network_args conv_dim=32 conv_alpha=16 --fp8_base "
        "--max_train_steps 50 --train_batch_size 2 --gradient_accumulation_steps 3 --seed 7 --unet_lr 1e-4 "
        "--text_encoder_lr 5e-5 --optimizer_type AdamW8bit --optimizer_args weight_decay=0.1 betas=0.9,0.99 "
        "--lr_scheduler cosine --lr_warmup_steps 10% --max_grad_norm 0 --mixed_precision bf16 "
        "--gradient_checkpointing --xformers --min_snr_gamma 5 --noise_offset 0.0357 --multires_noise_iterations 6 "
        "--ip_noise_gamma 0.1 --v_parameterization --zero_terminal_snr --caption_dropout_rate 0.1 --cache_latents "
        "--save_every_n_epochs 2 --save_last_n_epochs 3 --logging_dir logs --log_with all --flip_aug --deepspeed",
        gpus=2,
    )
    assert config.lora.rank == 32
    assert (config.lora.alpha, config.lora.quantize, "conv1" in config.lora.targets) == (16.0, "8bit", True)
    assert (config.batch.samples, config.batch.accumulation(2), config.seed) == (12, 3, 7)
    optim = config.optim
    assert (optim.name, optim.lr, optim.weight_decay, optim.betas) == ("adamw8bit", 1e-4, 0.1, (0.9, 0.99))
    assert (optim.schedule, optim.warmup_steps, optim.clip) == ("cosine", 5, 0.0)
    objective = config.objective
    assert (objective.prediction, objective.min_snr_gamma, objective.noise_offset) == ("v", 5.0, 0.0357)
    assert (objective.multires_noise_iterations, objective.input_perturbation) == (6, 0.1)
    assert objective.condition_dropout == 0.1
    assert (config.performance.precision, config.performance.recompute) == ("bf16", True)
    assert (config.performance.attention, config.data.random_flip) == ("xformers", True)
    assert (config.output.checkpoint_every, config.output.keep) == (10, 3), "60 samples make 5 steps of 12"
    assert config.output.report_to == ("tensorboard", "wandb")
    for word in ("--cache_latents: what", "smaller by 2 to 4 by chance", "a dropped caption is zeros", "Kaiming"):
        assert word in notes, word


LOKR = "--network_module lycoris.kohya --network_train_unet_only --network_args algo=lokr"


@pytest.mark.usefixtures("pictures")
def test_a_lokr_of_lycoris() -> None:
    config, _ = run_of(NETWORK, f"{LOKR} factor=8 --network_dim 16 --network_alpha 4")
    lora = config.lora
    assert (lora.kind, lora.rank, lora.alpha, lora.factor) == ("lokr", 16, 4.0, 8)
    assert {"to_q", "ff.net.2", "conv1", "upsamplers.0.conv"} <= set(lora.targets), "theirs adapts convolutions"
    words = "preset=attn-mlp full_matrix=True decompose_both=False bypass_mode=True dropout=0 dora_wd=False"
    lora = run_of(NETWORK, f"{LOKR} {words} conv_dim=100000 --network_dim 100000")[0].lora
    assert (lora.rank, lora.factor, lora.full_matrix, lora.decompose_both) == (100000, -1, True, False)
    assert "conv1" not in lora.targets
    names = named_network(UNETS["sdxl"])
    save_file(
        tensors_of(KOHYA, in_native_layout(kronecker.adapter(names, SHAPES["whole"]), names), "unet"), "a.safetensors"
    )
    lora = run_of(NETWORK, f"{LOKR} --network_weights a.safetensors --dim_from_weights")[0].lora
    assert (lora.kind, lora.rank, lora.factor) == ("lokr", 1, None)


DORA = LOKR.replace("algo=lokr", "algo=locon dora_wd=True")


@pytest.mark.usefixtures("pictures")
def test_a_dora_of_lycoris() -> None:
    config, notes = run_of(NETWORK, f"{DORA} wd_on_output=True factor=8 use_scalar=0 --network_dim 8 --network_alpha 4")
    lora = config.lora
    assert (lora.kind, lora.rank, lora.alpha, lora.factor) == ("dora", 8, 4.0, None)
    assert {"to_q", "conv1"} <= set(lora.targets)
    assert "the norm of each changed row counts as a constant" in notes
    assert "--network_args factor changes nothing here" in notes
    assert "--network_args use_scalar=0: off here; theirs takes this word for on" in notes
    export = translate(NETWORK, words(DORA), gpus=1).commands[-1]
    assert "lora-native" in export, "magnitudes of the other forms are lost in some program"
    config, notes = run_of(NETWORK, DORA.replace("dora_wd=True", "preset=attn-mlp"))
    assert config.lora.kind == "lora"
    assert "alpha as a tensor of each layer" in notes


@pytest.mark.usefixtures("pictures")
def test_lycoris_takes_the_kind_of_a_file() -> None:
    ends = {"lora_down.weight": (2, 64), "lora_up.weight": (64, 2), "dora_scale": (64, 1)}
    save_file({f"lora_unet_a.{end}": torch.ones(shape) for end, shape in ends.items()}, "d.safetensors")
    config, notes = run_of(NETWORK, f"{LOKR} --network_weights d.safetensors --dim_from_weights")
    assert (config.lora.kind, config.lora.rank) == ("dora", 2), "theirs does not read algo then"
    assert "--network_args changes nothing: the other flags decide" in notes
    for flags in (f"{LORA} --dim_from_weights", LORA, LOKR):
        with pytest.raises(ConfigError, match=r"d\.safetensors: an adapter of the kind dora, expected lo"):
            run_of(NETWORK, f"{flags} --network_weights d.safetensors")
    assert run_of(NETWORK, f"{DORA} --network_weights d.safetensors --network_dim 2")[0].lora.kind == "dora"


@pytest.mark.usefixtures("pictures")
def test_an_epoch_has_the_repeats_of_the_folder() -> None:
    """The training counts its samples; intervals in epochs are counted here."""
    command = training_command(
        translate(NETWORK, words(f"{LORA} --max_train_epochs 3 --save_every_n_epochs 1"), gpus=1)
    )
    assert command[command.index("--epochs") + 1] == "3"
    assert command[command.index("--output.checkpoint_every") + 1] == "60"


@pytest.mark.usefixtures("pictures")
def test_the_other_commands_are_ones_that_fastdiff_has() -> None:
    flags = (
        "--pretrained_model_name_or_path base.safetensors --vae vae.safetensors --output_name dog --enable_bucket "
        "--bucket_reso_steps 32 --flip_aug --vae_batch_size 4 --save_precision fp16 --huggingface_repo_id me/dog "
        "--caption_prefix 'photo of' --shuffle_caption --keep_tokens 1 --caption_tag_dropout_rate 0.1 "
        "--caption_extention .txt --caption_separator ; --alpha_mask --min_bucket_reso 512"
    )
    first, encoded, train, export = translate(FULL, words(flags), gpus=1).commands
    here = Path.cwd()
    assert first[:2] == ["python", "-c"]
    assert compile(first[2], "first", "exec")
    for part in (f"from_single_file('{here}/base.safetensors'", f"from_single_file('{here}/vae.safetensors'"):
        assert part in first[2]
    given = _parser().parse_args(encoded[1:])
    assert (given.source, given.pretrained) == (f"{here}/pictures", f"{here}/out/dog-pipeline")
    assert f"save_pretrained('{given.pretrained}')" in first[2]
    assert (given.resolution, given.buckets, given.bucket_step, given.flip, given.batch) == (1024, True, 32, True, 4)
    assert (given.layout, given.caption_prefix) == ("kohya", "photo of")
    assert (given.shuffle_tags, given.keep_tokens, given.drop_tags, given.tag_separator) == (10, 1, 0.1, ";")
    assert (given.caption_extension, given.masks, given.bucket_sides) == (".txt", "alpha", [512, 1024])
    config = config_of(train)
    assert (config.data.path, config.pretrained.path) == (str(given.out), given.pretrained)
    given = _parser().parse_args(export[1:])
    assert (str(given.run_folder), given.format, given.dtype) == (config.output.folder, "single-file", "fp16")
    assert given.push_to_hub == "me/dog"
    lora = translate(NETWORK, words(LORA), gpus=1).commands[-1]
    assert lora[lora.index("--format") + 1] == "lora"


@pytest.mark.usefixtures("pictures")
def test_flags_in_a_file_count_where_the_command_line_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "flags.toml").write_text(
        'network_module = "networks.lora"\n[training]\nlearning_rate = 1e-4\nnetwork_train_unet_only = true\n'
        'max_train_steps = 50\n[other]\nnetwork_args = ["conv_dim=8", "conv_alpha=4"]\nnetwork_dim = 8\n'
        "network_alpha = 4\nlearning_rat = 3\n"
    )
    config, notes = run_of(NETWORK, "--config_file flags --max_train_steps 70")
    assert (config.steps, config.optim.lr, config.lora.rank) == (70, 1e-4, 8)
    assert "conv2" in config.lora.targets
    assert "--config_file: learning_rat: no flags of the script" in notes
    assert not [note for note in notes.split("\n") if "changes nothing" in note]
    # As graphical interfaces write what is not given.
    (tmp_path / "flags.toml").write_text(
        'dynamo_backend = "no"\nmax_token_length = 75\nlr_scheduler_args = []\nvae = ""\nseed = 3\n'
    )
    config, _ = run_of(FULL, "--config_file flags.toml")
    assert config.seed == 3
    (tmp_path / "flags.toml").write_text('max_train_steps = "many"\nmax_grad_norm = "a"\n')
    with pytest.raises(ConfigError, match=r"--config_file: max_train_steps = 'many'[^\n]*\n  --config_file: max_grad"):
        run_of(FULL, "--config_file flags.toml")


def test_a_configuration_of_data_sets(pictures: Path, tmp_path: Path) -> None:
    """The encode reads it as it is; flags of the script count where it says nothing."""
    (tmp_path / "data.toml").write_text(
        "[general]\nenable_bucket = true\n[[datasets]]\nresolution = [1024, 576]\nbatch_size = 4\n"
        "[[datasets.subsets]]\nimage_dir = 'pictures/10_sks dog'\nclass_tokens = 'a cat'\nnum_repeats = 2\n"
        "caption_dropout_rate = 0.2\n"
    )
    flags = words(
        "--dataset_config data.toml --train_batch_size 2 --max_train_epochs 5 --flip_aug --max_bucket_reso 2048 "
        "--keep_tokens 2 --resize_interpolation area --save_every_n_epochs 1"
    )
    done = translate(FULL, flags, gpus=1)
    encoded, train, _ = done.commands
    given = vars(_parser().parse_args(encoded[1:]))
    assert (given["source"], given["bucket_sides"], given["flip"]) == (str(tmp_path / "data.toml"), [256, 2048], True)
    assert (given["keep_tokens"], given["interpolation"], given["resolution"]) == (2, "box", 1024)
    assert train[train.index("--epochs") + 1] == "5"
    assert train[train.index("--output.checkpoint_every") + 1] == "3", "6 pictures twice in batches of 4"
    assert train[train.index("--batch.micro") + 1] == "4", "the file goes before the flag"
    assert train[train.index("--objective.condition_dropout") + 1] == "0.2", "with 0, no guidance is drawn"
    notes = "\n".join(done.notes)
    for word in ("--train_data_dir is not used", "pictures/10_sks dog, named by", "a dropped caption is zeros"):
        assert word in notes, word
    for flag, message in (
        ("--shuffle_caption", "--shuffle_caption beside --dataset_config: write shuffle_caption into"),
        ("--color_aug", "--color_aug: pictures are encoded once"),
    ):
        with pytest.raises(ConfigError, match=message):
            translate(FULL, [*flags, flag], gpus=1)
    (tmp_path / "data.toml").write_text(
        f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{pictures}'\ncolor_aug = true\n"
    )
    with pytest.raises(ConfigError, match=r"color_aug = True: pictures are encoded once"):
        translate(FULL, flags, gpus=1)


def test_several_folders_are_several_data_sets(pictures: Path) -> None:
    """With their repeats; regularisation pictures are together as many as the others, with a weight of their own."""
    shutil.copytree(pictures / "10_sks dog", pictures / "2_sks cat")
    shutil.copytree(pictures / "10_sks dog", pictures.parent / "reg" / "1_dog")
    flags = f"{LORA} --reg_data_dir reg --prior_loss_weight 0.5 --max_train_epochs 3 --save_every_n_epochs 1"
    encoded, train, _ = translate(NETWORK, words(flags), gpus=1).commands
    given = _parser().parse_args(encoded[1:])
    assert (given.regularisation, given.prior_loss_weight) == (str(pictures.parent / "reg"), 0.5)
    assert train[train.index("--data.path") + 1] == str(given.out)
    assert train[train.index("--epochs") + 1] == "3"
    assert train[train.index("--output.checkpoint_every") + 1] == "144", "60 and 12, and as many of regularisation"


@pytest.mark.usefixtures("pictures")
def test_a_file_of_metadata_names_the_pictures(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"10_sks dog/0.png": {"tags": "sks"}}')
    flags = "--in_json meta.json --dataset_repeats 3 --max_train_epochs 2 --reg_data_dir reg"
    done = translate(FULL, words(flags), gpus=1)
    encoded, train, _ = done.commands
    given = _parser().parse_args(encoded[1:])
    assert (given.source, given.image_root) == (f"{tmp_path}/meta.json", f"{tmp_path}/pictures")
    assert train[train.index("--data.sets") + 1] == f"{given.out}:3"
    assert train[train.index("--epochs") + 1] == "2"
    assert any("--reg_data_dir reg is not used beside --in_json" in note for note in done.notes)


@pytest.mark.usefixtures("pictures")
def test_all_flags_without_counterpart_are_told_at_once() -> None:
    flags = "--network_module networks.dylora --max_token_length 225 --loss_type huber --min_timestep 0 --color_aug"
    with pytest.raises(ConfigError) as caught:
        run_of(NETWORK, flags)
    for name in ("--network_module networks.dylora", "--max_token_length", "--loss_type", "--color_aug", "without --n"):
        assert name in str(caught.value), name
    run_of(FULL, "--min_timestep 0 --max_timestep 1000")


@pytest.mark.usefixtures("pictures")
def test_prompts_come_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("# two\na cat --w 832 --h 1216 --d 1\n\na dog\n")
    config, notes = run_of(FULL, "--sample_prompts prompts.txt --sample_every_n_epochs 1")
    assert (config.validation.prompts, config.validation.every) == (("a cat", "a dog"), 60)
    assert "options behind them, such as --w 832, are left out" in notes
    _, notes = run_of(FULL, "--sample_prompts prompts.txt")
    assert "--sample_prompts changes nothing: it needs --sample_every_n_steps" in notes


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (NETWORK, "--network_module networks.lora", "without --network_train_unet_only theirs trains text encoders"),
        (NETWORK, "--network_train_unet_only", "--network_module is missing"),
        (NETWORK, f"{LORA} --network_args conv_dim=8", "--network_args conv_dim=8 conv_alpha=1.0: all layers have"),
        (NETWORK, f"{LORA} --network_args block_dims=1,2", "--network_args block_dims: all layers have one rank"),
        (NETWORK, "--network_train_unet_only --network_module networks.dylora", "--network_module networks.dylora"),
        (NETWORK, LOKR.replace("lokr", "loha"), "--network_args algo=loha: of lycoris.kohya, lora, locon, lokr alone"),
        (NETWORK, f"{LOKR} dora_wd=True", "--network_args dora_wd=True: a lokr has no magnitudes"),
        (NETWORK, f"{DORA} wd_on_output=False", "--network_args dora_wd=True wd_on_output=False: magnitudes here are"),
        (NETWORK, f"{DORA} bypass_mode=True", "--network_args dora_wd=True bypass_mode=True: theirs then trains no"),
        (
            NETWORK,
            f"{LOKR} use_tucker=1 dropout=0.1 speed=2",
            "; speed: lycoris.kohya has no such argument",
        ),
        (NETWORK, f"{LOKR} preset=mine.toml", "--network_args preset=mine.toml: layers are those of full,"),
        (NETWORK, f"{LOKR} conv_dim=8", "--network_args conv_dim=8 conv_alpha=1: all layers have one rank"),
        (NETWORK, f"{LOKR} factor=big", "--network_args factor=big: expected a number"),
        (FULL, "--train_text_encoder", "--train_text_encoder: text encoders are not trained here"),
        (FULL, "--optimizer_type Prodigy", "--optimizer_type Prodigy: AdamW alone is translated, as adamw, adamw8bit"),
        (FULL, "--optimizer_type Muon", "--optimizer_type Muon: AdamW alone is translated"),
        (FULL, "--optimizer_args momentum=0.9", "--optimizer_args momentum=0.9: known are weight_decay, betas, eps"),
        (FULL, "--lr_scheduler inverse_sqrt", "--lr_scheduler inverse_sqrt: not known here"),
        (FULL, "--lr_warmup_steps 100", "--lr_warmup_steps 100 with --lr_scheduler constant: theirs refuses it"),
        (FULL, "--lr_scheduler cosine_with_restarts --lr_scheduler_num_cycles 3", "--lr_scheduler_num_cycles 3"),
        (FULL, "--loss_type huber", "--loss_type: the error is squared"),
        (FULL, "--full_bf16", "--full_bf16 needs --mixed_precision bf16"),
        (FULL, "--max_token_length 225", "--max_token_length 225: captions of Stable Diffusion XL have 75 tokens"),
        (FULL, "--resolution 1024,768", "--resolution [1024, 768]: without enable_bucket pictures are squares"),
        (FULL, "--caption_tag_dropout_rate 0.1", "tags are dropped of shuffled captions alone"),
        (FULL, "--max_timestep 500", "--max_timestep 500: all timesteps are trained"),
        (FULL, "--train_data_dir nowhere", "is not here, and the names of its folders are part of the run"),
        (FULL, "--train_data_dir pictures/drafts", "holds no folder N_name with pictures"),
        (FULL, "--offload_optimizer_device cpu --deepspeed", "--offload_optimizer_device: only --zero_stage 3"),
        (FULL, "--caption_extension tags", "tags: expected one ending of caption files, such as .txt"),
    ],
)
def test_untranslatable_flags_are_refused(script: str, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate(script, words(flags), gpus=1)
