"""Whether trackio has what its servers need: a Hugging Face login for a Space, a write token for a server of one's own.

On this machine alone, its default, it needs nothing.
"""

from collections.abc import Mapping
from urllib.parse import parse_qs


def missing_trackio_login(environment: Mapping[str, str]) -> str | None:
    """Return why trackio cannot start a run with its server, and the ways out; None: nothing is known to be missing."""
    if environment.get("TRACKIO_SPACE_ID"):
        return _missing_for_space()
    if address := environment.get("TRACKIO_SERVER_URL"):
        return _missing_for_server(address.strip(), environment)
    return None


def _missing_for_space() -> str | None:
    from huggingface_hub import get_token

    if get_token():
        return None
    return (
        "TRACKIO_SPACE_ID names a Space, for which there is no login at Hugging Face; log in with `hf auth login`, set "
        "HF_TOKEN, or unset TRACKIO_SPACE_ID: the run then stays on this machine"
    )


def _missing_for_server(address: str, environment: Mapping[str, str]) -> str | None:
    without = "or unset TRACKIO_SERVER_URL: the run then stays on this machine"
    if not address.startswith(("http://", "https://")):
        return f"TRACKIO_SERVER_URL is no address that begins with http:// or https://; correct it, {without}"
    query = address.partition("#")[0].partition("?")[2]
    if environment.get("TRACKIO_WRITE_TOKEN") or parse_qs(query).get("write_token"):
        return None
    return (
        "TRACKIO_SERVER_URL names a server, for which there is no write token; set TRACKIO_WRITE_TOKEN, or take the "
        f"address with its write_token that the server prints, {without}"
    )
