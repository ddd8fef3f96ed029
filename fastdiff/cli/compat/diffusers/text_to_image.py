"""train_text_to_image.py and train_text_to_image_lora.py, for Stable Diffusion 1.x and 2.x; defaults are theirs."""

from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.diffusers.notes import ENCODED_EVERY_EPOCH
from fastdiff.cli.compat.diffusers.script import DiffusersScript, fine_tuning
from fastdiff.cli.compat.table import REQUIRED, SWITCH, Defaults, Meaning, to
from fastdiff.cli.compat.translation import Note, flag
from fastdiff.config.arguments.types import count

_NONE = dict.fromkeys((
    "revision", "variant", "dataset_name", "dataset_config_name", "train_data_dir", "max_train_samples", "cache_dir",
    "seed", "max_train_steps", "snr_gamma", "prediction_type", "hub_token", "hub_model_id", "mixed_precision",
    "checkpoints_total_limit", "resume_from_checkpoint",
))  # fmt: skip
_OFF = dict.fromkeys((
    "center_crop", "random_flip", "gradient_checkpointing", "scale_lr", "use_8bit_adam", "allow_tf32", "push_to_hub",
    "enable_xformers_memory_efficient_attention",
), False)  # fmt: skip
SHARED: dict[str, object] = {
    "pretrained_model_name_or_path": REQUIRED, **_NONE, **_OFF, "image_column": "image", "caption_column": "text",
    "image_interpolation_mode": "lanczos", "train_batch_size": 16, "num_train_epochs": 100,
    "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "lr_scheduler": "constant", "lr_warmup_steps": 500,
    "dataloader_num_workers": 0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_weight_decay": 1e-2,
    "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "noise_offset": 0.0, "logging_dir": "logs", "report_to": "tensorboard",
    "local_rank": -1, "checkpointing_steps": 500,
}  # fmt: skip
"""Defaults that the text-to-image scripts share, those of Stable Diffusion XL included."""
_DEFAULTS: Defaults = SHARED | {
    "output_dir": "sd-model-finetuned", "resolution": 512, "validation_prompts": None, "validation_epochs": 5,
    "input_perturbation": 0.0, "dream_training": False, "dream_detail_preservation": 1.0, "use_ema": False,
    "offload_ema": False, "foreach_ema": False, "non_ema_revision": None,
    "tracker_project_name": "text2image-fine-tune",
}  # fmt: skip
_DEFAULTS_OF_LORA: Defaults = SHARED | {
    "output_dir": "sd-model-finetuned-lora", "resolution": 512, "validation_prompt": None, "validation_epochs": 1,
    "num_validation_images": 4, "rank": 4,
}  # fmt: skip
ROUNDED_ALPHAS = (
    "alphas_cumprod stays fp32; theirs is rounded to the dtype of the latents, so in fp16 and bf16 the first "
    "timesteps get no noise"
)
FP32_MATRICES = (
    "the added matrices and their Adam state are fp32 in every precision; theirs are bf16 with --mixed_precision bf16"
)
_NOTES = (
    ROUNDED_ALPHAS,
    "text encoders stay as they are, as in their script; --train_text_encoder of train_text_to_image_lora_sdxl.py has "
    "no counterpart",
    ENCODED_EVERY_EPOCH,
)
OF_OTHERS = {
    "--train_text_encoder": "of train_text_to_image_lora_sdxl.py: text encoders are not trained here; leave it out"
}
"""Flags of related scripts that have no counterpart."""
_FUSED = "the average is always fused, and sharded over the GPUs by ZeRO"


def average(_: object, on: bool) -> list[str]:
    """Return the words of --use_ema."""
    return [*flag("ema.rates", (0.9999,) if on else ()), *flag("ema.warmup", on)]


def unclipped(given: Given) -> Note:
    """Return the note on a limit of 0."""
    return (
        not given.flags.max_grad_norm,
        "--max_grad_norm 0: nothing is clipped; theirs multiplies every gradient by 0",
    )


def variant(given: Given) -> Note:
    """Return the note on --variant in a script that does not take the network from it."""
    name = given.flags.variant
    return (
        name,
        f"--variant {name}: the UNet is taken from that variant too; theirs starts from the plain weights",
    )


def _preservation(given: Given, power: float) -> list[str]:
    return flag("objective.dream_detail_preservation", power if given.flags.dream_training else None)


def _differences(given: Given) -> list[Note]:
    return [unclipped(given), variant(given)]


def _differences_of_lora(given: Given) -> list[Note]:
    return [
        variant(given),
        (
            given.flags.max_grad_norm,
            "--max_grad_norm clips the gradient; in their script it has no effect, because its list of parameters is "
            "empty",
        ),
    ]


TEXT_TO_IMAGE = DiffusersScript(
    defaults=_DEFAULTS,
    own={
        "validation_prompts": Meaning(several="+"),
        "input_perturbation": Meaning(float, lambda _, scale: flag("objective.input_perturbation", abs(scale) or None)),
        "dream_training": Meaning(SWITCH, lambda _, on: flag("objective.dream", on or None)),
        "dream_detail_preservation": Meaning(float, _preservation, idle="it belongs to --dream_training"),
        "use_ema": Meaning(SWITCH, average),
        "offload_ema": Meaning(SWITCH, told=_FUSED),
        "foreach_ema": Meaning(SWITCH, told=_FUSED),
        "non_ema_revision": Meaning(told="the UNet is taken from --pretrained.revision too"),
        "tracker_project_name": Meaning(str, to("output.project")),
    },
    always=fine_tuning(),
    export="diffusers",
    drawn_steps=20,
    notes=_NOTES,
    differences=_differences,
)

TEXT_TO_IMAGE_LORA = DiffusersScript(
    defaults=_DEFAULTS_OF_LORA,
    own={"rank": Meaning(count, to("lora.rank"))},
    always=fine_tuning(flag("ema.rates", ())),
    export="lora-diffusers",
    drawn_steps=30,
    notes=(*_NOTES, FP32_MATRICES),
    differences=_differences_of_lora,
)
