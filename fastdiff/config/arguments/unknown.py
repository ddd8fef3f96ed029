"""Words that a command does not know: what they are in other programs, or the nearest of its own flags."""

import difflib
import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from fastdiff import sanitize
from fastdiff.config.arguments.of_others import answer

_MOST = 8
"""Flags that a message explains."""
_UNKNOWN = "unknown flag"


def explained(words: Sequence[str], known: Collection[str], command: str, typed: Sequence[str] = ()) -> str:
    """Return one line about flags, with the values behind them as typed, that a parser of ``command`` has left over.

    ``known`` are the command's own flags, with their hyphens, and ``typed`` all of its words. Values are shown only
    where they are translated.
    """
    flags = _with_values(words)
    said = [_explained(flag, values, known, command, typed) for flag, values in flags[:_MOST]]
    said += [f"{len(flags) - _MOST} more unknown flags"] if len(flags) > _MOST else []
    said += [f"`fastdiff {command} --help` lists the flags"] if any(line.endswith(_UNKNOWN) for line in said) else []
    return "; ".join(said)


def as_typed(unknown: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the words that argparse left over, each flag with the value behind it as it was typed.

    argparse takes the value of an unknown flag for a positional argument and leaves over a later word in its place.
    """
    words: list[str] = []
    for flag in filter(_is_flag, unknown):
        behind = typed[typed.index(flag) + 1 :][:1] if flag in typed and "=" not in flag else []
        words += [flag, *(word for word in behind if not _is_flag(word))]
    return words or list(unknown)


_SWITCHED = ("true", "false", "yes", "no", "on", "off")
"""Values that other programs give to switches."""


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def _with_values(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with the values behind it; those before any flag are under an empty name."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if _is_flag(word):
            name, equals, value = word.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            flags.append(("", [word]))
    return flags


def _explained(flag: str, values: Sequence[str], known: Collection[str], command: str, typed: Sequence[str]) -> str:
    shown = [sanitize.argument(value) for value in values]
    if not flag:
        switched = values[0].lower() in _SWITCHED
        before = next((one for one, word in pairwise(typed) if switched and word == values[0] and _is_flag(one)), None)
        switch = "it belongs to no flag" if before is None else f"{before} takes no value; {_switched(before, known)}"
        return f"{shown[0]}: unexpected, {switch}"
    if (said := answer(flag, shown, command)) is not None:
        return said
    near = nearest(flag, known)
    return f"{flag}: {_UNKNOWN}" + (f", did you mean {' or '.join(near)}?" if near else "")


def _switched(flag: str, known: Collection[str]) -> str:
    """Say how to set a switch: ``--model.learn-sigma`` and ``--model.no-learn-sigma``, ``--flip`` and ``--no-flip``."""
    section, dot, name = flag.lstrip("-").rpartition(".")
    plain = re.sub("^no[-_]", "", name)
    on, off = f"--{section}{dot}{plain}", f"--{section}{dot}no-{plain}"
    return f"write {on} or {off}" if dot or off in known else f"write {on}, or leave it out"


def nearest(flag: str, known: Collection[str]) -> list[str]:
    """Return up to two flags that may be meant: with the same last name, or of similar spelling."""
    by_name = {_plain(name): name for name in known}
    name = _plain(flag)
    same = [other for other in by_name if _last(other) == _last(name)]
    last = {_last(other): other for other in reversed(by_name)}
    similar = difflib.get_close_matches(name, by_name, n=2, cutoff=0.7)
    similar = similar or [last[other] for other in difflib.get_close_matches(_last(name), last, n=2, cutoff=0.75)]
    return [by_name[other] for other in (same or similar)[:2]]


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()


def _last(name: str) -> str:
    return name.rpartition(".")[2]
