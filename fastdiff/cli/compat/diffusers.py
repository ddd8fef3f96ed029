"""Flags of diffusers' train_text_to_image.py and train_text_to_image_lora.py, and their translation.

Flag names and defaults are theirs.
"""

import argparse
import math
from dataclasses import dataclass

from fastdiff import sanitize
from fastdiff.cli.compat.translation import (
    GRAY_NOTE,
    CountImages,
    Note,
    Translation,
    absolute,
    absolute_or_id,
    flag,
    training,
)
from fastdiff.config.arguments.of_others import PRECISIONS, PREDICTIONS
from fastdiff.config.arguments.types import LARGEST, count
from fastdiff.errors import ConfigError, FastdiffError

_PREDICTION = dict[str | None, str](PREDICTIONS) | {None: "auto"}
_PRECISION = dict[str | None, str](PRECISIONS) | {None: "fp32"}
_FILTERS = ("nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
_SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")

_ALWAYS = (
    "noise, timesteps, order and crops depend on the seed and the position in the run, and are the same on any "
    "number of GPUs; theirs depend on the number of processes and cannot be reproduced",
    "alphas_cumprod stays fp32; theirs is rounded to the dtype of the latents, so in fp16 and bf16 the first "
    "timesteps get no noise",
    "a resumed run continues at the sample where it stopped; theirs restarts the epoch",
    "checkpoints are in checkpoints/step-N of the run folder, with weights, averages, optimizer and position; theirs "
    "are folders checkpoint-N in --output_dir, which accelerate reads; `fastdiff export --step N` writes the weights "
    "of one",
    "text encoders stay as they are, as in their script; --train_text_encoder of train_text_to_image_lora_sdxl.py has "
    "no counterpart",
    "the export replaces that of an earlier start; theirs writes the final weights into --output_dir itself",
    "every step is logged, as in their script; --output.log_every 50 waits for the GPU less often",
    "every step has --batch.samples images, across the epochs; theirs has fewer in the last step of an epoch if "
    "their number is no multiple of the batch",
    "posteriors and embeddings are rounded to 16 bits, as in shards, also in fp32; theirs have the run's precision",
    f"{GRAY_NOTE}; EXIF rotation is applied, as by recent versions of `datasets`",
    "the images are encoded again in every epoch, as in their script; to encode them once, use `fastdiff encode`, "
    "give the shards as --data.path and drop --data.online (centre crops only)",
)
"""Differences of every run."""
_TRACKERS = ("tensorboard", "wandb", "trackio")
_WITHOUT_EPOCHS = 500
"""Steps between validation images where an epoch has an unknown number of them; their default of a checkpoint."""
_ROUNDED = "theirs rounds each epoch up to whole batches"
OF_OTHERS = {
    "--train_text_encoder": "of train_text_to_image_lora_sdxl.py: text encoders are not trained here; leave it out"
}
"""Flags of related scripts that have no counterpart."""

_WITHOUT_PROMPT = "no validation image is drawn"
IDLE = {
    "dataloader_num_workers": "here too 0 is one process that reads",
    "dream_detail_preservation": "it belongs to --dream_training",
    "hub_model_id": "it belongs to --push_to_hub",
    "local_rank": "it is of their launcher; fastdiff numbers its ranks itself",
    "lr_warmup_steps": "the schedule constant has no warm-up, as in theirs",
    "max_train_steps": "--num_train_epochs has as many",
    "num_train_epochs": "--max_train_steps goes before it, as in theirs",
    "num_validation_images": _WITHOUT_PROMPT,
    "scale_lr": "it multiplies by the batch, which is 1",
    "validation_epochs": _WITHOUT_PROMPT,
    "validation_prompt": "--num_validation_images below 1 draws nothing of it",
}
"""Why a flag changes nothing, where the others make it so."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of train_text_to_image.py."""
    _add_common(parser, output_dir="sd-model-finetuned", validation_epochs=5)
    add = parser.add_argument
    add("--input_perturbation", type=float, default=0.0)
    add("--validation_prompts", nargs="+")
    add("--dream_training", action="store_true")
    add("--dream_detail_preservation", type=float, default=1.0)
    for name in ("use_ema", "offload_ema", "foreach_ema"):
        add(f"--{name}", action="store_true")
    add("--non_ema_revision")
    add("--tracker_project_name", default="text2image-fine-tune")


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of train_text_to_image_lora.py."""
    _add_common(parser, output_dir="sd-model-finetuned-lora", validation_epochs=1)
    parser.add_argument("--validation_prompt")
    parser.add_argument("--num_validation_images", type=int, default=4)
    parser.add_argument("--rank", type=count, default=4)


def _add_common(parser: argparse.ArgumentParser, *, output_dir: str, validation_epochs: int) -> None:
    add = parser.add_argument
    add("--pretrained_model_name_or_path", required=True)
    texts = ("revision", "variant", "dataset_name", "dataset_config_name", "train_data_dir", "cache_dir", "hub_token")
    for name in (*texts, "hub_model_id", "resume_from_checkpoint"):
        add(f"--{name}")
    for name, text in (("image_column", "image"), ("caption_column", "text"), ("logging_dir", "logs")):
        add(f"--{name}", default=text)
    add("--output_dir", default=output_dir)
    add("--image_interpolation_mode", default="lanczos", choices=_FILTERS)
    add("--report_to", default="tensorboard")
    add("--max_train_samples", type=count)
    for name in ("max_train_steps", "checkpoints_total_limit"):
        add(f"--{name}", type=int)
    counts = {
        "resolution": 512, "train_batch_size": 16, "gradient_accumulation_steps": 1, "checkpointing_steps": 500,
    }  # fmt: skip
    for name, number in counts.items():
        add(f"--{name}", type=count, default=number)
    whole = {
        "num_train_epochs": 100, "lr_warmup_steps": 500, "dataloader_num_workers": 0, "local_rank": -1,
        "validation_epochs": validation_epochs,
    }  # fmt: skip
    for name, number in whole.items():
        add(f"--{name}", type=int, default=number)
    add("--seed", type=int)
    real = {
        "learning_rate": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_weight_decay": 1e-2,
        "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "noise_offset": 0.0,
    }  # fmt: skip
    for name, value in real.items():
        add(f"--{name}", type=float, default=value)
    add("--snr_gamma", type=float)
    add("--lr_scheduler", default="constant", choices=_SCHEDULES)
    add("--prediction_type", choices=("epsilon", "v_prediction"))
    add("--mixed_precision", choices=("no", "fp16", "bf16"))
    for name in (
        "center_crop", "random_flip", "gradient_checkpointing", "scale_lr", "use_8bit_adam", "allow_tf32",
        "push_to_hub", "enable_xformers_memory_efficient_attention",
    ):  # fmt: skip
        add(f"--{name}", action="store_true")


def translate(flags: argparse.Namespace, gpus: int, count_images: CountImages) -> Translation:
    """Translate train_text_to_image.py."""
    done = Translation()
    own = [
        *flag("objective.input_perturbation", abs(flags.input_perturbation) or None),
        *(flag("objective.dream", True) if flags.dream_training else []),
        *(flag("objective.dream_detail_preservation", flags.dream_detail_preservation) if flags.dream_training else []),
        *flag("ema.rates", (0.9999,) if flags.use_ema else ()),
        *flag("ema.warmup", flags.use_ema),
        *flag("output.project", flags.tracker_project_name),
    ]
    drawn = _Drawn(flags.validation_prompts or [], images=1, steps=20)
    _add_commands(done, flags, gpus, count_images, own, drawn, "diffusers")
    for name in ("offload_ema", "foreach_ema"):
        done.note(getattr(flags, name), f"--{name}: the average is always fused, and sharded over the GPUs by ZeRO")
    done.note(not flags.max_grad_norm, "--max_grad_norm 0: nothing is clipped; theirs multiplies every gradient by 0")
    done.note(flags.non_ema_revision, "--non_ema_revision: the UNet is taken from --pretrained.revision too")
    return done


def translate_lora(flags: argparse.Namespace, gpus: int, count_images: CountImages) -> Translation:
    """Translate train_text_to_image_lora.py."""
    done = Translation()
    asked = flags.validation_prompt is not None and flags.num_validation_images > 0
    drawn = _Drawn([flags.validation_prompt] if asked else [], images=flags.num_validation_images, steps=30)
    own = [*flag("lora.rank", flags.rank), *flag("ema.rates", ())]
    _add_commands(done, flags, gpus, count_images, own, drawn, "lora-diffusers")
    done.note(
        flags.max_grad_norm,
        "--max_grad_norm clips the gradient; in their script it has no effect, because its list of parameters is empty",
    )
    done.notes.append(
        "the added matrices and their Adam state are fp32 in every precision; theirs are bf16 with "
        "--mixed_precision bf16"
    )
    return done


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The validation images of a script."""

    prompts: list[str]
    images: int
    """Per prompt."""
    steps: int
    """Denoising steps."""


def _add_commands(
    done: Translation,
    flags: argparse.Namespace,
    gpus: int,
    count_images: CountImages,
    own: list[str],
    drawn: _Drawn,
    export: str,
) -> None:
    _check(flags)
    batch = _batch(flags, gpus)
    epoch, why = _steps_per_epoch(flags, gpus, count_images, asked=flags.max_train_steps is None or drawn.prompts)
    steps = flags.max_train_steps or (flags.num_train_epochs * epoch if epoch else None)
    train = training(
        gpus,
        flag("preset", "sd15-finetune"),
        flag("samples", steps * batch) if steps else flag("epochs", flags.num_train_epochs),
        flag("seed", flags.seed),
        flag("pretrained.path", absolute_or_id("--pretrained_model_name_or_path", flags.pretrained_model_name_or_path)),
        flag("pretrained.revision", flags.revision),
        flag("pretrained.variant", flags.variant),
        flag("data.online", True),
        flag("data.path", _source(flags)),
        _data(flags),
        flag("batch.samples", batch),
        flag("batch.micro", flags.train_batch_size),
        _objective(flags),
        _optimizer(flags, gpus),
        _performance(flags),
        own,
        _validation(flags, drawn, epoch),
        _output(flags, steps),
    )
    run = absolute("--output_dir", flags.output_dir)
    done.commands += [train, ["fastdiff", "export", run, f"{run}/export", "--overwrite", "--format", export]]
    if flags.push_to_hub:
        done.commands[-1] += ["--push-to-hub", flags.hub_model_id or flags.output_dir.rstrip("/").split("/")[-1]]
    done.notes += _ALWAYS
    done.note(why and not steps, f"--epochs {flags.num_train_epochs}: {why}, so the training counts them; {_ROUNDED}")
    done.note(
        why and drawn.prompts,
        f"--validation_epochs: {why}, so the images are drawn every {_WITHOUT_EPOCHS} steps: set --validation.every to "
        "the steps of an epoch times --validation_epochs",
    )
    notes = (*_notes_of_numbers(flags), *_notes_of_data(flags), *_notes_of_results(flags, drawn))
    for condition, text in notes:
        done.note(condition, text)


def _check(flags: argparse.Namespace) -> None:
    asked = getattr(flags, "validation_prompts", None) or getattr(flags, "validation_prompt", None) is not None
    if asked and not flags.validation_epochs:
        raise ConfigError("--validation_epochs 0 with a validation prompt: their script divides by it; at least 1")
    if (flags.num_train_epochs if flags.max_train_steps is None else flags.max_train_steps) < 1:
        name = "--num_train_epochs" if flags.max_train_steps is None else "--max_train_steps"
        raise ConfigError(f"{name}: their script takes no step below 1, and saves the weights that it began with")
    if not flags.dataset_name and not flags.train_data_dir:
        raise ConfigError("neither --dataset_name nor --train_data_dir is given; one of them names the images")
    if flags.report_to == "wandb" and flags.hub_token:
        raise ConfigError("--report_to wandb with --hub_token: their script refuses it too; use `hf auth login`")


def _source(flags: argparse.Namespace) -> str:
    if not flags.dataset_name:
        return absolute("--train_data_dir", flags.train_data_dir)
    if sanitize.is_address(flags.dataset_name):  # tars, which the trainer reads wherever they are
        return str(flags.dataset_name)
    return absolute_or_id("--dataset_name", flags.dataset_name)


def _batch(flags: argparse.Namespace, gpus: int) -> int:
    return int(flags.train_batch_size * gpus * flags.gradient_accumulation_steps)


def _steps_per_epoch(
    flags: argparse.Namespace, gpus: int, count_images: CountImages, *, asked: object
) -> tuple[int | None, str]:
    """Return the optimizer steps of an epoch; None, and why, if the images cannot be counted here, or without need."""
    if not asked:
        return None, ""
    source = _source(flags)
    columns = {"image_column": flags.image_column, "caption_column": flags.caption_column}
    try:
        images = count_images(source, dataset_config=_dataset_config(flags), **columns)
    except FastdiffError as error:
        return None, f"the images of {source} cannot be counted here ({error})"
    images = min(images, flags.max_train_samples or images)
    per_process = math.ceil(math.ceil(images / gpus) / flags.train_batch_size)
    return math.ceil(per_process / flags.gradient_accumulation_steps), ""


def _dataset_config(flags: argparse.Namespace) -> str | None:
    return flags.dataset_config_name if flags.dataset_name else None


def _data(flags: argparse.Namespace) -> list[str]:
    return [
        *flag("data.resolution", flags.resolution),
        *flag("data.center_crop", flags.center_crop),
        *flag("data.random_flip", flags.random_flip),
        *flag("data.image_interpolation_mode", flags.image_interpolation_mode),
        *flag("data.image_column", flags.image_column),
        *flag("data.caption_column", flags.caption_column),
        *flag("data.dataset_config", _dataset_config(flags)),
        *flag("data.max_samples", flags.max_train_samples),
        *flag("data.subset", "random" if flags.max_train_samples else None),
        *flag("data.workers", max(1, flags.dataloader_num_workers)),
        *flag("data.decode", "pillow"),
    ]


def _objective(flags: argparse.Namespace) -> list[str]:
    return [
        *flag("objective.prediction", _PREDICTION[flags.prediction_type]),
        *flag("objective.min_snr_gamma", flags.snr_gamma),
        *flag("objective.noise_offset", abs(flags.noise_offset) or None),  # the noise has no sign
        *flag("objective.condition_dropout", 0.0),
    ]


def _optimizer(flags: argparse.Namespace, gpus: int) -> list[str]:
    rate = flags.learning_rate * (_batch(flags, gpus) if flags.scale_lr else 1)
    return [
        *flag("optim.name", "adamw8bit" if flags.use_8bit_adam else "adamw"),
        *flag("optim.lr", rate),
        *flag("optim.betas", (flags.adam_beta1, flags.adam_beta2)),
        *flag("optim.weight_decay", flags.adam_weight_decay),
        *flag("optim.eps", flags.adam_epsilon),
        *flag("optim.clip", flags.max_grad_norm if math.isfinite(flags.max_grad_norm) else 0.0),
        *flag("optim.schedule", flags.lr_scheduler),
        *flag("optim.warmup_steps", None if flags.lr_scheduler == "constant" else max(0, flags.lr_warmup_steps)),
    ]


def _performance(flags: argparse.Namespace) -> list[str]:
    return [
        *flag("performance.precision", _PRECISION[flags.mixed_precision]),
        *flag("performance.allow_tf32", flags.allow_tf32),
        *flag("performance.recompute", flags.gradient_checkpointing),
        *flag("performance.attention", "xformers" if flags.enable_xformers_memory_efficient_attention else None),
    ]


def _validation(flags: argparse.Namespace, drawn: _Drawn, epoch: int | None) -> list[str]:
    if not drawn.prompts:
        return []
    # Python's remainder by -n is 0 as often as that by n.
    every = abs(flags.validation_epochs) * epoch if epoch else _WITHOUT_EPOCHS
    return [
        *flag("validation.prompts", drawn.prompts),
        *flag("validation.first", epoch or _WITHOUT_EPOCHS),
        *flag("validation.every", every),
        *flag("validation.images_per_prompt", drawn.images),
        *flag("validation.steps", drawn.steps),
    ]


def _output(flags: argparse.Namespace, steps: int | None) -> list[str]:
    trackers = ("tensorboard", "wandb") if flags.report_to == "all" else (flags.report_to,)
    every, limit = flags.checkpointing_steps, flags.checkpoints_total_limit
    of_all = math.ceil(steps / every) + 1 if steps else LARGEST
    return [
        *flag("output.folder", absolute("--output_dir", flags.output_dir)),
        *flag("output.log_every", 1),
        *flag("output.checkpoint_every", every),
        *flag("output.keep", of_all if limit is None else max(1, limit)),  # theirs keeps one for a limit of 0
        *flag("output.report_to", [name for name in trackers if name in _TRACKERS]),
    ]


def _notes_of_numbers(flags: argparse.Namespace) -> list[Note]:
    """Return the notes on seeds, precision and initial weights."""
    return [
        (
            flags.seed is not None,
            "with --seed all of their processes draw the same noise and timesteps; here every sample has its own",
        ),
        (flags.seed is None, "without --seed their run cannot be repeated; here the seed is 0"),
        (
            (flags.mixed_precision or "no") != "no",
            "the weights of the forward pass are in 16 bits, with fp32 masters (DeepSpeed); theirs are fp32 under "
            "autocast",
        ),
        (
            flags.mixed_precision is None,
            "without --mixed_precision theirs is the precision of `accelerate launch`; here it is fp32: add "
            "--performance.precision bf16 if theirs is lower",
        ),
        (
            flags.variant,
            f"--variant {flags.variant}: the UNet is taken from that variant too; theirs starts from the plain weights",
        ),
    ]


def _notes_of_data(flags: argparse.Namespace) -> list[Note]:
    """Return the notes on images, and on what is downloaded."""
    return [
        (
            flags.dataset_name and flags.train_data_dir,
            "--train_data_dir is not used together with --dataset_name; theirs passes it to the data set's loading "
            "script",
        ),
        (
            flags.dataset_config_name and not flags.dataset_name,
            "--dataset_config_name belongs to --dataset_name, which is not given",
        ),
        (flags.max_train_samples, "--max_train_samples: --seed draws the images, others than their generator"),
        (flags.cache_dir, f"--cache_dir: set the environment variable HF_HOME={flags.cache_dir} instead"),
        (flags.hub_token, "--hub_token: log in with `hf auth login`; a token must not be on a command line"),
    ]


def _notes_of_results(flags: argparse.Namespace, drawn: _Drawn) -> list[Note]:
    """Return the notes on checkpoints, validation images and trackers."""
    return [
        (drawn.prompts, "validation images are drawn with DPM-Solver++; theirs with the scheduler of the pipeline"),
        (
            flags.checkpoints_total_limit,
            "--checkpoints_total_limit: an old checkpoint is deleted when the new one is complete; theirs before",
        ),
        (
            not flags.resume_from_checkpoint,
            "without --resume_from_checkpoint theirs starts anew in the same --output_dir; here the same command "
            "resumes: for a new run give another --output.folder, or remove the old one",
        ),
        (
            flags.resume_from_checkpoint == "latest",
            "--resume_from_checkpoint latest: the same command resumes by itself (--resume never disables that)",
        ),
        (
            flags.resume_from_checkpoint not in (None, "", "latest"),
            f"--resume_from_checkpoint {flags.resume_from_checkpoint}: the same command resumes from the newest "
            "checkpoint of the run folder; one of accelerate is a pickle and is not read, but its unet/ can be part of "
            "the pipeline of --pretrained.path",
        ),
        (flags.report_to == "all", "--report_to all: tensorboard and wandb; comet_ml and others are not supported"),
        (
            flags.report_to not in (*_TRACKERS, "all"),
            f"--report_to {flags.report_to}: not supported; known are {', '.join(_TRACKERS)}; metrics.jsonl has all "
            "values",
        ),
        (flags.logging_dir != "logs", "--logging_dir: TensorBoard's files are in tensorboard/ of the run folder"),
    ]
