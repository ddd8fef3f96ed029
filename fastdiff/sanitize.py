"""Sanitized text for output: credentials are removed, and control characters are escaped.

Credentials are found by their form, also in addresses that no program could open: with a folded ``:/`` (a path makes it
of ``://``), with backslashes, without a scheme, percent-encoded, with a slash in the password, or with parameters
behind a semicolon. In doubt more is hidden.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

# Matches only at the start of a run of its letters, so that a long word is scanned once.
_SCHEME = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+):([/\\]+)")
_RELATIVE = re.compile(r"(?<![^='\"<(\[{,`])([/\\]{2,})(?=[^/\\]{0,400}@|[^/\\]{0,400}:.{0,400}@)")
"""Begin of an address without scheme, ``//user:password@host``; without an @ it is a path of this machine."""
_USER = re.compile(r"[^\s/\\:]+:(?!\d{1,3}@[^@]*$)[^\s@]*@")
"""Begin of ``user:password@host``; a number of up to three digits belongs to the name of a folder, ``exp:1@node3``."""
_PASSWORD_OF_WORDS = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+:[/\\]{2,}|(?:https?|s3):[/\\])[^\s@/\\?#:]{0,200}:"
    r"(?!\d+(?:[/?#'\",;:)\]\s]|$))[^\n@]{0,200}[ \t\r][^\n@]{0,200}@"
)
"""A password with blanks: its words would pass one by one."""
_BROKEN_SCHEME = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+):\s*([/\\])\s+(?=[/\\][^\s@]{0,400}@)")
"""Blanks between slashes, which programs skip."""
_PORTS = ("http", "https", "ftp")
_NETWORK = (*_PORTS, "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "wasb", "wasbs", "hf")
_OTHER_ADDRESS = re.compile(r":[^/]{0,400}@|//[^/]{0,400}@")
"""In a path: another address, or the rest of a password."""
_NAME = re.compile(r"key|token(?!iz)|secret|passw|credential|authorization|signature", re.IGNORECASE)
_SETTING = r"(?!\d{1,3}(?:[.-][a-z.-]+)?(?:[\s&;'\"<>]|$))"
"""No short number, which belongs to the name of a folder or a file, as in ``a;key=3.png``."""
_ASSIGNMENT = re.compile(
    r"(?<![\w.%-])(?!key=)((?:[\w.%-]{0,64}?(?:[_.%-]|(?<=[a-z])(?=[A-Z])))?(?i:(?:api|auth|access|private)?"
    r"(?:key|token|secret|passw(?:or)?d|credential|authorization|signature)(?:_?id)?s?))="
    rf"(?!(?<=s=)\d+(?!\w)){_SETTING}[^\s&;'\"<>]+"
)
"""The secret's name ends in one of these words; a number under a plural name is a count."""
_IN_QUERY = re.compile(rf"([?&;](?:sig|se|sp|sv|sr|st|key|auth|pass|pwd))={_SETTING}[^\s&;'\"<>]+", re.IGNORECASE)
"""Matches parameters that are ordinary words elsewhere; some are those of Azure's signatures."""
_PAIR = re.compile(
    r"""(["'])([\w.-]{0,64}?(?:key|token|secret|passw(?:or)?d|credential|signature|authorization|cookie))\1(\s*:\s*)"""
    r"""(["'])[^"'\n]+\4""",
    re.IGNORECASE,
)
"""An entry of JSON, or of a dictionary as Python shows it."""
_HEADER = re.compile(
    r"""\b((?:proxy-)?authorization|(?:set-)?cookie|x(?:-\w{1,32}){0,4}-(?:key|token|secret|signature))(\s*:\s*)"""
    r"""(?:(?:bearer|basic|token|digest)\s+)?[^\s"',;]+""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)(?=[^\s\"',;]*[\d=])[\w.~+/=-]{8,}", re.IGNORECASE)
_TOKEN = re.compile(
    r"(?<![\w/.-])(?:hf_[A-Za-z0-9]{30,}|wandb_v\d_\w{16,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,})(?![\w/])"
)
"""Tokens of services by their own form; not a part of a path."""
_CLOSING = "'\"<>()[]{},.;:!`"
_OPENING = "'\"<([{ `"
_HIDDEN = "***"
LEFT_OUT = "the credentials of addresses are not shown; write them again"
"""Note below a printed command that was given credentials."""
_CODED = 3
"""Levels of percent-encoding that are read."""


def is_address(text: str) -> bool:
    """Return whether ``text`` begins as an address: ``scheme://``, folded ``http:/``, or ``//user@host``."""
    plain = _plain(text)
    found = _SCHEME.match(plain)
    if found is None:
        return _RELATIVE.match(plain) is not None
    return len(found[2]) > 1 or found[1].lower() in _NETWORK


def address(text: str) -> str:
    """Remove user, password, parameters, query and fragment of an address; signed ones carry their secrets there.

    Text that is no address, such as a local path, stays as it is.
    """
    for form in _forms(_plain(text)):
        if (shown := _without_secrets(form)) != form:
            return shown
    return text


def _plain(text: str) -> str:
    """Return text as programs read it that skip control characters, and fold wide forms of letters."""
    wide = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return CONTROL.sub("", wide).lstrip(_OPENING)


def _forms(text: str) -> Iterator[str]:
    """Yield a text, and what is percent-encoded in it."""
    yield text
    for _ in range(_CODED):
        decoded = CONTROL.sub("", unquote(text))
        if decoded == text:
            return
        yield (text := decoded)


def _without_secrets(text: str) -> str:
    if found := _SCHEME.match(text):
        return found[0] + _of_address(text[found.end() :], found[1].lower(), known=is_address(text))
    if found := _RELATIVE.match(text):
        return found[0] + _of_address(text[found.end() :], "", known=True)
    if re.search(r"\s", text):
        return message(text) if _SCHEME.search(text) else text
    is_path = _begins_here(text)
    if _USER.match(text) and not is_path:
        return f"{_HIDDEN}@{_without_parameters(text.rpartition('@')[2])}"
    if found := _SCHEME.search(text):
        return text[: found.start()] + _without_secrets(text[found.start() :])
    return _without_parameters(text) if re.search("[?&;]", text) and not is_path else text


def _begins_here(text: str) -> bool:
    """Return whether the first folder of a relative path exists, as that of ``./new`` does."""
    first = text.partition("/")[0]
    return bool(first) and os.path.lexists(first)


def _of_address(text: str, scheme: str, *, known: bool) -> str:
    """Return what may be shown of an address behind its slashes; ``known``: it is one for certain."""
    text = text.replace("\\", "/")
    shown, *query = re.split(r"[?#]", text, maxsplit=1)
    netloc, slash, path = shown.partition("/")
    user, _, host = netloc.rpartition("@")
    behind = "".join(query)
    of_password = (  # which contains @, /, ? or #
        not _is_host(host, scheme)
        or (bool(user) and "@" in path)
        or ((not slash or ":" in netloc) and "@" in behind)
        or _OTHER_ADDRESS.search(path) is not None
    )
    if of_password and known:
        return _HIDDEN
    return re.sub(r";[^/]*", "", f"{host}{slash}{path}")


def _is_host(text: str, scheme: str) -> bool:
    """Return whether it can be a host and a port; otherwise it may be a part of a password."""
    if scheme in _NETWORK and scheme not in _PORTS and ":" in text:
        return False
    try:
        _ = urlsplit(f"//{text}").port
    except ValueError:
        return False
    return True


def argument(text: str) -> str:
    """Sanitize a command-line argument; an address, also after ``--name=``, extends to its end."""
    name, equals, value = text.partition("=")
    if is_address(text):
        return address(text)
    if equals and is_address(value):
        return f"{name}={address(value)}"
    return message(text)


def message(text: str) -> str:
    """Sanitize a message or a traceback: addresses, ``password=...``, entries and headers such as ``Authorization``."""
    text = _TOKEN.sub(_HIDDEN, _BEARER.sub(rf"\1\2{_HIDDEN}", _HEADER.sub(rf"\1\2{_HIDDEN}", _hide_pairs(text))))
    text = _PASSWORD_OF_WORDS.sub(r"\1", _BROKEN_SCHEME.sub(r"\1:\2", text))
    return re.sub(r"\S+", lambda found: _word(found[0]), text)


def _hide_pairs(text: str) -> str:
    return _PAIR.sub(rf"\1\2\1\3\4{_HIDDEN}\4", text)


def _word(word: str) -> str:
    core = word.rstrip(_CLOSING)
    closing = word[len(core) :]
    folded = core if core.isascii() else unicodedata.normalize("NFKC", core)
    for form in _forms(folded):
        if (shown := _of_word(form)) != form:
            return shown + closing
    return word


def _of_word(core: str) -> str:
    found = _SCHEME.search(core)
    if found is not None or (found := _RELATIVE.search(core)) is not None:
        begin, rest = core[: found.start()], address(core[found.start() :])
    elif _has_user(core):
        begin, rest = core[: core.find("=") + 1], f"{_HIDDEN}@{core.rpartition('@')[2]}"
    else:
        begin, rest = core, ""
    return _without_parameters(begin + rest)


def _has_user(word: str) -> bool:
    """Return whether it may be ``user:password@host``, as a path from the root or of a folder that is here is not."""
    user, _, _ = word.rpartition("@")
    name = word.lstrip(_OPENING)
    if ":" not in user or re.match("/[^/]", word.lstrip(_CLOSING)) or _begins_here(name):
        return False
    return re.fullmatch(r"[^\s/\\:@]+:\d{1,3}", name.rpartition("@")[0]) is None


def _without_parameters(text: str) -> str:
    shown = _IN_QUERY.sub(rf"\1={_HIDDEN}", _ASSIGNMENT.sub(rf"\1={_HIDDEN}", text))
    return text if shown != text and _is_named_here(text.lstrip(_OPENING)) else shown


def _is_named_here(path: str) -> bool:
    """Return whether the folder, or the file, whose name has the parameters exists."""
    begin, _, _ = path.rpartition("=")
    return os.path.lexists(begin + path[len(begin) :].partition("/")[0])


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


def is_utf8(text: str) -> bool:
    """Return whether a text can be written as UTF-8: a name in another encoding arrives with unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
