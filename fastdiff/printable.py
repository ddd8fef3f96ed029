"""Foreign text, such as a file name or a key, in messages: it must not command the terminal that shows it."""

from __future__ import annotations

import re

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line and paragraph separators, and halves of surrogate pairs, which no UTF-8 can hold."""

_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LONGEST = 2000


def printable(text: str) -> str:
    """A text for messages: what is no character, commands a terminal or turns the reading direction, as escapes.

    Of a long text, the first 2,000 characters.
    """
    valid = text[:_LONGEST].encode("utf-8", "backslashreplace").decode()
    for kind in (CONTROL, _REORDERING):
        valid = kind.sub(lambda match: f"\\x{ord(match[0]):02x}", valid)
    return f"{valid} ..." if len(text) > _LONGEST else valid
