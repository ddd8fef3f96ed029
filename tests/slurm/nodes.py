"""Machines for tests on one kernel: each has its own network, host name, processes and /run, and all share the files.

A machine is a set of Linux namespaces held by one process. Its address, its ``/etc/hosts`` and the configuration of its
daemons are where a real machine has them, so that commands under test run as on a cluster. When that process ends, the
kernel takes everything that belongs to the machine with it: processes, interfaces and mounts.
"""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import processes
from tests.support.processes import DIE_WITH_TESTS, ROOT, Finished
from tests.support.waiting import wait_until

_OWN_FOLDERS = ("/run", "/dev/shm", "/etc/ssh", "/etc/slurm", "/etc/munge")
_KEEP = f"""
set -e
hostname "$1"
for folder in {" ".join(_OWN_FOLDERS)}; do mount -t tmpfs -o mode=755 none $folder; done
mount --bind "$2" /etc/hosts
ip link set lo up
touch /run/up
while true; do sleep 1000; done  # bash as the first process also takes leave of orphans
"""
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc")


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    address: str
    pid: int
    """Of its first process, in the namespace of the tests."""

    def command(self, *command: str | Path, cwd: Path = ROOT) -> list[str | Path]:
        """Return the command line that runs ``command`` on this machine."""
        return ["nsenter", "--target", str(self.pid), "--all", "--", "env", "--chdir", cwd, *command]

    def run(self, *command: str | Path, timeout_s: float = 120, **environment: str) -> Finished:
        """Run a command on this machine to its end."""
        return processes.run(self.command(*command), timeout_s=timeout_s, **environment)

    def must(self, *command: str | Path, timeout_s: float = 120, **environment: str) -> str:
        """Return the output of a command that has to succeed."""
        done = self.run(*command, timeout_s=timeout_s, **environment)
        assert done.code == 0, f"{self.name}: {' '.join(map(str, command))}: exit code {done.code}: {done.output}"
        return done.output

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command on this machine; end it with ``processes.stop``."""
        return processes.start(self.command(*command), **environment)

    def write(self, path: str, content: str, mode: int = 0o644) -> None:
        """Write a file into one of the folders that only this machine has."""
        install = self.command("install", "--mode", f"{mode:o}", "/dev/stdin", path)
        subprocess.run([str(part) for part in install], input=content, text=True, check=True, timeout=10)

    def read(self, path: str) -> str:
        """Read a file in one of the folders that only this machine has."""
        return self.must("cat", path)

    def commands(self, pattern: str) -> list[str]:
        """Return ``process command...`` of the processes on this machine that match, zombies left out."""
        lines = self.must("ps", "-ww", "-eo", "stat=,pid=,args=").splitlines()
        found = [line.split(maxsplit=1) for line in lines]
        return [rest for state, rest in found if not state.startswith("Z") and pattern in rest]


@dataclass(frozen=True)
class Cluster:
    """Machines in one network whose cables lead to a bridge in ``head``."""

    head: Node
    nodes: tuple[Node, ...]

    @property
    def all(self) -> tuple[Node, ...]:
        """The head and the nodes."""
        return (self.head, *self.nodes)

    def unplug(self, node: Node) -> None:
        """Pull the cable of a node."""
        self.head.must("ip", "link", "set", node.name, "down")

    def plug(self, node: Node) -> None:
        """Put the cable back."""
        self.head.must("ip", "link", "set", node.name, "up")


@contextlib.contextmanager
def cluster(folder: Path, names: Sequence[str] = ("node1", "node2")) -> Iterator[Cluster]:
    """Start a head and nodes in a network of their own; ``folder`` is for their hosts files."""
    folder.mkdir(parents=True)
    everyone = {name: f"10.77.0.{number}" for number, name in enumerate(("head", *names), start=1)}
    with contextlib.ExitStack() as stack:
        head, *nodes = (
            stack.enter_context(_machine(name, address, _hosts(folder, name, everyone)))
            for name, address in everyone.items()
        )
        head.must("ip", "link", "add", "eth0", "type", "bridge")
        for node in nodes:
            cable = ["ip", "link", "add", "eth0", "netns", str(node.pid), "type", "veth"]
            head_end = ["peer", "name", node.name, "netns", str(head.pid)]
            subprocess.run([*cable, *head_end], check=True, timeout=10)
            head.must("ip", "link", "set", node.name, "master", "eth0", "up")
        for node in (head, *nodes):
            node.must("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
            node.must("ip", "link", "set", "eth0", "up")
        yield Cluster(head, tuple(nodes))


def _hosts(folder: Path, own: str, everyone: Mapping[str, str]) -> Path:
    """Write the hosts file of a machine, as Debian's installer does: its own name is 127.0.1.1."""
    path = folder / f"hosts-{own}"
    others = "".join(f"{address} {name}\n" for name, address in everyone.items() if name != own)
    path.write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{others}")
    return path


@contextlib.contextmanager
def _machine(name: str, address: str, hosts: Path) -> Iterator[Node]:
    # Whatever ends the tests ends the machine: the kernel kills the outer process with them, and the inner with that.
    outer = [*DIE_WITH_TESTS, "unshare", *_NAMESPACES, "--kill-child"]
    process = subprocess.Popen([*outer, "bash", "-c", _KEEP, name, name, str(hosts)], stdin=subprocess.DEVNULL)
    try:
        node = Node(name, address, _only_child(process.pid))
        wait_until(lambda: node.run("test", "-e", "/run/up").code == 0, f"{name} to come up")
        yield node
    finally:
        process.kill()
        process.wait()


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: bool(children.read_text().split()), "a child of unshare")
    return int(children.read_text())
