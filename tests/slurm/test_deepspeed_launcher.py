"""DeepSpeed's own multi-node launcher: ``deepspeed --hostfile F`` over pdsh and ssh."""

import os
from pathlib import Path

from tests.slurm.nodes import Cluster
from tests.slurm.training import command_line
from tests.support.processes import BIN
from tests.support.runs import hexes, losses


def test_two_nodes_train_like_one(machines: Cluster, undisturbed: list[float], digits: Path, tmp_path: Path) -> None:
    """One rank on each of two hosts with addresses of their own: bit for bit the losses of two ranks on one machine."""
    hostfile, environment = tmp_path / "hostfile", tmp_path / "environment"
    hostfile.write_text("".join(f"{node.name} slots=1\n" for node in machines.nodes))
    given = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": 1}
    given["GLOO_SOCKET_IFNAME"] = "eth0"  # the machines' own names are 127.0.1.1; supervisors see to that by themselves
    environment.write_text("".join(f"{name}={value}\n" for name, value in given.items()))

    done = machines.head.run(
        *(BIN / "deepspeed", "--hostfile", hostfile, "--launcher", "pdsh", "fastdiff/train.py"),
        *command_line(digits, tmp_path / "run"),
        timeout_s=400,
        DS_ENV_FILE=str(environment),
    )
    assert done.code == 0, done.output
    assert "node1: " in done.output, "the output of each node comes with its name"
    assert hexes(losses(tmp_path / "run")) == hexes(undisturbed)
