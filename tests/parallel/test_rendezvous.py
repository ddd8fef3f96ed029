"""Runs on one machine do not meet, although DeepSpeed's launcher gives all of them one port."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.ports import reserved_port
from tests.support.processes import BIN, ROOT, run, start, stop

PROBE = """
import os
from fastdiff.parallel.world import start_world, stop_world

world = start_world(60)
seen = world.gather((os.environ["JOB"], os.environ["MASTER_PORT"]))
assert len(set(seen)) == 1, seen
print("met", *seen[0], flush=True)
stop_world()
"""
LAUNCH = [BIN / "deepspeed", "--num_accelerators", "2"]


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path / "probe.py"


def test_two_runs_of_the_default_port_at_once(probe: Path) -> None:
    with socket.socket() as other:
        with suppress(OSError):  # taken by another program is as good
            other.bind(("127.0.0.1", 29_500))
            other.listen()
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        running = [start([*LAUNCH, probe], JOB=name, PYTHONPATH=path, TMPDIR=str(probe.parent)) for name in "ab"]
        try:
            outputs = [process.communicate(timeout=240)[0] for process in running]
        finally:
            for process in running:
                stop(process)
    assert [process.returncode for process in running] == [0, 0], outputs
    ports = [set(re.findall(rf"met {name} (\d+)", output)) for name, output in zip("ab", outputs, strict=True)]
    assert [len(found) for found in ports] == [1, 1]
    assert {"29500"} not in ports
    assert not list((probe.parent / f"fastdiff-{os.getuid()}").iterdir()), "the note is removed"


def test_a_port_that_is_given_is_used(probe: Path) -> None:
    port = reserved_port()
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = run([*LAUNCH, "--master_port", str(port), probe], JOB="c", PYTHONPATH=path, TMPDIR=tempfile.gettempdir())
    assert done.code == 0, done.output
    assert f"met c {port}" in done.output
