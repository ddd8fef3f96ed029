"""The processes of one node: started, signalled, looked at, reaped and, in the end, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastdiff.parallel.heartbeat import PHASES, Beat, Phase, beat_path, read_beat

_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
_KILL_S = 10.0
"""For all ranks together to be gone after SIGKILL."""
STOPPED_STATES = "TtZX"
"""States of ``/proc/PID/stat`` in which a process does not run at all: stopped, traced, dead."""


def spawn(command: Sequence[str], environment: Mapping[str, str], **options: object) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own; it gets SIGTERM when this process ends, even by SIGKILL.

    From the main thread: the kernel takes the thread that starts a process for its parent.
    """
    guarded = [sys.executable, "-I", str(_DIE_WITH_PARENT), str(os.getpid()), *command]
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        guarded, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True, **options
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was not reaped yet, and everything that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen of a rank from outside."""

    rank: int
    process: int
    state: str
    """Of ``/proc/PID/stat``: R runs, S sleeps, D waits for a device or storage, T is stopped, Z is dead."""
    step: int
    phase: Phase
    age_s: float
    """Since its last beat."""

    @property
    def place(self) -> tuple[bool, int, int, float]:
        """Sorts those that hold up the others first: a stopped one, then the furthest behind, then the longest mute."""
        return self.state not in STOPPED_STATES, self.step, PHASES.index(self.phase), -self.age_s


@dataclass(slots=True)
class Rank:
    """One rank as a process of this node."""

    number: int
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)

    @property
    def alive(self) -> bool:
        """False once it was reaped."""
        return self.process.returncode is None

    def reap(self) -> int | None:
        """Return its exit code, or minus the signal, if it has ended; what it left running is killed first."""
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        kill_group(self.process)  # while nobody else can have got its number
        return self.process.wait()


class Ranks:
    """The ranks of this node.

    Args:
        command: of one rank.
        environments: one for each rank, RANK among them.
        node_folder: where they leave beats and causes of failure.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], node_folder: Path) -> None:
        self._folder = node_folder
        self._ranks = [Rank(int(env["RANK"]), spawn(command, env)) for env in environments]

    @property
    def alive(self) -> list[Rank]:
        """Those that have not been reaped."""
        return [rank for rank in self._ranks if rank.alive]

    @property
    def training(self) -> bool:
        """Whether any of them, alive or not, has begun its first step."""
        beats = [self._beat(rank) for rank in self._ranks]
        return any(beat is not None and beat.phase != "start" for beat in beats)

    def reap(self) -> Iterator[tuple[Rank, int]]:
        """Yield the ranks that ended since the last call, with exit code or minus the signal, in the order of ranks."""
        for rank in self.alive:
            code = rank.reap()
            if code is not None:
                yield rank, code

    def signal(self, number: int) -> None:
        """Send a signal to all ranks at once."""
        for rank in self.alive:
            os.kill(rank.process.pid, number)

    def dump_stacks(self) -> None:
        """Let every rank that knows how write its stacks; the others would die of the signal."""
        for rank in self.alive:
            if self._beat(rank) is not None:
                os.kill(rank.process.pid, signal.SIGUSR2)

    def kill(self) -> list[Rank]:
        """Kill and reap everything; return what does not end, because it waits in the kernel."""
        for rank in self.alive:
            kill_group(rank.process)
        deadline = time.monotonic() + _KILL_S
        for rank in self.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        return self.alive

    def mute_for_s(self) -> float:
        """Return the age of the oldest last beat; ranks that are still starting do not count."""
        beats = [beat for rank in self.alive if (beat := self._beat(rank)) is not None and beat.phase != "start"]
        return max((time.monotonic() - beat.monotonic_s for beat in beats), default=0.0)

    def starting_for_s(self) -> float:
        """Return for how long a rank has been building the run; 0: all have taken their first batch."""
        beats = [self._beat(rank) or Beat(-1, "start", rank.started_s) for rank in self.alive]
        return max((time.monotonic() - beat.monotonic_s for beat in beats if beat.phase == "start"), default=0.0)

    def look(self) -> list[Sight]:
        """Return what is seen of every rank that lives."""
        return [self._look(rank) for rank in self.alive]

    def _look(self, rank: Rank) -> Sight:
        beat = self._beat(rank) or Beat(-1, "start", rank.started_s)
        age_s = time.monotonic() - beat.monotonic_s
        return Sight(rank.number, rank.process.pid, _state(rank.process.pid), beat.step, beat.phase, age_s)

    def _beat(self, rank: Rank) -> Beat | None:
        return read_beat(beat_path(self._folder, rank.number))


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
