"""Hostfiles in DeepSpeed's format: a line ``name slots=N`` per host, and comments."""

import re
from dataclasses import dataclass
from pathlib import Path

from fastdiff.cluster.launchers.job import require_name
from fastdiff.errors import ConfigError
from fastdiff.files import read_bounded

_LARGEST = 1 << 20  # bytes
HOST = r"[A-Za-z0-9][A-Za-z0-9.-]*"
"""A host name or an IPv4 address, without characters special to a shell, ssh or YAML."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a job; the first is node 0."""

    names: tuple[str, ...]
    slots: int
    """Ranks per host."""


def read_hostfile(path: Path) -> Hosts:
    """Read a hostfile; ConfigError with the line: unreadable, empty, malformed, a host twice, or slots that differ."""
    try:
        text = read_bounded(path, _LARGEST).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hostfile {path}: cannot be read ({error})") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"{path}, line {number}"
        found = re.fullmatch(r"(\S+)\s+slots=([1-9][0-9]{0,3})", content, re.ASCII)
        if found is None:
            raise ConfigError(f"{where}: {line!r}; expected a host and its ranks, for example `node1 slots=8`")
        name = found[1]
        require_name(f"{where}: host", name, HOST, "letters, digits, dots and dashes, the first a letter or a digit")
        if name in slots:
            raise ConfigError(f"{where}: {name} is listed twice; name each host once, with all its slots")
        slots[name] = int(found[2])
    if not slots:
        raise ConfigError(f"--hostfile {path}: no hosts; expected lines such as `node1 slots=8`")
    first = next(iter(slots))
    for name, count in slots.items():
        if count != slots[first]:
            raise ConfigError(
                f"{path}: {name} has slots={count}, {first} slots={slots[first]}; every node runs the same number of "
                f"ranks: give all slots={min(slots.values())}"
            )
    return Hosts(tuple(slots), slots[first])
