"""Runs on one machine do not meet, although DeepSpeed's launcher gives all of them one port."""

import os
import re
import socket
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.processes import BIN, ROOT, Finished, run
from tests.support.scripts import Launcher
from tests.support.servers.ports import reserved_port

PROBE = """
import os
from torch.distributed.distributed_c10d import _get_default_store
from fastdiff.parallel.world import start_world, stop_world

world = start_world(60, "cpu")
store = _get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
seen = world.gather((os.environ["JOB"], store.port, os.environ["MASTER_PORT"]))
assert len(set(seen)) == 1, seen
os.write(1, " ".join(["met", *map(str, seen[0])]).encode() + b"\\n")  # whole, beside the other rank's
stop_world()
"""
LATE = """
import os, threading, time
from fastdiff.parallel import rendezvous

os.environ.update(WORLD_SIZE="2", LOCAL_SIZE="2")
stores = []
first = threading.Thread(target=lambda: stores.append(rendezvous.meet(0, "127.0.0.1", 29500, 120.0)), daemon=True)
first.start()
note = rendezvous._note()
while first.is_alive() and not note.exists():
    time.sleep(0.01)
first.join(1.0)
print("waits" if first.is_alive() else "goes on", note.exists())
stores.append(rendezvous.meet(1, "127.0.0.1", 29500, 120.0))
first.join()
print("met", note.exists())
"""
MISSING = """
import os, resource, sys
from datetime import timedelta
from fastdiff.errors import report_any
from fastdiff.parallel import rendezvous

os.environ.update(WORLD_SIZE="2", LOCAL_SIZE="2")
note = rendezvous._note()
if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
wait = rendezvous._wait_for_all
rendezvous._wait_for_all = lambda store, note, port, _: wait(store, note, port, timedelta(seconds=1))
try:
    rendezvous.meet(0, "127.0.0.1", 29500, 120.0)
except Exception as error:
    print(note, note.exists())
    sys.exit(report_any(error))
"""
PATH = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
LAUNCH = [BIN / "deepspeed", "--num_accelerators", "2"]


def start(probe: Path, *launcher: str | Path, **environment: str) -> Launcher:
    """Start the launcher; its processes are forks."""
    return Launcher(*launcher, probe, PYTHONPATH=PATH, **environment)


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path / "probe.py"


def test_two_runs_of_the_default_port_at_once(probe: Path) -> None:
    with socket.socket() as other:
        with suppress(OSError):  # taken by another program is as good
            other.bind(("127.0.0.1", 29_500))
            other.listen()
        with ExitStack() as stack:
            jobs = [stack.enter_context(start(probe, *LAUNCH, JOB=name, TMPDIR=str(probe.parent))) for name in "ab"]
            ended = [job.wait() for job in jobs]
    assert [done.code for done in ended] == [0, 0], ended
    outputs = [done.output for done in ended]
    ports = [set(re.findall(rf"met {name} (\d+) 29500\n", output)) for name, output in zip("ab", outputs, strict=True)]
    assert [len(found) for found in ports] == [1, 1], "MASTER_PORT stays: the message at the exit depends on it"
    assert {"29500"} not in ports
    assert not list((probe.parent / f"fastdiff-{os.getuid()}").iterdir()), "the note is removed"


def test_a_port_that_is_given_is_used(probe: Path) -> None:
    port = reserved_port()
    with start(probe, *LAUNCH, "--master_port", str(port), JOB="c", TMPDIR=tempfile.gettempdir()) as job:
        done = job.wait()
    assert done.code == 0, done.output
    assert f"met c {port} {port}\n" in done.output


def as_launched(code: str, folder: Path, *arguments: str) -> Finished:
    """Run code in a process with the command line of DeepSpeed's launcher, as which it is then taken."""
    command = [sys.executable, "-c", code, "deepspeed.launcher.launch", *arguments]
    return run(command, PYTHONPATH=PATH, TMPDIR=str(folder))


@pytest.mark.nightly
def test_the_note_stays_until_a_late_rank_has_met_rank_0(tmp_path: Path) -> None:
    """Also without a process group, as with NCCL, which connects at the first collective."""
    done = as_launched(LATE, tmp_path)
    assert done.output == "waits True\nmet False\n"


def test_a_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    done = as_launched(MISSING, tmp_path)
    assert done.code == 2, done.output
    assert "these ranks did not start within 1 s: 1; look for their messages" in done.output
    assert "port False\n" in done.output, "the note is removed"


def test_a_note_that_cannot_be_written_is_an_error_of_storage(tmp_path: Path) -> None:
    done = as_launched(MISSING, tmp_path, "full")
    note = done.output.split()[0]
    assert done.code == 74, done.output
    assert f"fastdiff: error (rank 0): {note}: File too large; " in done.output
    assert "MASTER_PORT" not in done.output
