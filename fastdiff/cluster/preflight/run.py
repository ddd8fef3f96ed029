"""The pre-flight check: all problems of all nodes, reported together before the ranks start."""

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastdiff.cluster.preflight import bandwidth, clock
from fastdiff.cluster.preflight.node_checks import (
    SharedFolder,
    examine_data,
    examine_devices,
    examine_space,
    node_versions,
)
from fastdiff.cluster.preflight.report import NodeReport, Problem, as_error, compare, table_of_nodes
from fastdiff.cluster.supervisor.waiting import value_of
from fastdiff.config.run import RunConfig
from fastdiff.config.trackers import require_usable
from fastdiff.errors import ConfigError, StorageError
from fastdiff.parallel.world import attempt

_SLACK_S = 60.0
"""Extra wait of the other nodes for node 0: its verdict tells more than a timeout."""


def run(
    store: TCPStore,
    node: int,
    nodes: int,
    config: RunConfig,
    *,
    ranks_per_node: int,
    name: str | None = None,
    timeout_s: float = 600.0,
    now: Callable[[], float] = time.time,
) -> None:
    """Check this node and compare it with the others; called by the supervisors of all nodes before the ranks start.

    Only threads and child processes are used: no process group and no CUDA context stays in the supervisor. An
    exception in the supervisor, for example from a signal handler, ends the child processes.

    Args:
        store: store of the supervisors, hosted by node 0. Keys begin with ``preflight/``.
        node: number of this node.
        nodes: number of nodes, at least two; rank 0 checks a single node (``single_node``).
        config: configuration of the run, as parsed.
        ranks_per_node: training processes per node.
        name: name of this node in messages; None: the host name.
        timeout_s: timeout for all nodes to arrive, and again for all to report.
        now: clock of this node, in seconds since 1970.

    Raises:
        FastdiffError: all problems of all nodes, equal on all nodes, with the exit code of the first problem.
        torch.distributed.DistError: node 0, which hosts the store, is gone.
    """
    keys = PrefixStore("preflight", store)
    deadline = time.monotonic() + timeout_s
    asked = config.performance.device
    report = NodeReport(node=node, name=name or socket.gethostname(), versions=node_versions(asked))
    found: list[int] = []
    gpus = found[0] if _note(report, lambda: found.append(examine_devices(ranks_per_node, asked))) else None
    _meet(keys, report, nodes, deadline)
    deadline = time.monotonic() + timeout_s
    report.clock = clock.measure(keys, node, nodes, now)
    report.exchanges = bandwidth.measure(store, node, nodes, gpus, ranks_per_node, deadline)
    folder = SharedFolder(Path(config.output.folder), keys, node, deadline)
    try:
        report.wrote = _note(report, folder.write)
        _note(report, lambda: report.data.update(examine_data(config.data, config.validation)))
        if node == 0:
            _note(report, lambda: examine_space(config))
            _note(report, lambda: require_usable(config.output.report_to))  # rank 0 opens them
            verdict = _judge(keys, report, nodes, folder, deadline)
        else:
            keys.set(f"report/{node}", json.dumps(asdict(report)))
            verdict = json.loads(value_of(keys, "verdict", deadline + _SLACK_S))
    finally:
        if node == 0:
            folder.remove()
    if verdict:
        raise as_error([Problem(**problem) for problem in verdict], nodes)


def _judge(keys: Store, own: NodeReport, nodes: int, folder: SharedFolder, deadline: float) -> list[dict[str, Any]]:
    """Collect the reports of all nodes, print the table and publish the problems (on node 0)."""
    reports, problems = [own], []
    for node in range(1, nodes):
        try:
            reports.append(NodeReport.of(json.loads(value_of(keys, f"report/{node}", deadline))))
        except DistStoreError:
            problems.append(_silent(keys, node))
    unseen = folder.unseen(report.node for report in reports if report.wrote)
    problems = [*compare(reports), *(_apart(report) for report in reports if report.node in unseen), *problems]
    verdict = [asdict(problem) for problem in problems]
    keys.set("verdict", json.dumps(verdict))
    sys.stdout.write(f"{table_of_nodes(reports, problems)}\n")
    sys.stdout.flush()
    return verdict


def _meet(keys: Store, report: NodeReport, nodes: int, deadline: float) -> None:
    """Wait until all nodes have arrived, so that no later step waits; ConfigError: node 0 names the missing ones."""
    keys.set(f"name/{report.node}", report.name)
    missing: list[int] = []
    if report.node == 0:
        for node in range(1, nodes):
            try:
                value_of(keys, f"name/{node}", deadline)
            except DistStoreError:
                missing.append(node)
        keys.set("missing", json.dumps(missing))
    else:
        missing = json.loads(value_of(keys, "missing", deadline + _SLACK_S))
    if missing:
        listed = ", ".join(map(str, missing))
        raise ConfigError(f"pre-flight: of {nodes} nodes (0 to {nodes - 1}) these did not arrive: {listed}")


def _silent(keys: Store, node: int) -> Problem:
    return Problem(node, keys.get(f"name/{node}").decode(), ConfigError.exit_code, "arrived but sent no report")


def _apart(report: NodeReport) -> Problem:
    what = "writes into an output folder that node 0 does not see; it must be on storage shared by all nodes"
    return report.problem(what, StorageError)


def _note(report: NodeReport, action: Callable[[], object]) -> bool:
    """Run a check and add its error to the report, so that all problems are reported together."""
    _, error = attempt(action)
    if error is not None:
        report.note(error)
    return error is None
