"""A training script of sd-scripts as a record, and the translation of its command lines."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fastdiff.cli.compat import table
from fastdiff.cli.compat.kohya.config_file import in_file, values
from fastdiff.cli.compat.kohya.given import Given
from fastdiff.cli.compat.kohya.meanings import MEANINGS
from fastdiff.cli.compat.table import Defaults, Meaning
from fastdiff.cli.compat.translation import CountImages, Note, Translation, flag, training
from fastdiff.data.kohya.parts import VARIANTS

_UNKNOWN = "unknown_in_file"
_PRECISIONS = {"float": "fp32", "fp16": "fp16", "bf16": "bf16"}
_ALWAYS = (
    "noise, timesteps and order depend on the seed and the position in the run, and are the same on any number of GPUs",
    "pictures and captions are encoded once by `fastdiff encode`; each step draws a sample of the posterior, as theirs "
    "does without --cache_latents; with it theirs draws one for the whole run",
    "batches go on across the epochs; theirs has fewer pictures in the last batch of each bucket",
    "every step is logged, as in theirs; --output.log_every 50 waits for the GPU less often",
    "checkpoints are in checkpoints/step-N of the run folder; `fastdiff export --step N` writes the weights of one",
    "the same command resumes; theirs starts anew without --resume",
)


@dataclass(frozen=True, kw_only=True)
class KohyaScript:
    """A script: its flags with their defaults, and what is its own."""

    defaults: Defaults
    own: Mapping[str, Meaning]
    always: tuple[list[str], ...]
    """Words of every training command, besides those of the flags."""
    export: Callable[[argparse.Namespace], str]
    """Format in which it leaves its weights, by the flags."""
    notes: Callable[[argparse.Namespace], Sequence[str]] = lambda flags: ()
    """Differences that it alone has, by the flags."""

    @cached_property
    def meanings(self) -> dict[str, Meaning]:
        """Of all flags."""
        return MEANINGS | dict(self.own)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add its flags."""
        table.add_flags(parser, self.defaults, self.meanings)

    def read(self, parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line; values of ``--config_file`` count where it says nothing.

        Raises:
            ConfigError: the file cannot be read, or has a value that its flag does not take.
        """
        given = parser.parse_args(list(words))
        if not given.config_file:
            return given
        found, unknown = in_file(parser, values(given.config_file))
        whole = parser.parse_args(list(words), argparse.Namespace(**found, **{_UNKNOWN: unknown}))
        whole.config_file = None  # it is read
        return whole

    def translate(self, flags: argparse.Namespace, gpus: int, count_images: CountImages) -> Translation:
        """Translate a command line: encode the pictures, train, export.

        Raises:
            ConfigError: flags are refused, or contradict others.
        """
        given = Given(flags, gpus, count_images)
        words = table.words(given, flags, self.defaults, self.meanings)
        conversion = given.conversion()
        done = Translation(
            [
                *([conversion] if conversion else []),
                _encode(given),
                training(gpus, *self.always, words),
                [*self._export(given)],
            ],
            [*_ALWAYS, *self.notes(flags)],
        )
        for condition, text in _differences(given):
            done.note(condition, text)
        table.tell(done, flags, self.defaults, self.meanings)
        return done

    @property
    def idle(self) -> dict[str, str]:
        """Why a flag changes nothing, by its name; for those that some other flag makes so."""
        return table.idle(self.defaults, self.meanings)

    def _export(self, given: Given) -> list[str]:
        flags = given.flags
        words = ["fastdiff", "export", given.run, f"{given.run}-export", "--overwrite", "--format", self.export(flags)]
        if flags.save_precision:
            words += ["--dtype", _PRECISIONS[flags.save_precision]]
        if flags.huggingface_repo_id:
            words += ["--push-to-hub", flags.huggingface_repo_id]
            words += ["--private"] if flags.huggingface_repo_visibility == "private" else []
        return words


def _encode(given: Given) -> list[str]:
    more = flag("batch", given.flags.vae_batch_size if given.flags.vae_batch_size > 1 else None)
    pictures = given.pictures
    return ["fastdiff", "encode", pictures.source, given.data, "--pretrained", given.pipeline, *pictures.words, *more]


def _differences(given: Given) -> list[Note]:
    flags, pictures = given.flags, given.pictures
    unknown = getattr(flags, _UNKNOWN, [])
    return [
        *((True, text) for text in pictures.told),
        (unknown, f"--config_file: {', '.join(unknown)}: no flags of the script, which leaves them out without a word"),
        (
            not pictures.filtered,
            "pictures are resized by lanczos; theirs by area where they become smaller, as with --resize_interpolation "
            "area",
        ),
        (
            pictures.bucketed,
            "a picture goes to the bucket whose aspect ratio is nearest by quotient; theirs by difference, so that one "
            "between two buckets may go to the other",
        ),
        (flags.seed is None, "without --seed theirs draws one by chance; here the seed is 0"),
        (
            (flags.mixed_precision or "no") != "no" and not (flags.full_bf16 or flags.full_fp16),
            "the weights of the forward pass are in 16 bits, with fp32 masters; theirs are fp32 under autocast",
        ),
        (
            pictures.shuffled,
            f"--shuffle_caption: each caption is embedded in {VARIANTS} orders of its tags (--shuffle-tags of encode), "
            "and a step draws one of them; theirs shuffles at every use, and so embeds every caption again",
        ),
        (
            given.prompts,
            "--sample_prompts: prompts are drawn with the settings of the pipeline; options behind them, such as --w "
            "832, are left out: give them to `fastdiff sample`",
        ),
        (
            pictures.dropped,
            "--caption_dropout_rate: a dropped caption is zeros, as SDXL's pipeline draws; theirs is the empty caption",
        ),
    ]
