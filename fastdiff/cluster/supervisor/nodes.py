"""Messages between the supervisors: heartbeats, hangs, the first failure and the outcome of the run.

All messages go through a store in the supervisor of node 0. Each key is set once: the first to set it wins. A separate
thread talks to the store, because a call can hang as long as the network does.
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
from typing import TYPE_CHECKING

from fastdiff.cluster.supervisor.outcome import UNAVAILABLE, Outcome, of_ends, of_hang, of_lost_node
from fastdiff.cluster.supervisor.ranks import RankStatus
from fastdiff.cluster.supervisor.store import Store, lost
from fastdiff.errors import FastdiffError, Preempted
from fastdiff.parallel import rendezvous

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

JOIN_S = 300.0
"""Time for all supervisors to join: batch systems do not start all nodes at once."""
_CONNECT_S = 2.0
_RESOLVE_S = 1.0
_POLL_S = 0.25
_STATUSES_S = 5.0
_SILENT_S = 5.0
"""Time without a beat after which a node is the likely cause of a lost connection."""
_GOODBYE_S = 5.0


class NodeError(FastdiffError):
    """A node cannot be reached."""

    exit_code = UNAVAILABLE


def join(host: str, port: int, node: int) -> TCPStore:
    """Open the store of the supervisors of several nodes: node 0 hosts it, all others wait for it.

    Signal handlers run during the wait, and their exceptions propagate.

    Raises:
        NodeError: the port is taken, or node 0 did not arrive in time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if node == 0:
        listener = listen(host, port, alone=False)
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return reach(host, port, node, JOIN_S)


def reach(host: str, port: int, node: int, limit_s: float) -> TCPStore:
    """Return a connection to the store of node 0, as soon as its supervisor answers.

    Raises:
        NodeError: it has not answered within ``limit_s``.
    """
    from torch.distributed import DistError  # type: ignore[attr-defined]

    deadline = time.monotonic() + limit_s
    while True:
        try:
            return _connect(host, port)
        except DistError as error:
            if time.monotonic() > deadline:
                raise NodeError(
                    f"node {node} ({socket.gethostname()}): no supervisor of node 0 at {host}:{port} within "
                    f"{limit_s:.0f} s ({error}); is it running, and may nodes connect to that port?"
                ) from None


def _connect(host: str, port: int) -> TCPStore:
    """Return a connection to the store; raise DistError if it cannot be reached."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))


def listen(host: str, port: int, *, alone: bool) -> socket.socket:
    """Listen on ``host``, for other nodes unless ``alone``; raise NodeError if the port is taken."""
    deadline = time.monotonic() + (0 if alone else JOIN_S)
    while True:
        try:
            return rendezvous.listen(host, port, alone=alone)
        except socket.gaierror as error:  # Kubernetes creates the name some time after the pod
            if time.monotonic() > deadline:
                raise NodeError(f"--master {host}: {error.strerror}; give the name or address of node 0") from None
            time.sleep(_RESOLVE_S)
        except OSError as error:
            raise NodeError(
                f"--master {host} --port {port}: cannot listen there ({error}); choose another port"
            ) from None


class Nodes:
    """The connection of one supervisor to the others.

    Args:
        store: from ``reach``, or a ``LocalStore``; from now on only the thread of this object uses it.
        node: number of this node.
        count: number of nodes.
        name: name of this node in messages.
        limit_s: time without contact after which a node is lost.
        hang_timeout_s: hang timeout of the ranks, for messages.
        run: the run folder, for messages.
        notify: called from another thread when ``outcome``, ``hang`` or ``broken`` has changed.
    """

    def __init__(
        self,
        store: Store,
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
        """The outcome of the run, equal on all nodes."""
        self.hang = False
        """True once a node found a hanging rank; every node then reports its ranks."""
        self.broken = False
        """True once the connection to node 0 is lost."""
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
        """Seconds since the last answer of node 0."""
        return time.monotonic() - self._contact_s

    def propose(self, outcome: Outcome) -> None:
        """Propose the outcome of the run; the first proposal wins. Node 0 looks for the cause of a consequence."""
        self._outbox.put(("consequence" if outcome.consequence else "outcome", outcome.to_json()))

    def announce_hang(self) -> None:
        """Ask all nodes for the state of their ranks, to find the rank that hangs."""
        self._outbox.put(("hang", "1"))

    def report(self, statuses: Sequence[RankStatus]) -> None:
        """Send the state of this node's ranks, the answer to ``hang``."""
        self._outbox.put((f"statuses/{self._node}", json.dumps([asdict(status) for status in statuses])))

    def finish(self, exit_code: int) -> None:
        """Report that all ranks of this node ended without failure."""
        self._outbox.put((f"end/{self._node}", str(exit_code)))

    def close(self) -> None:
        """Disconnect; node 0, which hosts the store, waits until all others have read the outcome."""
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
        except lost():
            self.broken = True
            self._notify()

    def _send(self, timeout_s: float) -> None:
        """Send all queued messages; wait at most ``timeout_s`` for the first one."""
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

    # Node 0 only.

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
                # The kernel signals the end of the supervisor to its ranks: they save, and so do all other ranks.
                saved = ends[0] == str(Preempted.exit_code)
                self.propose(of_ends([Preempted.exit_code]) if saved else of_lost_node(self._name(node), silent_s))

    def _find_cause(self, consequence: Outcome) -> None:
        now = time.monotonic()
        silent = {node: now - at for node, (_, at) in self._beats.items() if now - at > _SILENT_S}
        lost = next((of_lost_node(self._name(node), silent_s) for node, silent_s in silent.items()), None)
        self.propose(lost or replace(consequence, consequence=False))

    def _find_culprit(self) -> None:
        self._hang_since_s = min(self._hang_since_s, time.monotonic())
        found = {node: self._read(f"statuses/{node}") for node in range(self._count)}
        missing = [self._name(node) for node, text in found.items() if text is None]
        if not missing or time.monotonic() - self._hang_since_s > _STATUSES_S:
            statuses = {
                self._name(node): [RankStatus(**status) for status in json.loads(text)]
                for node, text in found.items()
                if text
            }
            self.propose(of_hang(statuses, missing, self._hang_timeout_s, self._run))
