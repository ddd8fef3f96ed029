"""Flags of other trainers' scripts, as their own parsers list them: kind, default, choices and number of values.

Read from diffusers at 58eb52c and sd-scripts at 48d368f.
"""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
FILES = sorted(path.stem for path in _FOLDER.glob("*.json"))


def listed(file: str) -> dict[str, dict[str, Any]]:
    """The flags of a script, by name without hyphens."""
    found: dict[str, dict[str, Any]] = json.loads((_FOLDER / f"{file}.json").read_text())
    return found
