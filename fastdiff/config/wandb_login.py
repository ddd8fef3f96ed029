"""Whether wandb would find an API key, learnt from what it reads: environment, netrc and its settings files.

wandb itself takes a second to import, and is asked by rank 0 alone. In doubt a key is there: wandb then says what it
misses.
"""

import configparser
import netrc
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from fastdiff.files import read_bounded

_LARGEST = 1 << 20
"""Bytes of the largest file that is read."""
_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")
_ONLINE = ("online", "shared", "run")
_OWN_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Hosts of wandb's own service in the versions since 0.20, under which `wandb login` writes the key."""
_SHORTEST = 40
"""Characters of a key, behind the prefix of a self-hosted server."""


def missing_wandb_login(environment: Mapping[str, str]) -> str | None:
    """Return why wandb cannot start a run with a server, and the ways out; None: nothing is known to be missing."""
    settings = _settings(environment)
    mode = environment.get("WANDB_MODE") or settings.get("mode") or "online"
    if mode not in _MODES:
        return f"WANDB_MODE {mode}: expected {', '.join(_MODES[:4])}"
    anonymous = environment.get("WANDB_ANONYMOUS") in ("allow", "must")  # of older versions, without a key
    if mode not in _ONLINE or anonymous or _manages_keys(environment):
        return None
    key = environment.get("WANDB_API_KEY")
    if key and len(key) < _SHORTEST:
        return f"WANDB_API_KEY has {len(key)} characters, a key has {_SHORTEST} or more; {_ways_out(environment)}"
    if key or environment.get("WANDB_IDENTITY_TOKEN_FILE") or settings.get("api_key"):
        return None
    hosts = _hosts(environment.get("WANDB_BASE_URL") or settings.get("base_url") or "")
    if _has_netrc(environment, hosts):
        return None
    server = "" if hosts is _OWN_HOSTS else f" for {hosts[0]}"
    return (
        f"no API key{server}: WANDB_API_KEY, {_netrc_path(environment)} and wandb's settings have none; "
        f"{_ways_out(environment)}"
    )


def _ways_out(environment: Mapping[str, str]) -> str:
    disabled = "; WANDB_DISABLED is not read by wandb" if environment.get("WANDB_DISABLED") else ""
    return (
        "log in with `wandb login`, set WANDB_API_KEY, set WANDB_MODE=offline (`wandb sync` uploads the run later) or "
        f"disabled, or take another tracker: --output.report_to tensorboard{disabled}"
    )


def _manages_keys(environment: Mapping[str, str]) -> bool:
    """Return whether this is a SageMaker job, where wandb takes the key from elsewhere."""
    return "SM_TRAINING_ENV" in environment or Path("/opt/ml/input/config/hyperparameters.json").exists()


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of wandb's settings files: the one in the working folder goes before the user's."""
    folder = environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    found: dict[str, str] = {}
    for path in (Path(folder), Path(".wandb") if Path(".wandb").exists() else Path("wandb")):
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(OSError, ValueError, RuntimeError, configparser.Error):  # wandb ignores such a file, too
            parser.read_string(read_bounded(path.expanduser() / "settings", _LARGEST).decode())
            found |= dict(parser["default"]) if parser.has_section("default") else {}
    return found


def _hosts(address: str) -> tuple[str, ...]:
    """Return the names under which a key may lie in a netrc file; those of wandb's service stand for one another."""
    with suppress(ValueError):  # no address
        parts = urlsplit(address)
        host = parts.netloc.rpartition("@")[2]
        if parts.hostname and parts.hostname not in _OWN_HOSTS:
            return tuple(dict.fromkeys((host, parts.hostname)))
    return _OWN_HOSTS


def _netrc_path(environment: Mapping[str, str]) -> Path:
    if given := environment.get("NETRC"):
        return Path(given)
    other = Path("~/_netrc")
    return other if not _exists(Path("~/.netrc")) and _exists(other) else Path("~/.netrc")


def _exists(path: Path) -> bool:
    try:
        return path.expanduser().exists()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return False


def _has_netrc(environment: Mapping[str, str], hosts: tuple[str, ...]) -> bool:
    try:
        path = _netrc_path(environment).expanduser()
        if not path.is_file():
            return False
        keys = netrc.netrc(path)
    except (OSError, ValueError, RuntimeError, netrc.NetrcParseError):  # wandb ignores such a file, too
        return False
    found = [keys.authenticators(host) for host in hosts]
    return any(entry is not None and entry[2] for entry in found)
