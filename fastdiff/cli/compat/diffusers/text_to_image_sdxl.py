"""train_text_to_image_sdxl.py and train_text_to_image_lora_sdxl.py; defaults are theirs."""

from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.diffusers.notes import ENCODED_EVERY_EPOCH
from fastdiff.cli.compat.diffusers.script import DiffusersScript
from fastdiff.cli.compat.diffusers.text_to_image import FP32_MATRICES, ROUNDED_ALPHAS, SHARED, average, unclipped
from fastdiff.cli.compat.table import SWITCH, Defaults, Meaning, to
from fastdiff.cli.compat.translation import Note, flag
from fastdiff.config.arguments.of_others import PREDICTIONS
from fastdiff.config.arguments.types import count
from fastdiff.errors import ConfigError

_GUIDANCE = 5.0
"""Default of the pipeline, with which the scripts draw."""
_OF_BOTH: dict[str, object] = SHARED | {
    "pretrained_vae_model_name_or_path": None, "validation_prompt": None, "num_validation_images": 4,
    "validation_epochs": 1, "resolution": 1024, "enable_npu_flash_attention": False,
}  # fmt: skip
_DEFAULTS: Defaults = _OF_BOTH | {
    "output_dir": "sdxl-model-finetuned", "proportion_empty_prompts": 0.0, "use_ema": False,
    "timestep_bias_strategy": "none", "timestep_bias_multiplier": 1.0, "timestep_bias_begin": 0,
    "timestep_bias_end": 1000, "timestep_bias_portion": 0.25,
}  # fmt: skip
_BIASES = ("earlier", "later", "range", "none")
_UNBIASED = "--timestep_bias_strategy none does not use it"
_AUTOENCODER = (
    "images pass through the autoencoder of the pipeline, which is never in fp16, so that sdxl-vae-fp16-fix, made for "
    "fp16, is not needed; for one with other latents save a pipeline that has it as vae/, and give that"
)


def _prediction(_: Given, name: str | None) -> list[str]:
    known = {key: value for key, value in PREDICTIONS.items() if key != "sample"} | {None: "auto"}
    if name not in known:
        reason = (
            "theirs compares the output minus the noise with the latents, which trains the network on their sum"
            if name in PREDICTIONS
            else "their script knows no such prediction"
        )
        raise ConfigError(f"--prediction_type {name}: {reason}; use epsilon or v_prediction, as the pipeline predicts")
    return flag("objective.prediction", known[name])


def _bias(given: Given, strategy: str) -> list[str]:
    flags = given.flags
    if strategy == "none":
        return []
    bounds = {"begin": flags.timestep_bias_begin, "end": flags.timestep_bias_end} if strategy == "range" else {}
    portion = {} if strategy == "range" else {"portion": flags.timestep_bias_portion}
    values = {"multiplier": flags.timestep_bias_multiplier, **portion, **bounds}
    if flags.timestep_bias_multiplier == 1:  # the density without a bias
        return []
    return [
        *flag("timesteps.density", strategy),
        *(word for name, value in values.items() for word in flag(f"timesteps.bias_{name}", value)),
    ]


def _differences(given: Given) -> list[Note]:
    flags = given.flags
    return [
        (
            not flags.center_crop,
            "the crop coordinates of a sample are those of its crop; theirs draws them again in every epoch, beside "
            "latents that were cached with another crop",
        ),
        (
            (flags.image_column, flags.caption_column) != ("image", "text"),
            "--image_column and --caption_column are read; theirs fails at names other than image and text",
        ),
        (
            flags.timestep_bias_strategy != "none" and flags.timestep_bias_multiplier == 1,
            "--timestep_bias_multiplier 1: every timestep is as frequent as without --timestep_bias_strategy",
        ),
        *_of_both(given),
    ]


def _of_both(given: Given) -> list[Note]:
    return [
        unclipped(given),
        (
            given.flags.random_flip and not given.flags.center_crop,
            "a mirrored image keeps the crop coordinates of the original one; theirs has those of the mirrored one",
        ),
        (
            given.flags.mixed_precision == "bf16",
            "the autoencoder encodes in bf16; theirs in fp32, as shards of `fastdiff encode --precision fp32` have it",
        ),
    ]


_OWN = {
    "prediction_type": Meaning(str, _prediction),
    "pretrained_vae_model_name_or_path": Meaning(told=_AUTOENCODER),
}

SDXL = DiffusersScript(
    defaults=_DEFAULTS,
    own={
        **_OWN,
        "proportion_empty_prompts": Meaning(
            float,
            to("objective.condition_dropout"),
            told="captions are dropped anew at every use; theirs drops the same ones for the whole run, with the "
            "embedding of the empty caption, here with zeros, as SDXL's pipeline draws",
        ),
        "timestep_bias_strategy": Meaning(str, _bias, choices=_BIASES),
        "timestep_bias_multiplier": Meaning(float, idle=_UNBIASED),
        "timestep_bias_begin": Meaning(int, idle="--timestep_bias_strategy range alone uses it"),
        "timestep_bias_end": Meaning(int, idle="--timestep_bias_strategy range alone uses it"),
        "timestep_bias_portion": Meaning(float, idle="--timestep_bias_strategy earlier and later alone use it"),
        "use_ema": Meaning(SWITCH, average),
    },
    always=(flag("preset", "sdxl-finetune"), flag("output.project", "text2image-fine-tune-sdxl")),
    export="diffusers",
    drawn_steps=25,
    guidance=_GUIDANCE,
    notes=(
        ROUNDED_ALPHAS,
        "every use of an image has its own crop, mirroring and sample of the posterior; theirs encodes each image "
        "once, and its latents are the same in all epochs: for that use `fastdiff encode --posterior once`, give the "
        "shards as --data.path and drop --data.online (centre crops only)",
    ),
    differences=_differences,
)

SDXL_LORA = DiffusersScript(
    defaults=_OF_BOTH
    | {"output_dir": "sd-model-finetuned-lora", "rank": 4, "train_text_encoder": False, "debug_loss": False},
    own={
        **_OWN,
        "rank": Meaning(count, to("lora.rank")),
        "train_text_encoder": Meaning(
            SWITCH, refused="text encoders are not trained here; leave it out, and the UNet alone is trained"
        ),
        "debug_loss": Meaning(
            SWITCH, told="single losses are not logged; metrics.jsonl has their means by quarter of the timesteps"
        ),
    },
    always=(
        flag("preset", "sdxl-lora"),
        flag("objective.condition_dropout", 0.0),
        flag("validation.captions", 0),
        flag("output.project", "text2image-fine-tune"),
    ),
    export="lora-diffusers",
    drawn_steps=50,
    guidance=_GUIDANCE,
    notes=(ROUNDED_ALPHAS, ENCODED_EVERY_EPOCH, FP32_MATRICES),
    differences=_of_both,
)
