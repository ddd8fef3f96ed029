"""A translation: its commands and notes, and helpers that all translations share."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fastdiff.config.local_paths import require_local
from fastdiff.config.networks.pretrained import HUB_ID

LAUNCH = ["fastdiff", "launch", "local"]
"""Start of a training command; it runs in any folder, and on a free port. The flags of the run follow ``--``."""
EXPORT_NOTE = (
    "the newest checkpoint is exported; theirs writes its files at every save; --step N exports an earlier one"
)
"""Note for scripts with their own file format, which ``fastdiff export`` writes from a run."""
GRAY_NOTE = "16-bit gray images are scaled to 8 bits, theirs clipped"
_DEVICE = ["--performance.device", "auto"]
"""The other scripts also run on a CPU, where the presets refuse to."""


CountImages = Callable[..., int]
"""``data.images.sources.count_images``, or a stand-in that opens nothing."""
Note = tuple[object, str]
"""A condition, and the difference to tell if it holds."""


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


def absolute(name: str, path: str) -> str:
    """Return the value of the flag ``name`` as a path from the root.

    Raises:
        ConfigError: an address, or a relative path that would show what may be the credentials of one.
    """
    require_local(name, path)
    return os.path.abspath(path)


def absolute_or_id(name: str, text: str) -> str:
    """Return the path from the root; what may be an id of the Hugging Face hub, and is no path here, stays as it is."""
    return text if re.fullmatch(HUB_ID, text) and not os.path.exists(text) else absolute(name, text)


def training(gpus: int, *flags: list[str]) -> list[str]:
    """Return the training command."""
    return [*LAUNCH, "--ranks", str(gpus), "--", *(word for words in (*flags, _DEVICE) for word in words)]


def program() -> str:
    """Return the command of this installation: its name if the shell finds it by that, otherwise its path."""
    own, found = Path(sys.executable).with_name("fastdiff"), shutil.which("fastdiff")
    return str(own) if own.is_file() and (found is None or not own.samefile(found)) else "fastdiff"
