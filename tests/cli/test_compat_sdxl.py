"""Command lines of diffusers' scripts for Stable Diffusion XL become runs of fastdiff."""

import re

import pytest

from fastdiff.cli.compat.run import translate
from fastdiff.config.presets import SDXL_UNET
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from tests.cli.test_compat import T2I, run_of

FULL, LORA = "train_text_to_image_sdxl", "train_text_to_image_lora_sdxl"


@pytest.mark.parametrize("script", [FULL, LORA])
def test_the_defaults_of_the_script_are_those_of_the_run(script: str) -> None:
    config, notes = run_of(script, T2I)
    assert (config.batch.samples, config.batch.micro, config.steps) == (16, 16, 100)
    assert (config.optim.name, config.optim.lr, config.optim.betas, config.optim.weight_decay) == (
        "adamw", 1e-4, (0.9, 0.999), 1e-2,
    )  # fmt: skip
    assert (config.optim.eps, config.optim.clip, config.optim.schedule) == (1e-8, 1.0, "constant")
    assert (config.data.online, config.data.resolution, config.data.center_crop) == (True, 1024, False)
    assert (config.objective.prediction, config.objective.condition_dropout) == ("auto", 0.0)
    assert (config.ema.rates, config.timesteps) == ((), TimestepConfig())
    assert (config.lora.rank, config.lora.numerator) == ((4, 4) if script == LORA else (0, 0))
    assert (config.pretrained.path, config.pretrained.weights) == ("some/pipeline", True)
    assert (config.model, config.validation.draws_prompts) == (SDXL_UNET, False)
    assert config.output.project == f"text2image-fine-tune{'' if script == LORA else '-sdxl'}"
    assert "proportion_empty_prompts" not in "\n".join(notes)


def test_the_flags_arrive() -> None:
    """Those of the documented example, and the rest of the script's own."""
    flags = [
        "--pretrained_model_name_or_path=stabilityai/stable-diffusion-xl-base-1.0",
        "--pretrained_vae_model_name_or_path=madebyollin/sdxl-vae-fp16-fix",
        "--dataset_name=lambdalabs/naruto-blip-captions", "--enable_xformers_memory_efficient_attention",
        "--resolution=512", "--center_crop", "--random_flip", "--proportion_empty_prompts=0.2",
        "--train_batch_size=1", "--gradient_accumulation_steps=4", "--gradient_checkpointing",
        "--max_train_steps=10000", "--use_8bit_adam", "--learning_rate=1e-06", "--lr_scheduler=constant",
        "--lr_warmup_steps=0", "--mixed_precision=fp16", "--report_to=wandb",
        "--validation_prompt=a cute Sundar Pichai creature", "--validation_epochs", "5", "--checkpointing_steps=5000",
        "--output_dir=sdxl-naruto-model", "--push_to_hub", "--use_ema", "--timestep_bias_strategy", "range",
        "--timestep_bias_multiplier", "2", "--timestep_bias_begin", "200", "--timestep_bias_end", "500",
    ]  # fmt: skip
    config, notes = run_of(FULL, flags)
    assert (config.batch.samples, config.batch.accumulation(1), config.steps) == (4, 4, 10_000)
    assert (config.objective.condition_dropout, config.ema) == (0.2, EmaConfig(rates=(0.9999,), warmup=True))
    levels = config.timesteps
    assert (levels.density, levels.bias_multiplier, levels.bias_begin, levels.bias_end) == ("range", 2.0, 200, 500)
    shown = config.validation
    assert shown.prompts == ("a cute Sundar Pichai creature",)
    assert (shown.steps, shown.guidance_scale, shown.images_per_prompt) == (25, 5.0, 4)
    told = "\n".join(notes)
    for word in (
        "sdxl-vae-fp16-fix, made for fp16, is not needed", "theirs drops the same ones for the whole run",
        "its latents are the same in all epochs",
    ):  # fmt: skip
        assert word in told, word
    assert "cached with another crop" not in told, "a centred crop is always the same"
    command = translate(FULL, flags, gpus=1).commands[-1]
    assert command[-4:] == ["--format", "diffusers", "--push-to-hub", "sdxl-naruto-model"]


def test_faults_of_the_script_are_told() -> None:
    _, notes = run_of(FULL, [*T2I, "--caption_column", "said", "--random_flip", "--mixed_precision", "bf16"])
    told = "\n".join(notes)
    for word in ("cached with another crop", "fails at names other than", "of the mirrored one", "encodes in bf16"):
        assert word in told, word
    _, notes = run_of(FULL, [*T2I, "--timestep_bias_strategy", "later"])
    assert any("--timestep_bias_multiplier 1: every timestep is as frequent" in note for note in notes)


def test_lora() -> None:
    config, notes = run_of(LORA, [*T2I, "--rank", "8", "--validation_prompt", "a cat", "--debug_loss"])
    assert (config.lora.rank, config.validation.steps, config.validation.guidance_scale) == (8, 50, 5.0)
    assert any("--debug_loss: single losses" in note for note in notes)
    export = translate(LORA, T2I, gpus=1).commands[-1]
    assert export[-1] == "lora-diffusers"


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (LORA, "--train_text_encoder", "--train_text_encoder: text encoders are not trained here; leave it out"),
        (FULL, "--enable_npu_flash_attention", "--enable_npu_flash_attention: it is for Ascend NPUs"),
        (FULL, "--prediction_type sample", "--prediction_type sample: theirs compares the output minus the noise"),
        (FULL, "--prediction_type flow", "--prediction_type flow: their script knows no such prediction; use epsilon"),
        (FULL, "--rank 4", "unrecognized arguments: --rank"),
        (FULL, "--timestep_bias_strategy middle", "invalid choice"),
    ],
)
def test_untranslatable_flags_are_refused(script: str, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate(script, [*T2I, *flags.split()], gpus=1)
