"""What the experiment trackers need before a run starts: their packages, and the logins of those with a server."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import parse_qs

from fastdiff.config.wandb_login import missing_wandb_login
from fastdiff.console import write_line
from fastdiff.errors import ConfigError
from fastdiff.optional_packages import pip_install

PROJECT = "fastdiff"
"""Project in wandb and trackio where neither the run nor the user's settings of the tracker name one."""


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


_LOGINS: dict[str, Callable[[Mapping[str, str]], str | None]] = {
    "wandb": missing_wandb_login,
    "trackio": missing_trackio_login,
}
"""For each tracker that is a package of its own: what its server needs and the environment variables, or its files, do
not have."""


def require_usable(report_to: Sequence[str]) -> None:
    """Require that the trackers are installed and have their logins, without a network; ConfigError: the ways out."""
    for problem in problems(report_to):
        raise ConfigError(problem)


def problems(report_to: Sequence[str]) -> Iterator[str]:
    """Yield for each tracker that this machine cannot use what is missing, and the ways out."""
    for name in report_to:
        if name not in _LOGINS:
            continue
        if importlib.util.find_spec(name) is None:
            yield (
                f"--output.report_to {name} needs {name}, which is not installed: {pip_install(name)}; or leave it out"
            )
        elif problem := _LOGINS[name](os.environ):
            yield f"--output.report_to {name}: {problem}"


def warn_of_problems(report_to: Sequence[str], seen_from: str = "") -> None:
    """Write a line for each problem, where no run starts on this machine."""
    for problem in problems(report_to):
        write_line(f"fastdiff: warning: {seen_from}{problem}")


def variables(report_to: Sequence[str]) -> list[str]:
    """Return the names of the environment variables that are set for these trackers."""
    prefixes = tuple(f"{name.upper()}_" for name in report_to if name in _LOGINS)
    return sorted(name for name, value in os.environ.items() if prefixes and name.startswith(prefixes) and value)
