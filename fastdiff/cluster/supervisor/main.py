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
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff import process_limits, sanitize
from fastdiff.cluster.supervisor import environment
from fastdiff.cluster.supervisor.last_record import note_end
from fastdiff.cluster.supervisor.nodes import Nodes, connect, join, listen
from fastdiff.cluster.supervisor.outcome import Outcome, of_lost_node
from fastdiff.cluster.supervisor.ranks import Ranks
from fastdiff.cluster.supervisor.signals import STOP, Interrupted, Signals
from fastdiff.cluster.supervisor.store import LocalStore, Store, lost
from fastdiff.cluster.supervisor.watch import Limits, Watch
from fastdiff.config.arguments.types import Parser
from fastdiff.config.command_line import train_flags
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
class _Meeting:
    """Where the supervisors meet, and the ranks.

    The supervisor of node 0 hosts one store for both. On a single node the supervisor has nobody to meet: it binds the
    port and leaves the store to rank 0, so that it does not import torch, which takes seconds.
    """

    port: int
    store: TCPStore | None = None
    """The store of several nodes."""
    listener: socket.socket | None = None
    """The bound port of a single node."""

    @classmethod
    def of(cls, job: argparse.Namespace) -> _Meeting:
        if job.nodes == 1:
            listener = listen(job.master, job.port, alone=True)
            return cls(listener.getsockname()[1], listener=listener)
        store = join(job.master, job.port, job.node_rank)
        return cls(store.port, store)

    def connection(self, job: argparse.Namespace) -> Store:
        """Return a store for the thread of ``Nodes``."""
        return LocalStore() if self.store is None else connect(job.master, self.port)


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
    job = _parser().parse_args(list(argv))
    if job.end_with_input:
        threading.Thread(target=_follow_input, name="input", daemon=True).start()
    require(0 <= job.node_rank < job.nodes, f"--node-rank {job.node_rank}: expected 0 to {job.nodes - 1}, one per node")
    require(job.port > 0 or job.nodes == 1, f"--port is missing: the supervisors of {job.nodes} nodes meet there")
    launch, config = train_flags.parse(job.flags)
    contact_s = min(_CONTACT_S, launch.hang_timeout_s)
    with signals.raising(_on_stop):
        meeting = _Meeting.of(job)
        nodes = Nodes(
            meeting.connection(job),
            job.node_rank,
            job.nodes,
            name=socket.gethostname(),
            limit_s=contact_s,
            hang_timeout_s=launch.hang_timeout_s,
            run=Path(config.output.folder),
            notify=signals.wake,
        )
    try:
        if meeting.store is not None and not _prepare(job, config, meeting.store, nodes, signals):
            return _wait_for_outcome(nodes, signals, contact_s, job)
        watch = Watch(
            _start_ranks(job, Path(config.output.folder), folder, meeting),
            nodes,
            signals,
            Limits(launch.hang_timeout_s, max(_START_S, launch.hang_timeout_s), contact_s),
            folder=folder,
            name=_name(job),
            master=f"{job.master}:{meeting.port}",
            request_dumps=lambda: environment.request_nccl_dumps(folder, Path(config.output.folder)),
        )
        outcome = watch.until_end()
        if job.node_rank == 0:
            note_end(folder, outcome)
        if job.nodes == 1 and outcome.who:  # the rank has printed the cause
            outcome = replace(outcome, line=outcome.who if job.ranks_per_node > 1 else "")
        return outcome
    except Exception as error:
        error = explained(error)
        code = error.exit_code if isinstance(error, FastdiffError) else 1
        reason = f"{type(error).__name__}: {error}"
        nodes.propose(Outcome(code, f"fastdiff: {_name(job)} failed first: {sanitize.message(reason)}"))
        raise
    finally:
        nodes.close()


def _prepare(job: argparse.Namespace, config: RunConfig, store: TCPStore, nodes: Nodes, signals: Signals) -> bool:
    """Prepare one of several nodes and return whether it is ready; otherwise send the reason to all nodes."""
    from fastdiff.cluster.preflight.run import run as check_nodes

    def reason(number: int) -> str | None:
        return "another node" if nodes.outcome is not None or nodes.broken else _on_stop(number)

    try:
        with signals.raising(reason):
            environment.choose_interface(store, job.master, job.node_rank)
            if job.preflight:
                check_nodes(store, job.node_rank, job.nodes, config, ranks_per_node=job.ranks_per_node)
    except Interrupted as interrupted:
        nodes.propose(_stopped_early(interrupted))
    except FastdiffError as error:
        nodes.propose(Outcome(error.exit_code, f"fastdiff: error: {error}"))
    except OSError as error:
        known = explained(error)
        if not isinstance(known, FastdiffError):
            raise
        nodes.propose(Outcome(known.exit_code, f"fastdiff: error: {_name(job)}: {known}"))
    except lost():
        pass  # node 0 is gone
    else:
        return True
    return False


def _wait_for_outcome(nodes: Nodes, signals: Signals, contact_s: float, job: argparse.Namespace) -> Outcome:
    """Wait for the outcome that all nodes receive."""
    while nodes.outcome is None:
        if nodes.broken or nodes.silent_s > contact_s:
            return of_lost_node(f"node 0 ({job.master}:{job.port}), seen from {_name(job)},", nodes.silent_s)
        signals.take(0.5)
    return nodes.outcome


def _start_ranks(job: argparse.Namespace, run: Path, folder: Path, meeting: _Meeting) -> Ranks:
    environments = [
        environment.of_rank(
            os.environ,
            local_rank=local_rank,
            ranks_per_node=job.ranks_per_node,
            node=job.node_rank,
            nodes=job.nodes,
            master=(job.master, meeting.port),
            listener=meeting.listener,
            preflight=job.preflight and job.nodes == 1,  # several nodes have been checked
            node_folder=folder,
            run=run,
        )
        for local_rank in range(job.ranks_per_node)
    ]
    train = PACKAGE / "train.py"
    command = [sys.executable, str(train), *job.flags]
    log.debug(f"each rank: {shlex.join(command)}")
    ranks = Ranks(command, environments, folder)
    if meeting.listener is not None:
        meeting.listener.close()  # rank 0 has inherited it
    return ranks


def _on_stop(number: int) -> str | None:
    return signal.Signals(number).name if number in STOP else None


def _stopped_early(interrupted: Interrupted) -> Outcome:
    line = f"fastdiff: stopped by {interrupted.reason} before the ranks started; the same command starts again"
    return Outcome(Preempted.exit_code, line, abrupt=True)


def _name(job: argparse.Namespace) -> str:
    return f"node {job.node_rank} on {socket.gethostname()}"


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
