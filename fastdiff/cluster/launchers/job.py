"""The job that a launcher starts: its ranks, and the command of each node."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastdiff.cluster.preflight.run_folder import check_run_folder
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.command_line import train_flags
from fastdiff.config.engine import require_engine
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import plugins
from fastdiff.config.sections.performance import Device
from fastdiff.config.trackers import require_usable, warn_of_problems
from fastdiff.console import note, write_line
from fastdiff.data.loading.fit import check_data_set
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.outputs import require_output, write_output
from fastdiff.parallel.visible_gpus import visible_gpus
from fastdiff.plurals import counted

SUPERVISOR = "fastdiff.cluster.supervisor.main"
CORES_PER_RANK = 8
"""Cores that a launcher asks for by default: for the rank itself, its readers of data and its saves."""
PORTS = range(20_000, 30_000)
"""Ports below the ephemeral range of Linux."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run on one or more nodes."""

    nodes: int
    ranks_per_node: int
    preflight: bool
    flags: tuple[str, ...]
    """Flags of ``fastdiff/train.py``."""

    def check(self, *, elsewhere: bool = False) -> RunConfig:
        """Return the configuration of the run; raise the errors of its ranks before any process starts.

        Args:
            elsewhere: whether the ranks run on other machines; a data set that is not here is then a warning.

        Raises:
            ConfigError: a flag is unknown, or the flags contradict one another or do not fit the number of ranks or the
                data set; or a tracker is not installed, or lacks its login.
            DataError: the data set is missing or damaged.
            StorageError: the data set cannot be read.
            SystemExit: 0 after ``--help``.
        """
        launch, config = train_flags.parse(self.flags)
        ranks = self.nodes * self.ranks_per_node
        config.batch.require_divisible(ranks)
        require_engine(config, deepspeed_config.resolve(launch.deepspeed, config, ranks))
        try:
            if not launch.dry_run:
                _check_trackers(config.output.report_to, elsewhere=elsewhere)
                check_run_folder(config, launch)
                check_data_set(config, launch.preset)
                _check_plugins(config, elsewhere=elsewhere)
        except (DataError, StorageError) as error:
            if not elsewhere:
                raise
            write_line(f"fastdiff: warning: seen from this machine: {error}; each node looks again before the start")
        return config

    def on_gpus(self, device: Device) -> Job:
        """Return the job whose ranks refuse a node without a GPU, unless its flags choose the device."""
        if device != "auto":
            return self
        return replace(self, flags=(*self.flags, "--performance.device", "cuda"))

    def arguments(self, master: str, port: int | str) -> list[str]:
        """Return the arguments of the supervisors, without ``--node-rank``, which precedes them."""
        sizes = ["--nodes", str(self.nodes), "--ranks-per-node", str(self.ranks_per_node)]
        preflight = [] if self.preflight else ["--no-preflight"]
        return [*sizes, "--master", master, "--port", str(port), *preflight, "--", *self.flags]


def local_job(flags: Sequence[str], ranks: int | None, *, preflight: bool, beside: Collection[str] = ()) -> Job | None:
    """Return the job of a run on this machine, after the checks of its flags, and say what starts.

    Args:
        flags: of the run.
        ranks: as given; None: one per visible GPU, or one on the CPU.
        preflight: whether to check the node.
        beside: flags of the command itself, as of ``train_flags.parse``.

    Returns:
        The job; None after ``--dry-run``, which prints it.

    Raises:
        FastdiffError, SystemExit: as of ``Job.check``.
    """
    launch, config = train_flags.parse(flags, beside)
    gpus = 0 if config.performance.device == "cpu" else visible_gpus()
    ranks = ranks or max(1, gpus)
    job = Job(nodes=1, ranks_per_node=ranks, preflight=preflight, flags=tuple(flags))
    job.check()
    if launch.dry_run:
        train_flags.print_dry_run(config, deepspeed_config.resolve(launch.deepspeed, config, ranks))
        return None
    where = f"{counted(ranks, 'rank')} on {f'GPUs, {gpus} visible' if gpus else 'the CPU'}"
    note(f"fastdiff: {config.output.folder}: {config.steps:,} steps; starting {where}")
    return job


def random_port() -> int:
    """Return a random port, for a machine whose free ports are unknown."""
    return secrets.choice(PORTS)


def require_name(flag: str, value: str, pattern: str, expected: str) -> None:
    """Require a value that is safe in a script, a manifest and a command line.

    Args:
        flag: name of the flag, for the message.
        value: the given value.
        pattern: regular expression of the whole value.
        expected: the pattern in words.

    Raises:
        ConfigError: the value does not match.
    """
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ConfigError(f"{flag} {value!r}: expected {expected}")


def write(path: Path, content: str) -> None:
    """Write a file that only the user can read: flags may hold private values."""
    require_output(path)
    write_output(path, content.encode(), 0o600)


def passed(path: Path, command: Sequence[str], doubt: str) -> str:
    """Pass a file to a command of the cluster and return its output.

    Raises:
        ConfigError: the command is missing, does not answer (``doubt`` says why it may not), or refuses the file.
    """
    name = command[0]
    try:
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise ConfigError(f"{name} is missing on this machine; copy {path} to one that has it") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name} did not answer within 120 s; {doubt}") from None
    if done.returncode:
        raise ConfigError(f"{name} refuses {path}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _check_trackers(report_to: Sequence[str], *, elsewhere: bool) -> None:
    """Require the trackers' packages and logins (ConfigError), if the run is here; others may have what it lacks."""
    if elsewhere:
        warn_of_problems(report_to, "seen from this machine: ")
    else:
        require_usable(report_to)


def _check_plugins(config: RunConfig, *, elsewhere: bool) -> None:
    """Require the files of objective and callbacks; those of a job elsewhere may lie on its nodes only.

    The file of a network is needed here as well: it decides the fields of the command line. ConfigError: one is missing
    on the machine of the run.
    """
    try:
        plugins(config)
    except ConfigError as error:
        if not elsewhere:
            raise
        write_line(f"fastdiff: warning: seen from this machine: {error}; each node looks again before the start")
