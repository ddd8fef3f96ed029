"""What diffusers' DreamBooth scripts for LoRA share: pictures of one subject, encoded once, and class pictures."""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.diffusers.script import DiffusersScript
from fastdiff.cli.compat.table import REQUIRED, SWITCH, Defaults, Meaning, to
from fastdiff.cli.compat.translation import Note, absolute, absolute_or_id, flag
from fastdiff.config.arguments.types import count
from fastdiff.config.optimizers.adamw import ADAMW
from fastdiff.errors import ConfigError, FastdiffError, require
from fastdiff.files import read_bounded

_LARGEST = 1 << 20
_WEIGHTINGS = {"none": "none", "logit_normal": "none", "mode": "none", "sigma_sqrt": "sigma_sqrt", "cosmap": "cosmap"}
_DENSITIES = {"logit_normal": "logit_normal", "mode": "mode"}
"""Of --weighting_scheme; the others draw uniformly."""
_UNREAD = "their script does not read it"


class DreamBooth(Given):
    """A command line of a DreamBooth script."""

    @property
    def prior(self) -> bool:
        """Whether class pictures are trained, too."""
        return bool(self.flags.with_prior_preservation)

    @cached_property
    def source(self) -> str:
        """The pictures of the subject."""
        flags = self.flags
        if flags.dataset_name:
            return absolute_or_id("--dataset_name", flags.dataset_name)
        return absolute("--instance_data_dir", flags.instance_data_dir)

    @property
    def shards(self) -> str:
        """The folder of the encoded pictures."""
        return absolute("--output_dir", f"{self.flags.output_dir}-data")

    @property
    def class_shards(self) -> str:
        """The folder of the encoded class pictures."""
        return f"{self.shards}-class"

    @cached_property
    def batch(self) -> int:
        """Pictures in an optimizer step, those of the class included."""
        return self.micro * self.gpus * int(self.flags.gradient_accumulation_steps)

    @property
    def micro(self) -> int:
        """Pictures in a forward pass of a process."""
        return int(self.flags.train_batch_size) * (2 if self.prior else 1)

    @cached_property
    def epoch(self) -> tuple[int | None, str]:
        """Optimizer steps of an epoch; None, and why, if the pictures cannot be counted here, or without need."""
        flags = self.flags
        if flags.max_train_steps is not None and not self.prompts:
            return None, ""
        try:
            images = self.count_images(self.source, dataset_config=self.dataset_config) * flags.repeats
        except FastdiffError as error:
            return None, f"the images of {self.source} cannot be counted here ({error})"
        per_process = math.ceil(math.ceil(images / flags.train_batch_size) / self.gpus)
        return math.ceil(per_process / flags.gradient_accumulation_steps), ""

    def check(self) -> None:
        """Raise ConfigError for flags that their script refuses, too, or that it would do nothing with."""
        flags = self.flags
        require(
            bool(flags.dataset_name) != bool(flags.instance_data_dir),
            "--dataset_name and --instance_data_dir: expected one of them, as in theirs, which names the images",
        )
        if self.prior:
            for name in ("class_data_dir", "class_prompt"):
                require(bool(getattr(flags, name)), f"--with_prior_preservation needs --{name}, in theirs too")
        self._check_length()

    def encode(self, pipeline: list[str]) -> list[list[str]]:
        """Return the commands that encode the pictures.

        Args:
            pipeline: words of the pipeline and of how its encoders are used.
        """
        flags = self.flags
        words = [*pipeline, "--resolution", str(flags.resolution), "--interpolation", "bilinear"]
        if getattr(flags, "use_aspect_ratio_buckets", False):
            words.append("--buckets")
        words += ["--decode", "pillow", "--workers", str(max(1, flags.dataloader_num_workers))]
        own = ["--caption", flags.instance_prompt, *(["--flip"] if flags.random_flip else [])]
        if flags.dataset_name:
            own += ["--image-column", flags.image_column, *flag("dataset-config", flags.dataset_config_name)]
            own += flag("caption-column", flags.caption_column)
        commands = [["fastdiff", "encode", self.source, self.shards, *words, *own]]
        if self.prior:
            folder = absolute("--class_data_dir", flags.class_data_dir)
            limit = flag("max-samples", flags.num_class_images)
            given = ["--caption", flags.class_prompt, *(["--flip"] if flags.random_flip else []), *limit]
            commands.append(["fastdiff", "encode", folder, self.class_shards, *words, *given])
        return commands


def _data(given: DreamBooth, _: object) -> list[str]:
    mirrored = flag("data.random_flip", given.flags.random_flip or None)
    if not given.prior:
        return [*flag("data.path", given.shards), *mirrored]
    loss = given.flags.prior_loss_weight
    sets = (f"{given.shards}:weight=1", f"{given.class_shards}:weight=1:loss_weight={loss:g}")
    return [*flag("data.sets", sets), *mirrored]


def _length(given: DreamBooth, _: object) -> list[str]:
    if given.steps:
        return flag("samples", given.steps * given.batch)
    require(
        not given.prior,
        f"--num_train_epochs with class pictures: {given.epoch[1]}; give --max_train_steps",
    )
    return flag("epochs", given.flags.num_train_epochs * given.flags.repeats)


def _scheme(given: DreamBooth, name: str) -> list[str]:
    flags = given.flags
    own = {
        # Their index counts from the noisiest timestep, ours from the data.
        "logit_normal": [*flag("timesteps.mean", 0.0 - flags.logit_mean), *flag("timesteps.std", flags.logit_std)],
        "mode": flag("timesteps.mode_scale", flags.mode_scale),
    }
    weighting = _WEIGHTINGS[name]
    if getattr(flags, "precondition_outputs", 0):
        # The error of x0, which is sigma^2 times that of the velocity.
        weighting = {"none": "x0", "sigma_sqrt": "none"}.get(weighting, weighting)
    return [
        *flag("timesteps.density", _DENSITIES.get(name, "uniform")),
        *own.get(name, []),
        *flag("objective.weighting", weighting),
    ]


def _optimizer(given: DreamBooth, name: str) -> list[str]:
    if name.lower() == "prodigy":
        raise ConfigError("--optimizer prodigy: not known here; use AdamW, with a learning rate such as 1e-4")
    return flag("optim.name", "adamw8bit" if given.flags.use_8bit_adam else "adamw")


def _quantized(_: DreamBooth, file: str | None) -> list[str]:
    if file is None:
        return flag("lora.quantize", "none")
    found = _read(file)
    bits = [bits for bits in (4, 8) if found.get(f"load_in_{bits}bit")]
    require(bool(bits), f"--bnb_quantization_config_path {file}: neither load_in_4bit nor load_in_8bit is true")
    return flag("lora.quantize", f"{bits[0]}bit")


def _read(file: str) -> dict[str, Any]:
    path = Path(absolute("--bnb_quantization_config_path", file))
    try:
        found = json.loads(read_bounded(path, _LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--bnb_quantization_config_path {path} cannot be read: {error}") from None
    require(isinstance(found, dict), f"--bnb_quantization_config_path {path}: expected an object")
    return dict(found)


def _layers(_: DreamBooth, text: str | None) -> list[str]:
    return flag("lora.targets", [part.strip() for part in text.split(",")]) if text else []


def _of_prior(kind: Callable[[str], Any] | None, told: str = "") -> Meaning:
    return Meaning(kind, told=told, idle="it belongs to --with_prior_preservation")


_NONE = (
    "revision", "variant", "dataset_name", "dataset_config_name", "instance_data_dir", "cache_dir", "caption_column",
    "class_data_dir", "class_prompt", "validation_prompt", "seed", "max_train_steps", "checkpoints_total_limit",
    "resume_from_checkpoint", "prodigy_beta3", "lora_layers", "hub_token", "hub_model_id", "mixed_precision",
)  # fmt: skip
_OFF = (
    "with_prior_preservation", "center_crop", "random_flip", "gradient_checkpointing", "scale_lr", "use_8bit_adam",
    "push_to_hub", "allow_tf32", "cache_latents", "upcast_before_saving",
)  # fmt: skip
SHARED: dict[str, object] = {
    **dict.fromkeys(_NONE), **dict.fromkeys(_OFF, False), "pretrained_model_name_or_path": REQUIRED,
    "instance_prompt": REQUIRED, "image_column": "image", "repeats": 1, "num_validation_images": 4,
    "validation_epochs": 50, "rank": 4, "lora_dropout": 0.0, "prior_loss_weight": 1.0, "num_class_images": 100,
    "resolution": 512, "train_batch_size": 4, "sample_batch_size": 4, "num_train_epochs": 1,
    "checkpointing_steps": 500, "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "lr_scheduler": "constant",
    "lr_warmup_steps": 500, "lr_num_cycles": 1, "lr_power": 1.0, "dataloader_num_workers": 0,
    "weighting_scheme": "none", "logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29, "optimizer": "AdamW",
    "adam_beta1": 0.9, "adam_beta2": 0.999, "prodigy_decouple": True, "adam_weight_decay": 1e-4, "adam_epsilon": 1e-8,
    "prodigy_use_bias_correction": True, "prodigy_safeguard_warmup": True, "max_grad_norm": 1.0, "logging_dir": "logs",
    "report_to": "tensorboard", "local_rank": -1, "max_sequence_length": 512,
}  # fmt: skip
"""Defaults that the scripts share."""
NEWER: dict[str, object] = {
    "bnb_quantization_config_path": None, "skip_final_inference": False, "final_validation_prompt": None,
    "lora_alpha": 4, "aspect_ratio_buckets": None, "use_aspect_ratio_buckets": False, "offload": False,
}  # fmt: skip
"""Defaults of all but SD3's script."""
_PRODIGY = "it belongs to --optimizer prodigy"
MEANINGS: dict[str, Meaning] = {
    "max_train_steps": Meaning(int, _length, idle="--num_train_epochs has as many"),
    "dataset_name": Meaning(str, _data),
    "instance_data_dir": Meaning(),
    "instance_prompt": Meaning(),
    "image_column": Meaning(idle="it belongs to --dataset_name"),
    "caption_column": Meaning(idle="it belongs to --dataset_name"),
    "dataset_config_name": Meaning(),
    "repeats": Meaning(count, idle="a run in steps, not in epochs, has as many of them"),
    "max_train_samples": Meaning(int),
    "resolution": Meaning(count),
    "center_crop": Meaning(SWITCH, idle="pictures are encoded once, from the centre"),
    "random_flip": Meaning(SWITCH),
    "use_aspect_ratio_buckets": Meaning(SWITCH),
    "aspect_ratio_buckets": Meaning(
        refused="the sizes of buckets follow from the area of --resolution; give --use_aspect_ratio_buckets alone"
    ),
    "dataloader_num_workers": Meaning(int, idle="here too 0 is one process that reads"),
    "train_batch_size": Meaning(count, lambda given, _: flag("batch.micro", given.micro)),
    "sample_batch_size": _of_prior(int, "how many class pictures `fastdiff sample` draws at once: its --batch"),
    "with_prior_preservation": Meaning(SWITCH),
    "prior_loss_weight": _of_prior(float),
    "num_class_images": _of_prior(count),
    "class_data_dir": _of_prior(str),
    "class_prompt": _of_prior(str),
    "prior_generation_precision": Meaning(
        told="pictures of the class are drawn by `fastdiff sample`, with its --precision",
        choices=("no", "fp32", "fp16", "bf16"),
    ),
    "caption_dropout": Meaning(float, to("objective.condition_dropout")),
    "max_sequence_length": Meaning(int),
    "weighting_scheme": Meaning(
        str, _scheme, choices=("sigma_sqrt", "logit_normal", "mode", "cosmap", "none")
    ),
    "logit_mean": Meaning(float, idle="--weighting_scheme logit_normal alone uses it"),
    "logit_std": Meaning(float, idle="--weighting_scheme logit_normal alone uses it"),
    "mode_scale": Meaning(float, idle="--weighting_scheme mode alone uses it"),
    "guidance_scale": Meaning(float, told="the network takes none: that of a network with guidance embeddings"),
    "rank": Meaning(count, to("lora.rank")),
    "lora_alpha": Meaning(int, to("lora.alpha")),
    "lora_dropout": Meaning(float, refused="inputs of the added matrices are not dropped; leave it out"),
    "lora_layers": Meaning(str, _layers),
    "bnb_quantization_config_path": Meaning(
        str, _quantized, told="4 bits are NF4 with blocks of 64, whatever its other entries say"
    ),
    "do_fp8_training": Meaning(
        SWITCH, refused="frozen matrices are in 16 bits or quantized; --bnb_quantization_config_path saves more memory"
    ),
    "optimizer": Meaning(str, _optimizer),
    "use_8bit_adam": Meaning(SWITCH),
    "prodigy_beta3": Meaning(float, idle=_PRODIGY),
    "prodigy_decouple": Meaning(bool, idle=_PRODIGY),
    "prodigy_use_bias_correction": Meaning(bool, idle=_PRODIGY),
    "prodigy_safeguard_warmup": Meaning(bool, idle=_PRODIGY),
    "text_encoder_lr": Meaning(float, told=_UNREAD),
    "adam_weight_decay_text_encoder": Meaning(float, told=_UNREAD),
    "train_text_encoder": Meaning(
        SWITCH, refused="text encoders are not trained here; leave it out, and the transformer alone is trained"
    ),
    "lr_num_cycles": Meaning(
        int, lambda given, number: _one("lr_num_cycles", number, given.flags.lr_scheduler == "cosine_with_restarts"),
        idle="--lr_scheduler cosine_with_restarts alone uses it",
    ),
    "lr_power": Meaning(
        float, lambda given, power: _one("lr_power", power, given.flags.lr_scheduler == "polynomial"),
        idle="--lr_scheduler polynomial alone uses it",
    ),
    "cache_latents": Meaning(SWITCH, told="what `fastdiff encode` does: latents are always stored once"),
    "offload": Meaning(SWITCH, told="encoders are not in memory while the network trains"),
    "fsdp_text_encoder": Meaning(SWITCH, told="text encoders are not in memory while the network trains"),
    "upcast_before_saving": Meaning(SWITCH, told="the added matrices are fp32, and are exported so"),
    "skip_final_inference": Meaning(SWITCH, told="images at the end are those of --validation.prompts"),
    "final_validation_prompt": Meaning(told="images at the end are those of --validation.prompts; add it there"),
}  # fmt: skip
"""Of the flags that other scripts of diffusers do not have, or that mean something else in them."""


def _one(name: str, value: float, used: bool) -> list[str]:
    require(value == 1 or not used, f"--{name} {value:g}: schedules have the value 1 here")
    return []


def captioned(flags: argparse.Namespace) -> bool:
    """Return whether the pictures have captions of their own."""
    return bool(flags.dataset_name and flags.caption_column)


def differences(given: Given) -> list[Note]:
    """Return the differences of every DreamBooth script that depend on the flags."""
    flags = given.flags
    return [
        (
            not flags.center_crop,
            "without --center_crop: pictures are cropped at the centre too; theirs draws one crop of each copy of a "
            "picture before the training, and keeps it: --repeats shows it several",
        ),
        (
            flags.optimizer.lower() != ADAMW.name,
            f"--optimizer {flags.optimizer}: theirs does not know it, and takes AdamW",
        ),
        (
            flags.random_flip,
            "--random_flip: each use of a picture is mirrored or not; theirs decides once for each copy",
        ),
        (
            captioned(flags),
            "--caption_column: a picture with an empty caption is trained as the empty prompt; theirs gives it "
            "--instance_prompt",
        ),
        (
            flags.dataset_name and not flags.caption_column,
            "without --caption_column all pictures have --instance_prompt in theirs; here captions in the column text "
            "go before it",
        ),
        (
            flags.with_prior_preservation,
            f"--num_class_images {flags.num_class_images}: theirs draws the pictures that --class_data_dir lacks; draw "
            "them first, with `fastdiff sample` or the pipeline",
        ),
        (
            flags.with_prior_preservation,
            "--with_prior_preservation: an epoch has as many class pictures as others, a batch about as many, and the "
            "loss is the mean of all; a batch of theirs has exactly as many, and it adds the two means, which is twice "
            "as much: Adam takes the same steps, but --max_grad_norm clips at half the norm",
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class DreamBoothScript(DiffusersScript):
    """A DreamBooth script: how it encodes pictures, besides what others have."""

    posterior: str
    """What it takes of a posterior, for `fastdiff encode`."""
    tokens: int
    """Tokens of a caption that the pipeline reads."""

    def commands_before(self, given: Given) -> list[list[str]]:
        """Return the commands that encode the pictures."""
        assert isinstance(given, DreamBooth)
        flags = given.flags
        base = absolute_or_id("--pretrained_model_name_or_path", flags.pretrained_model_name_or_path)
        words = ["--pretrained", base, *flag("revision", flags.revision), *flag("variant", flags.variant)]
        return given.encode([*words, "--posterior", self.posterior, *flag("max-tokens", self._tokens(flags))])

    def words_of_all(self, given: Given) -> list[str]:
        """Return words of the training command that no flag alone has."""
        return flag("pretrained.max_tokens", self._tokens(given.flags))

    def _tokens(self, flags: argparse.Namespace) -> int | None:
        return None if flags.max_sequence_length == self.tokens else int(flags.max_sequence_length)


def dreambooth(
    preset: str,
    project: str,
    defaults: Defaults,
    *,
    posterior: str,
    tokens: int,
    network: list[str] | None = None,
    own: Mapping[str, Meaning] | None = None,
    notes: tuple[str, ...] = (),
    more: Callable[[Given], list[Note]] = lambda _: [],
) -> DreamBoothScript:
    """Return the record of a script.

    Args:
        preset: the preset of its family, or of one that is trained alike.
        project: its name in trackers.
        defaults: of its flags.
        posterior: what it takes of a posterior.
        tokens: tokens of a caption that the pipeline reads.
        network: words of the network, if the preset has another.
        own: meanings of its flags that others do not have.
        notes: differences of every run.
        more: differences that depend on its flags.
    """
    undropped = [] if "caption_dropout" in defaults else flag("objective.condition_dropout", 0.0)
    return DreamBoothScript(
        defaults=defaults,
        own=MEANINGS | dict(own or {}),
        always=(
            flag("preset", preset),
            network or [],
            flag("validation.captions", 0),
            flag("output.project", project),
            undropped,
        ),
        export="lora",
        notes=notes,
        differences=lambda given: [*differences(given), *more(given)],
        given=DreamBooth,
        posterior=posterior,
        tokens=tokens,
    )
