"""The command line of a script of sd-scripts, and what follows from several of its flags."""

import argparse
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastdiff.cli.compat.kohya.pictures import Pictures, pictures_of
from fastdiff.cli.compat.translation import CountImages, absolute, absolute_or_id
from fastdiff.errors import ConfigError, FastdiffError, require

_LAST = "last"
"""Their name of the final weights."""
_SINGLE_FILES = (".safetensors", ".ckpt", ".pt")


@dataclass(frozen=True)
class Given:
    """A command line."""

    flags: argparse.Namespace
    gpus: int
    count_images: CountImages

    @cached_property
    def run(self) -> str:
        """The run folder."""
        require(bool(self.flags.output_dir), "--output_dir is missing; their script needs it too")
        return absolute("--output_dir", f"{self.flags.output_dir}/{self.flags.output_name or _LAST}")

    @cached_property
    def _found(self) -> tuple[tuple[Pictures, ...], tuple[str, ...]]:
        return pictures_of(self.flags)

    @property
    def pictures(self) -> tuple[Pictures, ...]:
        """The folders of pictures."""
        return self._found[0]

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is left out of them, in words."""
        return self._found[1]

    @cached_property
    def micro(self) -> int:
        """Pictures per process and forward pass."""
        sizes = sorted({int(each.values["batch_size"]) for each in self.pictures})
        if len(sizes) > 1:
            raise ConfigError(
                f"--dataset_config: batch_size {' and '.join(map(str, sizes))}: a run has one; give all the same"
            )
        return sizes[0]

    @property
    def batch(self) -> int:
        """Pictures in an optimizer step."""
        return self.micro * self.gpus * int(self.flags.gradient_accumulation_steps)

    @cached_property
    def epoch(self) -> int | None:
        """Optimizer steps of an epoch; None if the pictures cannot be counted here."""
        if (counted := self._counted) is None:
            return None
        own = sum(number for each, number in zip(self.pictures, counted, strict=True) if not each.regularisation)
        samples = 2 * own if any(each.regularisation for each in self.pictures) else own
        return math.ceil(samples / self.batch)

    @cached_property
    def _counted(self) -> list[int] | None:
        """Samples of each of the pictures with their repeats; None if they cannot be counted here."""
        try:
            return [each.repeats * self.count_images(each.source) for each in self.pictures]
        except FastdiffError:
            return None

    @property
    def uses(self) -> list[str]:
        """How often an epoch has each of the pictures, for ``--data.sets``.

        Regularisation pictures are together as many as the others (theirs begins them anew until they are).
        ConfigError: they cannot be counted here.
        """
        own = [not each.regularisation for each in self.pictures]
        if all(own):
            return [str(each.repeats) for each in self.pictures]
        if (counted := self._counted) is None:
            raise ConfigError("regularisation pictures: they cannot be counted here; translate where all pictures are")
        sums = {
            side: sum(n for n, is_own in zip(counted, own, strict=True) if is_own == side) for side in (True, False)
        }
        require(sums[True] > 0, "only regularisation pictures are given; give some to learn, too")
        factor, loss = sums[True] / sums[False], getattr(self.flags, "prior_loss_weight", 1.0)
        return [
            f"weight={number}" if is_own else f"weight={number * factor:g}:loss_weight={loss:g}"
            for number, is_own in zip(counted, own, strict=True)
        ]

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None where the training counts its epochs."""
        return None if self.flags.max_train_epochs else self.flags.max_train_steps

    @property
    def is_single_file(self) -> bool:
        """Whether the weights are one file, as of the original repositories."""
        return str(self.flags.pretrained_model_name_or_path).endswith(_SINGLE_FILES)

    @property
    def pipeline(self) -> str:
        """The pipeline in the layout of diffusers."""
        name = self.flags.pretrained_model_name_or_path
        require(bool(name), "--pretrained_model_name_or_path is missing; their script needs it too")
        if self.is_single_file or self.flags.vae:
            return f"{self.run}-pipeline"
        return absolute_or_id("--pretrained_model_name_or_path", name)

    def conversion(self) -> list[str] | None:
        """Return the command that saves the pipeline in the layout of diffusers; None: it is in it."""
        if not self.is_single_file and not self.flags.vae:
            return None
        base = _loaded("StableDiffusionXLPipeline", "pretrained_model_name_or_path", self.flags)
        pipeline = f"{base[:-1]}, vae={_loaded('AutoencoderKL', 'vae', self.flags)})" if self.flags.vae else base
        return ["python", "-c", f"import diffusers; {pipeline}.save_pretrained({self.pipeline!r})"]

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """The folder of each of the pictures, encoded."""
        if len(self.pictures) == 1:
            return (f"{self.run}-data",)
        return tuple(f"{self.run}-data/{number}" for number in range(1, len(self.pictures) + 1))

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """Prompts of the sample images; ConfigError: the file of them is not here."""
        flags = self.flags
        if not flags.sample_prompts or not (flags.sample_every_n_steps or flags.sample_every_n_epochs):
            return ()
        path = Path(absolute("--sample_prompts", flags.sample_prompts))
        require(
            path.suffix == ".txt", f"--sample_prompts {path}: expected a .txt file; give its prompts as lines of one"
        )
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--sample_prompts {path} cannot be read: {error}; translate it where it is") from None
        texts = (line.strip() for line in lines)
        # Options follow the prompt, as in: a cat --w 832 --h 1216 --d 1.
        found = tuple(text.partition(" --")[0].strip() for text in texts if text and not text.startswith("#"))
        require(bool(found), f"--sample_prompts {os.fspath(path)} has no prompts")
        return found


def _loaded(kind: str, name: str, flags: argparse.Namespace) -> str:
    """Return the expression that loads what a flag names, a single file or in the layout of diffusers."""
    path = getattr(flags, name)
    if path.endswith(_SINGLE_FILES):
        return f"diffusers.{kind}.from_single_file({absolute(f'--{name}', path)!r})"
    return f"diffusers.{kind}.from_pretrained({absolute_or_id(f'--{name}', path)!r})"
