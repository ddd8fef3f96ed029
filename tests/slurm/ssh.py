"""Real sshd on machines of a test, with keys made for it, so that ``ssh node1`` works from each without a question."""

import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.slurm.nodes import Cluster, Node
from tests.support.waiting import wait_until

_SERVER = """
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PidFile /run/sshd.pid
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
SetEnv {environment}
"""
_CLIENT = """
IdentityFile /etc/ssh/user_key
IdentitiesOnly yes
GlobalKnownHostsFile /etc/ssh/known_hosts
UserKnownHostsFile /dev/null
StrictHostKeyChecking yes
BatchMode yes
"""


def start_sshd(machines: Cluster, folder: Path, environment: Mapping[str, str]) -> None:
    """Start an sshd on every node; it ends with its machine.

    Args:
        machines: which.
        folder: for keys.
        environment: what commands find on the nodes, beside what is usual.
    """
    folder.mkdir(parents=True)
    user_key, user_public = _new_key(folder / "user")
    host_keys = {node.name: _new_key(folder / node.name) for node in machines.nodes}
    known = "".join(f"{name} {public}" for name, (_, public) in host_keys.items())
    for node in machines.all:
        node.write("/etc/ssh/ssh_config", _CLIENT)
        node.write("/etc/ssh/known_hosts", known)
        node.write("/etc/ssh/user_key", user_key, mode=0o600)
    server = _SERVER.format(environment=" ".join(f"{name}={value}" for name, value in environment.items()))
    for node in machines.nodes:
        node.write("/etc/ssh/sshd_config", server)
        node.write("/etc/ssh/authorized_keys", user_public)
        node.write("/etc/ssh/host_key", host_keys[node.name][0], mode=0o600)
        node.must("mkdir", "--parents", "/run/sshd")
        node.must("/usr/sbin/sshd")
        wait_until(partial(_answers, machines.head, node), f"the sshd of {node.name}")


def _answers(head: Node, node: Node) -> bool:
    return head.run("ssh", node.name, "true").code == 0


def _new_key(path: Path) -> tuple[str, str]:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True, timeout=20
    )
    return path.read_text(), path.with_suffix(".pub").read_text()
