"""Paths that must lie on this machine: an address is refused before a folder is named so."""

import os

from fastdiff import sanitize
from fastdiff.errors import ConfigError


def require_local(flag: str, text: str) -> None:
    """Raise ConfigError if the value of ``flag`` is an address."""
    if (why := refusal(text)) is not None:
        raise ConfigError(f"{flag} {why}")


def refusal(text: str) -> str | None:
    """Return why a text is no path of this machine, with the text sanitized; None: it is one."""
    shown = sanitize.address(text)
    if sanitize.is_address(text):
        return f"{shown}: an address, expected a path of this machine; copy the files here first"
    if not os.path.isabs(text) and shown != text:
        return (
            f"{shown}: an address with credentials, without its scheme; expected a path of this machine; begin that of "
            "a new folder with ./"
        )
    return None
