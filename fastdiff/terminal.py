"""Text that fits its terminal: wrapped at the borders of words there, and as it is in pipes and files.

A command on an indented line of its own can still be copied: its broken lines end with a backslash. Commands in
backticks are not broken where a line has room for them.
"""

import os
import re
from collections.abc import Iterable, Iterator
from typing import TextIO

_NARROWEST = 20
_USUAL = 80
"""Columns of a terminal that does not tell."""
_HANGING = 4
"""Spaces before what did not fit on a line, beyond those of the line."""
_COMMENT = "# "
"""Begin of each line of a shell comment."""
_COMMAND = re.compile(r"(fastdiff|python|deepspeed|torchrun|sbatch|pip) ")
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+\s*""")
_PROSE_WORD = re.compile(r"(?:`[^`]*`|\S)+\s*")
_WORD = re.compile(r"\S+\s*")


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is shown on a terminal."""
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


def redraws(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can draw over a line."""
    return is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def columns(stream: TextIO) -> int | None:
    """Return the width of a terminal, or the environment's COLUMNS; None: the stream is no terminal."""
    if not is_terminal(stream):
        return None
    given = os.environ.get("COLUMNS", "")
    try:
        found = int(given) if given.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # it has no descriptor, or hung up
        found = 0
    return max(found, _NARROWEST) if found else _USUAL


def width(text: str) -> int:
    """Return the columns of a line, in which the characters of some scripts take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fitted(text: str, room: int | None) -> str:
    """Return a text with every line that is wider than ``room`` columns wrapped; None: as it is.

    Only a word that is wider itself stays so.
    """
    if room is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, room))


def _wrapped(line: str, room: int) -> Iterator[str]:
    if width(line) <= room:
        yield line
        return
    if line.startswith(_COMMENT):
        yield from (_COMMENT + part for part in _wrapped(line.removeprefix(_COMMENT), room - len(_COMMENT)))
        return
    rest = line.lstrip(" ")
    margin = len(line) - len(rest)
    hanging = min(margin + _HANGING, room // 2)
    if margin and _COMMAND.match(rest):
        *parts, last = filled(_SHELL_WORD.findall(rest), room - margin - 2, room - hanging - 2)
        lines = [*(f"{part} \\" for part in parts), last]
    else:
        lines = list(filled(_prose(rest, room - hanging), room - margin, room - hanging))
    yield " " * margin + lines[0]
    yield from (" " * hanging + part for part in lines[1:])


def _prose(text: str, room: int) -> Iterator[str]:
    """Yield the words of a text with the spaces behind them; a command in backticks is one if there is room for it."""
    for word in _PROSE_WORD.findall(text):
        yield from [word] if width(word.rstrip()) <= room else _WORD.findall(word)


def filled(pieces: Iterable[str], first: int, others: int) -> Iterator[str]:
    """Yield lines of pieces, broken only between them: the first of ``first`` columns, the others of ``others``."""
    line, room = "", first
    for piece in pieces:
        if line and width(line + piece.rstrip()) > room:
            yield line.rstrip()
            line, room = "", others
        line += piece
    yield line.rstrip()
