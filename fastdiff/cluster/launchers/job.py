"""What is launched: how many ranks where, and the command that each node runs."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from fastdiff.config import command_line
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError

SUPERVISOR = "fastdiff.cluster.supervisor.main"
PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run on one or more nodes."""

    nodes: int
    ranks_per_node: int
    preflight: bool
    flags: tuple[str, ...]
    """Of ``fastdiff/train.py``."""

    def check(self) -> RunConfig:
        """Return the configuration of the run; refuse what its ranks would refuse, before anything is started.

        Raises:
            ConfigError: the flags contradict one another, or the number of ranks.
            SystemExit: 0 after ``--help``, 2 after a wrong flag.
        """
        launch, config = command_line.parse(self.flags)
        ranks = self.nodes * self.ranks_per_node
        config.batch.accumulation(ranks)
        deepspeed_config.resolve(launch.deepspeed, config, ranks)
        return config

    def arguments(self, master: str, port: int | str) -> list[str]:
        """Return the arguments of the supervisors but for ``--node-rank``, which goes before them.

        Args:
            master: address of node 0.
            port: on which its supervisor listens.
        """
        sizes = ["--nodes", str(self.nodes), "--ranks-per-node", str(self.ranks_per_node)]
        preflight = [] if self.preflight else ["--no-preflight"]
        return [*sizes, "--master", master, "--port", str(port), *preflight, "--", *self.flags]


def random_port() -> int:
    """Return a port for a machine that cannot be asked which are free."""
    return secrets.choice(PORTS)


def require_name(flag: str, value: str, pattern: str, expected: str) -> None:
    """Refuse a value that would mean something else where it ends up: in a script, a manifest, a command line.

    Args:
        flag: for the message.
        value: as given.
        pattern: of all of it.
        expected: in words.

    Raises:
        ConfigError: it does not match.
    """
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ConfigError(f"{flag} {value!r}: expected {expected}")


def write(path: Path, content: str) -> None:
    """Write a file for the user, readable by nobody else: flags may hold what is not for everyone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(content)
