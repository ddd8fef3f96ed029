"""A real Slurm on machines of a test: munge everywhere, the controller on the head, one slurmd per node."""

import re
import secrets
import time
from pathlib import Path

from tests.slurm.nodes import Cluster, Node
from tests.support.waiting import wait_until

# cred_expire is also how long a job that is queued again waits (120 s by default).
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=7
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=30
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerParameters=sched_interval=5
NodeName={names} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The queue, as a user on the head sees it."""

    def __init__(self, head: Node) -> None:
        self.head = head

    def state(self, job: int) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED..."""
        found = re.search(r"JobState=(\w+)", self.describe(job))
        assert found is not None
        return found[1]

    def describe(self, job: int) -> str:
        """Return what Slurm knows of a job."""
        return self.head.must("scontrol", "show", "job", str(job))

    def wait(self, job: int, state: str, timeout_s: float) -> None:
        """Wait for a state of a job; fail when it ends in another one."""
        deadline = time.monotonic() + timeout_s
        while (now := self.state(job)) != state:
            assert now not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), self.describe(job)
            assert time.monotonic() < deadline, f"{now} after {timeout_s} s: {self.describe(job)}"
            time.sleep(0.2)

    def cancel_all(self) -> None:
        """End every job, and wait for it."""
        self.head.must("scancel", "--user=root")
        wait_until(lambda: not self.head.must("squeue", "--noheader").strip(), "an empty queue")


def start_slurm(machines: Cluster, folder: Path) -> Slurm:
    """Start Slurm; it ends with the machines. ``folder`` is for its state and logs."""
    (folder / "state").mkdir(parents=True)
    key = secrets.token_hex(64)
    names = ",".join(node.name for node in machines.nodes)
    for node in machines.all:
        node.write("/etc/munge/munge.key", key, mode=0o600)
        node.write("/etc/slurm/slurm.conf", _CONFIGURATION.format(folder=folder, names=names))
        _start_munge(node)
    machines.head.must("slurmctld")
    for node in machines.nodes:
        node.must("slurmd", "-N", node.name)
    wait_until(
        lambda: (
            machines.head.run("sinfo", "--noheader", "--format=%T %D").output.strip() == f"idle {len(machines.nodes)}"
        ),
        "all nodes to be idle",
    )
    return Slurm(machines.head)


def _start_munge(node: Node) -> None:
    node.must("mkdir", "--parents", "/run/munge")
    node.must("munged", "--force", "--key-file=/etc/munge/munge.key", "--log-file=/run/munge/munged.log",
              "--pid-file=/run/munge/munged.pid", "--seed-file=/run/munge/munged.seed")  # fmt: skip
