"""The supervisor: one process per node that starts the ranks, watches them and reports the first failure.

``python -m fastdiff.cluster.supervisor.main --nodes N --node-rank R --ranks-per-node K --master HOST --port P --
FLAGS``, with FLAGS for ``fastdiff/train.py``. ``fastdiff launch`` writes this command line.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff import process_limits, sanitize
from fastdiff.cluster.supervisor import environment
from fastdiff.cluster.supervisor.last_record import note_end
from fastdiff.cluster.supervisor.nodes import Nodes, join, listen, reach
from fastdiff.cluster.supervisor.outcome import Outcome, of_ends, of_lost_node
from fastdiff.cluster.supervisor.ranks import Ranks
from fastdiff.cluster.supervisor.signals import STOP, Interrupted, Signals
from fastdiff.cluster.supervisor.store import LocalStore, Store, lost
from fastdiff.cluster.supervisor.watch import Limits, Watch
from fastdiff.config.arguments.types import Parser
from fastdiff.config.command_line import train_flags
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.console import log, write_line
from fastdiff.errors import FastdiffError, Preempted, explained, report_any, require
from fastdiff.files import raise_open_files
from fastdiff.live_line import live_line
from fastdiff.standard_streams import lossy_output
from fastdiff.version import PACKAGE

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_CONTACT_S = 60.0
"""Time without contact after which a node is lost; the hang timeout if that is shorter."""
_START_S = 600.0
"""Time for a rank to build, restore and take its first batch; the hang timeout if that is longer."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What all starts of the ranks share."""

    arguments: argparse.Namespace
    launch: Launch
    config: RunConfig
    signals: Signals
    store: TCPStore | None
    """Of several nodes, in the supervisor of node 0, for supervisors and ranks. A single supervisor has nobody to meet:
    it leaves the store to rank 0, so that it does not import torch, which takes seconds."""

    @property
    def name(self) -> str:
        """Of this node, in messages."""
        return f"node {self.arguments.node_rank} on {socket.gethostname()}"

    @property
    def contact_s(self) -> float:
        """Time without contact after which a node is lost."""
        return min(_CONTACT_S, self.launch.hang_timeout_s)

    def nodes(self, attempt: int) -> Nodes:
        """Return the connection to the other supervisors for one start of the ranks."""
        return Nodes(
            self._connection(attempt),
            self.arguments.node_rank,
            self.arguments.nodes,
            name=socket.gethostname(),
            limit_s=self.contact_s,
            hang_timeout_s=self.launch.hang_timeout_s,
            run=Path(self.config.output.folder),
            notify=self.signals.wake,
        )

    def _connection(self, attempt: int) -> Store:
        if self.store is None:
            return LocalStore()
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        given = self.arguments
        own = reach(given.master, self.store.port, given.node_rank, self.contact_s)
        return PrefixStore(f"supervisors-{attempt}", own)


@lossy_output()
def main(argv: Sequence[str]) -> int:
    """Run the supervisor of one node and return the exit code of the run."""
    live_line.shares = True
    try:
        process_limits.try_threads()
        raise_open_files()
        with (
            Signals() as signals,
            tempfile.TemporaryDirectory(prefix="fastdiff-", ignore_cleanup_errors=True) as folder,
        ):
            try:
                outcome = _supervise(argv, Path(folder), signals)
            except Interrupted as interrupted:
                outcome = _stopped_early(interrupted)
    except Exception as error:
        return report_any(error)
    if outcome.line:
        write_line(outcome.line)
    return outcome.exit_code


def _supervise(argv: Sequence[str], folder: Path, signals: Signals) -> Outcome:
    given = _parser().parse_args(list(argv))
    if given.end_with_input:
        threading.Thread(target=_follow_input, name="input", daemon=True).start()
    last = given.nodes - 1
    require(0 <= given.node_rank <= last, f"--node-rank {given.node_rank}: expected 0 to {last}, one per node")
    require(given.port > 0 or given.nodes == 1, f"--port is missing: the supervisors of {given.nodes} nodes meet there")
    launch, config = train_flags.parse(given.flags)
    with signals.raising(_on_stop):
        store = None if given.nodes == 1 else join(given.master, given.port, given.node_rank)
    return _until_end(_Job(given, launch, config, signals, store), folder)


def _until_end(job: _Job, folder: Path) -> Outcome:
    """Start the ranks, and again after a lack of memory, with a smaller micro-batch each time."""
    stopping, micro = False, None
    for attempt in count():
        own = folder / str(attempt)
        own.mkdir()
        outcome, stopping = _run_ranks(job, own, attempt, micro, stopping=stopping)
        if outcome.micro is None or (micro is not None and outcome.micro >= micro):
            return outcome
        micro = outcome.micro
        if job.arguments.node_rank == 0:
            log.warning(f"starting the ranks again, in micro-batches of {micro} samples per rank")
    raise AssertionError("unreachable")


def _run_ranks(job: _Job, folder: Path, attempt: int, micro: int | None, *, stopping: bool) -> tuple[Outcome, bool]:
    """Start the ranks and watch them to their end; return it, and whether this node was asked to stop.

    Args:
        job: of this node.
        folder: private folder for the ranks of this start.
        attempt: number of starts before.
        micro: most samples of a micro-batch; None: as the run has them.
        stopping: this node was asked to stop while the ranks before ran out of memory.
    """
    given, run = job.arguments, Path(job.config.output.folder)
    with job.signals.raising(_on_stop):
        listener = listen(given.master, given.port, alone=True) if job.store is None else None
        nodes = job.nodes(attempt)
    port = listener.getsockname()[1] if listener is not None else job.store.port  # type: ignore[union-attr]
    try:
        if stopping:
            nodes.propose(of_ends([Preempted.exit_code]))
        if stopping or (job.store is not None and attempt == 0 and not _prepare(job, job.store, nodes)):
            return _wait_for_outcome(job, nodes), stopping
        watch = Watch(
            _start_ranks(job, folder, attempt, micro, port, listener),
            nodes,
            job.signals,
            Limits(job.launch.hang_timeout_s, max(_START_S, job.launch.hang_timeout_s), job.contact_s),
            folder=folder,
            name=job.name,
            master=f"{given.master}:{port}",
            request_dumps=lambda: environment.request_nccl_dumps(folder, run),
        )
        outcome = watch.until_end()
        if given.node_rank == 0:
            note_end(folder, outcome)
        if given.nodes == 1 and outcome.who:  # the rank has printed the cause
            outcome = replace(outcome, line=outcome.who if given.ranks_per_node > 1 else "")
        return outcome, watch.stopping
    except Exception as error:
        error = explained(error)
        code = error.exit_code if isinstance(error, FastdiffError) else 1
        reason = f"{type(error).__name__}: {error}"
        nodes.propose(Outcome(code, f"fastdiff: {job.name} failed first: {sanitize.message(reason)}"))
        raise
    finally:
        nodes.close()


def _prepare(job: _Job, store: TCPStore, nodes: Nodes) -> bool:
    """Prepare one of several nodes and return whether it is ready; otherwise send the reason to all nodes."""
    from fastdiff.cluster.preflight.run import run as check_nodes

    given = job.arguments

    def reason(number: int) -> str | None:
        return "another node" if nodes.outcome is not None or nodes.broken else _on_stop(number)

    try:
        with job.signals.raising(reason):
            environment.choose_interface(store, given.master, given.node_rank)
            if given.preflight:
                check_nodes(store, given.node_rank, given.nodes, job.config, ranks_per_node=given.ranks_per_node)
    except Interrupted as interrupted:
        nodes.propose(_stopped_early(interrupted))
    except FastdiffError as error:
        nodes.propose(Outcome(error.exit_code, f"fastdiff: error: {error}"))
    except OSError as error:
        known = explained(error)
        if not isinstance(known, FastdiffError):
            raise
        nodes.propose(Outcome(known.exit_code, f"fastdiff: error: {job.name}: {known}"))
    except lost():
        pass  # node 0 is gone
    else:
        return True
    return False


def _wait_for_outcome(job: _Job, nodes: Nodes) -> Outcome:
    """Wait for the outcome that all nodes receive."""
    given = job.arguments
    while nodes.outcome is None:
        if nodes.broken or nodes.silent_s > job.contact_s:
            return of_lost_node(f"node 0 ({given.master}:{given.port}), seen from {job.name},", nodes.silent_s)
        job.signals.take(0.5)
    return nodes.outcome


def _start_ranks(
    job: _Job, folder: Path, attempt: int, micro: int | None, port: int, listener: socket.socket | None
) -> Ranks:
    given = job.arguments
    environments = [
        environment.of_rank(
            os.environ,
            local_rank=local_rank,
            ranks_per_node=given.ranks_per_node,
            node=given.node_rank,
            nodes=given.nodes,
            attempt=attempt,
            micro=micro,
            master=(given.master, port),
            listener=listener,
            preflight=given.preflight and given.nodes == 1 and attempt == 0,  # several nodes have been checked
            node_folder=folder,
            run=Path(job.config.output.folder),
        )
        for local_rank in range(given.ranks_per_node)
    ]
    train = PACKAGE / "train.py"
    command = [sys.executable, str(train), *given.flags]
    log.debug(f"each rank: {shlex.join(command)}")
    ranks = Ranks(command, environments, folder)
    if listener is not None:
        listener.close()  # rank 0 has inherited it
    return ranks


def _on_stop(number: int) -> str | None:
    return signal.Signals(number).name if number in STOP else None


def _stopped_early(interrupted: Interrupted) -> Outcome:
    line = f"fastdiff: stopped by {interrupted.reason} before the ranks started; the same command starts again"
    return Outcome(Preempted.exit_code, line, abrupt=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m fastdiff.cluster.supervisor.main", description=__doc__)
    parser.add_argument("--nodes", type=_positive, default=1, metavar="N")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="0 to N - 1; node 0 is HOST")
    parser.add_argument("--ranks-per-node", type=_positive, required=True, metavar="K")
    parser.add_argument("--master", default="127.0.0.1", metavar="HOST", help="address of node 0")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="port on HOST; with one node 0 means any")
    parser.add_argument("--end-with-input", action="store_true", help="stop when standard input ends")
    parser.add_argument("--no-preflight", dest="preflight", action="store_false")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of fastdiff/train.py, after --")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected at least 1")
    return number


def _follow_input() -> None:
    """Send SIGTERM to this process when standard input ends.

    The supervisor then ends with the ssh connection that started it: ssh forwards neither signals nor its own end to
    the remote command.
    """
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
