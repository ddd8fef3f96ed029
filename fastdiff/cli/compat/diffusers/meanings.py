"""What the flags are that scripts of diffusers share."""

import math

from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.table import SWITCH, Meaning, to
from fastdiff.cli.compat.translation import absolute, absolute_or_id, flag
from fastdiff.config.arguments.of_others import PRECISIONS, PREDICTIONS
from fastdiff.config.arguments.types import LARGEST, count

TRACKERS = ("tensorboard", "wandb", "trackio")
WITHOUT_EPOCHS = 500
"""Steps between validation images where an epoch has an unknown number of them; their default of a checkpoint."""
_PREDICTION = dict[str | None, str](PREDICTIONS) | {None: "auto"}
_PRECISION = dict[str | None, str](PRECISIONS) | {None: "fp32"}
_FILTERS = ("nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
_SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
_WITHOUT_PROMPT = "no validation image is drawn"


def _length(given: Given, _: object) -> list[str]:
    if given.steps:
        return flag("samples", given.steps * given.batch)
    return flag("epochs", given.flags.num_train_epochs)


def _pipeline(given: Given, path: str) -> list[str]:
    return flag("pretrained.path", absolute_or_id("--pretrained_model_name_or_path", path))


def _subset(given: Given, samples: int | None) -> list[str]:
    return [*flag("data.max_samples", samples), *flag("data.subset", "random" if samples else None)]


def _rate(given: Given, rate: float) -> list[str]:
    return flag("optim.lr", rate * (given.batch if given.flags.scale_lr else 1))


def _warmup(given: Given, steps: int) -> list[str]:
    return flag("optim.warmup_steps", 0 if given.flags.lr_scheduler == "constant" else max(0, steps))


def _validation(given: Given, epochs: int) -> list[str]:
    if not given.prompts:
        return []
    epoch, _ = given.epoch
    return [
        *flag("validation.prompts", given.prompts),
        *flag("validation.first", epoch or WITHOUT_EPOCHS),
        # Python's remainder by -n is 0 as often as that by n.
        *flag("validation.every", abs(epochs) * epoch if epoch else WITHOUT_EPOCHS),
        *flag("validation.images_per_prompt", getattr(given.flags, "num_validation_images", 1)),
        *flag("validation.steps", given.drawn_steps),
        *flag("validation.guidance_scale", given.guidance),
    ]


def _kept(given: Given, limit: int | None) -> list[str]:
    steps = given.steps
    of_all = math.ceil(steps / given.flags.checkpointing_steps) + 1 if steps else LARGEST
    return flag("output.keep", of_all if limit is None else max(1, limit))  # theirs keeps one for a limit of 0


def _trackers(given: Given, name: str) -> list[str]:
    named = ("tensorboard", "wandb") if name == "all" else (name,)
    return flag("output.report_to", [each for each in named if each in TRACKERS])


MEANINGS: dict[str, Meaning] = {
    # Length, seed and weights
    "max_train_steps": Meaning(int, _length, idle="--num_train_epochs has as many"),
    "num_train_epochs": Meaning(int, idle="--max_train_steps goes before it, as in theirs"),
    "seed": Meaning(int, to("seed")),
    "pretrained_model_name_or_path": Meaning(str, _pipeline),
    "revision": Meaning(str, to("pretrained.revision")),
    "variant": Meaning(str, to("pretrained.variant")),
    # Data
    "dataset_name": Meaning(str, lambda given, _: [*flag("data.online", True), *flag("data.path", given.source)]),
    "train_data_dir": Meaning(),
    "resolution": Meaning(count, to("data.resolution")),
    "center_crop": Meaning(SWITCH, to("data.center_crop")),
    "random_flip": Meaning(SWITCH, to("data.random_flip")),
    "image_interpolation_mode": Meaning(str, to("data.image_interpolation_mode"), choices=_FILTERS),
    "image_column": Meaning(str, to("data.image_column")),
    "caption_column": Meaning(str, to("data.caption_column")),
    "dataset_config_name": Meaning(str, lambda given, _: flag("data.dataset_config", given.dataset_config)),
    "max_train_samples": Meaning(count, _subset, "--seed draws the images, others than their generator"),
    "dataloader_num_workers": Meaning(
        int,
        lambda _, number: [*flag("data.workers", max(1, number)), *flag("data.decode", "pillow")],
        idle="here too 0 is one process that reads",
    ),
    "cache_dir": Meaning(),
    # Batch
    "gradient_accumulation_steps": Meaning(count, lambda given, _: flag("batch.samples", given.batch)),
    "train_batch_size": Meaning(count, to("batch.micro")),
    # Objective
    "prediction_type": Meaning(
        str,
        lambda _, name: flag("objective.prediction", _PREDICTION[name]),
        choices=("epsilon", "v_prediction"),
    ),
    "snr_gamma": Meaning(float, to("objective.min_snr_gamma")),
    "noise_offset": Meaning(float, lambda _, size: flag("objective.noise_offset", abs(size) or None)),  # it has no sign
    # Optimizer
    "use_8bit_adam": Meaning(SWITCH, lambda _, on: flag("optim.name", "adamw8bit" if on else "adamw")),
    "learning_rate": Meaning(float, _rate),
    "scale_lr": Meaning(SWITCH, idle="it multiplies by the batch, which is 1"),
    "adam_beta1": Meaning(float, lambda given, first: flag("optim.betas", (first, given.flags.adam_beta2))),
    "adam_beta2": Meaning(float),
    "adam_weight_decay": Meaning(float, to("optim.weight_decay")),
    "adam_epsilon": Meaning(float, to("optim.eps")),
    "max_grad_norm": Meaning(float, lambda _, norm: flag("optim.clip", norm if math.isfinite(norm) else 0.0)),
    "lr_scheduler": Meaning(str, to("optim.schedule"), choices=_SCHEDULES),
    "lr_warmup_steps": Meaning(int, _warmup, idle="the schedule constant has no warm-up, as in theirs"),
    # Precision and memory
    "mixed_precision": Meaning(
        str, lambda _, name: flag("performance.precision", _PRECISION[name]), choices=("no", "fp16", "bf16")
    ),
    "allow_tf32": Meaning(SWITCH, to("performance.allow_tf32")),
    "gradient_checkpointing": Meaning(SWITCH, to("performance.recompute")),
    "enable_xformers_memory_efficient_attention": Meaning(
        SWITCH, lambda _, on: flag("performance.attention", "xformers" if on else None)
    ),
    "enable_npu_flash_attention": Meaning(
        SWITCH, refused="it is for Ascend NPUs, which fastdiff does not run on; leave it out on a GPU"
    ),
    # Validation images
    "validation_epochs": Meaning(int, _validation, idle=_WITHOUT_PROMPT),
    "validation_prompt": Meaning(idle="--num_validation_images below 1 draws nothing of it"),
    "num_validation_images": Meaning(int, idle=_WITHOUT_PROMPT),
    # Output
    "output_dir": Meaning(
        str,
        lambda _, folder: [*flag("output.folder", absolute("--output_dir", folder)), *flag("output.log_every", 1)],
    ),
    "checkpointing_steps": Meaning(count, to("output.checkpoint_every")),
    "checkpoints_total_limit": Meaning(int, _kept),
    "report_to": Meaning(str, _trackers),
    "logging_dir": Meaning(told="TensorBoard's files are in tensorboard/ of the run folder"),
    "resume_from_checkpoint": Meaning(),
    "push_to_hub": Meaning(SWITCH),
    "hub_model_id": Meaning(idle="it belongs to --push_to_hub"),
    "hub_token": Meaning(told="log in with `hf auth login`; a token must not be on a command line"),
    "local_rank": Meaning(int, idle="it is of their launcher; fastdiff numbers its ranks itself"),
}
"""By name; their words follow one another in this order."""
