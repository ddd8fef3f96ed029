"""What a translation consists of, and what all of them need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdiff.data.images.sources import open_source
from fastdiff.errors import ConfigError, FastdiffError

TRAINER = "fastdiff/train.py"
"""After which the flags of a training command begin."""
EXPORT_NOTE = (
    "the newest checkpoint is exported, where theirs leaves its files at every save; --step N exports an earlier one"
)
"""Of scripts whose files are theirs alone, and made of a run here by ``fastdiff export``."""


@dataclass(slots=True)
class Translation:
    """Commands of fastdiff, in the order in which they are run, and what they do differently."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, condition: object, text: str) -> None:
        """Add a note if ``condition`` holds."""
        if condition:
            self.notes.append(text)


def flag(name: str, value: object) -> list[str]:
    """``--name value`` for the command line of the trainer; nothing for None, both forms for a truth value."""
    if value is None:
        return []
    if isinstance(value, bool):
        group, _, field_name = name.rpartition(".")
        return [f"--{name}" if value else f"--{group}.no-{field_name.replace('_', '-')}"]
    if isinstance(value, tuple | list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def count_images(source: str, what_else: str, **columns: str) -> int:
    """Number of images of a source, for epochs; ConfigError if it cannot be told, with what to give instead."""
    try:
        return len(open_source(source, samples_per_unit=1, **columns))  # type: ignore[arg-type]
    except FastdiffError as error:
        raise ConfigError(
            f"something is given in epochs, and the images of {source} cannot be counted ({error}); {what_else}"
        ) from None


def launcher(gpus: int) -> Sequence[str]:
    """The beginning of a training command."""
    return ["deepspeed", "--num_gpus", str(gpus), TRAINER]
