"""The rank processes of one node: start, signal, inspect, reap and kill them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastdiff.exit_message import message_file
from fastdiff.parallel.heartbeat import PHASES, Beat, Phase, beat_path, read_beat
from fastdiff.parallel.rendezvous import LISTENER

_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
_KILL_S = 10.0
"""Time for all ranks together to end after SIGKILL."""
STOPPED_STATES = "TtZX"
"""States in ``/proc/PID/stat`` of processes that cannot run: stopped, traced, zombie, dead."""


def spawn(command: Sequence[str], environment: Mapping[str, str], **options: object) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own session; it gets SIGTERM when this process ends, even by SIGKILL.

    Call it in the main thread: the kernel takes the thread that starts a process for its parent.
    """
    guarded = [sys.executable, "-I", str(_DIE_WITH_PARENT), str(os.getpid()), *command]
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        guarded, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True, **options
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that is not reaped yet, and all its descendants in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The state of a rank as its supervisor sees it."""

    rank: int
    process: int
    state: str
    """State in ``/proc/PID/stat``: R running, S sleeping, D waiting for a device or storage, T stopped, Z zombie."""
    step: int
    phase: Phase
    age_s: float
    """Seconds since its last beat."""

    @property
    def place(self) -> tuple[bool, int, int, float]:
        """Sort key with the likely culprit of a hang first: stopped, then least progress, then oldest beat."""
        return self.state not in STOPPED_STATES, self.step, PHASES.index(self.phase), -self.age_s


@dataclass(slots=True)
class Rank:
    """A rank process of this node."""

    number: int
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)

    @property
    def alive(self) -> bool:
        """False once the process is reaped."""
        return self.process.returncode is None

    def reap(self) -> int | None:
        """Return its exit code, or minus the signal, once it has ended; first kill the processes it left running."""
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        kill_group(self.process)  # while its process id cannot be reused
        return self.process.wait()


class Ranks:
    """The ranks of this node.

    Args:
        command: command of one rank.
        environments: environment of each rank, with RANK; it inherits the descriptor in LISTENER.
        node_folder: folder of the ranks' beats and causes of failure.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], node_folder: Path) -> None:
        self._folder = node_folder
        self._ranks = [
            Rank(int(env["RANK"]), spawn(command, env, pass_fds=[int(env[LISTENER])] if LISTENER in env else []))
            for env in environments
        ]

    @property
    def every(self) -> list[Rank]:
        """All ranks, alive or not."""
        return self._ranks

    @property
    def alive(self) -> list[Rank]:
        """The ranks that are not reaped yet."""
        return [rank for rank in self._ranks if rank.alive]

    @property
    def told(self) -> Rank | None:
        """The rank, alive or not, that has printed the message of this node; None: none has."""
        return next((rank for rank in self._ranks if message_file(self._folder, rank.number).exists()), None)

    @property
    def training(self) -> bool:
        """True once any rank, alive or not, has begun its first step."""
        beats = [self._beat(rank) for rank in self._ranks]
        return any(beat is not None and beat.phase != "start" for beat in beats)

    def reap(self) -> Iterator[tuple[Rank, int]]:
        """Yield the ranks that ended since the last call, in order, each with its exit code or minus the signal."""
        for rank in self.alive:
            code = rank.reap()
            if code is not None:
                yield rank, code

    def signal(self, number: int) -> None:
        """Send a signal to all ranks at once."""
        for rank in self.alive:
            os.kill(rank.process.pid, number)

    def dump_stacks(self) -> None:
        """Let every rank that has beaten write its stacks; the signal would kill a rank without a handler."""
        for rank in self.alive:
            if self._beat(rank) is not None:
                os.kill(rank.process.pid, signal.SIGUSR2)

    def kill(self) -> list[Rank]:
        """Kill and reap all ranks; return those that do not end because they wait in the kernel."""
        for rank in self.alive:
            kill_group(rank.process)
        deadline = time.monotonic() + _KILL_S
        for rank in self.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        return self.alive

    def silent_for_s(self) -> float:
        """Return the age of the oldest last beat, in seconds; ranks that are still starting do not count."""
        beats = [beat for rank in self.alive if (beat := self._beat(rank)) is not None and beat.phase != "start"]
        return max((time.monotonic() - beat.monotonic_s for beat in beats), default=0.0)

    def starting_for_s(self) -> float:
        """Return the longest start of a rank so far, in seconds; 0 once all have taken their first batch."""
        beats = [self._beat(rank) or Beat(-1, "start", rank.started_s) for rank in self.alive]
        return max((time.monotonic() - beat.monotonic_s for beat in beats if beat.phase == "start"), default=0.0)

    def statuses(self) -> list[RankStatus]:
        """Return the state of every living rank."""
        return [self._status(rank) for rank in self.alive]

    def _status(self, rank: Rank) -> RankStatus:
        beat = self._beat(rank) or Beat(-1, "start", rank.started_s)
        age_s = time.monotonic() - beat.monotonic_s
        return RankStatus(rank.number, rank.process.pid, _state(rank.process.pid), beat.step, beat.phase, age_s)

    def _beat(self, rank: Rank) -> Beat | None:
        return read_beat(beat_path(self._folder, rank.number))


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
