"""Command lines of records in the form that runs today."""

import shlex
from dataclasses import dataclass

from fastdiff.config.presets import PRESETS
from fastdiff.errors import ConfigError
from fastdiff_bench.__main__ import parser_of

_RENAMED = {f"dit-{size}-{patch}": f"dit-{size}-{patch}-256" for size in ("s", "b", "l", "xl") for patch in (2, 4, 8)}
"""Presets of old records, and what replaced them."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a record."""

    text: str
    """What runs today, or what ran then if nothing does."""
    note: str
    """How it differs from what was recorded, or why it no longer runs; empty: it is the same."""


def translate(recorded: str) -> Command:
    """Return the command that takes a record again.

    Args:
        recorded: from the fingerprint: ``fastdiff bench step --preset digits``,
            or the older ``python -m bench step --preset digits``.
    """
    words = shlex.split(recorded)
    words = words[3:] if words[:3] == ["python", "-m", "bench"] else words[2:]
    renamed = [word for word in words if word in _RENAMED and word not in PRESETS]
    words = [_RENAMED.get(word, word) if word in renamed else word for word in words]
    text = shlex.join(["fastdiff", "bench", *words])
    if problem := _problem(words):
        return Command(text, f"no longer runs: {problem}")
    note = "; ".join(f"preset {old} is called {_RENAMED[old]} now" for old in dict.fromkeys(renamed))
    return Command(text, note)


def _problem(words: list[str]) -> str:
    """Return why the parser refuses a command; empty if it does not."""
    if not words:
        return "it names no benchmark"
    try:
        given = parser_of(words[:1]).parse_args(words)
    except ConfigError as error:
        return str(error)
    named = getattr(given, "preset", None) or []
    gone = [name for name in ([named] if isinstance(named, str) else named) if name not in PRESETS]
    return f"preset {', '.join(gone)} was removed" if gone else ""
