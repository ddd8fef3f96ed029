"""``fastdiff launch hosts``: over real ssh, to machines with addresses of their own."""

from pathlib import Path

import pytest

from tests.slurm.nodes import Cluster
from tests.slurm.training import STEPS, command_line
from tests.support.processes import BIN, stop
from tests.support.runs import hexes, intact, losses
from tests.support.waiting import steps_logged, wait_for_steps

STOP_AT = 40
"""Step at which the command is asked to stop."""


@pytest.mark.fault(12)
def test_the_command_is_stopped_and_goes_on(
    machines: Cluster, undisturbed: list[float], digits: Path, tmp_path: Path
) -> None:
    """SIGTERM to the command on the head: the ranks on both hosts save the same step; the same command ends the run."""
    run, hostfile = tmp_path / "run", tmp_path / "hostfile"
    hostfile.write_text("".join(f"{node.name} slots=1\n" for node in machines.nodes))
    command = [BIN / "fastdiff", "launch", "hosts", "--hostfile", hostfile, "--submit", "--"]
    command += command_line(digits, run)

    process = machines.head.start(*command)
    try:
        wait_for_steps(run, STOP_AT, process)
        (line,) = machines.head.commands("launch hosts")
        machines.head.must("kill", "-TERM", line.split()[0])
        output, _ = process.communicate(timeout=120)
    finally:
        stop(process)
    assert process.returncode == 75, output
    saved = intact(run)[0]
    assert STOP_AT <= steps_logged(run) == saved < STEPS, output
    assert [line for node in machines.nodes for line in node.commands("python")] == []

    done = machines.head.run(*command, timeout_s=400)
    assert done.code == 0, done.output
    assert f"resuming from step {saved};" in done.output
    assert hexes(losses(run)) == hexes(undisturbed)
