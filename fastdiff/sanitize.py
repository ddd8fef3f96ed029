"""Sanitized text for output: credentials are removed, and control characters are escaped.

Credentials are found by their form, also in addresses that no program could open: with a folded ``:/`` (a path makes it
of ``://``), with a slash in the password, or with parameters behind a semicolon.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

# Matches only at the start of a run of its letters, so that a long word is scanned once.
_SCHEME = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+):(/+)")
_PASSWORD_OF_WORDS = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+://+|(?:https?|s3):/)[^\s@/?#:]{0,200}:"
    r"(?!\d+(?:[/?#'\",;:)\]\s]|$))[^\n@]{0,200} [^\n@]{0,200}@"
)
"""A password with blanks, whose words would pass one by one."""
_NETWORK = ("http", "https", "ftp", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "wasb", "wasbs", "hf")
_NAME = re.compile(r"key|token(?!iz)|secret|passw|credential|authorization|signature", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    r"(?<![\w.%-])(?!key=)((?:[\w.%-]{0,64}?(?:[_.%-]|(?<=[a-z])(?=[A-Z])))?(?i:(?:api|auth|access|private)?"
    r"(?:key|token|secret|passw(?:or)?d|credential|authorization|signature)(?:_?id)?s?))="
    r"(?!(?<=s=)\d+(?!\w))[^\s&;'\"<>]+"
)
"""The secret's name ends in one of these words; a number under a plural name is a count."""
_IN_QUERY = re.compile(r"([?&;](?:sig|se|sp|sv|sr|st|key|auth|pass|pwd))=[^\s&;'\"<>]+", re.IGNORECASE)
"""Matches parameters that are ordinary words elsewhere; some are those of Azure's signatures."""
_CLOSING = "'\"<>()[]{},.;:!`"
_HIDDEN = "***"


def is_address(text: str) -> bool:
    """Return whether ``text`` begins as an address, ``scheme://``, or as one that a path has folded, ``http:/``."""
    found = _SCHEME.match(text)
    return found is not None and (len(found[2]) > 1 or found[1].lower() in _NETWORK)


def address(text: str) -> str:
    """Remove user, password, parameters, query and fragment of an address; signed ones carry their secrets there.

    Text that is no address, such as a local path, stays as it is.
    """
    found = _SCHEME.match(text)
    if found is None:
        return text
    begin = found[0]
    shown, *query = re.split(r"[?#]", text[found.end() :], maxsplit=1)
    netloc, slash, path = shown.partition("/")
    host = netloc.rpartition("@")[2]
    of_password = not _is_host(host) or (not slash and "@" in "".join(query))  # which contains /, ? or #
    if of_password and is_address(text):
        return f"{begin}{_HIDDEN}"
    return begin + re.sub(r";[^/]*", "", f"{host}{slash}{path}")


def _is_host(text: str) -> bool:
    """Return whether it can be a host and a port; otherwise it may be a part of a password."""
    try:
        _ = urlsplit(f"//{text}").port
    except ValueError:
        return False
    return True


def argument(text: str) -> str:
    """Sanitize a command-line argument; an address, also after ``--name=``, extends to its end."""
    name, equals, value = text.partition("=")
    if _SCHEME.match(text):
        return address(text)
    if equals and _SCHEME.match(value):
        return f"{name}={address(value)}"
    return message(text)


def message(text: str) -> str:
    """Sanitize a message or a traceback: every word that contains an address, and every ``password=...``."""
    text = _PASSWORD_OF_WORDS.sub(r"\1", text)
    return re.sub(r"\S+", lambda found: _word(found[0]), text)


def _word(word: str) -> str:
    core = word.rstrip(_CLOSING)
    closing = word[len(core) :]
    found = _SCHEME.search(core)
    if found is not None:
        begin, rest = core[: found.start()], address(core[found.start() :])
    elif ":" in core.rpartition("@")[0] and not re.match("/[^/]", core.lstrip(_CLOSING)):  # user:password@host
        begin, rest = core[: core.find("=") + 1], f"{_HIDDEN}@{core.rpartition('@')[2]}"
    else:
        begin, rest = core, ""
    return _IN_QUERY.sub(rf"\1={_HIDDEN}", _ASSIGNMENT.sub(rf"\1={_HIDDEN}", begin + rest)) + closing


def tree(value: Any, text: Callable[[str], str] = address) -> Any:
    """Sanitize JSON values: texts by ``text``, and values under names such as ``api_key`` are hidden.

    A number under a plural name, such as ``tokens``, is a count and stays.

    Args:
        value: JSON values.
        text: ``address`` keeps what may be a path or a prompt, for records; ``argument`` is for output.
    """
    if isinstance(value, dict):
        return {name: _entry(str(name), inner, text) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [tree(inner, text) for inner in value]
    return text(value) if isinstance(value, str) else value


def _entry(name: str, value: Any, text: Callable[[str], str]) -> Any:
    if not _NAME.search(name):
        return tree(value, text)
    if isinstance(value, list | tuple):
        return [_entry(name, inner, text) for inner in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and not name.lower().endswith("s")):
        return _HIDDEN
    return tree(value, text)


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
