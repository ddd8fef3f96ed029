"""Environment variables of launchers: the place of a process among the others.

They are inherited, so they may be those of a template, of an interactive shell of Slurm or of a job that has ended.
Numbers that cannot be are refused here, before a process waits for ranks that nobody starts.
"""

import os
import re
from dataclasses import dataclass

from fastdiff.errors import ConfigError

_LARGEST = 10**9
_SPECIAL_STEP = 0xFFFFFFF0
"""Least number of Slurm's steps of one process: that of an interactive shell is 4294967290."""
_LOCAL_SIZES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", *_LOCAL_SIZES, "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and deepspeed set for each process that they start."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process among those that a launcher has started; by default it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Processes on this machine; 1 also if the launcher does not say."""
    names: tuple[str, ...] = ()
    """The variables that say so."""

    @property
    def told_by(self) -> str:
        """The variables with their values, for messages."""
        return ", ".join(f"{name}={os.environ[name]}" for name in self.names if name in os.environ)


def place() -> Place:
    """Return the place that torchrun or deepspeed has given to this process.

    Raises:
        ConfigError: A variable is missing, or is no number that can be.
    """
    if "RANK" not in os.environ:
        return Place()
    own = next((name for name in _LOCAL_SIZES if name in os.environ), None)
    return _read("RANK", "WORLD_SIZE", "LOCAL_RANK", own)


def place_in_any_job() -> Place:
    """Return ``place()`` or, if neither has started this process, its place in Slurm; ConfigError as there."""
    # The other variables of Slurm are also set outside of a step, in the batch script.
    if "RANK" in os.environ or "SLURM_STEP_ID" not in os.environ or _number("SLURM_STEP_ID", 0) >= _SPECIAL_STEP:
        return place()
    return _read("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def leave_job() -> str:
    """Remove the variables from the environment of a command that is no rank; return those that were there."""
    found = [name for name in VARIABLES if os.environ.pop(name, None) is not None]
    return ", ".join(found)


def master() -> tuple[str, int]:
    """Return host and port of MASTER_ADDR and MASTER_PORT; ConfigError if one is missing, or the port is none."""
    host = os.environ.get("MASTER_ADDR", "")
    if not host:
        raise _refused("MASTER_ADDR", "the name or address of the machine of rank 0")
    return host, _number("MASTER_PORT", None, 1, 65_535)


def _read(rank: str, size: str, local_rank: str, local_size: str | None = None) -> Place:
    ranks = _number(size, None, 1)
    return Place(
        rank=_number(rank, None, 0, ranks - 1, f" ({size} is {ranks})"),
        size=ranks,
        local_rank=_number(local_rank, 0, 0, ranks - 1, f" ({size} is {ranks})"),
        local_size=_number(local_size, 1, 1, ranks, f" ({size} is {ranks})") if local_size else 1,
        names=(rank, size),
    )


def _number(name: str, default: int | None, least: int = 0, most: int | None = None, why: str = "") -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is not None and re.fullmatch(r"[0-9]{1,10}", text) and least <= int(text) <= (most or _LARGEST * 10):
        return int(text)
    raise _refused(name, f"a number from {least} to {_LARGEST if most is None else most}{why}")


def _refused(name: str, expected: str) -> ConfigError:
    found = f"is {os.environ[name]!r}" if name in os.environ else "is not set"
    others = "SLURM_STEP_ID" if name.startswith("SLURM_") else " ".join(n for n in VARIABLES if n in os.environ)
    return ConfigError(
        f"the environment variable {name} {found}, expected {expected}: a launcher (torchrun, deepspeed, srun) sets it "
        f"for each process; if none has started this one, `unset {others}`",
        everywhere=False,
    )
