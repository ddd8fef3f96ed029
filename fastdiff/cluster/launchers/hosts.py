"""Start a job over ssh: one connection per host; its end also ends the supervisor there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from fastdiff import sanitize
from fastdiff.cluster.launchers.hostfile import Hosts
from fastdiff.cluster.launchers.job import SUPERVISOR, Job, random_port
from fastdiff.cluster.supervisor.signals import STOP, heeded
from fastdiff.console import write_line
from fastdiff.errors import ConfigError, Preempted
from fastdiff.private_folders import OWN_CACHE
from fastdiff.version import PACKAGE

_FORWARDED = ("CUDA_", "DS_", "GLOO_", "HF_", "NCCL_", "OMP_", "PYTHON", "TORCH", "TRACKIO_", "TRITON_", "WANDB_")
"""Prefixes of the environment variables to forward; a remote login does not set them."""
_ALSO = ("PATH", "LD_LIBRARY_PATH", "NETRC", OWN_CACHE)
_LOCAL = ("CUDA_VISIBLE_DEVICES",)
"""Variables that hold for this machine only; its devices may differ from those of the hosts."""
_GRACE_S = 30.0
"""Wait after the first failure: the other supervisors learn of it themselves within a few seconds."""
_BAR_S = 1.0
_KILL_S = 90.0
"""Wait after the request to stop; the hosts save first."""
_PLAIN = re.compile(r"[\w@+=:,./ -]*", re.ASCII)


def ssh_commands(job: Job, hosts: Hosts, ssh_config: Path | None) -> list[list[str]]:
    """Return the commands that start the supervisors, in the order of the hosts.

    They use the paths of this working folder and this interpreter, which must exist on every host. The remote shell
    gets one line with every word quoted.
    """
    port = random_port()
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
    options += ["-F", str(ssh_config)] if ssh_config else []
    commands = []
    for rank, host in enumerate(hosts.names):
        supervisor = [sys.executable, "-u", "-m", SUPERVISOR, "--end-with-input", "--node-rank", str(rank)]
        variables = [f"{name}={value}" for name, value in forwarded(os.environ).items()]
        # env takes each word with "=" before the command for a variable; the interpreter's path contains none.
        remote = ["env", "-C", os.getcwd(), *variables, *supervisor, *job.arguments(hosts.names[0], port)]
        commands.append(["ssh", *options, "--", host, shlex.join(remote)])
    return commands


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the ranks need on every host.

    Variables that look like secrets are left out: all users of a host can read its command lines.
    """
    left_out = withheld(environment)
    return {name: value for name, value in _wanted(environment).items() if name not in left_out}


def withheld(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that ``forwarded`` leaves out because they look like secrets."""
    wanted = _wanted(environment)
    harmless = sanitize.tree(wanted)
    return [name for name, value in wanted.items() if harmless[name] != value]


def _wanted(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(_FORWARDED) or name in _ALSO) and name not in _LOCAL and name.isidentifier()
    }


def deepspeed_command(job: Job, hostfile: Path) -> list[str]:
    """Return the command of DeepSpeed's launcher for the same job; ConfigError if a shell would get a word unquoted."""
    train = str(PACKAGE / "train.py")
    for word in (*job.flags, train, os.getcwd(), sys.executable):
        if not _PLAIN.fullmatch(word):
            raise ConfigError(
                f"{word!r}: DeepSpeed's launcher would pass this to a shell unquoted; start the job with --submit "
                "instead"
            )
    launcher = ["deepspeed", "--hostfile", str(hostfile.absolute()), "--master_port", str(random_port())]
    return [*launcher, train, *job.flags]


def run(job: Job, hosts: Hosts, ssh_config: Path | None) -> int:
    """Start the job on all hosts, show their output and return the exit code; called in the main thread.

    A signal asks all hosts to save and stop; a second signal ends the connections. ConfigError: this machine has no
    ssh.
    """
    if names := withheld(os.environ):
        write_line(
            f"fastdiff: {', '.join(names)}: not passed on to the hosts, where all users can read command lines; log in "
            "there (`wandb login`, `hf auth login`), or set what is needed in the shell's start-up file"
        )
    try:
        connections = [
            _Connection(host, command)
            for host, command in zip(hosts.names, ssh_commands(job, hosts, ssh_config), strict=True)
        ]
    except FileNotFoundError:
        raise ConfigError("ssh is missing on this machine; install the OpenSSH client") from None
    stops: list[int] = []
    before = {number: signal.signal(number, lambda number, _: stops.append(number)) for number in heeded(STOP)}
    try:
        return _watch(connections, stops)
    finally:
        for connection in connections:
            connection.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(connections: Sequence[_Connection], stops: Sequence[int]) -> int:
    """Wait for all connections; stop all hosts after a failure of one, or on request."""
    first_bad: int | None = None
    stop_at = kill_at = float("inf")
    while True:
        codes = [connection.code for connection in connections]
        if all(code is not None for code in codes):
            break
        now = time.monotonic()
        bad = next((code for code in codes if code), None)
        if bad is not None and first_bad is None:
            first_bad, stop_at = bad, min(stop_at, now + _GRACE_S)
        if stops:
            stop_at = min(stop_at, now)
        if now >= stop_at and kill_at == float("inf"):
            kill_at = now + _KILL_S
            for connection in connections:
                connection.ask_to_stop()
        if now >= kill_at or len(stops) > 1:
            return first_bad or 128 + (stops[-1] if stops else signal.SIGKILL)
        time.sleep(0.1)
    return _exit_code([code or 0 for code in codes])


def _exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of the job: that of the first failure, otherwise 75 if any host stopped on request."""
    wrong = [code for code in codes if code not in (0, Preempted.exit_code)]
    return wrong[0] if wrong else max(codes)


class _Connection:
    """One ssh process; its output is shown line by line after the name of its host."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self._host = host
        # A session of its own: Ctrl-C reaches only this process, which then asks the hosts to stop.
        self._ssh = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._ssh.stdout is not None
        assert self._ssh.stderr is not None
        self._readers = [
            threading.Thread(target=self._show, args=(self._ssh.stdout, sys.stdout.buffer), daemon=True),
            threading.Thread(target=self._show, args=(self._ssh.stderr, sys.stderr.buffer), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """Exit code of ssh; None while it runs."""
        code = self._ssh.poll()
        return 128 - code if code is not None and code < 0 else code

    def ask_to_stop(self) -> None:
        """Close the supervisor's input."""
        assert self._ssh.stdin is not None
        self._ssh.stdin.close()

    def end(self) -> None:
        """Close the connection if it is open, and show the remaining output."""
        if self._ssh.poll() is None:
            self._ssh.kill()
            self._ssh.wait()
        for reader in self._readers:
            reader.join(timeout=5)
        if self._ssh.returncode == 255:
            sys.stderr.write(f"fastdiff: {self._host}: ssh could not connect, or lost the connection (255)\n")

    def _show(self, source: IO[bytes], target: IO[bytes]) -> None:
        prefix = f"{self._host}: ".encode()
        for line in _lines(source):
            with contextlib.suppress(OSError):  # this process's output is closed; the host must not block on it
                target.write(prefix + line + b"\n")
                target.flush()


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream; of a line that is overwritten, as a progress bar, one state per second."""
    rest, shown_s = b"", 0.0
    while chunk := os.read(source.fileno(), 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
        state, end, rest = rest.rpartition(b"\r")
        if end and time.monotonic() - shown_s >= _BAR_S:
            shown_s = time.monotonic()
            yield state.rpartition(b"\r")[2]
        elif end and not rest:
            rest = state.rpartition(b"\r")[2] + end
    if rest:
        yield rest.rstrip(b"\r")
