"""A translation: its commands and notes, and helpers that all translations share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdiff.data.images.sources import open_source
from fastdiff.errors import ConfigError, FastdiffError

TRAINER = "fastdiff/train.py"
"""The flags of a training command follow it."""
EXPORT_NOTE = (
    "the newest checkpoint is exported; theirs writes its files at every save; --step N exports an earlier one"
)
"""Note for scripts with their own file format, which ``fastdiff export`` writes from a run."""


@dataclass(slots=True)
class Translation:
    """Commands of fastdiff in the order of their execution, and notes on the differences."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, condition: object, text: str) -> None:
        """Add a note if ``condition`` holds."""
        if condition:
            self.notes.append(text)


def flag(name: str, value: object) -> list[str]:
    """Return ``--name value`` for the trainer; nothing for None, and the flag or its negation for a bool."""
    if value is None:
        return []
    if isinstance(value, bool):
        group, _, field_name = name.rpartition(".")
        return [f"--{name}" if value else f"--{group}.no-{field_name.replace('_', '-')}"]
    if isinstance(value, tuple | list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def count_images(source: str, remedy: str, **columns: str) -> int:
    """Count the images of a source, for epochs; ConfigError with the remedy if they cannot be counted."""
    try:
        return len(open_source(source, samples_per_unit=1, **columns))  # type: ignore[arg-type]
    except FastdiffError as error:
        raise ConfigError(
            f"a flag is given in epochs, and the images of {source} cannot be counted ({error}); {remedy}"
        ) from None


def launcher(gpus: int) -> Sequence[str]:
    """Return the beginning of a training command."""
    return ["deepspeed", "--num_gpus", str(gpus), TRAINER]
