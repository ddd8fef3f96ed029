"""Differences between a run of fastdiff and one of a script of diffusers."""

from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.diffusers.meanings import TRACKERS, WITHOUT_EPOCHS
from fastdiff.cli.compat.translation import GRAY_NOTE, Note

_ROUNDED = "theirs rounds each epoch up to whole batches"
ALWAYS = (
    "noise, timesteps, order and crops depend on the seed and the position in the run, and are the same on any "
    "number of GPUs; theirs depend on the number of processes and cannot be reproduced",
    "a resumed run continues at the sample where it stopped; theirs restarts the epoch",
    "checkpoints are in checkpoints/step-N of the run folder, with weights, averages, optimizer and position; theirs "
    "are folders checkpoint-N in --output_dir, which accelerate reads; `fastdiff export --step N` writes the weights "
    "of one",
    "the export replaces that of an earlier start; theirs writes the final weights into --output_dir itself",
    "every step is logged, as in their script; --output.log_every 50 waits for the GPU less often",
    "every step has --batch.samples images, across the epochs; theirs has fewer in the last step of an epoch if "
    "their number is no multiple of the batch",
    "posteriors and embeddings are rounded to 16 bits, as in shards, also in fp32; theirs have the run's precision",
    f"{GRAY_NOTE}; EXIF rotation is applied, as by recent versions of `datasets`",
)
"""Of every script."""
ENCODED_EVERY_EPOCH = (
    "the images are encoded again in every epoch, as in their script; to encode them once, use `fastdiff encode`, "
    "give the shards as --data.path and drop --data.online (centre crops only)"
)


def differences(given: Given) -> list[Note]:
    """Return the differences that depend on the flags, each with its condition."""
    return [*_of_length(given), *_of_numbers(given), *_of_data(given), *_of_results(given)]


def _of_length(given: Given) -> list[Note]:
    why = given.epoch[1]
    return [
        (
            why and not given.steps,
            f"--epochs {given.flags.num_train_epochs}: {why}, so the training counts them; {_ROUNDED}",
        ),
        (
            why and given.prompts,
            f"--validation_epochs: {why}, so the images are drawn every {WITHOUT_EPOCHS} steps: set --validation.every "
            "to the steps of an epoch times --validation_epochs",
        ),
    ]


def _of_numbers(given: Given) -> list[Note]:
    """Return the notes on seeds, precision and initial weights."""
    flags = given.flags
    return [
        (
            flags.seed is not None,
            "with --seed all of their processes draw the same noise and timesteps; here every sample has its own",
        ),
        (flags.seed is None, "without --seed their run cannot be repeated; here the seed is 0"),
        (
            (flags.mixed_precision or "no") != "no"
            and not hasattr(flags, "rank"),  # frozen ones are in 16 bits in both
            "the weights of the forward pass are in 16 bits, with fp32 masters (DeepSpeed); theirs are fp32 under "
            "autocast",
        ),
        (
            flags.mixed_precision is None,
            "without --mixed_precision theirs is the precision of `accelerate launch`; here it is fp32: add "
            "--performance.precision bf16 if theirs is lower",
        ),
    ]


def _of_data(given: Given) -> list[Note]:
    """Return the notes on images, and on what is downloaded."""
    flags = given.flags
    return [
        (
            flags.dataset_name and getattr(flags, "train_data_dir", None),
            "--train_data_dir is not used together with --dataset_name; theirs passes it to the data set's loading "
            "script",
        ),
        (
            flags.dataset_config_name and not flags.dataset_name,
            "--dataset_config_name belongs to --dataset_name, which is not given",
        ),
        (flags.cache_dir, f"--cache_dir: set the environment variable HF_HOME={flags.cache_dir} instead"),
    ]


def _of_results(given: Given) -> list[Note]:
    """Return the notes on checkpoints, validation images and trackers."""
    flags = given.flags
    return [
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
            flags.report_to not in (*TRACKERS, "all"),
            f"--report_to {flags.report_to}: not supported; known are {', '.join(TRACKERS)}; metrics.jsonl has all "
            "values",
        ),
    ]
