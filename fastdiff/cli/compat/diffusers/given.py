"""The command line of a script of diffusers, and what follows from several of its flags."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fastdiff import sanitize
from fastdiff.cli.compat.translation import CountImages, absolute, absolute_or_id
from fastdiff.errors import ConfigError, FastdiffError


@dataclass(frozen=True)
class Given:
    """A command line."""

    flags: argparse.Namespace
    gpus: int
    count_images: CountImages
    drawn_steps: int | None
    """Denoising steps of a validation image; None: those of the pipeline."""
    guidance: float | None
    """Guidance scale of a validation image; None: that of the pipeline."""

    @cached_property
    def batch(self) -> int:
        """Images in an optimizer step."""
        return int(self.flags.train_batch_size * self.gpus * self.flags.gradient_accumulation_steps)

    @cached_property
    def prompts(self) -> Sequence[str]:
        """Prompts of the validation images; none where none is drawn."""
        several: list[str] | None = getattr(self.flags, "validation_prompts", None)
        one: str | None = getattr(self.flags, "validation_prompt", None)
        if several:
            return several
        return [] if one is None or self.flags.num_validation_images < 1 else [one]

    @cached_property
    def source(self) -> str:
        """The images, for ``--data.path``."""
        flags = self.flags
        if not flags.dataset_name:
            return absolute("--train_data_dir", flags.train_data_dir)
        if sanitize.is_address(flags.dataset_name):  # tars, which the trainer reads wherever they are
            return str(flags.dataset_name)
        return absolute_or_id("--dataset_name", flags.dataset_name)

    @property
    def dataset_config(self) -> str | None:
        """The configuration of a Hugging Face data set; a folder has none."""
        return self.flags.dataset_config_name if self.flags.dataset_name else None

    @cached_property
    def epoch(self) -> tuple[int | None, str]:
        """Optimizer steps of an epoch; None, and why, if the images cannot be counted here, or without need."""
        flags = self.flags
        if flags.max_train_steps is not None and not self.prompts:
            return None, ""
        columns = {"image_column": flags.image_column, "caption_column": flags.caption_column}
        try:
            images = self.count_images(self.source, dataset_config=self.dataset_config, **columns)
        except FastdiffError as error:
            return None, f"the images of {self.source} cannot be counted here ({error})"
        images = min(images, flags.max_train_samples or images)
        per_process = math.ceil(math.ceil(images / self.gpus) / flags.train_batch_size)
        return math.ceil(per_process / flags.gradient_accumulation_steps), ""

    @cached_property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None where the training counts its epochs."""
        epoch = self.epoch[0]
        return self.flags.max_train_steps or (self.flags.num_train_epochs * epoch if epoch else None)

    def check(self) -> None:
        """Raise ConfigError for flags that their script refuses, too, or that it would do nothing with."""
        flags = self.flags
        if not flags.dataset_name and not flags.train_data_dir:
            raise ConfigError("neither --dataset_name nor --train_data_dir is given; one of them names the images")
        self._check_length()

    def _check_length(self) -> None:
        flags = self.flags
        asked = getattr(flags, "validation_prompts", None) or getattr(flags, "validation_prompt", None) is not None
        if asked and not flags.validation_epochs:
            raise ConfigError("--validation_epochs 0 with a validation prompt: their script divides by it; at least 1")
        if (flags.num_train_epochs if flags.max_train_steps is None else flags.max_train_steps) < 1:
            name = "--num_train_epochs" if flags.max_train_steps is None else "--max_train_steps"
            raise ConfigError(f"{name}: their script takes no step below 1, and saves the weights that it began with")
        if flags.report_to == "wandb" and flags.hub_token:
            raise ConfigError("--report_to wandb with --hub_token: their script refuses it too; use `hf auth login`")
