"""What the supervisors of all nodes tell one another: they live, a rank hangs, who failed first, how it all ended.

Everything goes through a TCPStore in the supervisor of node 0: a key is set once, and the first to set it wins. A
thread of its own talks to it, because a call can hang as long as the network does.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from fastdiff.cluster.supervisor.outcome import UNAVAILABLE, Outcome, of_ends, of_hang, of_lost_node
from fastdiff.cluster.supervisor.ranks import Sight
from fastdiff.errors import FastdiffError, Preempted
from fastdiff.parallel import rendezvous

JOIN_S = 300.0
"""All supervisors must have come within this time: batch systems do not start nodes at once."""
_CONNECT_S = 2.0
_RESOLVE_S = 1.0
_POLL_S = 0.25
_SIGHTS_S = 5.0
_MUTE_S = 5.0
"""Without a beat for so long, a node is the likely cause of a connection that was cut."""
_GOODBYE_S = 5.0


class NodeError(FastdiffError):
    """A node cannot be reached."""

    exit_code = UNAVAILABLE


def join(host: str, port: int, node: int, count: int) -> TCPStore:
    """Open the store of the supervisors: node 0 hosts it, on the address of ``host`` alone, the others wait for it.

    Signal handlers run in between, and what they raise comes out.

    Raises:
        NodeError: the port is taken, or node 0 did not come in time.
    """
    if node == 0:
        listener = _listen(host, port, alone=count == 1)
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            return connect(host, port)
        except DistError as error:
            if time.monotonic() > deadline:
                raise NodeError(
                    f"node {node} ({socket.gethostname()}): no supervisor of node 0 at {host}:{port} within "
                    f"{JOIN_S:.0f} s ({error}); is it running, and may nodes connect to that port?"
                ) from None


def connect(host: str, port: int) -> TCPStore:
    """Return a connection to the store; DistError if there is none."""
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))


def _listen(host: str, port: int, *, alone: bool) -> socket.socket:
    deadline = time.monotonic() + (0 if alone else JOIN_S)
    while True:
        try:
            return rendezvous.listen(host, port, alone=alone)
        except socket.gaierror as error:  # Kubernetes makes the name a while after the pod
            if time.monotonic() > deadline:
                raise NodeError(f"--master {host}: {error.strerror}; give the name or address of node 0") from None
            time.sleep(_RESOLVE_S)
        except OSError as error:
            raise NodeError(
                f"--master {host} --port {port}: cannot listen there ({error}); choose another port"
            ) from None


class Nodes:
    """The tie of one node to the others.

    Args:
        store: from ``join``; used by the thread of this object alone from now on.
        node: number of this node.
        count: how many nodes there are.
        name: of this node in messages.
        limit_s: a node without contact for so long is lost.
        hang_timeout_s: of the ranks, for messages.
        run: the run folder, for messages.
        notify: called from another thread when ``outcome``, ``hang`` or ``broken`` has changed.
    """

    def __init__(
        self,
        store: TCPStore,
        node: int,
        count: int,
        *,
        name: str,
        limit_s: float,
        hang_timeout_s: float,
        run: Path,
        notify: Callable[[], None],
    ) -> None:
        self.outcome: Outcome | None = None
        """How the run ended, as all nodes know it."""
        self.hang = False
        """Some node found a rank that hangs: each now reports what it sees of its own."""
        self.broken = False
        """The connection to node 0 was cut."""
        self._store, self._node, self._count, self._limit_s = store, node, count, limit_s
        self._hang_timeout_s, self._run, self._notify = hang_timeout_s, run, notify
        self._contact_s = time.monotonic()
        self._outbox: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._outbox.put((f"name/{node}", name))
        self._beats = {other: ("", self._contact_s) for other in range(count) if other != node}
        self._hang_since_s = float("inf")
        self._closing = False
        self._thread = threading.Thread(target=self._talk, name="nodes", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """How long ago node 0 last answered."""
        return time.monotonic() - self._contact_s

    def propose(self, outcome: Outcome) -> None:
        """Let the run end like this, unless it has ended already; node 0 looks for the cause of a consequence."""
        self._outbox.put(("consequence" if outcome.consequence else "outcome", outcome.to_json()))

    def announce_hang(self) -> None:
        """Ask all nodes what they see of their ranks, to find out who holds up the others."""
        self._outbox.put(("hang", "1"))

    def report(self, sights: Sequence[Sight]) -> None:
        """Answer ``hang``."""
        self._outbox.put((f"sights/{self._node}", json.dumps([asdict(sight) for sight in sights])))

    def finish(self, exit_code: int) -> None:
        """Tell that the ranks of this node have all ended well."""
        self._outbox.put((f"end/{self._node}", str(exit_code)))

    def close(self) -> None:
        """Say goodbye; node 0, which holds the store, waits until the others have read the outcome."""
        self._closing = True
        self._thread.join(timeout=_GOODBYE_S + 2 * _POLL_S)

    def _talk(self) -> None:
        beats = 0
        try:
            while not self._closing:
                self._send(timeout_s=_POLL_S)
                beats += 1
                self._store.set(f"beat/{self._node}", str(beats))
                if self._node == 0:
                    self._decide()
                self._listen_to_others()
                self._contact_s = time.monotonic()
            self._send(timeout_s=0)
            self._say_goodbye()
        except DistError:
            self.broken = True
            self._notify()

    def _send(self, timeout_s: float) -> None:
        """Send what is to be sent, and wait for something for at most ``timeout_s``."""
        while True:
            try:
                key, value = self._outbox.get(timeout=timeout_s) if timeout_s else self._outbox.get_nowait()
            except queue.Empty:
                return
            self._store.compare_set(key, "", value)
            timeout_s = 0

    def _listen_to_others(self) -> None:
        if self.outcome is None and (text := self._read("outcome")):
            self.outcome = Outcome.from_json(text)
            if self._node:
                self._store.add("goodbyes", 1)
            self._notify()
        elif not self.hang and self._read("hang"):
            self.hang = True
            self._notify()

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + _GOODBYE_S
        while self._node == 0 and time.monotonic() < deadline and self._store.add("goodbyes", 0) < self._count - 1:
            time.sleep(_POLL_S / 5)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _name(self, node: int) -> str:
        host = self._read(f"name/{node}")
        return f"node {node}" + (f" on {host}" if host else "")

    # What only node 0 does.

    def _decide(self) -> None:
        ends = [self._read(f"end/{node}") for node in range(self._count)]
        if all(ends):
            self.propose(of_ends(int(end or 0) for end in ends))
        if self._read("hang"):
            self._find_culprit()
        if consequence := self._read("consequence"):
            self._find_cause(Outcome.from_json(consequence))
        for node, (last, at) in self._beats.items():
            beat = self._read(f"beat/{node}") or ""
            silent_s = time.monotonic() - at
            if beat != last:
                self._beats[node] = (beat, time.monotonic())
            elif silent_s > (self._limit_s if beat else JOIN_S):
                # Its ranks are told by the kernel that their supervisor ended: they save, and so do all others.
                saved = ends[0] == str(Preempted.exit_code)
                self.propose(of_ends([Preempted.exit_code]) if saved else of_lost_node(self._name(node), silent_s))

    def _find_cause(self, consequence: Outcome) -> None:
        now = time.monotonic()
        silent = {node: now - at for node, (_, at) in self._beats.items() if now - at > _MUTE_S}
        lost = next((of_lost_node(self._name(node), silent_s) for node, silent_s in silent.items()), None)
        self.propose(lost or replace(consequence, consequence=False))

    def _find_culprit(self) -> None:
        self._hang_since_s = min(self._hang_since_s, time.monotonic())
        found = {node: self._read(f"sights/{node}") for node in range(self._count)}
        missing = [self._name(node) for node, text in found.items() if text is None]
        if not missing or time.monotonic() - self._hang_since_s > _SIGHTS_S:
            sights = {
                self._name(node): [Sight(**sight) for sight in json.loads(text)] for node, text in found.items() if text
            }
            self.propose(of_hang(sights, missing, self._hang_timeout_s, self._run))
