"""Secrets taken out of what is written or shown: credentials in addresses, and values whose names say what they are."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

# Only at the beginning of a word, so that a long one is gone through once; a password may hold quotes.
_ADDRESS = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+://(?:[^\s/?#]*@)?[^\s'\"<>]*")
_NAME = re.compile(r"key|token(?!iz)|secret|passw|credential|authorization", re.IGNORECASE)
_HIDDEN = "***"


def address(text: str) -> str:
    """An address without user, password, query and fragment, where signed addresses have their secrets.

    What is no address, such as a path on this machine, stays as it is.
    """
    if not _ADDRESS.match(text):
        return text
    scheme, _, rest = text.partition("://")
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:  # no address that anything could open
        return f"{scheme}://{_HIDDEN}"
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def line(text: str) -> str:
    """A text, for example an argument of the command line, with every address in it as ``address`` shows it.

    One that is an address, or ``--name=`` and an address, is so to its end, whatever is in it.
    """
    name, equals, value = text.partition("=")
    if _ADDRESS.match(text):
        text = address(text)
    elif equals and _ADDRESS.match(value):
        text = f"{name}={address(value)}"
    return _ADDRESS.sub(lambda found: address(found[0]), text)


def tree(value: Any) -> Any:
    """JSON values without credentials: those of texts that are addresses, and values under names such as ``api_key``.

    A number under a name in the plural, such as ``tokens``, is how many there are, and stays.
    """
    if isinstance(value, dict):
        return {name: _entry(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [tree(inner) for inner in value]
    return address(value) if isinstance(value, str) else value


def _entry(name: str, value: Any) -> Any:
    if not _NAME.search(name):
        return tree(value)
    if isinstance(value, list | tuple):
        return [_entry(name, inner) for inner in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and not name.lower().endswith("s")):
        return _HIDDEN
    return tree(value)


CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line and paragraph separators, and halves of surrogate pairs, which no UTF-8 can hold."""

_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LONGEST = 2000


def escape(text: str) -> str:
    """A text for messages: what is no character, commands a terminal or turns the reading direction, as escapes.

    Of a long text, the first 2,000 characters.
    """
    valid = text[:_LONGEST].encode("utf-8", "backslashreplace").decode()
    for kind in (CONTROL, _REORDERING):
        valid = kind.sub(lambda match: f"\\x{ord(match[0]):02x}", valid)
    return f"{valid} ..." if len(text) > _LONGEST else valid
