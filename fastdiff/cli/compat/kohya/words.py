"""Words of the training command for flags of sd-scripts that depend on others, or are refused by their value."""

import argparse
import math
import re
from typing import Any

from fastdiff.cli.compat.kohya.given import Given
from fastdiff.cli.compat.translation import flag
from fastdiff.config.arguments.of_others import PRECISIONS
from fastdiff.config.arguments.types import LARGEST
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.optimizers.registry import optimizers
from fastdiff.errors import ConfigError, require

_SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
_PAGED = {"pagedadamw8bit": "adamw8bit", "pagedadamw": "adamw", "pagedadamw32bit": "adamw"}


def int_or_share(text: str) -> float:
    """Return a number of steps, or a share of all: below 1, or in percent."""
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    return int(text) if value >= 1 and not text.endswith("%") else value


def extension(text: str) -> str:
    """Return an ending of caption files that is read here."""
    if not re.fullmatch(r"\.\w+", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text}: expected one ending of caption files, such as .txt; rename the files"
        )
    return text


def length(given: Given, steps: int) -> list[str]:
    """Return the samples or epochs of the run."""
    epochs = given.flags.max_train_epochs
    return flag("epochs", epochs) if epochs else flag("samples", steps * given.batch)


def data(given: Given, _: object) -> list[str]:
    """Return the folder of shards; that of a file of metadata is one data set, which is repeated."""
    pictures = given.pictures
    mirrored = flag("data.random_flip", True) if pictures.mirrored else []
    repeats = given.flags.dataset_repeats
    if given.flags.in_json and not given.flags.dataset_config and repeats > 1:
        return [*flag("data.sets", [f"{given.data}:{repeats}"]), *mirrored]
    return [*flag("data.path", given.data), *mirrored]


def dropout(given: Given, _: float) -> list[str]:
    """Return the share of dropped captions; where data sets differ in it, the encoded data have that of each."""
    return flag("objective.condition_dropout", max(subset["caption_dropout_rate"] for subset in given.pictures.subsets))


def rate(given: Given, rate: float) -> list[str]:
    """Return the learning rate of the network."""
    own = getattr(given.flags, "unet_lr", None)
    return flag("optim.lr", rate if own is None else own)


def optimizer(given: Given, name: str) -> list[str]:
    """Return the optimizer."""
    flags = given.flags
    short = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}
    shortened = [word for switch, word in short.items() if getattr(flags, switch)]
    if shortened and name:
        raise ConfigError(
            f"--optimizer_type {name} beside --use_8bit_adam or --use_lion_optimizer: theirs refuses it too"
        )
    wanted = (name or next(iter(shortened), "AdamW")).lower()
    families = {own: family for own, family in optimizers().items() if issubclass(family.config, AdamWConfig)}
    known = {alias: own for own, family in families.items() for alias in (own, *family.aliases)}
    ours = known.get(_PAGED.get(wanted, wanted))
    if ours is None:
        asked = f"--optimizer_type {name}" if name else "--use_lion_optimizer"
        raise ConfigError(f"{asked}: AdamW alone is translated, as {', '.join(families)}")
    return flag("optim.name", ours)


def arguments(_: Given, words: list[str] | None) -> list[str]:
    """Return the arguments of the optimizer, with its defaults."""
    found = {"weight_decay": "0.01", "betas": "0.9,0.999", "eps": "1e-08"}  # of torch and bitsandbytes
    for word in words or ():
        name, equals, value = word.partition("=")
        known = ", ".join(found)
        require(bool(equals) and name in found, f"--optimizer_args {word}: known are {known}, as NAME=VALUE")
        found[name] = value
    betas = tuple(part.strip() for part in found["betas"].strip("()[]").split(","))
    return [
        *flag("optim.weight_decay", found["weight_decay"]),
        *flag("optim.betas", betas),
        *flag("optim.eps", found["eps"]),
    ]


def schedule(given: Given, name: str) -> list[str]:
    """Return the schedule of the learning rate."""
    if name not in _SCHEDULES:
        raise ConfigError(f"--lr_scheduler {name}: not known here; known are {', '.join(_SCHEDULES)}")
    return flag("optim.schedule", name)


def warmup(given: Given, steps: float) -> list[str]:
    """Return the steps of the warm-up."""
    if not steps:
        return flag("optim.warmup_steps", 0)
    if given.flags.lr_scheduler == "constant":
        raise ConfigError(
            f"--lr_warmup_steps {steps:g} with --lr_scheduler constant: theirs refuses it; use constant_with_warmup"
        )
    if isinstance(steps, float):
        total = given.steps or (given.epoch and given.epoch * given.flags.max_train_epochs)
        if not total:
            raise ConfigError(
                f"--lr_warmup_steps {steps:g}: a share of --max_train_epochs, and the pictures are not here to be "
                "counted; give the number of steps"
            )
        steps = int(steps * total)
    return flag("optim.warmup_steps", int(steps))


def cycles(given: Given, cycles: int) -> list[str]:
    """Return nothing: a schedule has one cycle."""
    used = given.flags.lr_scheduler == "cosine_with_restarts"
    require(cycles == 1 or not used, f"--lr_scheduler_num_cycles {cycles}: the schedule has one cycle here")
    return []


def power(given: Given, power: float) -> list[str]:
    """Return nothing: the power is 1."""
    used = given.flags.lr_scheduler == "polynomial"
    require(power == 1 or not used, f"--lr_scheduler_power {power:g}: the polynomial schedule is of power 1 here")
    return []


def precision(given: Given, name: str) -> list[str]:
    """Return the dtype of the passes."""
    flags = given.flags
    full = "bf16" if flags.full_bf16 else "fp16" if flags.full_fp16 else name
    require(full == name, f"--full_{full} needs --mixed_precision {full}, as in theirs")
    return flag("performance.precision", PRECISIONS[name])


def attention(given: Given, _: bool) -> list[str]:
    """Return the backend of attention."""
    return flag("performance.attention", "xformers" if given.flags.xformers else None)


def every(name: str, epochs: str) -> Any:
    """Return the words of an interval in steps, or in epochs by another flag."""

    def words(given: Given, steps: int | None) -> list[str]:
        number = getattr(given.flags, epochs)
        if steps is None and number:
            if given.epoch is None:
                raise ConfigError(f"--{epochs} {number}: the pictures are not here to be counted; give it in steps")
            steps = number * given.epoch
        return flag(name, steps)

    return words


def checkpoints(given: Given, steps: int | None) -> list[str]:
    """Return how often checkpoints are written, and how many stay."""
    found = every("output.checkpoint_every", "save_every_n_epochs")(given, steps)
    return [*(found or flag("output.checkpoint_every", 0)), *_kept(given, found)]


def _kept(given: Given, every: list[str]) -> list[str]:
    flags = given.flags
    if not every:
        return flag("output.keep", 1)
    interval = int(every[1])
    if flags.save_last_n_steps is not None:
        return flag("output.keep", flags.save_last_n_steps // interval + 1)
    if flags.save_last_n_epochs is not None:
        return flag("output.keep", max(1, flags.save_last_n_epochs))
    return flag("output.keep", math.ceil(given.steps / interval) + 1 if given.steps else LARGEST)


def samples(given: Given, steps: int | None) -> list[str]:
    """Return the sample images."""
    if not given.prompts:
        return []
    words = every("validation.every", "sample_every_n_epochs")(given, steps)
    return [*flag("validation.prompts", given.prompts), *words, *flag("validation.images_per_prompt", 1)]


def trackers(given: Given, name: str | None) -> list[str]:
    """Return the trackers; without --logging_dir there is none."""
    flags = given.flags
    named = {"all": ("tensorboard", "wandb"), None: ("tensorboard",)}.get(name, (name,))
    if "tensorboard" in named and not flags.logging_dir:
        require(name is None, f"--log_with {name}: theirs needs --logging_dir for tensorboard")
        named = ()
    return flag("output.report_to", list(named))


def noise_offset(given: Given, size: float | None) -> list[str]:
    """Return the offset, which has no sign."""
    return flag("objective.noise_offset", abs(size) if size else None)  # it has no sign


def perturbation(_: Given, scale: float | None) -> list[str]:
    """Return the extra noise on the input, which has no sign."""
    return flag("objective.input_perturbation", abs(scale) if scale else None)


def multires(given: Given, iterations: int | None) -> list[str]:
    """Return the noise of several resolutions."""
    if not iterations:
        return []
    discount = flag("objective.multires_noise_discount", given.flags.multires_noise_discount)
    return [*flag("objective.multires_noise_iterations", iterations), *discount]


def zero(given: Given, on: bool) -> list[str]:
    """Return the configuration of DeepSpeed."""
    if not on:
        return []
    flags = given.flags
    named = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
    off = [name for name in ("optimizer", "param") if getattr(flags, f"offload_{name}_device")]
    if off and (flags.zero_stage != 3 or any(getattr(flags, f"offload_{name}_device") == "nvme" for name in off)):
        raise ConfigError(
            f"--offload_{off[0]}_device: only --zero_stage 3 with cpu has a name here, zero3_offload; for others write "
            "a configuration of DeepSpeed and give --deepspeed_config FILE"
        )
    return ["--deepspeed_config", "zero3_offload" if off else named[flags.zero_stage]]


def timesteps(end: int) -> Any:
    """Return the words of one end of the timesteps, which is where they end anyway; ConfigError: it is another."""

    def words(_: Given, number: int | None) -> list[str]:
        name = "min_timestep" if end == 0 else "max_timestep"
        require(
            number in (None, end),
            f"--{name} {number}: all timesteps are trained; --timesteps.density range makes some of them more frequent",
        )
        return []

    return words
