"""Command lines of diffusers' DreamBooth scripts for LoRA become runs of fastdiff."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fastdiff.cli.compat.run import translate
from fastdiff.cli.main import _parser
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from tests.cli.test_compat import config_of, training_command
from tests.support.inputs.images import encode, natural

KLEIN, Z_IMAGE, SD3, QWEN = (
    f"train_dreambooth_lora_{name}" for name in ("flux2_klein", "z_image", "sd3", "qwen_image")
)
OF_FAMILIES = {KLEIN: ("flux2", "repa"), Z_IMAGE: ("z-image", "sit"), QWEN: ("qwen-image", "repa"), SD3: ("sd3", "sd3")}
BASE = "--pretrained_model_name_or_path some/pipeline --instance_data_dir dog --instance_prompt 'a photo of sks dog'"


def words(flags: str) -> list[str]:
    return shlex.split(f"{BASE} {flags}")


def run_of(script: str, flags: str = "--max_train_steps 100", gpus: int = 1) -> tuple[RunConfig, str]:
    done = translate(script, words(flags), gpus=gpus)
    return config_of(training_command(done)), "\n".join(done.notes)


@pytest.fixture
def dog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six pictures."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dog").mkdir()
    for number in range(6):
        (tmp_path / "dog" / f"{number}.png").write_bytes(encode(natural(8, 8), "PNG"))
    return tmp_path / "dog"


@pytest.mark.parametrize("script", OF_FAMILIES)
def test_the_defaults_of_the_script_are_those_of_the_run(script: str) -> None:
    config, notes = run_of(script)
    kind, convention = OF_FAMILIES[script]
    assert (config.model.kind, config.objective.process) == (kind, "flow")
    assert getattr(config.objective, "convention") == convention  # noqa: B009  of flow alone
    assert (config.steps, config.batch.samples, config.batch.micro) == (100, 4, 4)
    optim = config.optim
    assert (optim.name, optim.lr, optim.betas, optim.eps, optim.weight_decay, optim.clip) == (
        "adamw", 1e-4, (0.9, 0.999), 1e-8, 1e-4, 1.0,
    )  # fmt: skip
    assert (config.lora.rank, config.lora.numerator, config.lora.quantize) == (4, 4, "none")
    assert (config.timesteps.density, config.objective.weighting) == (
        *(("logit_normal", "x0") if script == SD3 else ("uniform", "none")),
    )  # fmt: skip
    assert (config.timesteps.shift, config.objective.condition_dropout) == ("pipeline", 0.0)
    assert (config.performance.precision, config.performance.recompute, config.ema.rates) == ("fp32", False, ())
    assert config.pretrained.max_tokens == {SD3: 77, QWEN: 512}.get(script)
    assert not config.validation.draws_prompts
    assert "without --center_crop" in notes


@pytest.mark.parametrize("script", OF_FAMILIES)
def test_the_encode_command_is_one_that_fastdiff_has(script: str) -> None:
    encoded, train, export = translate(
        script, words("--max_train_steps 9 --random_flip --output_dir o"), gpus=1
    ).commands
    given = _parser().parse_args(encoded[1:])
    here = Path.cwd()
    assert (given.source, str(given.out), given.pretrained) == (f"{here}/dog", f"{here}/o-data", "some/pipeline")
    assert (given.resolution, given.interpolation, given.flip, given.caption) == (
        512, "bilinear", True, "a photo of sks dog",
    )  # fmt: skip
    assert given.posterior == ("mean" if script in (KLEIN, Z_IMAGE) else "each-step")
    config = config_of(train)
    assert getattr(given, "max_tokens", None) == config.pretrained.max_tokens
    assert (config.data.path, config.data.random_flip) == (str(given.out), True)
    assert str(_parser().parse_args(export[1:]).run_folder) == config.output.folder == f"{here}/o"


def test_the_flags_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "4bit.json").write_text(json.dumps({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}))
    config, notes = run_of(
        QWEN,
        "--max_train_steps 50 --train_batch_size 2 --gradient_accumulation_steps 2 --rank 16 --lora_alpha 8 "
        "--lora_layers 'to_q, to_k' --bnb_quantization_config_path 4bit.json --weighting_scheme logit_normal "
        "--logit_mean 0.5 --logit_std 2 --caption_dropout 0.1 --use_8bit_adam --lr_scheduler cosine "
        "--lr_warmup_steps 5 --mixed_precision bf16 --gradient_checkpointing --cache_latents --offload "
        "--pretrained_tokenizer_4_name_or_path other",
        gpus=2,
    )
    assert (config.batch.samples, config.batch.accumulation(2)) == (8, 2)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (16, 8.0, ("to_q", "to_k"))
    assert config.lora.quantize == "4bit"
    levels = config.timesteps
    assert (levels.density, levels.mean, levels.std) == ("logit_normal", -0.5, 2.0), "theirs counts from the noise"
    assert (config.objective.condition_dropout, config.optim.name) == (0.1, "adamw8bit")
    assert (config.optim.schedule, config.optim.warmup_steps) == ("cosine", 5)
    assert (config.performance.precision, config.performance.recompute) == ("bf16", True)
    for word in ("--cache_latents: what", "4 bits are NF4", "of the script for HiDream"):
        assert word in notes, word


@pytest.mark.parametrize(
    ("script", "flags", "density", "weighting"),
    [
        (KLEIN, "--weighting_scheme mode --mode_scale 1", "mode", "none"),
        (KLEIN, "--weighting_scheme sigma_sqrt", "uniform", "sigma_sqrt"),
        (Z_IMAGE, "--weighting_scheme cosmap", "uniform", "cosmap"),
        (SD3, "--weighting_scheme sigma_sqrt", "uniform", "none"),
        (SD3, "--weighting_scheme sigma_sqrt --precondition_outputs 0", "uniform", "sigma_sqrt"),
    ],
)
def test_weightings(script: str, flags: str, density: str, weighting: str) -> None:
    config, _ = run_of(script, f"--max_train_steps 9 {flags}")
    assert (config.timesteps.density, config.objective.weighting) == (density, weighting)


@pytest.mark.usefixtures("dog")
def test_epochs_count_the_copies_of_the_pictures() -> None:
    config, _ = run_of(Z_IMAGE, "--num_train_epochs 3 --repeats 4 --validation_prompt dog --validation_epochs 2")
    assert (config.steps, config.validation.every) == (18, 12), "24 copies make 6 steps of 4"
    command = training_command(translate(Z_IMAGE, [*words("--num_train_epochs 3 --repeats 4")[:3], "no", *words("")[4:],
        "--num_train_epochs", "3", "--repeats", "4"], gpus=1))  # fmt: skip
    assert command[command.index("--epochs") + 1] == "12"


def test_prior_preservation() -> None:
    prior = "--with_prior_preservation --class_data_dir dogs --class_prompt 'a dog' --prior_loss_weight 0.5"
    done = translate(KLEIN, words(f"--max_train_steps 9 --num_class_images 50 {prior}"), gpus=2)
    _, encoded, train, _ = done.commands
    given = _parser().parse_args(encoded[1:])
    assert (given.caption, given.max_samples) == ("a dog", 50)
    config = config_of(train)
    assert (config.batch.samples, config.batch.micro, config.steps) == (16, 8, 9), "four pictures of each per GPU"
    own, prior_set = config.data.entries
    assert (own.weight, own.loss_weight, prior_set.weight, prior_set.loss_weight) == (1.0, 1.0, 1.0, 0.5)
    assert prior_set.path == str(given.out)
    assert any("it adds the two means" in note for note in done.notes)


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        (KLEIN, "", ("--text_encoder_out_layers 10 20 30, the default of theirs", "9 18 27")),
        (SD3, "--weighting_scheme cosmap", ("--precondition_outputs 1 with cosmap", "sigma^2 times")),
        (SD3, "--cache_latents --dataset_name a/b --caption_column text", ("beside captions of other pictures",)),
        (Z_IMAGE, "", ("grows until the memory is full",)),
        (Z_IMAGE, "--optimizer Muon", ("--optimizer Muon: theirs does not know it, and takes AdamW",)),
    ],
)
def test_faults_of_the_scripts_are_told(script: str, flags: str, words: tuple[str, ...]) -> None:
    base = BASE.replace("--instance_data_dir dog", "") if "--dataset_name" in flags else BASE
    notes = "\n".join(translate(script, shlex.split(f"{base} --max_train_steps 9 {flags}"), gpus=1).notes)
    for word in words:
        assert word in notes, word


def test_what_is_right_is_not_told() -> None:
    _, notes = run_of(KLEIN, "--max_train_steps 9 --text_encoder_out_layers 9 18 27 --center_crop")
    assert "--text_encoder_out_layers" not in notes
    assert "--center_crop" not in notes
    _, notes = run_of(SD3, "--max_train_steps 9 --precondition_outputs 0")
    assert "--precondition_outputs" not in notes


def test_blocks_of_sd3() -> None:
    config, _ = run_of(SD3, "--max_train_steps 9 --lora_blocks 2,5 --lora_layers attn.to_k")
    assert config.lora.targets == ("transformer_blocks.2.attn.to_k", "transformer_blocks.5.attn.to_k")


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (KLEIN, "--text_encoder_out_layers 1 2 3", "--text_encoder_out_layers 1 2 3: the pipeline reads 9 18 27"),
        (KLEIN, "--dataset_name a/b", "--dataset_name and --instance_data_dir: expected one of them"),
        (KLEIN, "--with_prior_preservation", "--with_prior_preservation needs --class_data_dir, in theirs too"),
        (KLEIN, "--optimizer prodigy", "--optimizer prodigy: not known here"),
        (KLEIN, "--lora_dropout 0.1", "--lora_dropout 0.1: inputs of the added matrices are not dropped"),
        (KLEIN, "--do_fp8_training", "--do_fp8_training: frozen matrices are in 16 bits or quantized"),
        (KLEIN, "--aspect_ratio_buckets '672,1568'", "--aspect_ratio_buckets: the sizes of buckets follow"),
        (KLEIN, "--bnb_quantization_config_path none.json", "none.json cannot be read"),
        (KLEIN, "--lr_scheduler polynomial --lr_power 2", "--lr_power 2: schedules have the value 1 here"),
        (SD3, "--train_text_encoder", "--train_text_encoder: text encoders are not trained here"),
        (SD3, "--lora_blocks all", "--lora_blocks all: expected numbers of blocks"),
        (SD3, "--weighting_scheme none", "invalid choice"),
    ],
)
def test_untranslatable_flags_are_refused(script: str, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate(script, words(f"--max_train_steps 9 {flags}"), gpus=1)
