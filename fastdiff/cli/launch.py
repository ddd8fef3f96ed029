"""``fastdiff train`` and ``fastdiff launch``: start a run on this machine, over ssh, by Slurm or on Kubernetes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fastdiff.config.arguments.types import Parser, Subcommands, count, count_or_zero, local_path
from fastdiff.console import show, write_line
from fastdiff.errors import ConfigError

if TYPE_CHECKING:
    from fastdiff.cluster.launchers.job import Job
    from fastdiff.config.run import RunConfig

_EXAMPLES = """\
TRAIN FLAGS are those of `fastdiff train`, after a --. Repeat the command to resume the run.

  fastdiff launch local --ranks 8 -- --preset digits
  fastdiff launch hosts --hostfile hosts --submit -- --preset digits
  fastdiff launch slurm --nodes 2 --ranks-per-node 8 --time 8:00:00 --submit -- --preset digits
  fastdiff launch k8s --nodes 2 --ranks-per-node 8 --image registry/fastdiff --pvc data:/data -- --preset digits
"""


TRAIN = "train"
_GIB_PER_RANK = 32
"""Memory that a pod asks for: of its processes, the pinned copies of checkpoints and /dev/shm."""


def add(commands: Subcommands) -> None:
    """Register the commands."""
    text = "train, or resume, on the GPUs of this machine"
    train = commands.add_parser(TRAIN, help=text, add_help=False, allow_abbrev=False)
    train.leaves = "flags"
    train.add_argument("--ranks", type=count)
    train.add_argument("--no-preflight", dest="preflight", action="store_false")
    train.set_defaults(run=_train, own=train.flags)
    parser = commands.add_parser(
        "launch",
        help="start a run on one or many machines, supervised",
        description="Start a run under supervisors, one per node: they check the nodes first, watch the ranks, and "
        "report who failed first and why. Exit code 75: the run was asked to stop and has saved.",
        epilog=_EXAMPLES,
    )
    targets = parser.add_subparsers(required=True, metavar="TARGET", dest="target")
    _add_local(targets)
    _add_hosts(targets)
    _add_slurm(targets)
    _add_k8s(targets)


def _add_target(targets: Subcommands, name: str, text: str) -> argparse.ArgumentParser:
    parser: Parser = targets.add_parser(name, help=text, allow_abbrev=False)
    parser.example = next(line.strip() for line in _EXAMPLES.splitlines() if f"launch {name} " in line)
    parser.add_argument("--no-preflight", dest="preflight", action="store_false", help="do not check the nodes first")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- TRAIN FLAGS", help="flags of `fastdiff train`")
    return parser


def _add_local(targets: Subcommands) -> None:
    parser = _add_target(targets, "local", "run here, now")
    parser.add_argument("--ranks", type=count, required=True, metavar="K", help="processes, one per GPU")
    parser.set_defaults(run=_local)


def _add_hosts(targets: Subcommands) -> None:
    parser = _add_target(targets, "hosts", "run on the hosts of a hostfile, over ssh, in the same folder on each")
    parser.add_argument("--hostfile", type=local_path, required=True, metavar="FILE", help="lines `name slots=RANKS`")
    parser.add_argument(
        "--ssh-config", type=local_path, metavar="FILE", help="configuration of ssh; default: the user's"
    )
    parser.add_argument("--submit", action="store_true", help="start the job; it ends with this command")
    parser.add_argument(
        "--output",
        type=local_path,
        default=Path("fastdiff-hosts.sh"),
        metavar="FILE",
        help="without --submit: script to write for DeepSpeed's own launcher; default: %(default)s",
    )
    parser.set_defaults(run=_hosts)


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=count, required=True, metavar="N", help="machines")
    parser.add_argument("--ranks-per-node", type=count, required=True, metavar="K", help="processes on each")
    parser.add_argument(
        "--gpus-per-node",
        type=count_or_zero,
        metavar="N",
        help="GPUs to ask for; default: one per rank, none with --performance.device cpu; 0: none",
    )
    parser.add_argument("--name", default="fastdiff", help="name of the job; default: %(default)s")


def _add_slurm(targets: Subcommands) -> None:
    parser = _add_target(targets, "slurm", "write a script for sbatch that requeues after a preemption")
    _add_size(parser)
    parser.add_argument("--time", help="time limit in sbatch's format")
    parser.add_argument("--partition", help="partition of the cluster")
    parser.add_argument("--account", help="account to charge")
    parser.add_argument(
        "--cpus-per-task",
        type=count_or_zero,
        metavar="N",
        help="cores to ask for on each node, which runs one task; default: 8 per rank; 0: as the cluster decides",
    )
    parser.add_argument("--exclusive", action="store_true", help="let no other job use the nodes")
    parser.add_argument(
        "--signal-before",
        type=count,
        default=120,
        metavar="SECONDS",
        help="seconds before the time limit at which the run saves and stops; default: %(default)s",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help="additional sbatch option, for example mem=0 or gres=gpu:h100:8, which replaces --gpus-per-node",
    )
    _add_output(parser, "fastdiff.sbatch", "sbatch")
    parser.set_defaults(run=_slurm)


def _add_k8s(targets: Subcommands) -> None:
    parser = _add_target(targets, "k8s", "write a manifest for Kubernetes (1.31 or newer)")
    _add_size(parser)
    parser.add_argument("--image", required=True, help="container image with fastdiff installed")
    parser.add_argument("--namespace", help="default: kubectl's")
    parser.add_argument(
        "--pvc",
        action="append",
        default=[],
        metavar="CLAIM:/PATH",
        help="persistent volume claim and its mount point; all nodes must be able to write to the run folder's volume",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="Secret whose keys become environment variables, for example HF_TOKEN or WANDB_API_KEY",
    )
    parser.add_argument(
        "--cpus", type=count_or_zero, metavar="N", help="cores to request per pod; default: 8 per rank; 0: none"
    )
    parser.add_argument(
        "--memory", type=count_or_zero, metavar="GIB", help="memory to request per pod; default: 32 per rank; 0: none"
    )
    parser.add_argument(
        "--toleration",
        action="append",
        default=[],
        metavar="KEY[=VALUE][:EFFECT]",
        help="taint to tolerate, for example nvidia.com/gpu:NoSchedule",
    )
    parser.add_argument(
        "--node-selector", action="append", default=[], metavar="KEY=VALUE", help="label that the nodes must have"
    )
    parser.add_argument(
        "--user",
        type=count_or_zero,
        default=1000,
        metavar="UID",
        help="user and group of the processes; 0: the image's, also root; default: %(default)s",
    )
    _add_output(parser, "fastdiff.yaml", "kubectl apply")
    parser.set_defaults(run=_k8s)


def _add_output(parser: argparse.ArgumentParser, name: str, command: str) -> None:
    parser.add_argument(
        "--output", type=local_path, default=Path(name), metavar="FILE", help="file to write; default: %(default)s"
    )
    parser.add_argument("--submit", action="store_true", help=f"also run {command} on it")


def _job(arguments: argparse.Namespace, nodes: int, ranks_per_node: int) -> tuple[Job, RunConfig]:
    """Return the job and its run, after a check of its flags."""
    from fastdiff.cluster.launchers.job import Job

    flags = arguments.flags
    if flags[:1] != ["--"]:
        raise ConfigError(
            f"{' '.join(flags) or 'no flags'}: the flags of the run go after a --, as in -- --preset digits"
        )
    job = Job(nodes=nodes, ranks_per_node=ranks_per_node, preflight=arguments.preflight, flags=tuple(flags[1:]))
    return job, job.check(elsewhere=arguments.target != "local")


def _scheduled(arguments: argparse.Namespace) -> tuple[Job, RunConfig, int]:
    """Return the job of a scheduler, its run, and the GPUs to ask for on each node.

    With any, a rank without one is an error.
    """
    ranks, gpus = arguments.ranks_per_node, arguments.gpus_per_node
    job, config = _job(arguments, arguments.nodes, ranks)
    if gpus is None:
        gpus = 0 if config.performance.device == "cpu" else ranks
    return job.on_gpus(config.performance.device) if gpus else job, config, gpus


def _tell_variables(report_to: Sequence[str], what: str) -> None:
    """Name the variables of trackers of this shell that the job will not have, and say ``what`` is of them."""
    from fastdiff.config.trackers import variables

    if names := variables(report_to):
        write_line(f"fastdiff: warning: {', '.join(names)}: {what}")


def _cores(given: int | None, ranks: int) -> int:
    from fastdiff.cluster.launchers.job import CORES_PER_RANK

    return CORES_PER_RANK * ranks if given is None else given


def _train(arguments: argparse.Namespace) -> None:
    """Train under a supervisor, as ``fastdiff launch local`` does."""
    from fastdiff.cluster.launchers.job import local_job

    job = local_job(arguments.flags, arguments.ranks, preflight=arguments.preflight, beside=arguments.own)
    if job is not None:
        _supervise(job)


def _local(arguments: argparse.Namespace) -> None:
    _supervise(_job(arguments, 1, arguments.ranks)[0])


def _supervise(job: Job) -> NoReturn:
    from fastdiff.cluster.supervisor import main as supervisor

    # In this process, which has imported half of it. Port 0: the supervisor chooses a free one.
    sys.exit(supervisor.main(job.arguments("127.0.0.1", 0)))


def _hosts(arguments: argparse.Namespace) -> None:
    from fastdiff.cluster.launchers import hosts
    from fastdiff.cluster.launchers.hostfile import read_hostfile
    from fastdiff.cluster.launchers.job import write

    found = read_hostfile(arguments.hostfile)
    job, config = _job(arguments, len(found.names), found.slots)
    if arguments.submit:
        sys.exit(hosts.run(job, found, arguments.ssh_config))
    remedy = "not passed on by DeepSpeed's launcher; write them into ~/.deepspeed_env, or give --submit"
    _tell_variables(config.output.report_to, remedy)
    command = hosts.deepspeed_command(job, arguments.hostfile)
    start = f"cd -- {shlex.quote(os.getcwd())} || exit 1\nexec {shlex.join(command)}\n"
    write(arguments.output, f"#!/bin/sh\n# Written by `fastdiff launch hosts`.\n{start}")
    show(f"{arguments.output}: the job for DeepSpeed's launcher, without supervision")
    show(f"next: the same command with --submit, or sh {shlex.quote(str(arguments.output))}")


def _slurm(arguments: argparse.Namespace) -> None:
    from fastdiff.cluster.launchers import slurm
    from fastdiff.cluster.launchers.job import write

    pairs = [option.partition("=") for option in arguments.sbatch]
    options = _unique("--sbatch", [(key, value) for key, _, value in pairs])
    job, _, gpus = _scheduled(arguments)
    batch = slurm.Batch(
        name=arguments.name,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        signal_before_s=arguments.signal_before,
        gpus_per_node=gpus,
        cpus_per_node=_cores(arguments.cpus_per_task, arguments.ranks_per_node),
        exclusive=arguments.exclusive,
        options=options,
    )
    write(arguments.output, slurm.script(job, batch))
    if arguments.submit:
        show(f"submitted job {slurm.submit(arguments.output)}")
    else:
        show(f"{arguments.output} is written; next: {shlex.join(['sbatch', str(arguments.output)])}")


def _k8s(arguments: argparse.Namespace) -> None:
    from fastdiff.cluster.launchers import kubernetes
    from fastdiff.cluster.launchers.job import write

    pairs = [volume.partition(":") for volume in arguments.pvc]
    labels = [label.partition("=") for label in arguments.node_selector]
    job, config, gpus = _scheduled(arguments)
    memory = _GIB_PER_RANK * arguments.ranks_per_node if arguments.memory is None else arguments.memory
    pods = kubernetes.Pods(
        name=arguments.name,
        image=arguments.image,
        namespace=arguments.namespace,
        volumes=_unique("--pvc", [(claim, mount) for claim, _, mount in pairs]),
        gpus=gpus,
        cores=_cores(arguments.cpus, arguments.ranks_per_node),
        memory_gib=memory,
        secrets=tuple(arguments.secret),
        tolerations=tuple(arguments.toleration),
        node_selector=_unique("--node-selector", [(key, value) for key, _, value in labels]),
        user=arguments.user,
    )
    if not pods.volumes:
        write_line("fastdiff: warning: without --pvc the run folder, its checkpoints and the data end with their pod")
    if not pods.secrets:
        _tell_variables(config.output.report_to, "not in the manifest; put them into a Secret, and name it by --secret")
    write(arguments.output, kubernetes.manifest(job, pods))
    if arguments.submit:
        show(kubernetes.submit(arguments.output))
    else:
        show(f"{arguments.output} is written; next: {shlex.join(['kubectl', 'apply', '-f', str(arguments.output)])}")


def _unique(flag: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    for key, _ in pairs:
        if [other for other, _ in pairs].count(key) > 1:
            raise ConfigError(f"{flag} {key}: given twice")
    return dict(pairs)
