"""A Slurm job: an ``sbatch`` script that starts one supervisor per node and requeues itself after a preemption."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastdiff.cluster.launchers.job import PORTS, SUPERVISOR, Job, passed, require_name
from fastdiff.errors import ConfigError, Preempted
from fastdiff.ledger.records import SUBMITTED

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_VALUE = r"[A-Za-z0-9_.,:=/@%+*&|()\[\]-]+"
_WAIT_S = 180
"""Time between the first and the last node to end; longer than the detection of a lost node takes."""
_OURS = (
    "nodes", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "open-mode", "signal", "job-name", "time",
    "partition", "account", "wrap", "parsable", "array", "chdir",
)  # fmt: skip

_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task")
"""Options of sbatch that ask for GPUs."""
_CORES = ("cpus-per-task", "cpus-per-gpu", "mincpus", "tres-per-task")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The settings of the Slurm job; ConfigError if a value is not safe in the script."""

    name: str
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int = 0
    """GPUs to ask for on each node; 0: none."""
    cpus_per_node: int = 0
    """Cores to ask for on each node; 0: as many as the cluster gives."""
    exclusive: bool = False
    """Whether no other job may use the nodes."""
    signal_before_s: int = 120
    """Seconds before the time limit at which the ranks are asked to save and stop."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch; an empty value stands for an option without one."""

    def __post_init__(self) -> None:
        words = "letters, digits, dots, dashes and underscores, the first a letter or a digit"
        for flag, value in (("--name", self.name), ("--partition", self.partition), ("--account", self.account)):
            if value is not None:
                require_name(flag, value, _NAME if flag != "--partition" else rf"{_NAME}(,{_NAME})*", words)
        if self.time is not None:
            require_name("--time", self.time, r"[0-9]+([:-][0-9]+)*", "a Slurm time such as 30, 12:00:00 or 2-00")
        for key, value in self.options.items():
            require_name("--sbatch", key, r"[a-z][a-z0-9-]*", "KEY or KEY=VALUE, KEY as listed by sbatch --help")
            if key in _OURS:
                raise ConfigError(f"--sbatch {key}: `fastdiff launch slurm` sets this itself; see its --help")
            if value:
                require_name(f"--sbatch {key}", value, _VALUE, "no spaces, quotes or characters such as ; $ # \\")

    def directives(self, nodes: int) -> list[str]:
        """Return the ``#SBATCH`` lines."""
        settings = {
            "job-name": self.name,
            "nodes": str(nodes),
            "ntasks-per-node": "1",
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "requeue": "",
            "open-mode": "append",
            "signal": f"B:USR1@{self.signal_before_s}",
            **self._resources(),
            **self.options,
        }
        return [
            f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}"
            for key, value in settings.items()
            if value is not None
        ]

    def _resources(self) -> dict[str, str]:
        """Return the options for GPUs and cores, without those that ``options`` ask for in another way."""
        found: dict[str, str] = {}
        if self.gpus_per_node and not self.options.keys() & set(_GPUS):
            found["gpus-per-node"] = str(self.gpus_per_node)
        if self.cpus_per_node and not self.options.keys() & set(_CORES):
            found["cpus-per-task"] = str(self.cpus_per_node)  # one task per node: the supervisor
        return found | ({"exclusive": ""} if self.exclusive else {})


# Slurm signals a time limit and `scancel --batch` to the batch step alone. srun forwards SIGUSR1 to its tasks; at
# SIGTERM it ends them. It no longer inherits --cpus-per-task from sbatch, and would bind all ranks to too few cores.
# --kill-on-bad-exit would kill nodes that still save when the first exits with 75; --wait gives them time.
# Only a running job is requeued: a cancelled job must stay cancelled, and Slurm itself requeues a preempted one.
_SCRIPT = """\
#!/bin/bash
{directives}
# Written by `fastdiff launch slurm`. Start it with sbatch; it requeues itself after a preemption or a time limit.
set -u
cd -- {folder} || exit 1
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
master=${{hosts%%$'\\n'*}}
port=$(({first_port} + SLURM_JOB_ID % {ports}))
export {submitted}=$(squeue --noheader --format=%V --job="$SLURM_JOB_ID") # for the ledger of the run

step=
trap 'told=1; [ -n "$step" ] && kill -USR1 "$step"' USR1 TERM
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait={wait_s} \\
    sh -c 'exec "$0" -u -m {supervisor} --node-rank "$SLURM_NODEID" "$@"' \\
    {command} &
step=$!
told=1
while [ -n "$told" ]; do # a trap ends the wait
    told=
    wait "$step"
    code=$?
done

if [ "$code" -eq {preempted} ] && [ "$(squeue --noheader --format=%T --job="$SLURM_JOB_ID")" = RUNNING ]; then
    echo "fastdiff: saved; job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(job: Job, batch: Batch) -> str:
    """Return the script for ``sbatch``; it runs in this working folder and with this interpreter."""
    command = shlex.join([sys.executable, *job.arguments("MASTER", "PORT")])
    command = command.replace("--master MASTER --port PORT", '--master "$master" --port "$port"', 1)
    return _SCRIPT.format(
        directives="\n".join(batch.directives(job.nodes)),
        folder=shlex.quote(os.getcwd()),
        first_port=PORTS.start,
        ports=len(PORTS),
        submitted=SUBMITTED,
        supervisor=SUPERVISOR,
        command=command,
        preempted=Preempted.exit_code,
        wait_s=_WAIT_S,
    )


def submit(path: Path) -> str:
    """Pass a script to ``sbatch`` and return the job number; ConfigError if sbatch is missing or refuses the script."""
    return passed(path, ["sbatch", "--parsable"], "is slurmctld running (`scontrol ping`)?").partition(";")[0]
