"""A cable that is pulled, for some seconds and for ever."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdiff.cluster.supervisor.outcome import UNAVAILABLE
from tests.slurm.nodes import Cluster
from tests.slurm.training import command_line
from tests.support.processes import stop
from tests.support.runs import hexes, losses
from tests.support.waiting import steps_logged, wait_for_steps

HANG_TIMEOUT_S = 15
PORT = "29400"
PULL_AT = 20
"""Step at which the cable is pulled."""


@pytest.fixture
def pulled(machines: Cluster) -> Iterator[Cluster]:
    """Machines whose second node is plugged in again in the end."""
    yield machines
    machines.plug(machines.nodes[1])


@contextlib.contextmanager
def supervised(machines: Cluster, *train: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one rank on each node, under its supervisor, whose output does not go through the network under test."""
    options = ["--nodes", "2", "--ranks-per-node", "1", "--master", "node1", "--port", PORT, "--no-preflight"]
    command = ["python", "-m", "fastdiff.cluster.supervisor.main", *options]
    found = [
        node.start(*command, "--node-rank", str(number), "--", *train) for number, node in enumerate(machines.nodes)
    ]
    try:
        yield found
    finally:
        for process in found:
            stop(process)


@pytest.mark.fault(15)
def test_a_cut_of_six_seconds_is_survived(
    pulled: Cluster, undisturbed: list[float], digits: Path, tmp_path: Path
) -> None:
    """No step is made meanwhile, and then the run goes on as if nothing had been."""
    run = tmp_path / "run"
    with supervised(pulled, *command_line(digits, run)) as processes:
        wait_for_steps(run, PULL_AT, *processes)
        pulled.unplug(pulled.nodes[1])
        time.sleep(1)
        during = steps_logged(run)
        time.sleep(5)
        assert steps_logged(run) == during < len(undisturbed), "the cut was one"
        pulled.plug(pulled.nodes[1])
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    assert hexes(losses(run)) == hexes(undisturbed)


@pytest.mark.fault(15)
def test_a_cut_for_ever_ends_both_sides(pulled: Cluster, digits: Path, tmp_path: Path) -> None:
    """Each side ends soon after the hang time-out, says whom it misses, and leaves no rank."""
    run = tmp_path / "run"
    train = [*command_line(digits, run), "--hang-timeout", str(HANG_TIMEOUT_S)]
    with supervised(pulled, *train) as processes:
        wait_for_steps(run, PULL_AT, *processes)
        pulled.unplug(pulled.nodes[1])
        cut = time.monotonic()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert time.monotonic() - cut < 4 * HANG_TIMEOUT_S
    lost = ("fastdiff: node 1 on node2 failed first: ", "fastdiff: node 0 (node1:29400), seen from node 1")
    for process, output, beginning in zip(processes, outputs, lost, strict=True):
        assert process.returncode == UNAVAILABLE, output
        assert output.strip().splitlines()[-1].startswith(beginning), output
    assert all(node.commands("python") == [] for node in pulled.nodes)
