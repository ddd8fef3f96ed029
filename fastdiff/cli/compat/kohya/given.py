"""The command line of a script of sd-scripts, and what follows from several of its flags."""

import argparse
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastdiff.cli.compat.kohya.pictures import Pictures, pictures_of
from fastdiff.cli.compat.translation import CountImages, absolute, absolute_or_id
from fastdiff.config.data_sets import DataSet, Member, samples_per_epoch
from fastdiff.data.kohya.parts import Part
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
    def pictures(self) -> Pictures:
        """What it reads; ConfigError: see ``pictures_of``."""
        return pictures_of(self.flags)

    @property
    def batch(self) -> int:
        """Pictures in an optimizer step."""
        return self.pictures.micro * self.gpus * int(self.flags.gradient_accumulation_steps)

    @cached_property
    def epoch(self) -> int | None:
        """Optimizer steps of an epoch; None if the pictures cannot be counted here."""
        parts = self.pictures.parts
        try:
            sizes = [self._count(part) for part in parts]
        except FastdiffError:
            return None
        members = [
            Member(entry=0, path=part.source, name="", listed=part.listed, loss_weight=1.0, condition_dropout=None)
            for part in parts
        ]
        return math.ceil(sum(samples_per_epoch([DataSet(path="")], members, sizes)) / self.batch)

    def _count(self, part: Part) -> int:
        columns = {name: part.options[name] for name in ("directly", "image_root") if name in part.options}
        return self.count_images(part.source, **columns)

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

    @property
    def data(self) -> str:
        """The folder of the encoded pictures."""
        return f"{self.run}-data"

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
            lines = path.read_text("utf-8-sig").splitlines()
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
