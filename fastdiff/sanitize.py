"""Sanitized text for output: credentials are removed, and control characters are escaped."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

# Matches only at the start of a word, so that a long word is scanned once; a password may contain quotes.
_ADDRESS = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+://(?:[^\s/?#]*@)?[^\s'\"<>]*")
_NAME = re.compile(r"key|token(?!iz)|secret|passw|credential|authorization", re.IGNORECASE)
_HIDDEN = "***"


def address(text: str) -> str:
    """Remove user, password, query and fragment from an address; signed addresses carry their secrets there.

    Text that is no address, such as a local path, stays as it is.
    """
    if not _ADDRESS.match(text):
        return text
    scheme, _, rest = text.partition("://")
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:  # not a valid address; nothing can open it
        return f"{scheme}://{_HIDDEN}"
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def line(text: str) -> str:
    """Sanitize every address in a text, for example in a command-line argument.

    A text that is an address, or ``--name=`` followed by one, is treated as one address up to its end.
    """
    name, equals, value = text.partition("=")
    if _ADDRESS.match(text):
        text = address(text)
    elif equals and _ADDRESS.match(value):
        text = f"{name}={address(value)}"
    return _ADDRESS.sub(lambda found: address(found[0]), text)


def tree(value: Any) -> Any:
    """Sanitize JSON values: addresses lose their credentials, and values under names such as ``api_key`` are hidden.

    A number under a plural name, such as ``tokens``, is a count and stays.
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
"""Control characters, line and paragraph separators, and unpaired surrogates, which UTF-8 cannot encode."""

_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LONGEST = 2000


def escape(text: str) -> str:
    """Escape control and bidirectional characters of untrusted text; keep at most its first 2,000 characters."""
    valid = text[:_LONGEST].encode("utf-8", "backslashreplace").decode()
    for kind in (CONTROL, _REORDERING):
        valid = kind.sub(lambda match: f"\\x{ord(match[0]):02x}", valid)
    return f"{valid} ..." if len(text) > _LONGEST else valid
