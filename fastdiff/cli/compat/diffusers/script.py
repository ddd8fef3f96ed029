"""A training script of diffusers as a record, and the translation of its command lines."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fastdiff.cli.compat import table
from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.diffusers.meanings import MEANINGS
from fastdiff.cli.compat.diffusers.notes import ALWAYS, differences
from fastdiff.cli.compat.table import Defaults, Meaning
from fastdiff.cli.compat.translation import CountImages, Note, Translation, absolute, flag, training


def _none(given: Given) -> list[Note]:
    return []


@dataclass(frozen=True, kw_only=True)
class DiffusersScript:
    """A script: its flags with their defaults, and what is its own."""

    defaults: Defaults
    own: Mapping[str, Meaning] = field(default_factory=dict)
    """Flags that other scripts do not have, or that mean something else in them."""
    always: tuple[list[str], ...]
    """Words of every training command, besides those of the flags."""
    export: str
    """Format in which it leaves its weights."""
    drawn_steps: int | None = None
    """Denoising steps of its validation images; None: those of the pipeline."""
    guidance: float | None = None
    """Guidance scale of its validation images; None: that of the pipeline."""
    notes: tuple[str, ...] = ()
    """Differences of every run, besides those of all scripts."""
    differences: Callable[[Given], list[Note]] = _none
    """Differences that depend on the flags."""
    always_told: tuple[str, ...] = ALWAYS
    """Differences of all scripts of its kind."""
    given: type[Given] = Given
    """How several of its flags are read together."""

    @cached_property
    def meanings(self) -> dict[str, Meaning]:
        """Of all flags."""
        return MEANINGS | dict(self.own)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add its flags."""
        table.add_flags(parser, self.defaults, self.meanings)

    def translate(self, flags: argparse.Namespace, gpus: int, count_images: CountImages) -> Translation:
        """Translate a command line: train, then export.

        Raises:
            ConfigError: a flag is refused, or contradicts another one.
        """
        given = self.given(flags, gpus, count_images, self.drawn_steps, self.guidance)
        given.check()
        done = Translation()
        words = table.words(given, flags, self.defaults, self.meanings)
        run = absolute("--output_dir", flags.output_dir)
        done.commands = [
            *self.commands_before(given),
            training(gpus, *self.always, words, self.words_of_all(given)),
            ["fastdiff", "export", run, f"{run}/export", "--overwrite", "--format", self.export],
        ]
        if flags.push_to_hub:
            done.commands[-1] += ["--push-to-hub", flags.hub_model_id or flags.output_dir.rstrip("/").split("/")[-1]]
        done.notes += [*self.always_told, *self.notes]
        for condition, text in (*differences(given), *self.differences(given)):
            done.note(condition, text)
        table.tell(done, flags, self.defaults, self.meanings)
        return done

    def commands_before(self, given: Given) -> list[list[str]]:
        """Return the commands before the training."""
        return []

    def words_of_all(self, given: Given) -> list[str]:
        """Return words of the training command that no flag alone has."""
        return []

    @property
    def idle(self) -> dict[str, str]:
        """Why a flag changes nothing, by its name; for those that some other flag makes so."""
        return table.idle(self.defaults, self.meanings)


def fine_tuning(*words: list[str]) -> tuple[list[str], ...]:
    """Return the words of a run that begins with a pipeline's weights and drops no caption."""
    return (flag("preset", "sd15-finetune"), flag("objective.condition_dropout", 0.0), *words)
