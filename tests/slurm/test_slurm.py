"""Jobs of a real Slurm, made and submitted by ``fastdiff launch slurm``."""

import re
from pathlib import Path

import pytest

from tests.slurm.nodes import Cluster
from tests.slurm.slurm import Slurm
from tests.slurm.training import STEPS, command_line
from tests.support.processes import BIN
from tests.support.runs import hexes, intact, losses
from tests.support.waiting import steps_logged, wait_for_steps

PREEMPTIONS = {
    25: ["scontrol", "requeue"],
    50: ["scancel", "--batch", "--signal=USR1"],
    85: ["scancel", "--signal=USR1"],
    110: ["scancel", "--batch", "--signal=TERM"],
}
"""After which step, how: as the scheduler does it, to the batch step alone, to the ranks' step, as some sites do."""


def submit(queue: Slurm, folder: Path, flags: list[str], *options: str) -> int:
    """Submit a run with one rank on each of two nodes and return the number of the job, whose output is ``log``."""
    launch = [BIN / "fastdiff", "launch", "slurm", "--nodes", "2", "--ranks-per-node", "1", *options]
    launch += ["--cpus-per-task", "0"]  # the machines of this cluster have fewer than usual
    files = ["--output", folder / "job.sbatch", "--sbatch", f"output={folder / 'log'}"]
    output = queue.head.must(*launch, *files, "--submit", "--", *flags)
    found = re.search(r"submitted job (\d+)", output)
    assert found is not None, output
    return int(found[1])


def ranks(machines: Cluster) -> list[str]:
    return [line for node in machines.nodes for line in node.commands("python")]


@pytest.mark.fault(12)
def test_a_job_that_is_preempted_in_four_ways_ends_like_one_that_is_not(
    machines: Cluster, queue: Slurm, undisturbed: list[float], digits: Path, tmp_path: Path
) -> None:
    """Each time all ranks save the step they are at, nothing of them is left, and Slurm starts the job again."""
    run, log = tmp_path / "run", tmp_path / "log"
    job = submit(queue, tmp_path, command_line(digits, run), "--no-preflight")
    for restarts, (step, preempt) in enumerate(PREEMPTIONS.items(), start=1):
        wait_for_steps(run, step)
        queue.head.must(*preempt, str(job))
        queue.wait(job, "PENDING", timeout_s=120)
        assert ranks(machines) == []
        assert step <= steps_logged(run) == intact(run)[0] < STEPS, log.read_text()
        assert f"Restarts={restarts} " in queue.describe(job)
    queue.wait(job, "COMPLETED", timeout_s=400)
    assert hexes(losses(run)) == hexes(undisturbed)


@pytest.mark.fault(13)
def test_a_job_whose_rank_dies_fails_and_is_not_started_again(
    machines: Cluster, queue: Slurm, digits: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    job = submit(queue, tmp_path, command_line(digits, run))
    wait_for_steps(run, 5)
    node = machines.nodes[1]
    (line,) = node.commands("train.py")
    node.must("kill", "-KILL", line.split()[0])
    queue.wait(job, "FAILED", timeout_s=120)
    assert "Restarts=0 " in queue.describe(job)
    assert "ExitCode=137:0" in queue.describe(job)
    assert re.search(
        r"fastdiff: rank 1 \(node 1 on node2, process \d+\) failed first: killed by SIGKILL", log.read_text()
    )
    assert ranks(machines) == []
